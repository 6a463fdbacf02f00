"""The models there are: those on this machine, and those that are known by name."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from app.chat.speed_history import Use, uses
from engine.catalog import cache
from engine.catalog.files import quantization_of
from engine.catalog.names import HubModel, Source, WebFile, known_models, parse, short_name
from engine.errors import ModelFileError, OrinError, UsageError
from engine.formats.gguf import GGUF
from engine.model import summary
from engine.model.config import ModelConfig


@dataclass(frozen=True)
class Entry:
    """A model. `path` None: it is known, but not here, and then `size_bytes`, `parameters` and
    `context_length` are 0. `problem` says why a file cannot be used."""

    name: str
    source: Source
    path: Path | None = None
    size_bytes: int = 0
    quantization: str = ""
    architecture: str = ""
    parameters: int = 0
    context_length: int = 0
    use: Use | None = None
    problem: str = ""

    @property
    def tokens_per_s(self) -> float | None:
        """The last measured speed of decoding."""
        return self.use.tokens_per_s if self.use else None


def on_this_machine(own: Mapping[str, str] = {}) -> list[Entry]:
    """Downloaded models, files with a name of the user's `own`, and files that were used and are still there;
    by name. Reads the head of each file."""
    sources: dict[Path, Source] = {model.path: model.source for model in cache.installed()}
    known = {path.resolve() for path in sources}
    used = uses()
    for path in (*_own_files(own), *used):
        if path.resolve() not in known and path.is_file():
            known.add(path.resolve())
            sources[path] = path
    found = [read_entry(source, path, own, used.get(path.resolve())) for path, source in sources.items()]
    return sorted(found, key=lambda entry: entry.name.lower())


def not_here(here: list[Entry], own: Mapping[str, str] = {}) -> list[Entry]:
    """The models with a name that are not among those `here`."""
    sources = {entry.source for entry in here}
    names = [*own, *(model.name for model in known_models())]
    missing: dict[Source, Entry] = {}
    for name in names:
        with contextlib.suppress(UsageError):
            source = parse(name, own)
            if source not in sources and not isinstance(source, Path):
                quantization = source.quantization if isinstance(source, HubModel) else quantization_of(name)
                missing.setdefault(source, Entry(name, source, quantization=quantization))
    return list(missing.values())


def read_entry(source: Source, path: Path, own: Mapping[str, str] = {}, use: Use | None = None) -> Entry:
    """What the head of the file at `path` tells."""
    name = short_name(source, own)
    try:
        with GGUF(path) as file:
            problem = ""
            try:
                ModelConfig.from_gguf(file)
            except ModelFileError as error:
                problem = error.message
            architecture = file.get("general.architecture", str, "")
            return Entry(
                name=name,
                source=source,
                path=path,
                size_bytes=file.file_bytes,
                quantization=summary.quantization(file),
                architecture=architecture,
                parameters=summary.parameters(file),
                context_length=file.get(f"{architecture}.context_length", int, 0),
                use=use,
                problem=problem,
            )
    except (OrinError, OSError) as error:
        size = path.stat().st_size if path.is_file() else 0
        problem = error.message if isinstance(error, OrinError) else str(error)
        return Entry(name, source, path, size, quantization_of(path.name), use=use, problem=problem)


def source_of(name: str, own: Mapping[str, str] = {}) -> tuple[Source, Path | None]:
    """What `name` means and the file it is here, None where it is not here. Raises UsageError."""
    source = parse(name, own)
    if isinstance(source, HubModel | WebFile):
        return source, cache.find(source)
    downloaded = next((model for model in cache.installed() if model.path == source), None)
    return (downloaded.source if downloaded else source), source if source.is_file() else None


def _own_files(own: Mapping[str, str]) -> list[Path]:
    files = []
    for name in own:
        with contextlib.suppress(UsageError):
            if isinstance(source := parse(name, own), Path):
                files.append(source)
    return files
