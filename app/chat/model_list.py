"""Lists models: the files on this machine, and the names that can be downloaded."""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from app.chat.speed_history import ModelRecord, model_records
from engine.catalog import cache
from engine.catalog.encoders import encoder_beside
from engine.catalog.files import quantization_of
from engine.catalog.names import HubModel, Source, WebFile, known_models, parse, short_name
from engine.description import file_summary
from engine.description.architectures import read_spec
from engine.errors import ModelFileError, OrinError
from engine.formats.gguf import GGUF
from engine.formats.tokens.vocabulary import check_tokenizer
from engine.loading import packed_weights_cache
from engine.model.memory_need import memory_need
from widgets.text import as_count


@dataclass(frozen=True)
class Entry:
    """A model. Where `path` is None it is not on this machine, and `size_bytes`, `parameters`, `context_length`
    (tokens) and `need_bytes` (the memory that it needs with the default context) are 0. `active_parameters`: those that
    a token uses. `problem` says why it cannot be used, "" if it can. `record` None: not used here yet. `encoder`: with
    which it sees pictures."""

    name: str
    source: Source
    path: Path | None = None
    size_bytes: int = 0
    quantization: str = ""
    architecture: str = ""
    parameters: int = 0
    active_parameters: int = 0
    context_length: int = 0
    need_bytes: int = 0
    record: ModelRecord | None = None
    problem: str = ""
    encoder: Path | None = None

    @property
    def parameters_text(self) -> str:
        """30.5B, 3.34B active: of a mixture of experts, also the parameters that a token uses. "" if not known."""
        counts = dict.fromkeys((self.parameters, self.active_parameters))
        return ", ".join(map(as_count, filter(None, counts))) + (" active" if len(counts) > 1 else "")

    @property
    def tokens_per_s(self) -> float | None:
        """The last decode speed."""
        return self.record.tokens_per_s if self.record else None


def on_this_machine(names: Mapping[str, str] = {}) -> list[Entry]:
    """Downloaded models, existing files that the user has given one of `names`, and files used before; by name.
    Reads the head of each file."""
    sources: dict[Path, Source] = {model.path: model.source for model in cache.installed()}
    resolved = {path.resolve() for path in sources}
    for path in (*_named_files(names), *model_records()):
        if path.resolve() not in resolved and path.is_file():
            resolved.add(path.resolve())
            sources[path] = path
    entries = [read_entry(source, path, names) for path, source in sources.items()]
    return sorted(entries, key=lambda entry: entry.name.lower())


def not_here(present: list[Entry], names: Mapping[str, str] = {}) -> list[Entry]:
    """The models that have a name, the user's or our own, and are not among `present`."""
    sources = {entry.source for entry in present}
    missing: dict[Source, Entry] = {}
    for name in (*names, *(model.name for model in known_models())):
        with contextlib.suppress(ModelFileError):
            source = parse(name, names)
            if source not in sources and not isinstance(source, Path):
                quantization = source.quantization if isinstance(source, HubModel) else quantization_of(name)
                missing.setdefault(source, Entry(name, source, quantization=quantization))
    return list(missing.values())


def read_entry(source: Source, path: Path, names: Mapping[str, str] = {}) -> Entry:
    """The entry of a file, from the file's head and this machine's record of it."""
    name, record = short_name(source, names), model_records().get(path.resolve())
    try:
        with GGUF(path) as file:
            problem, parameters = "", file_summary.parameters(file)
            active, need_bytes = parameters, 0
            try:
                spec = read_spec(file)
                active -= spec.idle_parameters
                need_bytes = memory_need(spec).total_bytes
                check_tokenizer(file)
            except ModelFileError as error:
                problem = error.message
            architecture = file.get("general.architecture", str, "")
            return Entry(
                name=name,
                source=source,
                path=path,
                size_bytes=file.file_bytes,
                quantization=file_summary.quantization(file),
                architecture=architecture,
                parameters=parameters,
                active_parameters=active,
                context_length=file.get(f"{architecture}.context_length", int, 0),
                need_bytes=need_bytes,
                record=record,
                problem=problem,
                encoder=encoder_beside(path),
            )
    except Exception as error:  # whatever is wrong with a file, it must not hide the others
        size = path.stat().st_size if path.is_file() else 0
        is_known = isinstance(error, OrinError | OSError)
        problem = error.message if isinstance(error, OrinError) else str(error)
        problem = problem if is_known else f"It cannot be read: {type(error).__name__} {problem}".strip()
        return Entry(name, source, path, size, quantization_of(path.name), record=record, problem=problem)


def delete_downloaded(model: cache.Installed) -> int:
    """Deletes a downloaded model and its packed weights; returns the bytes freed. Raises OSError."""
    return packed_weights_cache.delete(model.path) + cache.remove(model)


def source_of(name: str, names: Mapping[str, str] = {}) -> tuple[Source, Path | None]:
    """The source that `name` stands for, and its file on this machine (None: not downloaded). Raises ModelFileError."""
    source = parse(name, names)
    if isinstance(source, HubModel | WebFile):
        return source, cache.find(source)
    downloaded = next((model for model in cache.installed() if model.path == source), None)
    return (downloaded.source if downloaded else source), source if source.is_file() else None


def _named_files(names: Mapping[str, str]) -> list[Path]:
    files = []
    for name in names:
        with contextlib.suppress(ModelFileError):
            if isinstance(source := parse(name, names), Path):
                files.append(source)
    return files
