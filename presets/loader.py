"""Reads, checks and saves presets. A preset is a TOML file that says how an engine is set up. Built-in presets lie
beside this file. The user's presets lie in the configuration folder and replace built-in ones of the same name.

    title = "CUDA, quantized kernels, searched 2 wide"
    backend = "CUDA"          # auto, CPU, CUDA, NV
    kernels = "fused"         # fused (our quantized kernels), graph (tensor graphs that tinygrad compiles),
                              # auto (fused)
    jitbeam = 2               # width of the search for kernels, 0 to 16; this key may also be written beam.
                              # fused: our search for schedules, on a GPU; graph: tinygrad's search
    context = 8192            # tokens, or "max": what the model was trained for and memory has room for
    kv = "f16"                # the format of the KV cache; q8_0 takes half the memory
    speculate = "auto"        # who guesses next tokens, of which a step checks several: auto, off, lookup, heads, draft
    search_when_idle = "always"   # an idle chat searches for faster kernels: mains (on mains power), always, never
    [matvec]                  # tinygrad's heuristic for matrix-vector products, in "graph"
    block_size = 4
    threads_per_row = 8
    rows_per_thread = 4
    [sampling]
    temperature = 0.7
    effort = "low"            # how much a model thinks that reads it (gpt-oss): low, medium, high
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import platformdirs
from msgspec import Meta

from engine.errors import UsageError
from engine.formats.kv_format import KVFormat
from engine.protocol.events import ContextLength, KernelPath, Matvec, Speculate
from engine.system.whole_file import read_text, write_whole
from presets.sampling import PresetSampling, out_of_range

BUILT_IN = Path(__file__).parent
_UNKNOWN = re.compile(r"unknown field `(?P<key>.*?)`(?: - at `\$\.(?P<table>\w+)`)?")
NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,39}")

_Width = Annotated[int, Meta(ge=0, le=16)]


class PresetMatvec(Matvec, frozen=True, kw_only=True, tag="Matvec", forbid_unknown_fields=True):
    """The table [matvec]: `Matvec`, but an unknown key is an error."""


class Preset(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    title: Annotated[str, Meta(min_length=1, max_length=80)]
    backend: Literal["auto", "CPU", "CUDA", "NV"] = "auto"
    kernels: KernelPath = "auto"
    beam: _Width = 0
    jitbeam: _Width = 0
    context: ContextLength = None
    kv: KVFormat | None = None
    speculate: Speculate | None = None
    search_when_idle: Literal["mains", "always", "never"] | None = None
    matvec: PresetMatvec | None = None
    sampling: PresetSampling = PresetSampling()

    @property
    def search_width(self) -> int:
        """The keys `beam` and `jitbeam` are one setting; 0 searches nothing."""
        return max(self.beam, self.jitbeam)


@dataclass(frozen=True)
class PresetFile:
    """`preset` is None if the file cannot be used, and `problem` says why."""

    name: str
    path: Path
    preset: Preset | None
    problem: str = ""

    @property
    def built_in(self) -> bool:
        return self.path.parent == BUILT_IN


def user_folder() -> Path:
    return platformdirs.user_config_path("orin-chat", appauthor=False) / "presets"


def preset_files() -> dict[str, PresetFile]:
    """All presets by name: the built-in ones, then the user's, each in the order of their names."""
    files: dict[str, PresetFile] = {}
    for folder in (BUILT_IN, user_folder()):
        for path in sorted(folder.glob("*.toml"), key=lambda path: path.stem):
            try:
                files[path.stem] = PresetFile(path.stem, path, read(path))
            except (OSError, ValueError) as error:
                files[path.stem] = PresetFile(path.stem, path, None, _reason(error))
    return files


def find_preset(name: str) -> Preset:
    """Raises UsageError if there is no such preset, or its file cannot be used."""
    files = preset_files()
    if (file := files.get(name)) is None:
        raise UsageError(f"There is no preset {name!r}.", f"Choose one of {', '.join(files)}.")
    if file.preset is None:
        raise UsageError(
            f"The preset {file.path} cannot be used: {file.problem}.",
            "Correct the file, or choose another preset.",
        )
    return file.preset


def read(path: Path) -> Preset:
    """Raises OSError, or ValueError that names the key if the file is no preset."""
    try:
        return parse(read_text(path))
    except RecursionError:
        raise ValueError("lists within lists") from None


def parse(text: str) -> Preset:
    """Raises ValueError that names the key if `text` is no preset. (The errors of msgspec are ValueErrors.)"""
    preset = msgspec.toml.decode(text, type=Preset)
    if flaw := out_of_range(preset.sampling):
        raise ValueError(flaw)
    return preset


def save(name: str, text: str) -> Path:
    """Writes the user's preset `name` and returns its file. Raises UsageError if `name` or `text` is not valid, or the
    folder cannot be written."""
    if not NAME.fullmatch(name):
        raise UsageError(
            f"{name!r} is no name for a preset.", "Take small letters, digits, dots and dashes, 40 at most."
        )
    path = user_folder() / f"{name}.toml"
    try:
        parse(text)
        write_whole(path, text.encode())
    except (OSError, ValueError) as error:
        raise UsageError(f"The preset {name} is not saved: {_reason(error)}.") from error
    return path


def delete(name: str) -> None:
    """Deletes the user's preset `name`. A built-in preset of that name is used again. Raises UsageError."""
    try:
        (user_folder() / f"{name}.toml").unlink()
    except OSError as error:
        raise UsageError(f"The preset {name} is not deleted: {_reason(error)}.") from error


def _reason(error: OSError | ValueError) -> str:
    """What is wrong, without a full stop. If a key is unknown, lists the keys."""
    if isinstance(error, OSError):
        return f"{error.strerror} ({error.filename})"
    if unknown := _UNKNOWN.search(str(error)):
        table = unknown["table"] or ""
        keys = {"sampling": PresetSampling, "matvec": PresetMatvec}.get(table, Preset).__struct_fields__
        listed = f"[{table}] has" if table else "there are"
        return f"there is no key {unknown['key']}; {listed} {', '.join(keys)}"
    return str(error).rstrip(".")
