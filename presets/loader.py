"""Presets: how an engine is set up, under a name. Built-in ones lie beside this file, the user's own in the
folder of the configuration; a user's takes the place of a built-in one of the same name.

    title = "CUDA, quantized kernels, searched 2 wide"    # what is shown
    backend = "CUDA"          # auto, CPU, CUDA, NV
    kernels = "fused"         # fused (quantized kernels of our own), graph (tensor graphs that tinygrad compiles),
                              # auto (fused)
    jitbeam = 2               # width of the search for kernels, 0 to 16; beam is another name of this key.
                              # fused: for how our products are cut, on a GPU; graph: tinygrad's own search
    context = 8192            # tokens
    [matvec]                  # tinygrad's heuristic for matrix-vector products, in "graph"
    block_size = 4
    threads_per_row = 8
    rows_per_thread = 4
    [sampling]
    temperature = 0.7
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import platformdirs
from msgspec import Meta

from engine.errors import UsageError
from engine.events import KernelPath, Matvec
from presets.sampling import PresetSampling, out_of_range

BUILT_IN = Path(__file__).parent
_UNKNOWN = re.compile(r"unknown field `(?P<key>.*?)`(?: - at `\$\.(?P<table>\w+)`)?")
NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,39}")

_Width = Annotated[int, Meta(ge=0, le=16)]


class PresetMatvec(Matvec, frozen=True, kw_only=True, tag="Matvec", forbid_unknown_fields=True):
    """`Matvec` as the file spells it: a key that does not exist is an error."""


class Preset(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    title: Annotated[str, Meta(min_length=1, max_length=80)]
    backend: Literal["auto", "CPU", "CUDA", "NV"] = "auto"
    kernels: KernelPath = "auto"
    beam: _Width = 0
    jitbeam: _Width = 0
    context: Annotated[int, Meta(ge=2, le=2**31 - 1)] | None = None
    matvec: PresetMatvec | None = None
    sampling: PresetSampling = PresetSampling()

    @property
    def search_width(self) -> int:
        """The keys `beam` and `jitbeam` are one setting; 0 searches nothing."""
        return max(self.beam, self.jitbeam)


@dataclass(frozen=True)
class Entry:
    """A preset that there is. `preset` is None where its file cannot be used, and `problem` says why."""

    name: str
    path: Path
    preset: Preset | None
    problem: str = ""

    @property
    def built_in(self) -> bool:
        return self.path.parent == BUILT_IN


def own_folder() -> Path:
    return platformdirs.user_config_path("orin-chat", appauthor=False) / "presets"


def entries() -> dict[str, Entry]:
    """All presets by name: the built-in ones in the order of their names, then the user's own."""
    found: dict[str, Entry] = {}
    for folder in (BUILT_IN, own_folder()):
        for path in sorted(folder.glob("*.toml"), key=lambda path: path.stem):
            try:
                found[path.stem] = Entry(path.stem, path, read(path))
            except (OSError, ValueError) as error:
                found[path.stem] = Entry(path.stem, path, None, _reason(error))
    return found


def find(name: str) -> Preset:
    """The preset of a name. Raises UsageError where there is none, or its file cannot be used."""
    known = entries()
    if (entry := known.get(name)) is None:
        raise UsageError(f"There is no preset {name!r}.", f"Choose one of {', '.join(known)}.")
    if entry.preset is None:
        raise UsageError(
            f"The preset {entry.path} cannot be used: {entry.problem}.",
            "Mend the file, or choose another preset.",
        )
    return entry.preset


def read(path: Path) -> Preset:
    """Raises OSError, or ValueError that names the key, for a file that does not hold a preset."""
    return parse(path.read_text("utf-8"))


def parse(text: str) -> Preset:
    """Raises ValueError (as msgspec's errors are), naming the key, for a text that is not a preset."""
    fields = msgspec.toml.decode(text)
    if (
        fields.get("kv") == "f16"
    ):  # older presets name the type of the KV cache; there is no other to choose yet
        del fields["kv"]
    preset = msgspec.convert(fields, Preset)
    if flaw := out_of_range(preset.sampling):
        raise ValueError(flaw)
    return preset


def save(name: str, text: str) -> Path:
    """Keeps `text` as the user's own preset `name` and returns its file. Raises UsageError for a name or a
    text that is none, or a folder that cannot be written."""
    if not NAME.fullmatch(name):
        raise UsageError(
            f"{name!r} is no name for a preset.", "Take small letters, digits, dots and dashes, 40 at most."
        )
    path = own_folder() / f"{name}.toml"
    try:
        parse(text)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    except (OSError, ValueError) as error:
        raise UsageError(f"The preset {name} is not saved: {_reason(error)}.") from error
    return path


def delete(name: str) -> None:
    """Removes the user's own preset `name`; a built-in one that it stood in for is back. Raises UsageError."""
    try:
        (own_folder() / f"{name}.toml").unlink()
    except OSError as error:
        raise UsageError(f"The preset {name} is not deleted: {_reason(error)}.") from error


def _reason(error: OSError | ValueError) -> str:
    """What is wrong, without a full stop, and of a key that there is none of, which there are."""
    if isinstance(error, OSError):
        return f"{error.strerror} ({error.filename})"
    if unknown := _UNKNOWN.search(str(error)):
        table = unknown["table"] or ""
        keys = {"sampling": PresetSampling, "matvec": PresetMatvec}.get(table, Preset).__struct_fields__
        where = f"[{table}] has" if table else "there are"
        return f"there is no key {unknown['key']}; {where} {', '.join(keys)}"
    return str(error).rstrip(".")
