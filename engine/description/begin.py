"""The embeddings, which layers may add again (Talkie), as data.

Source: src/models/talkie.cpp of llama.cpp.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.description.checked_file import CheckedFile
from engine.description.spec import Sublayer
from engine.description.sublayers import Operator


@dataclass(frozen=True)
class Begin(Operator):
    """The embeddings of the tokens, before the norm that the stream begins with."""

    words = "embeddings that layers add again"


def read_begin(file: CheckedFile, prefix: str, dim: int) -> Sublayer:
    """Adds them, normed as the stream's beginning is, times the layer's number. Raises ModelFileError."""
    scale = file.required(f"{prefix}layer_output_scale.weight", 1)
    return Sublayer(None, Begin(), replace(scale, size=dim, each=dim))
