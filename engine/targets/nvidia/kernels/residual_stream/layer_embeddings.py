"""What a token gives each layer of a model, and how the layer takes it (`engine.description.spec.LayerEmbeddings`)."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from tinygrad import UOp

from engine.kernels.device_memory import aligned
from engine.kernels.kernel import Kernel
from engine.targets.nvidia.kernels.products.activation_order import PLACES, Order
from engine.targets.nvidia.kernels.products.matmul import as_half
from engine.targets.nvidia.kernels.uops import (
    after_store,
    chain,
    f32,
    finish,
    gated,
    inverse_rms,
    load,
    load_index,
    load_run,
    shared,
    store,
    tree,
)
from engine.targets.nvidia.kernels.weights.matrix_bytes import QUARTER, UNIT, units_of
from engine.targets.nvidia.kernels.weights.weight_layout import WeightLayout


def stride(tokens: int, size: int) -> int:
    """Elements from one layer's embeddings of `tokens` tokens to those of the next."""
    return aligned(tokens * size)


@functools.cache
def layer_embeddings(
    layout: WeightLayout, tokens: int, vocab: int, dim: int, size: int, layers: int, parts: int, eps: float,
    used: int, divided: bool,
) -> Kernel:  # fmt: skip
    """The embeddings of the first `used` of `layers` layers, `size` elements each. Buffers: out, float32 (used,
    stride(tokens, size)), of which each layer's begins with (tokens, size); ids, the tokens, int32 (tokens,) or more;
    sums, the projection of their embeddings (tokens, dim), as partial sums, float32 (parts, tokens, used * size);
    sizes, if these were `divided` by a number each, float32 (tokens,); norm, its weight, float32 (size,); the table's
    planes."""
    units, threads = units_of(layers * size), size // QUARTER
    assert size % QUARTER == 0 and threads <= 1024

    def kernel(out: UOp, ids: UOp, sums: UOp, sizes: UOp | None, norm: UOp, planes: Sequence[UOp]) -> UOp:
        thread, token = UOp.special(threads, "lidx0"), UOp.special(tokens, "gidx0")
        layer = UOp.special(used, "gidx1") if used > 1 else UOp.const(0)
        row, first = load_index(ids, token, vocab), thread * QUARTER
        column = layer * size + first
        place = token * (used * size) + column
        runs = [load_run(sums, p * (tokens * used * size) + place, QUARTER) for p in range(parts)]
        factor = f32(dim**-0.5)
        if sizes is not None:
            factor = factor * load(sizes, token)
        projected = [chain(terms) * factor for terms in zip(*runs, strict=True)]
        squares = after_store(shared(threads, slot=0), thread, chain(x * x for x in projected))
        scale = inverse_rms(tree(load_run(squares, 0, threads)), size, eps)
        part = column % UNIT // QUARTER
        own = layout.quarter(layout.load_quarter(planes, row, units, column // UNIT, part), part)
        results = []
        for j, (a, b) in enumerate(zip(projected, own, strict=True)):
            value = (a * scale * load(norm, first + j) + b * f32(size**0.5)) * f32(0.5**0.5)
            results.append(store(out, layer * stride(tokens, size) + token * size + first + j, value))
        return finish(f"layer_embeddings_{layout.name}_{tokens}_{used}x{size}", results)

    planes = "planes", len(layout.shapes(vocab, layers * size))
    return Kernel(kernel, ("out",), ("ids", "sums", divided and "sizes", "norm", planes))


@functools.cache
def gate_embeddings(tokens: int, size: int, parts: int, order: Order) -> Kernel:
    """gelu(gate) * e for the next product of a prompt. Buffers: out, float16 (tokens, size) in an `Order`; sums, the
    gate's partial sums, float32 (parts, tokens, size); sizes, what its inputs were divided by, float32 (tokens,);
    embedding, e, float32 (tokens, size)."""

    def kernel(out: UOp, sums: UOp, sizes: UOp, embedding: UOp) -> UOp:
        column = UOp.special(-(-size // 128), "gidx0") * 128 + UOp.special(128, "lidx0")
        token = UOp.special(tokens, "gidx1")
        ok = None if size % 128 == 0 else column < size
        place = token * size + column
        gate = chain(load(sums, p * (tokens * size) + place, ok) for p in range(parts)) * load(sizes, token)
        value = as_half(gated(gate, load(embedding, place, ok), "gelu"))
        return finish(
            f"prefill_gate_{tokens}_{size}", [store(out, PLACES[order](token, column, size), value, ok)]
        )

    return Kernel(kernel, ("out",), ("sums", "sizes", "embedding"))
