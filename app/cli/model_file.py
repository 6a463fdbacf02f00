"""Which model file a command works on: the one that is named, else that of settings.toml, else the last one that was
used, else the built-in one."""

from __future__ import annotations

import sys
from pathlib import Path

from app.chat.settings import Settings, last_model, remember_model
from engine.catalog.names import parse
from engine.errors import ModelFileError
from presets import GUIDE


def model_path(given: str | None, settings: Settings) -> Path:
    """The model file; `given` is what the command line names. A model that has a name and is not on this machine is
    downloaded. Raises UsageError for an unknown name, ModelFileError if the file cannot be had."""
    name = _name(given, settings)
    path = parse(name, settings.names)
    if not isinstance(path, Path):
        from app.cli.download import obtain  # imports a client for HTTP

        path = obtain(name, settings.names, sys.stderr, quiet=given is None)
    try:
        if path.is_file():
            return path
    except OSError as error:
        raise ModelFileError(
            f"{path} cannot be read: {error.strerror}.", "Check that it is a file that you may read."
        ) from None
    nearby = sorted((path if path.is_dir() else path.parent).glob("*.gguf"))
    names = ", ".join(map(str, nearby[:5])) + (f" and {len(nearby) - 5} more" if len(nearby) > 5 else "")
    what = "a folder" if path.is_dir() else "a device or a pipe" if path.exists() else ""
    raise ModelFileError(
        f"{path} is {what}, not a model file." if what else f"There is no file {path}.",
        f"GGUF files there: {names}." if nearby else "Give the path of a GGUF file: --model FILE.",
    )


def remember(given: str | None, settings: Settings) -> None:
    """Makes it the last model used: a path is stored in full; a name stays one and finds newer versions."""
    name = _name(given, settings)
    source = parse(name, settings.names)
    remember_model(str(source) if isinstance(source, Path) else name)


def _name(given: str | None, settings: Settings) -> str:
    return given if given is not None else settings.model or last_model() or GUIDE
