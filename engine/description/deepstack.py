"""Models that add parts of a picture's embeddings to its tokens after their first layers (deepstack, Qwen3-VL).

The key is llama.cpp's (src/models/qwen3vl.cpp): after layer i of so many, part i + 1 is added.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from engine.description.checked_file import CheckedFile
from engine.description.spec import Sublayer
from engine.formats.gguf import GGUF, damaged

_KEY = "n_deepstack_layers"


def picture_width(file: GGUF, architecture: str) -> int:
    """The elements of the embeddings of pictures that a model takes, without a look at its tensors."""
    parts = 1 + file.get(f"{architecture}.{_KEY}", int, 0)
    return parts * file.get(f"{architecture}.embedding_length", int, 0)


def with_picture_parts(file: CheckedFile, layers: Iterable[Iterable[Sublayer]]) -> Iterator[Sublayer]:
    """The sublayers of all layers, those that are the last ones of the first layers with a part of pictures. Raises
    ModelFileError."""
    count = file.file.get(file.key(_KEY), int, 0)
    done = 0
    for done, layer in enumerate(layers, 1):
        *others, last = layer
        yield from others
        yield replace(last, picture_part=done) if done <= count else last
    if not 0 <= count <= done:
        raise damaged(file.file.path, f"{file.key(_KEY)} is {count}")
