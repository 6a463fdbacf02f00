"""Writes a conversation as a Markdown document."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from engine.errors import OrinError
from engine.events import Message
from widgets.text import clean, one_line


class ExportError(OrinError):
    """The document could not be written."""


def to_markdown(title: str, model: str, messages: Iterable[Message]) -> str:
    """A heading for the chat and for each message, under its author. Thinking is folded in a `<details>`."""
    authors = {"system": "System", "user": "You", "assistant": one_line(model) or "Assistant"}
    parts = [f"# {one_line(title)}"]
    for message in messages:
        parts.append(f"## {authors[message.role]}")
        if thinking := clean(message.thinking).strip():
            parts.append(f"<details><summary>Thinking</summary>\n\n{thinking}\n\n</details>")
        parts.append(clean(message.content).strip())
    return "\n\n".join(parts) + "\n"


def write_new(path: Path, text: str) -> None:
    """Writes a new file, whole or not at all, that only its owner can read. Raises OSError, FileExistsError if there is
    such a file."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8", errors="replace") as file:
        try:
            file.write(text)
            file.flush()
        except OSError:
            path.unlink(missing_ok=True)
            raise


def write_new_file(folder: Path, title: str, text: str) -> Path:
    """Writes a new file in `folder`, named after `title`, with a number if there is one. Raises ExportError."""
    name = "-".join(re.findall(r"\w+", one_line(title).lower()))[:50].strip("-") or "chat"
    for number in range(1, 1000):
        path = folder / f"{name}{'' if number == 1 else f'-{number}'}.md"
        try:
            write_new(path, text)
            return path
        except FileExistsError:
            continue
        except OSError as error:
            raise ExportError(
                f"{path} cannot be written: {error.strerror or error}.",
                "Start orin-chat in a folder where you may write, and export again.",
            ) from error
    raise ExportError(
        f"There are a thousand files named {name} here already.", "Remove some, and export again."
    )
