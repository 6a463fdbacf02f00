"""Models whose tokens attend to all of a text, read from their files: those of the kind of BERT, and what models for
embeddings and ranks make of a pooled vector.

https://github.com/ggml-org/llama.cpp, src/models/bert.cpp and the pooling in src/llama-graph.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from engine.description.checked_file import CheckedFile
from engine.description.spec import Projection, Sublayer
from engine.description.sublayers import Operator, Weight
from engine.formats.pooling import pooling_of

EMBEDDING_NORM = "token_embd_norm"
_PROJECTIONS = "dense_2", "dense_3"
"""Those of EmbeddingGemma."""


def last_norm(layers: int) -> str:
    """The last norm of a model whose norms come after its sums."""
    return f"blk.{layers - 1}.layer_output_norm"


def read_normed_after(
    file: CheckedFile, i: int, dim: int, operators: Callable[[str], tuple[Operator, Operator]]
) -> Iterator[Sublayer]:
    """Layer i of a model whose norms come after the sums: the norm of a sublayer is that after the sum before it.
    `operators` reads attention and the feed-forward layer. Raises ModelFileError."""
    prefix = f"blk.{i}."
    norms = last_norm(i) if i else EMBEDDING_NORM, f"{prefix}attn_output_norm"
    for name, operator in zip(norms, operators(prefix), strict=True):
        norm, bias = file.required(f"{name}.weight", dim), file.vector(f"{name}.bias", dim)
        yield Sublayer(norm, operator, None, norm_bias=bias, replaces=True)


def read_projections(file: CheckedFile, dim: int) -> tuple[Projection, ...]:
    """What becomes of an embedding (`ModelSpec.projections`). Raises ModelFileError."""
    first, second = _PROJECTIONS
    if not file.has(f"{first}.weight"):
        return ()
    width = file.file.tensors[f"{first}.weight"].shape[0]
    return Projection(file.weight(first, width, dim)), Projection(file.weight(second, dim, width))


def read_classes(file: CheckedFile, dim: int) -> tuple[Projection, ...]:
    """See `ModelSpec.classes`: none if the file is not of a model that ranks documents. Raises ModelFileError."""
    found = [name for name in ("cls", "cls.output") if file.has(f"{name}.weight")]
    steps = tuple(_projection(file, name, dim, tanh=name == "cls") for name in found)
    return steps if pooling_of(file.file) == "rank" else ()


def _projection(file: CheckedFile, name: str, dim: int, tanh: bool) -> Projection:
    rows = file.file.tensors[f"{name}.weight"].shape[0]
    weight: Weight = file.weight(name, rows, dim)
    return Projection(weight, file.vector(f"{name}.bias", rows), tanh)
