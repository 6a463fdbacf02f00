"""Models that add parts of a picture's embeddings to its tokens between their layers (deepstack).

The keys are llama.cpp's: of Qwen3-VL (src/models/qwen3vl.cpp), after layer i of so many, part i + 1 is added; of
Granite 4 Vision (src/models/granite.cpp), a number for each layer says which part is added before it, or -1."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from engine.description.checked_file import CheckedFile
from engine.description.spec import Sublayer
from engine.formats.gguf import GGUF, damaged

_COUNT, _MAPPING = "n_deepstack_layers", "deepstack_mapping"
_MOST = 64


def picture_width(file: GGUF, architecture: str) -> int:
    """The elements of the embeddings of pictures that a model takes, without a look at its tensors. Raises
    ModelFileError."""
    parts = 1 + max(_parts(file, architecture), default=0)
    return parts * file.get(f"{architecture}.embedding_length", int, 0)


def has_picture_parts(file: GGUF, architecture: str) -> bool:
    """Raises ModelFileError."""
    return any(_parts(file, architecture))


def with_picture_parts(file: CheckedFile, layers: Iterable[Iterable[Sublayer]]) -> Iterator[Sublayer]:
    """The sublayers of all layers, of which the last ones of some layers add a part of pictures. Raises
    ModelFileError."""
    parts, done = _parts(file.file, file.architecture), 0
    for done, layer in enumerate(layers, 1):
        *others, last = layer
        yield from others
        part = parts[done - 1] if done <= len(parts) else 0
        yield replace(last, picture_part=part) if part else last
    is_mapped = file.key(_MAPPING) in file.file.metadata
    if len(parts) + is_mapped > done:
        key = file.key(_MAPPING if is_mapped else _COUNT)
        raise damaged(file.file.path, f"{key} is of more than {done} layers")


def _parts(file: GGUF, architecture: str) -> list[int]:
    """The part of pictures that is added after each layer, 0 for none. Raises ModelFileError."""
    count = file.get(f"{architecture}.{_COUNT}", int, 0)
    if not 0 <= count <= _MOST:
        raise damaged(file.path, f"{architecture}.{_COUNT} is {count}")
    if (key := f"{architecture}.{_MAPPING}") not in file.metadata:
        return list(range(1, count + 1))
    mapping = file.get(key, np.ndarray)
    parts = [max(int(part), 0) for part in mapping[1:]] if mapping.dtype.kind in "iu" else [-1]
    if max(parts, default=0) > _MOST or set(parts) - {0} != set(range(1, max(parts, default=0) + 1)):
        raise damaged(file.path, f"{key} does not count the parts of pictures")
    return parts
