"""Writes a conversation as a Markdown document."""

import contextlib
import errno
import html
import os
import re
import tempfile
from base64 import b64encode
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import quote

from engine.errors import OrinError, UsageError
from engine.formats.picture_kind import media_type
from engine.protocol.events import Message, Picture
from widgets.text import clean, one_line


def to_markdown(title: str, model: str, messages: Iterable[Message]) -> str:
    """A heading for the chat and for each message, under its author. Thinking and what tools returned are folded in
    `<details>`."""
    authors = {"system": "System", "user": "You", "assistant": one_line(model) or "Assistant"}
    parts, author, arguments = [f"# {one_line(title)}"], "", dict[str, str]()
    for message in messages:
        arguments |= {call.id: one_line(call.arguments) for call in message.tool_calls}
        if message.role == "tool":
            called = f"{one_line(message.name)} {arguments.get(message.tool_call_id, '')}"
            parts.append(_folded(html.escape(called, quote=False), _fenced(clean(message.content))))
            continue
        if author != message.role or message.role == "user":
            parts.append(f"## {authors[message.role]}")
        author = message.role
        if thinking := clean(message.thinking).strip():
            parts.append(_folded("Thinking", thinking))
        parts += map(_link, message.pictures)
        parts.append(clean(message.content).strip())
    return "\n\n".join(filter(None, parts)) + "\n"


def _folded(summary: str, text: str) -> str:
    return f"<details><summary>{summary}</summary>\n\n{text}\n\n</details>"


def _fenced(text: str) -> str:
    """As a block of code that the text cannot end."""
    ticks = "`" * (max(map(len, re.findall(r"`{3,}", text)), default=2) + 1)
    return f"{ticks}\n{text.strip()}\n{ticks}"


def _link(picture: Picture) -> str:
    """A link to a picture's file or, where that is gone, with the picture in it."""
    name = re.sub(r"[\[\]\\]", " ", one_line(Path(picture.name).name))
    if Path(picture.name).is_file():
        return f"![{name}](<{quote(picture.name)}>)"
    return f"![{name}](data:{media_type(picture.data)};base64,{b64encode(picture.data).decode()})"


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


def write_named(name: str, text: str) -> Path:
    """Writes a new file that the user named, and returns its path. Raises UsageError."""
    path = Path(name).expanduser()
    try:
        write_new(path, text)
    except FileExistsError:
        raise UsageError(f"{path} exists already.", "Choose another name.") from None
    except (OSError, ValueError) as error:  # a ValueError for a character that no name can have
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"{path} cannot be written: {reason}.") from None
    return path


def write_new_file(title: str, text: str) -> Path:
    """Writes a new file, named after `title`, with a number if there is one, and returns its path. It is in the
    current folder or, if nothing can be written there, in the home folder or in one for temporary files. Raises
    OrinError."""
    name = "-".join(re.findall(r"\w+", one_line(title).lower()))[:50].strip("-") or "chat"
    problem = ""
    for find in (Path.cwd, Path.home, lambda: Path(tempfile.gettempdir()), lambda: Path("/dev/shm")):
        try:
            return _write_numbered(find(), name, text)
        except (OSError, RuntimeError) as error:  # a RuntimeError without a home folder
            reason = getattr(error, "strerror", None) or error
            path = getattr(error, "filename", None) or f"{name}.md"
            problem = problem or f"{path} cannot be written: {reason}."
    raise OrinError(problem, "Start orin-chat in a folder where you may write, and export again.")


def _write_numbered(folder: Path, name: str, text: str) -> Path:
    """Raises OSError."""
    for number in range(1, 1000):
        path = folder / f"{name}{'' if number == 1 else f'-{number}'}.md"
        with contextlib.suppress(FileExistsError):
            write_new(path, text)
            return path
    raise OSError(errno.EEXIST, "there are a thousand files of that name", str(folder / name))
