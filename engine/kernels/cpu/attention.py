"""Attention over the cached keys and values, for one token or a tile of them.

A core takes a head of keys and values at a time, with `queries` rows that share it: the query heads of the
group, of as many tokens as fit registers. First the scores of all tokens, `lanes` of them side by side; then
their exponentials; then the weighted sum of values, `lanes` elements side by side.
"""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray
from tinygrad import UOp
from tinygrad.uop.ops import Ops

from engine.kernels.cpu.program import F32, Index, Program
from engine.kernels.cpu.rows import POSITION, Heads, tokens_of
from engine.kernels.cpu.thread_pool import Kernel

_REGISTERS = 16  # sums that are kept at a time
_MASKED = -1e30


def queries_together(heads: Heads, cores: int, tile: int) -> tuple[int, int]:
    """(query heads, tokens) that a task takes: heads of one group, fewer of them where there are more cores
    than tasks, and as many tokens as keep registers busy."""
    shared_by = heads.query // heads.kv
    together = shared_by
    while tile == 1 and together > 1 and heads.query // together < cores:
        together = max(d for d in range(1, together) if shared_by % d == 0)
    tokens = 1
    while tokens < tile and 2 * tokens * together <= _REGISTERS and tile % (2 * tokens) == 0:
        tokens *= 2
    return together, tokens


def pieces(heads: Heads, cores: int, tile: int) -> int:
    """Into how many the work may be cut, which need scratch each."""
    together, tokens = queries_together(heads, cores, tile)
    return min(heads.query // together * (tile // tokens), 4 * cores)


def scratch_size(heads: Heads, cores: int, tile: int) -> int:
    together, tokens = queries_together(heads, cores, tile)
    return pieces(heads, cores, tile) * together * tokens * heads.length


def mask(lanes: int) -> NDArray[np.float32]:
    """What is added to scores, from `lanes - 1 - n` on, of a vector whose first n tokens may be seen."""
    return np.where(np.arange(2 * lanes) < lanes, 0, _MASKED).astype(np.float32)


@functools.cache
def attention(heads: Heads, cores: int, tile: int) -> Kernel:
    """Buffers: out, float32 (tokens, query * dim); scratch, float32 (`scratch_size`,); keys, values; the
    state; queries, float32 (tokens, query * dim), normed, rotated and scaled; `mask`."""
    h, lanes = heads, heads.lanes
    together, tokens = queries_together(heads, cores, tile)
    n = together * tokens
    vectors = h.dim // lanes
    at_once = max(d for d in range(1, vectors + 1) if vectors % d == 0 and (d == 1 or d * n <= _REGISTERS))
    width = h.query * h.dim

    def kernel(
        part: UOp,
        parts: UOp,
        out: UOp,
        scores: UOp,
        keys: UOp,
        values: UOp,
        state: UOp,
        queries: UOp,
        hidden: UOp,
    ) -> UOp:
        k = Program(lanes)
        k.scratch(scores)
        start = k.index(state, POSITION)
        every = tokens_of(k, state, tile)
        end = (
            start + every
        )  # a loop's length must not depend on the loop around: all tasks go as far as the last
        blocks = (end + (lanes - 1)) // lanes
        tasks = every // tokens * (h.query // together)
        mine = (tasks + parts - 1 - part) // parts
        base = part * (n * h.length)
        with k.loop(mine) as i:
            task = i * parts + part
            block, share_of = task // (h.query // together), task % (h.query // together)
            kv = share_of // (h.query // h.kv // together)
            token = block * tokens  # the first of the task's
            rows = [
                (token + t) * width + (share_of * together + q) * h.dim
                for t in range(tokens)
                for q in range(together)
            ]

            def score_at(b: Index, q: Index) -> Index:
                return base + (b * n + q) * lanes

            # scores
            largest = [k.registers(lanes) for _ in range(n)]
            for m in largest:
                k.fill(m, 0, UOp.const(_MASKED, F32))
            with k.loop(blocks) as b:
                sums = [k.registers(lanes) for _ in range(n)]
                for s in sums:
                    k.fill(s, 0, UOp.const(0.0, F32))
                with k.loop(h.dim) as d:
                    key = k.vector(keys, h.key_at(kv, b, d)).cast(F32)
                    for q, s in enumerate(sums):
                        k.store(s, 0, k.vector(s, 0) + key * k.load(queries, rows[q] + d))
                for q, s in enumerate(sums):
                    # of this vector's tokens, those up to the query's own may be seen
                    seen = (start + token + q // together + 1 - b * lanes).maximum(0).minimum(lanes)
                    score = k.vector(s, 0) + k.vector(hidden, lanes - seen)
                    k.store(scores, score_at(b, q), score)
                    k.store(largest[q], 0, k.vector(largest[q], 0).maximum(score))

            # their exponentials
            totals, peaks, inverses = k.registers(n * lanes), k.registers(n), k.registers(n)
            for q in range(n):
                k.store(peaks, q, k.across(k.vector(largest[q], 0), Ops.MAX))
            with k.loop(n) as q:
                k.fill(totals, q * lanes, UOp.const(0.0, F32))
            with k.loop(blocks) as b, k.loop(n) as q:
                weight = k.exp(k.vector(scores, score_at(b, q)) + k.load(peaks, q) * -1.0)
                k.store(scores, score_at(b, q), weight)
                k.store(totals, q * lanes, k.vector(totals, q * lanes) + weight)
            with k.loop(n) as q:
                k.store(inverses, q, k.across(k.vector(totals, q * lanes), Ops.ADD).reciprocal())

            # the weighted sum of values
            with k.loop(vectors // at_once) as j:
                sums = [k.registers(lanes) for _ in range(n * at_once)]
                for s in sums:
                    k.fill(s, 0, UOp.const(0.0, F32))
                with k.loop(end) as t:
                    for v in range(at_once):
                        value = k.vector(values, h.value_at(kv, t, (j * at_once + v) * lanes)).cast(F32)
                        for q in range(n):
                            s = sums[v * n + q]
                            weight = k.load(scores, score_at(t // lanes, q) + t % lanes)
                            k.store(s, 0, k.vector(s, 0) + value * weight)
                for v in range(at_once):
                    for q in range(n):
                        result = k.vector(sums[v * n + q], 0) * k.load(inverses, q)
                        k.store(out, rows[q] + (j * at_once + v) * lanes, result)
        return k.finish(f"attention_{h.query}_{h.kv}_{h.dim}_{tile}")

    return kernel
