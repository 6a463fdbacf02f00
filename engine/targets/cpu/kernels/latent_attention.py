"""What latent attention computes beside products and attention (`engine.description.attention.LatentAttention`).

    q, k · heads' product · join · rotate · attend · take · heads' product · order · o

A product with a matrix of each head is one with experts (`experts`), of which each token takes all: a tile has tokens
of one head, and the tiles of all heads follow each other. So rows before it are (tokens, heads), and after it they are
in places: (tiles of tokens, heads, tile).

The rotated elements of a vector come in two halves, each before one of the latent elements: so those of a pair are half
a vector apart (`rope`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from math import gcd

from tinygrad import UOp

from engine.kernels.compilation import KernelFunction
from engine.targets.cpu.kernels.activations import sum_of_squares
from engine.targets.cpu.kernels.kernel_builder import I32, Index, KernelBuilder, even_share
from engine.targets.cpu.kernels.step_state import TILES, n_tokens


@dataclass(frozen=True)
class LatentHeads:
    """`heads` of vectors of `latent` and `rotated` elements, whose results have `values` elements. Latent elements are
    RMS-normed with `eps`."""

    heads: int
    latent: int
    rotated: int
    values: int
    eps: float
    lanes: int

    @property
    def dim(self) -> int:
        return self.latent + self.rotated

    def sources(self, tokens: int, tile: int) -> Iterable[int]:
        """The row (token, head) at each place, of so many tokens at most."""
        tiles = range(-(-tokens // tile))
        return (
            (i * tile + t) * self.heads + head
            for i in tiles
            for head in range(self.heads)
            for t in range(tile)
        )

    def place(self, token: Index, head: Index, tile: int) -> Index:
        """The place of the row (token, head)."""
        return head if tile == 1 else (token // tile * self.heads + head) * tile + token % tile


@functools.cache
def count_tiles(h: LatentHeads) -> KernelFunction:
    """The tiles of all heads. Buffers: a state with the number of tiles; the state of the step."""

    def kernel(part: UOp, parts: UOp, tiles: UOp, state: UOp) -> UOp:
        k = KernelBuilder(h.lanes)
        with k.loop(even_share(1, part, parts)[1]):
            k.store(tiles, TILES, (k.index(state, TILES) * h.heads).cast(I32))
        return k.finish(f"count_tiles_{h.heads}")

    return kernel


@functools.cache
def join(h: LatentHeads, tile: int) -> KernelFunction:
    """The queries of all heads and the key of each token, before their rotation. Buffers: these, float32 (tokens, heads
    + 1, dim); the state if tile is more than 1; the latent elements of queries, float32 (places, latent), and their
    rotated ones, float32 (tokens, heads, rotated); those of keys, float32 (tokens, latent + rotated), of which the
    latent ones are normed; the weight of that norm, float32 (latent,)."""
    halves = h.latent // 2, h.rotated // 2

    def kernel(part: UOp, parts: UOp, out: UOp, *buffers: UOp) -> UOp:
        *states, of_queries, turned, of_keys, weight = buffers
        k = KernelBuilder(h.lanes)
        factor, n, n_turned = k.registers(1), gcd(halves[0], h.lanes), gcd(halves[1], h.lanes)

        def copy_turned(source: UOp, at: Index, to: Index) -> None:
            for half in (0, 1):
                with k.loop(halves[1] // n_turned) as j:
                    v = k.vector(source, at + half * halves[1] + j * n_turned, n_turned)
                    k.store(out, to + half * (h.dim // 2) + j * n_turned, v)

        with k.loop(n_tokens(k, states[0] if states else None, tile)) as t:
            to = t * ((h.heads + 1) * h.dim)
            first, count = even_share(h.heads, part, parts)
            with k.loop(count) as i:
                head = first + i
                own, place = to + head * h.dim, h.place(t, head, tile)
                copy_turned(turned, (t * h.heads + head) * h.rotated, own)
                for half in (0, 1):
                    with k.loop(halves[0] // n) as j:
                        v = k.vector(of_queries, place * h.latent + half * halves[0] + j * n, n)
                        k.store(out, own + half * (h.dim // 2) + halves[1] + j * n, v)
            own, at = to + h.heads * h.dim, t * h.dim
            with k.loop(even_share(1, part, parts)[1]):
                copy_turned(of_keys, at + h.latent, own)
                mean = sum_of_squares(k, of_keys, at, h.latent, n) * (1.0 / h.latent)
                k.store(factor, 0, (mean + h.eps).sqrt().reciprocal())
                for half in (0, 1):
                    with k.loop(halves[0] // n) as j:
                        d = half * halves[0] + j * n
                        v = k.vector(of_keys, at + d, n) * k.load(factor, 0) * k.vector(weight, d, n)
                        k.store(out, own + half * (h.dim // 2) + halves[1] + j * n, v)
        return k.finish(f"join_latent_{h.heads}_{h.dim}_{tile}")

    return kernel


@functools.cache
def take(h: LatentHeads, tile: int) -> KernelFunction:
    """The latent elements of what heads attend to. Buffers: these, float32 (tokens, heads, latent); the state if tile
    is more than 1; all elements, float32 (tokens, heads, dim)."""
    half = h.latent // 2

    def kernel(part: UOp, parts: UOp, out: UOp, *buffers: UOp) -> UOp:
        *states, rows = buffers
        k, n = KernelBuilder(h.lanes), gcd(half, h.lanes)
        first, count = even_share(h.heads, part, parts)
        with k.loop(n_tokens(k, states[0] if states else None, tile)) as t, k.loop(count) as i:
            row = t * h.heads + first + i
            for side in (0, 1):
                with k.loop(half // n) as j:
                    v = k.vector(rows, row * h.dim + side * (h.dim // 2) + h.rotated // 2 + j * n, n)
                    k.store(out, row * h.latent + side * half + j * n, v)
        return k.finish(f"take_latent_{h.heads}_{h.dim}_{tile}")

    return kernel


@functools.cache
def order(h: LatentHeads, tile: int) -> KernelFunction:
    """The results of heads, token by token. Buffers: these, float32 (tokens, heads, values); the state; the results,
    float32 (places, values)."""

    def kernel(part: UOp, parts: UOp, out: UOp, state: UOp, results: UOp) -> UOp:
        k, n = KernelBuilder(h.lanes), gcd(h.values, h.lanes)
        first, count = even_share(h.heads, part, parts)
        with k.loop(n_tokens(k, state, tile)) as t, k.loop(count) as i:
            head = first + i
            place = h.place(t, head, tile)
            with k.loop(h.values // n) as j:
                v = k.vector(results, place * h.values + j * n, n)
                k.store(out, (t * h.heads + head) * h.values + j * n, v)
        return k.finish(f"order_heads_{h.heads}_{h.values}_{tile}")

    return kernel
