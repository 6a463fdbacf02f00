"""What a model file says of embeddings (https://github.com/ggml-org/llama.cpp, enum llama_pooling_type)."""

from __future__ import annotations

from engine.formats.gguf import GGUF, damaged
from engine.protocol.events import Pooling

_POOLING: dict[int, Pooling | None] = {-1: None, 0: None, 1: "mean", 2: "cls", 3: "last", 4: "rank"}


def pooling_of(file: GGUF) -> Pooling | None:
    """How the embeddings of a model are made; None if its file does not say, as that of a chat model. Raises
    ModelFileError."""
    number = file.get(f"{file.get('general.architecture', str, '')}.pooling_type", int, -1)
    if number not in _POOLING:
        raise damaged(file.path, f"its pooling type is {number}")
    return _POOLING[number]
