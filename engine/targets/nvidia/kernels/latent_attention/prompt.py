"""Latent attention of several tokens, beside its products and attention itself.

    q, k . head_rows . heads' product . join . rotate . attention . take_rows . heads' product . order . o

A product with a matrix of each head is one with experts (`ExpertTiles`), of which each token takes all. So its
activations are in places: tiles of each head, one head after the other.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from tinygrad import UOp

from engine.kernels.kernel import Kernel
from engine.targets.nvidia.kernels.latent_attention.heads import LatentHeads
from engine.targets.nvidia.kernels.products.activation_order import PLACES, Order
from engine.targets.nvidia.kernels.products.matmul import ExpertTiles, as_half, fragment_index
from engine.targets.nvidia.kernels.products.runs import Runs
from engine.targets.nvidia.kernels.residual_stream.token_norm import TokenNorm
from engine.targets.nvidia.kernels.uops import finish, load, store

_THREADS = 128


def head_tiles(tokens: int, heads: int) -> ExpertTiles:
    """The tiles of the products of heads."""
    return ExpertTiles(tokens, heads, heads, 32 if tokens % 32 == 0 else 16)


def head_lists(tiles: ExpertTiles) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """The assignments of all tokens to all heads, and the head of each tile (`ExpertTiles`)."""
    places = np.arange(_places(tiles))
    assignments = np.where(places < tiles.tokens, places * tiles.n + np.arange(tiles.n)[:, None], -1)
    lists = np.full(tiles.size, -1), np.full(tiles.count, -1)
    lists[0][: assignments.size] = assignments.reshape(-1)
    owners = np.repeat(np.arange(tiles.n), len(places) // tiles.tile)
    lists[1][: len(owners)] = owners
    return lists[0].astype(np.int32), lists[1].astype(np.int32)


def _places(tiles: ExpertTiles) -> int:
    """Places of a head."""
    return -(-tiles.tokens // tiles.tile) * tiles.tile


def _elements(n: int) -> tuple[UOp, UOp, UOp | None]:
    """The element of a thread, of n, the same within bounds, and whether it is one (None: always)."""
    e = UOp.special(-(-n // _THREADS), "gidx0") * _THREADS + UOp.special(_THREADS, "lidx0")
    return (e, e, None) if n % _THREADS == 0 else (e, e.minimum(n - 1), e < n)


@functools.cache
def head_rows(h: LatentHeads, runs: Runs, tiles: ExpertTiles) -> Kernel:
    """The plain elements of queries, which are the first rows of a product, in places. Buffers: out, fragments, float16
    (fragments_size(tiles.size, plain),); sums, those of the product's runs."""

    def kernel(out: UOp, sums: Sequence[UOp]) -> UOp:
        _, e, ok = _elements(h.plain)
        head, token = UOp.special(h.heads, "gidx1"), UOp.special(runs.tokens, "gidx2")
        inside = UOp.const(True) if ok is None else ok
        value = runs.load(sums, None, token, head * h.plain + e, inside)
        place = fragment_index(head * _places(tiles) + token, e, h.plain)
        return finish(f"head_rows_{h.name}_{runs.tokens}", [store(out, place, as_half(value), ok)])

    return Kernel(kernel, ("out",), (("sums", len(runs.sizes)),))


@functools.cache
def join(h: LatentHeads, queries: Runs, keys: Runs, first_key: int) -> Kernel:
    """The queries and the key of each token, before their rotation. Buffers: vectors, float32 (tokens, rows); latent,
    the latent elements of queries, float32 (heads, tokens, latent); of_queries, the sums of runs, in which the rotated
    elements of queries follow their plain ones; of_keys, those in which the latent and the rotated elements of the key
    are the rows from `first_key` on; norm, the weight of the norm of the key's latent elements, float32 (latent,)."""
    tokens, n_plain = queries.tokens, h.heads * h.plain

    def kernel(
        vectors: UOp, latent: UOp, of_queries: Sequence[UOp], of_keys: Sequence[UOp], norm: UOp
    ) -> UOp:
        token, vector = UOp.special(tokens, "gidx0"), UOp.special(h.heads + 1, "gidx1")
        token_norm = TokenNorm(h.latent, h.eps)
        is_key = vector.eq(h.heads)
        head, to = vector.minimum(h.heads - 1), (token * (h.heads + 1) + vector) * h.dim
        is_query = vector < h.heads
        values, stores = [], []
        for e, ok in token_norm.places:
            inside = is_key if ok is None else is_key & ok
            values.append(keys.load(of_keys, None, token, e + first_key, inside))
        factor = token_norm.factor(values, 0)
        for (e, ok), value in zip(token_norm.places, values, strict=True):
            inside = is_query if ok is None else is_query & ok
            own = load(latent, (head * tokens + token) * h.latent + e, inside)
            element = is_key.where(value * factor * load(norm, e, ok), own)
            stores.append(store(vectors, to + h.latent_place(e), element, ok))
        for start in range(0, h.rotated, token_norm.threads):
            e = token_norm.thread + start
            ok = e < h.rotated
            e = e.minimum(h.rotated - 1)
            row = head * h.rotated + e + n_plain
            turned = queries.load(of_queries, None, token, row, ok & is_query)
            turned = turned + keys.load(of_keys, None, token, e + (first_key + h.latent), ok & is_key)
            stores.append(store(vectors, to + h.rotated_place(e), turned, ok))
        return finish(f"join_latent_{h.name}_{tokens}", stores)

    ins = "latent", ("of_queries", len(queries.sizes)), ("of_keys", len(keys.sizes)), "norm"
    return Kernel(kernel, ("vectors",), ins)


@functools.cache
def take_rows(h: LatentHeads, tokens: int, tiles: ExpertTiles, order: Order) -> Kernel:
    """The latent elements of what heads attend to, in places. Buffers: out, fragments, float16
    (fragments_size(tiles.size, latent),); attended, all elements, float16 (tokens, heads * dim) in an `Order`."""

    def kernel(out: UOp, attended: UOp) -> UOp:
        _, e, ok = _elements(h.latent)
        head, token = UOp.special(h.heads, "gidx1"), UOp.special(tokens, "gidx2")
        value = load(attended, PLACES[order](token, head * h.dim + h.latent_place(e), h.heads * h.dim))
        place = fragment_index(head * _places(tiles) + token, e, h.latent)
        return finish(f"take_rows_{h.name}_{tokens}_{order}", [store(out, place, value, ok)])

    return Kernel(kernel, ("out",), ("attended",))


@functools.cache
def order_heads(h: LatentHeads, tokens: int, order: Order) -> Kernel:
    """The results of heads as activations of the last product. Buffers: out, float16 (tokens, heads * values) in an
    `Order`; results, float32 (heads, tokens, values)."""

    def kernel(out: UOp, results: UOp) -> UOp:
        _, e, ok = _elements(h.values)
        head, token = UOp.special(h.heads, "gidx1"), UOp.special(tokens, "gidx2")
        value = load(results, (head * tokens + token) * h.values + e)
        place = PLACES[order](token, head * h.values + e, h.heads * h.values)
        return finish(f"order_heads_{h.name}_{tokens}_{order}", [store(out, place, as_half(value), ok)])

    return Kernel(kernel, ("out",), ("results",))


@functools.cache
def narrow_rows(runs: Runs, width: int, eps: float, order: Order) -> Kernel:
    """Norms what the product of queries reads, the first rows of a product. Buffers: out, float16 (tokens, width) in an
    `Order`; sums, those of the product's runs; norm, the weight, float32 (width,)."""

    def kernel(out: UOp, sums: Sequence[UOp], norm: UOp) -> UOp:
        token_norm, token = TokenNorm(width, eps), UOp.special(runs.tokens, "gidx0")
        values = []
        for e, ok in token_norm.places:
            values.append(runs.load(sums, None, token, e, UOp.const(True) if ok is None else ok))
        factor = token_norm.factor(values, 0)
        stores = [
            store(out, PLACES[order](token, e, width), as_half(value * factor * load(norm, e, ok)), ok)
            for (e, ok), value in zip(token_norm.places, values, strict=True)
        ]
        return finish(f"narrow_rows_{width}_{runs.tokens}_{order}", stores)

    return Kernel(kernel, ("out",), (("sums", len(runs.sizes)), "norm"))
