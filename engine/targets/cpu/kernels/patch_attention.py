"""Attention of all patches of a picture to all, or to those of their window.

A task is a tile of queries of a head, in three passes that stay in a core's caches: the scores of the keys, a tile of
them side by side; their exponentials; and the weighted sum of the values. The keys of a head are read once for a tile
of queries, and if there are windows, only those of the tiles that have keys of its queries' windows.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from math import gcd

from tinygrad import UOp
from tinygrad.uop.ops import Ops

from engine.kernels.compilation import KernelFunction
from engine.targets.cpu.kernels.kernel_builder import F32, KernelBuilder, even_share
from engine.targets.cpu.kernels.patches import FIRST, PatchHeads
from engine.targets.cpu.kernels.step_state import TILES

HIDDEN = -1e30
"""Added to the scores of patches that are none."""
_MASKED = -1e30


class KeyTiles:
    """The tiles of keys of a tile of queries, and what hides keys of other windows from these. `windows`: how many
    tiles of keys each tile of queries has, and the first one of each, int32 (1 + tiles,); and of each patch the number
    of its window, float32 (tiles * lanes,). Without them these are all tiles."""

    def __init__(self, k: KernelBuilder, tiles: UOp, queries: UOp, windows: Sequence[UOp]) -> None:
        """`tiles`: of all keys. `queries`: the number of their tile in the picture."""
        self._k, self._queries = k, queries * k.lanes
        self.first, self.count = UOp.const(0), tiles
        self._numbers: UOp | None = None
        if windows:
            firsts, self._numbers = windows
            self.first, self.count = k.index(firsts, queries + 1), k.index(firsts, 0)

    def hide(self, scores: UOp, block: UOp, query: int | None = None, key: int = 0) -> UOp:
        """The scores of a query with all keys of a tile, or of all queries with a key."""
        if self._numbers is None:
            return scores
        k, keys = self._k, block * self._k.lanes
        if query is None:
            apart = k.vector(self._numbers, self._queries) + k.load(self._numbers, keys + key) * -1.0
        else:
            apart = k.vector(self._numbers, keys) + k.load(self._numbers, self._queries + query) * -1.0
        return scores + apart.maximum(apart * -1.0) * _MASKED


class _Scores:
    """The scores of a tile of queries and its keys, in a buffer from `base` on: [tile of keys, query, key]."""

    def __init__(self, k: KernelBuilder, h: PatchHeads, of_keys: KeyTiles, scores: UOp, base: UOp) -> None:
        self._k, self._h, self._of_keys, self._scores, self._base = k, h, of_keys, scores, base

    def _at(self, i: UOp, query: int | UOp) -> UOp:
        return self._base + (i * self._k.lanes + query) * self._k.lanes

    def fill(self, q: UOp, keys: UOp, hidden: UOp, first_tile: UOp, queries: UOp) -> list[UOp]:
        """Computes them, of the queries' tile and of the keys of a head from its `first_tile` on. The largest of each
        query so far, in vectors."""
        k, h, lanes = self._k, self._h, self._k.lanes
        largest = [k.registers(lanes) for _ in range(lanes)]
        for m in largest:
            k.fill(m, 0, UOp.const(_MASKED, F32))
        with k.loop(self._of_keys.count) as i:
            block = self._of_keys.first + i
            sums = [k.zeros() for _ in range(lanes)]
            with k.loop(h.dim) as d:
                key = k.vector(keys, ((first_tile + block) * h.dim + d) * lanes)
                for t, s in enumerate(sums):
                    k.store(s, 0, k.vector(s, 0) + key * k.load(q, (queries * h.dim + d) * lanes + t))
            for t, s in enumerate(sums):
                score = self._of_keys.hide(k.vector(s, 0) + k.vector(hidden, block * lanes), block, t)
                k.store(self._scores, self._at(i, t), score)
                k.store(largest[t], 0, k.vector(largest[t], 0).maximum(score))
        return largest

    def weigh(self, largest: Sequence[UOp]) -> UOp:
        """Makes weights of them: their exponentials. What each query's results are to be multiplied by, in an array."""
        k, lanes, scores = self._k, self._k.lanes, self._scores
        peaks, totals = k.registers(lanes), k.registers(lanes * lanes)
        for t in range(lanes):
            k.store(peaks, t, k.across(k.vector(largest[t], 0), Ops.MAX))
        with k.loop(lanes) as t:
            k.fill(totals, t * lanes, UOp.const(0.0, F32))
        with k.loop(self._of_keys.count) as i, k.loop(lanes) as t:
            share = k.exp(k.vector(scores, self._at(i, t)) + k.load(peaks, t) * -1.0)
            k.store(scores, self._at(i, t), share)
            k.store(totals, t * lanes, k.vector(totals, t * lanes) + share)
        inverses = k.registers(lanes)
        with k.loop(lanes) as t:
            total = k.across(k.vector(totals, t * lanes), Ops.ADD)
            k.store(inverses, t, total.reciprocal())
        return inverses

    def sums(self, v: UOp, first_tile: UOp, padded_dim: int, column: UOp | int) -> list[UOp]:
        """The weighted sums of `lanes` columns of a head's values, of each query."""
        k, lanes = self._k, self._k.lanes
        sums = [k.zeros() for _ in range(lanes)]
        with k.loop(self._of_keys.count) as i, k.loop(lanes) as key:
            row = (first_tile + self._of_keys.first + i) * lanes + key
            value = k.vector(v, row * padded_dim + column)
            for t, s in enumerate(sums):
                k.store(s, 0, k.vector(s, 0) + value * k.load(self._scores, self._at(i, t) + key))
        return sums


@functools.cache
def attend(h: PatchHeads, windowed: bool = False) -> KernelFunction:
    """Attention of a chunk's queries. Buffers: out, float32 (rows, width); scratch, float32 (parts, tiles, lanes,
    lanes); queries, keys and values (`split_heads`); what hides keys, float32 (tiles * lanes,): 0, or a large negative
    number; the tiles of a picture's queries and of its keys, int32 (2,); the state; if `windowed`, the windows
    (`KeyTiles`)."""
    lanes, dim = h.lanes, h.dim

    def kernel(
        part: UOp,
        parts: UOp,
        out: UOp,
        scores: UOp,
        q: UOp,
        keys: UOp,
        v: UOp,
        hidden: UOp,
        shape: UOp,
        state: UOp,
        *windows: UOp,
    ) -> UOp:
        k = KernelBuilder(lanes)
        k.scratch(scores)
        tiles, of_keys, in_chunk = k.index(shape, 0), k.index(shape, 1), k.index(state, TILES)
        base = part * (of_keys * (lanes * lanes))
        first, count = even_share(in_chunk * h.heads, part, parts)
        with k.loop(count) as n:
            task = first + n  # the tiles of a head one after the other, so that its keys stay in the cache
            head, tile = task // in_chunk, task % in_chunk
            own = k.index(state, FIRST) // lanes + tile
            own_scores = _Scores(k, h, KeyTiles(k, of_keys, own, windows), scores, base)
            first_key = head // h.sharing * of_keys
            largest = own_scores.fill(q, keys, hidden, first_key, head * tiles + own)
            inverses = own_scores.weigh(largest)

            def weighted(column: UOp | int, n: int) -> None:
                """The first n of `lanes` columns of the result."""
                sums = own_scores.sums(v, first_key, h.padded_dim, column)
                for t, s in enumerate(sums):
                    result = k.vector(s, 0) * k.load(inverses, t)
                    to = (tile * lanes + t) * h.width + head * dim + column
                    together = gcd(n, lanes)
                    for e in range(0, n, together):
                        k.store(out, to + e, result if n == lanes else k.part(result, e, together))

            h.by_vectors(k, weighted)
        return k.finish(f"attend_patches_{h.heads}_{dim}")

    return kernel
