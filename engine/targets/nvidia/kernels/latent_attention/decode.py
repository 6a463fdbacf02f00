"""Latent attention of a token, beside its products and attention itself.

    q, k (`queries_apart`) . latent_key . heads' product (`placed`) . attention . heads' product (`as_input`) . o

With a matrix before that of queries, latent_key comes before the latter, and norms what it reads too.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from tinygrad import UOp

from engine.kernels.kernel import Kernel
from engine.targets.nvidia.kernels.latent_attention.heads import LatentHeads
from engine.targets.nvidia.kernels.products.epilogues import BlockRows, Epilogue
from engine.targets.nvidia.kernels.residual_stream.token_norm import TokenNorm
from engine.targets.nvidia.kernels.uops import f32, finish, inverse_rms, load, store
from engine.targets.nvidia.kernels.weights.matrix_bytes import UNIT
from engine.targets.nvidia.kernels.weights.weight_layout import permuted, permuted_size


@functools.cache
def queries_apart(h: LatentHeads, has_keys: bool) -> Epilogue:
    """Stores the rows of a product apart: first those of all heads' plain elements, then those of the rotated ones, and
    if it `has_keys`, those of a key. outs: plain, a vector for each head's product, permuted and scaled, float32
    (heads, permuted_size(plain)); vectors, those of the queries, of which the rotated elements are stored, float32
    (rows,); key, float32 (dim,). ins: the input_scale of the heads' product, float32 (UNIT,)."""
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
def latent_key(h: LatentHeads, width: int = 0, copies: int = 0) -> Kernel:
    """The key of a token, before its rotation. Buffers: vectors, of which it is the last, float32 (rows,); key, its
    latent and its rotated elements, float32, after `width` others; norm, the weight of the norm of the latent ones,
    float32 (latent,). If there are others, these are normed, for the product of queries: out, for each of its
    input_scales a permuted vector, float32 (permuted_size(width),); norms, the weight times each input_scale, float32
    (width,)."""

    def kernel(vectors: UOp, out: Sequence[UOp], key: UOp, norm: UOp, norms: Sequence[UOp]) -> UOp:
        token_norm, to = TokenNorm(max(h.latent, width), h.eps), h.heads * h.dim
        is_key = UOp.special(2, "gidx0").eq(0) if width else UOp.const(True)
        first, n = (
            is_key.where(UOp.const(width), UOp.const(0)),
            is_key.where(*map(UOp.const, (h.latent, width))),
        )
        values = [load(key, e + first, e < n) for e, _ in token_norm.places]
        mean = token_norm.total([value * value for value in values], 0) * is_key.where(
            f32(1 / h.latent), f32(1 / max(width, 1))
        )
        factor, stores = inverse_rms(mean, 1, h.eps), []
        for (e, _), value in zip(token_norm.places, values, strict=True):
            ok = is_key & (e < h.latent)
            latent = e.minimum(h.latent - 1)
            weighted = value * factor * load(norm, latent, ok)
            stores.append(store(vectors, to + h.latent_place(latent), weighted, ok))
            for vector, weight in zip(out, norms, strict=True):
                ok = (e < width) & (is_key ^ True)
                weighted = value * factor * load(weight, e, ok)
                stores.append(store(vector, permuted(e.minimum(width - 1), width), weighted, ok))
        for start in range(0, h.rotated, token_norm.threads):
            e = token_norm.thread + start
            ok = is_key & (e < h.rotated)
            place = to + h.rotated_place(e.minimum(h.rotated - 1))
            stores.append(store(vectors, place, load(key, e + (width + h.latent), ok), ok))
        return finish(f"latent_key_{h.name}_{width}", stores)

    return Kernel(kernel, ("vectors", ("out", copies)), ("key", "norm", ("norms", copies)))
