"""The model file that a command works on: the one on the command line, else in settings.toml, else the last one used,
else the built-in one."""

import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from app.chat.settings import Settings, last_model, remember, remember_model, remembered
from app.cli.progress import say
from engine.catalog import cache
from engine.catalog.drafters import drafter_beside
from engine.catalog.files import models_among
from engine.catalog.names import WebFile, draft_for, hub_hint, parse
from engine.errors import ModelFileError, UsageError
from engine.system.invocation import call
from presets import GUIDE, guide_path
from widgets.text import one_line


def model_path(
    named: str | None,
    settings: Settings,
    cancelled: Callable[[], bool] = lambda: False,
    option: str = "--model FILE",
) -> Path:
    """The model file; `named` is the model of the command line, after `option`. Downloads a model that is not on this
    machine, until `cancelled` returns true. Raises ModelFileError if it cannot be had, UsageError if the download was
    cancelled."""
    name = _name(named, settings)
    path = parse(name, settings.names)
    if not isinstance(path, Path):
        from app.cli.download import obtain  # imports an HTTP client

        path = obtain(name, settings.names, sys.stderr, quiet=named is None, cancelled=cancelled)
    try:
        if path.is_file():
            return path
    except OSError as error:
        raise ModelFileError(
            f"{path} cannot be read: {error.strerror}.", "Check that it is a file that you may read."
        ) from None
    if named is None:
        raise ModelFileError(f"There is no file {path}.", why_this(named, settings))
    folder = path if path.is_dir() else path.parent
    nearby = models_in(folder)
    names = ", ".join(map(str, nearby[:5])) + (f" and {len(nearby) - 5} more" if len(nearby) > 5 else "")
    kind = "a folder" if path.is_dir() else "a device or a pipe" if path.exists() else ""
    what = f"{path} is {kind}, not a model file." if kind else f"There is no file {path}."
    if not kind and path.is_symlink():
        what = f"{path} is a link to {one_line(str(path.readlink()))}, which is not there."
    hint = f"GGUF files there: {names}." if nearby else f"Give the path of a GGUF file: {option}."
    if not (nearby or path.exists()):
        hint = hub_hint(name) or hint
    raise ModelFileError(what, hint)


def why_this(named: str | None, settings: Settings) -> str:
    """Why a model is used that was not `named`, and how another one is; "" if it was."""
    if named is not None:
        return ""
    if _name(named, settings) == GUIDE:
        return "It is built in. --model NAME takes another one."
    why = "settings.toml names it" if settings.model else "It was used last"
    return f"{why}. --model NAME takes another one, --model {GUIDE} the one that is built in."


def model_paths(names: Sequence[str], settings: Settings) -> dict[str, Path]:
    """The files of the models of --models. A name that is none is refused before one of the others is downloaded.
    Raises what `model_path` raises."""
    for name in names:
        parse(name, settings.names)
    return {name: model_path(name, settings, option="--models FILE,FILE") for name in names}


def models_in(folder: Path) -> list[Path]:
    """The files to open of the models in a folder: no encoders, and no later parts."""
    files = [file.name for file in folder.glob("*") if file.is_file()]
    return [folder / model.file for model in models_among(files)]


def find_model(named: str | None, settings: Settings, *, or_built_in: bool) -> tuple[Path, str]:
    """The model file, and "". With `or_built_in`, if the model of the settings or of the last chat cannot be had: the
    built-in one, and a sentence that says so. Raises what `model_path` raises."""
    try:
        return model_path(named, settings), ""
    except ModelFileError as error:
        if named is not None or not or_built_in:
            raise
        return guide_path(), f"{error.message} {GUIDE} answers, a small model that is built in"


def draft_model(args: Namespace, settings: Settings) -> Path | None:
    """The file of the draft model of --draft, if there is one to be used. Raises UsageError, and what `model_path`
    raises."""
    if args.draft == "auto":
        model = _name(args.model, settings)
        if draft := draft_for(model, settings.names):
            return model_path(draft, settings)
        source = parse(model, settings.names)
        path = source if isinstance(source, Path) else cache.find(source)
        if beside := path and drafter_beside(path):
            return beside
        raise UsageError(f"No draft model is known for {one_line(model)}.", "Name it: --draft NAME.")
    if args.draft is None and args.speculate == "draft":
        raise UsageError("--speculate draft needs a draft model.", "Name it: --draft NAME.")
    return None if args.draft is None else model_path(args.draft, settings, option="--draft FILE")


def adapters(asked: str | None) -> str:
    """The adapters of --lora, with their whole paths (`EngineOptions.lora`). Raises UsageError if a file is missing, or
    has a path with a comma."""
    if asked is None:
        return ""
    from engine.loading.adapters import parse_adapters

    found = [replace(adapter, path=adapter.path.expanduser()) for adapter in parse_adapters(asked)]
    form = "Give the path of a LoRA adapter: --lora FILE, or --lora FILE:SCALE."
    if not found:
        raise UsageError("--lora names no file.", form)
    for adapter in found:
        if not adapter.path.is_file():
            raise UsageError(f"There is no file {one_line(str(adapter.path))}.", form)
        if "," in (path := str(adapter.path.resolve())):
            raise UsageError(
                f"{one_line(path)} has a comma, which ends the name of an adapter.", "Give it another name."
            )
    return ",".join(f"{adapter.path.resolve()}:{adapter.scale:g}" for adapter in found)


def greet(named: str | None, model_path: str, *, is_chat: bool) -> None:
    """Introduces the built-in model on standard error, if no model was named and it answers: in every chat, and before
    the first single answer."""
    is_known = remembered("greeting") and not is_chat
    if named is None and model_path == str(guide_path()) and not is_known:
        say(
            sys.stderr,
            f"{GUIDE} answers: a small built-in model that knows only orin-chat. "
            f"For a larger model: {call('--model qwen3:0.6b')}. `{call('models')}` lists more.",
        )
        remember("greeting", "shown")


def remember_last_model(named: str | None, settings: Settings) -> None:
    """Remembers the model as the last one used: a file by its full path, else by its name, which finds newer files."""
    name = _name(named, settings)
    source = parse(name, settings.names)
    if isinstance(source, WebFile):  # its address may hold a password
        source = cache.find(source) or source
    remember_model(str(source) if isinstance(source, Path | WebFile) else name)


def _name(named: str | None, settings: Settings) -> str:
    return named if named is not None else settings.model or last_model() or GUIDE
