"""Latent attention of a token, beside its products and attention itself.

    q, k (`queries_apart`) . latent_key . heads' product (`placed`) . attention . take_latent . heads' product
    (`as_input`) . o

With a matrix before that of queries, narrow_query comes between the two.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from tinygrad import UOp

from engine.kernels.kernel import Kernel
from engine.targets.nvidia.kernels.latent_attention.heads import LatentHeads
from engine.targets.nvidia.kernels.products.epilogues import BlockRows, Epilogue
from engine.targets.nvidia.kernels.residual_stream.token_norm import TokenNorm
from engine.targets.nvidia.kernels.uops import finish, load, store
from engine.targets.nvidia.kernels.weights.matrix_bytes import UNIT
from engine.targets.nvidia.kernels.weights.weight_layout import permuted, permuted_size


@functools.cache
def queries_apart(h: LatentHeads, has_keys: bool) -> Epilogue:
    """Of a product's rows, first those of all heads' plain elements, then those of the rotated ones, and if it
    `has_keys`, those of a key. outs: plain, a vector for each head's product, permuted and scaled, float32 (heads,
    permuted_size(plain)); vectors, those of the queries, of which the rotated elements are stored, float32 (rows,);
    key, float32 (dim,). ins: the input_scale of the heads' product, float32 (UNIT,)."""
    n_plain, n_rotated = h.heads * h.plain, h.heads * h.rotated

    def stores(
        rows: BlockRows, plain: UOp, vectors: UOp, input_scale: UOp, key: UOp | None = None
    ) -> list[UOp]:
        i = rows.thread
        ok, row = rows.valid(i), rows.index(i)
        value = rows.product(i, ok)
        head, e = row // h.plain, row % h.plain
        scaled = value * load(input_scale, e % UNIT)
        place = head * permuted_size(h.plain) + permuted(e, h.plain)
        results = [store(plain, place, scaled, ok & (row < n_plain))]
        turned = (row - n_plain).maximum(0)
        place = turned // h.rotated * h.dim + h.rotated_place(turned % h.rotated)
        is_turned = (row >= n_plain) & (row < n_plain + n_rotated)
        results.append(store(vectors, place, value, ok & is_turned))
        if key is not None:
            e = (row - (n_plain + n_rotated)).maximum(0)
            results.append(store(key, e, value, ok & (row >= n_plain + n_rotated)))
        return results

    return Epilogue(("plain", "vectors", has_keys and "key"), ("input_scale",), 1, stores)


@functools.cache
def placed(h: LatentHeads) -> Epilogue:
    """The results of all heads as the latent elements of queries. outs: vectors, float32 (rows,)."""

    def stores(rows: BlockRows, vectors: UOp) -> list[UOp]:
        i = rows.thread
        ok, e = rows.valid(i), rows.index(i)
        assert rows.slot is not None
        return [store(vectors, rows.slot * h.dim + h.latent_place(e), rows.product(i, ok), ok)]

    return Epilogue(("vectors",), (), 1, stores, by_slot=True)


@functools.cache
def as_input(h: LatentHeads) -> Epilogue:
    """The results of all heads, one after the other, permuted and scaled for the next product. outs: out, that vector;
    ins: its input_scale, float32 (UNIT,)."""
    n = h.heads * h.values

    def stores(rows: BlockRows, out: UOp, input_scale: UOp) -> list[UOp]:
        i = rows.thread
        assert rows.slot is not None
        ok, place = rows.valid(i), rows.slot * h.values + rows.index(i)
        value = rows.product(i, ok) * load(input_scale, place % UNIT)
        return [store(out, permuted(place, n), value, ok)]

    return Epilogue(("out",), ("input_scale",), 1, stores, by_slot=True)


@functools.cache
def latent_key(h: LatentHeads, first: int) -> Kernel:
    """The key of a token, before its rotation. Buffers: vectors, of which it is the last, float32 (rows,); key, its
    latent and its rotated elements, float32, from `first` on; norm, the weight of the norm of the latent ones, float32
    (latent,)."""

    def kernel(vectors: UOp, key: UOp, norm: UOp) -> UOp:
        token_norm, to = TokenNorm(h.latent, h.eps), h.heads * h.dim
        values = [load(key, e + first, ok) for e, ok in token_norm.places]
        factor = token_norm.factor(values, 0)
        stores = [
            store(vectors, to + h.latent_place(e), value * factor * load(norm, e, ok), ok)
            for (e, ok), value in zip(token_norm.places, values, strict=True)
        ]
        for start in range(0, h.rotated, token_norm.threads):
            e = token_norm.thread + start
            ok = e < h.rotated
            place = to + h.rotated_place(e.minimum(h.rotated - 1))
            stores.append(store(vectors, place, load(key, e + (first + h.latent), ok), ok))
        return finish(f"latent_key_{h.name}", stores)

    return Kernel(kernel, ("vectors",), ("key", "norm"))


@functools.cache
def narrow_query(width: int, eps: float, copies: int) -> Kernel:
    """Norms what the product of queries reads. Buffers: out, for each of its input_scales a permuted vector, float32
    (permuted_size(width),); rows, of which the first are normed, float32; norms, the weight times each input_scale,
    float32 (width,)."""

    def kernel(out: Sequence[UOp], rows: UOp, norms: Sequence[UOp]) -> UOp:
        token_norm = TokenNorm(width, eps)
        values = [load(rows, e, ok) for e, ok in token_norm.places]
        factor = token_norm.factor(values, 0)
        stores = [
            store(vector, permuted(e, width), value * factor * load(norm, e, ok), ok)
            for vector, norm in zip(out, norms, strict=True)
            for (e, ok), value in zip(token_norm.places, values, strict=True)
        ]
        return finish(f"narrow_query_{width}", stores)

    return Kernel(kernel, (("out", copies),), ("rows", ("norms", copies)))


@functools.cache
def take_latent(h: LatentHeads) -> Kernel:
    """The latent elements of what heads attend to, for their product. Buffers: out, a vector for each, permuted and
    scaled, float32 (heads, permuted_size(latent)); attended, all elements, float32 (heads * dim,), permuted;
    input_scale, that of the product, float32 (UNIT,)."""
    threads = 128

    def kernel(out: UOp, attended: UOp, input_scale: UOp) -> UOp:
        e = UOp.special(-(-h.latent // threads), "gidx0") * threads + UOp.special(threads, "lidx0")
        head, ok = UOp.special(h.heads, "gidx1"), None if h.latent % threads == 0 else e < h.latent
        place = head * h.dim + h.latent_place(e if ok is None else e.minimum(h.latent - 1))
        value = load(attended, permuted(place, h.heads * h.dim)) * load(input_scale, e % UNIT)
        result = store(out, head * permuted_size(h.latent) + permuted(e, h.latent), value, ok)
        return finish(f"take_latent_{h.name}", [result])

    return Kernel(kernel, ("out",), ("attended", "input_scale"))
