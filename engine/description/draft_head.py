"""The draft head of a file, multi-token prediction of Qwen3.5 and its successors, as a model of one layer.

Source of names and formulas: graph_mtp in src/models/qwen35.cpp of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from engine.description.checked_file import CheckedFile
from engine.description.spec import Join, ModelSpec, Rope, Sublayer
from engine.description.sublayers import Vector, Weight
from engine.errors import ModelFileError
from engine.formats.ggml_types import TYPES


def read_draft_head(
    file: CheckedFile,
    number: int,
    layer: Callable[[int], Iterable[Sublayer]],
    ropes: list[Rope],
    spec: ModelSpec,
) -> ModelSpec | None:
    """The draft head that is layer `number` of the file of a model, which `layer` reads, with the rotary embeddings
    that are in `ropes` then. None if there is none that is known."""
    prefix = f"blk.{number}.nextn."
    if not file.has(f"{prefix}eh_proj.weight"):
        return None
    try:
        joined = file.weight(f"{prefix}eh_proj", spec.dim, 2 * spec.dim)
        if spec.dim % TYPES[joined.type].block:  # a block has parts of both
            return None

        def half(first: int) -> Weight:
            return replace(joined, cols=spec.dim, first_col=first, of_cols=joined.cols)

        def norm(name: str) -> Vector:
            return file.required(f"{prefix}{name}.weight", spec.dim)

        def matrix(name: str, else_: Weight) -> Weight:
            has = file.has(f"{prefix}{name}.weight")
            return file.weight(f"{prefix}{name}", spec.vocab, spec.dim) if has else else_

        # Ling names it as if it were that of the layer
        names = f"{prefix}shared_head_norm.weight", f"blk.{number}.layer_output_norm.weight"
        norms = (file.vector(name, spec.dim) for name in names)
        join = Join(half(0), half(spec.dim), norm("enorm"), norm("hnorm"), spec.output_norm)
        return replace(
            spec,
            sublayers=tuple(layer(number)),
            ropes=tuple(ropes),
            embedding=matrix("embed_tokens", spec.embedding),
            head=matrix("shared_head_head", spec.head),
            output_norm=next(filter(None, norms), spec.output_norm),
            draft_layers=0,
            encoders=(),
            join=join,
        )
    except ModelFileError:  # of a variant: the model runs without it
        return None
