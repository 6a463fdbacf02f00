"""Encoders of pictures: the "mmproj" files beside models and in their repositories."""

import contextlib
import re
from collections.abc import Iterable
from itertools import pairwise, takewhile
from pathlib import Path

from engine.catalog.files import is_safe, quantization_of
from engine.errors import ModelFileError
from engine.system.whole_file import open_file

_PREFERRED = ("F16", "BF16", "Q8_0", "F32")
_HEAD_BYTES = 100
_ENCODER = re.compile(r"mmproj[^/]*\.gguf$", re.I)


def is_encoder(file: str) -> bool:
    """Whether the name of a file is that of an encoder."""
    return _ENCODER.search(file) is not None


def encoders_among(files: Iterable[str], model: str) -> list[str]:
    """The encoders among the names of files, the best for the file `model` first: those in its folder, those whose
    names have most in common with its name, and the types that published models have."""
    folder, _, name = model.rpartition("/")

    def rank(file: str) -> tuple[bool, int, int, str]:
        quantization = quantization_of(file)
        kind = _PREFERRED.index(quantization) if quantization in _PREFERRED else len(_PREFERRED)
        return file.rpartition("/")[0] != folder, -_in_common(file.rpartition("/")[2], name), kind, file

    return sorted((file for file in files if is_encoder(file) and is_safe(file)), key=rank)


def _in_common(encoder: str, model: str) -> int:
    """How many characters the names begin with alike, without "mmproj"."""
    pairs = zip(re.sub(r"mmproj[-_.]?", "", encoder.lower()), model.lower(), strict=False)
    return len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))


def encoder_beside(model: Path) -> Path | None:
    """The encoder for a model's file: the best one that fits it, in its folder or, in the hub's cache, anywhere in its
    repository. One with another name than encoders have is known by its first bytes. None if there is none."""
    snapshot = snapshot_of(model)
    folder = snapshot or model.parent
    try:
        every = (folder.rglob if snapshot else folder.glob)("*")
        files = [file for file in every if file.suffix.lower() == ".gguf" and file.is_file()]
        found = [file.relative_to(folder).as_posix() for file in files]
        names = encoders_among(found, model.relative_to(folder).as_posix())
        others = [name for name in found if not is_encoder(name)]
        names += sorted(name for name in others if is_safe(name) and _begins_as_encoder(folder / name))
        return next((folder / name for name in names if fits(folder / name, model)), None)
    except OSError:
        return None


def fits(encoder: Path, model: Path) -> bool:
    """Whether an encoder runs, and is for models such as this one. Reads the heads of both files."""
    from engine.description.deepstack import picture_width  # imports numpy, as does the next one
    from engine.description.encoder_kinds import FITTING
    from engine.description.vision_reader import read_vision
    from engine.formats.gguf import GGUF

    with contextlib.suppress(ModelFileError, OSError), GGUF(encoder) as seen, GGUF(model) as file:
        architecture, spec = file.get("general.architecture", str, ""), read_vision(seen)
        return spec.kind in FITTING.get(architecture, ()) and spec.width == picture_width(file, architecture)
    return False


def _begins_as_encoder(path: Path) -> bool:
    """Whether a file names the architecture of encoders where writers of GGUF put it: first."""
    with contextlib.suppress(OSError), open_file(path) as file:
        head = file.read(_HEAD_BYTES)
        return head.startswith(b"GGUF") and b"general.architecture" in head and b"clip" in head
    return False


def snapshot_of(model: Path) -> Path | None:
    """The folder of a repository's files at one commit, in the hub's cache; None for a file elsewhere."""
    return next((folder for folder, root in pairwise(model.parents) if root.name == "snapshots"), None)
