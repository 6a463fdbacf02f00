"""Attention over the cached keys and values, for one token or a tile of them.

A task is one key head and the query rows that share it: the query heads of its group, for as many tokens as fit the
registers. It has three passes: the scores of the cached tokens, `lanes` tokens side by side; their exponentials; and
the weighted sum of the values, `lanes` elements side by side. With a window, a task reads only the blocks of `lanes`
tokens that hold keys of its windows.

The tokens of a step are those of a prompt, or `rows` of different sequences, of which each is a task of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from math import gcd
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from tinygrad import UOp
from tinygrad.uop.ops import Ops

from engine.formats.kv_format import QUANT_BLOCK
from engine.kernels.compilation import KernelFunction
from engine.targets.cpu.kernels.activations import capped
from engine.targets.cpu.kernels.kernel_builder import F32, Index, KernelBuilder
from engine.targets.cpu.kernels.rope import HeadLanes, n_entries
from engine.targets.cpu.kernels.step_state import n_tokens, position_of, sequence_of

MAX_SUMS = 16  # vectors that a loop accumulates, so that they stay in registers
_MASKED = -1e30


def task_shape(heads: HeadLanes, threads: int, tile: int, rows: int) -> tuple[int, int]:
    """(query heads, tokens) of a task: the query heads of a group, or fewer if there are more threads than groups, and
    as many tokens as keep the registers busy."""
    shared_by = heads.query // heads.kv
    task_heads = shared_by
    while tile == 1 and task_heads > 1 and heads.query // task_heads < threads:
        task_heads = max(d for d in range(1, task_heads) if shared_by % d == 0)
    tokens = 1
    while not rows and tokens < tile and 2 * tokens * task_heads <= MAX_SUMS and tile % (2 * tokens) == 0:
        tokens *= 2
    return task_heads, tokens


def n_parts(heads: HeadLanes, threads: int, tile: int, rows: int = 0) -> int:
    """The largest number of parts for the kernel, with `rows` the only one; each part needs scratch of its own."""
    task_heads, tokens = task_shape(heads, threads, tile, rows)
    if rows:  # a loop's length must not depend on an outer loop, so each row is in parts of its own
        return heads.query // task_heads * rows
    return min(heads.query // task_heads * (tile // tokens), 4 * threads)


def max_blocks(heads: HeadLanes, entries: Index, tokens: int, rows: int) -> Index:
    """The largest number of blocks of `lanes` tokens that a task with `tokens` tokens reads. `entries`: those of a
    sequence in the tables."""
    if not heads.window:
        return entries * (heads.block // heads.lanes)
    ahead = 0 if rows else heads.ahead
    return (heads.window + ahead + tokens - 2) // heads.lanes + 2


def scratch_size(heads: HeadLanes, entries: int, threads: int, tile: int, rows: int = 0) -> int:
    """Elements of the scratch buffer."""
    task_heads, tokens = task_shape(heads, threads, tile, rows)
    blocks = max_blocks(heads, entries, tokens, rows)
    assert isinstance(blocks, int)
    return n_parts(heads, threads, tile, rows) * task_heads * tokens * blocks * heads.lanes


def mask(lanes: int) -> NDArray[np.float32]:
    """float32 (4 * lanes,): zeros, large negative numbers, zeros, and the numbers from 0 on. The `lanes` elements from
    `lanes - n` on are added to the scores of a vector of tokens of which only the first n are visible; those from
    `2 * lanes - n` on, if the first n are not."""
    return np.append(
        np.repeat(np.array([0, _MASKED, 0], np.float32), lanes), np.arange(lanes, dtype=np.float32)
    )


@functools.cache
def attention(heads: HeadLanes, threads: int, tile: int, rows: int = 0) -> KernelFunction:
    """Buffers: out, float32 (tokens, query * dim); scratch, float32 (`scratch_size`,); the layer's cache
    (`HeadLanes.cached`); the tables of the sequences; the state, unless there are `rows`; the tokens' places; the
    queries of `rope.rotate`; `mask`; the sinks and the slopes, float32 (query,) each, if there are any; how many tokens
    each token sees, int32 (tokens,), if `heads` look ahead, unless there are `rows`."""

    def kernel(part: UOp, parts: UOp, *buffers: UOp) -> UOp:
        return _Attention(heads, threads, tile, rows, buffers).build(part, parts)

    return kernel


class _Task(NamedTuple):
    """A task of the kernel. `kv`: its key head. `first_query`: its first query head. `token`: its first token, at
    `position`. `first_block`: the first block of keys that is read. `queries`: where the query of each row begins."""

    kv: UOp
    first_query: UOp
    token: UOp
    position: UOp
    first_block: Index
    queries: list[UOp]


class _Attention:
    """The kernel of `attention` under construction. A row is a query head of a token of a task."""

    def __init__(self, heads: HeadLanes, threads: int, tile: int, rows: int, buffers: Sequence[UOp]) -> None:
        h = self.heads = heads
        self.lanes, self.tile, self.rows = h.lanes, tile, rows
        self.task_heads, self.tokens = task_shape(h, threads, tile, rows)
        self.n = self.task_heads * self.tokens
        self.out, self.scores, self.keys, self.values, *rest = buffers
        self.key_scales, self.value_scales = (rest.pop(0) if h.is_quantized else None for _ in range(2))
        self.tables, self.state = rest.pop(0), None if rows else rest.pop(0)
        self.places, self.query_rows, self.mask, *rest = rest
        self.seen_by = rest.pop() if h.ahead > 0 and not rows else None
        self.slopes = rest.pop() if h.slopes else None
        self.sinks = rest
        assert len(self.sinks) == h.sinks
        self.k = KernelBuilder(self.lanes)
        self.k.scratch(self.scores)

    def build(self, part: UOp, parts: UOp) -> UOp:
        h, k, lanes = self.heads, self.k, self.lanes
        head_blocks = h.query // self.task_heads
        task_blocks = max_blocks(h, n_entries(k, self.tables), self.tokens, self.rows)
        row: Index = part // head_blocks if self.rows else 0
        start, self.sequence = position_of(k, self.places, row), sequence_of(k, self.places, row)
        step_tokens = n_tokens(k, self.state, self.tile)
        # A loop's length must not depend on an outer loop, so all tasks read the keys up to the last token's.
        end = start + step_tokens
        all_blocks = (end + (lanes - 1)) // lanes
        self.blocks = all_blocks.minimum(task_blocks) if h.window else all_blocks
        self.scratch_from = part * (self.n * task_blocks * lanes)
        tasks = (self.rows or step_tokens // self.tokens) * head_blocks
        part_tasks = (tasks + parts - 1 - part) // parts  # with rows, one
        with k.loop(part_tasks) as i:
            number = part if self.rows else i * parts + part
            block, head_block = number // head_blocks, number % head_blocks
            token = block * self.tokens
            position = start if self.rows else start + token
            first_block: Index = 0
            if h.window:
                oldest = position // h.window * h.window if h.chunked else position - (h.window - 1)
                first_block = (oldest.maximum(0) // lanes).minimum(all_blocks - self.blocks)
            first_query = head_block * self.task_heads
            queries = [
                (token + t) * (h.query * h.dim) + (first_query + q) * h.dim
                for t in range(self.tokens)
                for q in range(self.task_heads)
            ]
            kv = head_block // (h.query // h.kv // self.task_heads)
            task = _Task(kv, first_query, token, position, first_block, queries)
            largest = self.store_scores(task)
            inverses = self.exponentiate(task, largest)
            self.store_sums(task, inverses)
        return k.finish(f"attention_{h.query}_{h.kv}_{h.dim}_{self.tile}")

    def score_index(self, block: Index, row: Index) -> Index:
        """Where the scores of a row with the tokens of a block are."""
        return self.scratch_from + (block * self.n + row) * self.lanes

    def cache_row(self, task: _Task, block: UOp) -> Index:
        """The row of the cache with the first token of a block that the task reads."""
        return self.heads.row(
            self.k, self.tables, self.sequence, task.kv, (task.first_block + block) * self.lanes
        )

    # --- scores ---------------------------------------------------------------------------------------------

    def store_scores(self, task: _Task) -> list[UOp]:
        """Stores the scores of all rows with all tokens. Returns the largest of each row in each lane."""
        h, k = self.heads, self.k
        largest = [k.registers(self.lanes) for _ in range(self.n)]
        for m in largest:
            k.fill(m, 0, UOp.const(_MASKED, F32))
        with k.loop(self.blocks) as b:
            for q, products in enumerate(self.products(task, b)):
                score = capped(k, k.vector(products, 0), h.softcap) if h.softcap else k.vector(products, 0)
                score = self.masked(task, score, q, (task.first_block + b) * self.lanes)
                k.store(self.scores, self.score_index(b, q), score)
                k.store(largest[q], 0, k.vector(largest[q], 0).maximum(score))
        return largest

    def products(self, task: _Task, block: UOp) -> list[UOp]:
        """Registers with the products of each row's query with the keys of a block."""
        h, k = self.heads, self.k
        groups, in_group = (h.dim // QUANT_BLOCK, QUANT_BLOCK) if h.is_quantized else (1, h.dim)
        row = self.cache_row(task, block)
        sums = [k.zeros() for _ in range(self.n)]
        with k.loop(groups) as group:
            scale = None
            if self.key_scales is not None:
                scale = k.vector(self.key_scales, h.scale_index(row, group)).cast(F32)
            with k.loop(in_group) as i:
                d = group * in_group + i
                key = k.vector(self.keys, h.key_index(row, d)).cast(F32)
                if scale is not None:
                    key = key * scale
                for at, s in zip(task.queries, sums, strict=True):
                    k.store(s, 0, k.vector(s, 0) + key * k.load(self.query_rows, at + d))
        return sums

    def masked(self, task: _Task, score: UOp, row: int, first_token: Index) -> UOp:
        """The scores of a row with a block from `first_token` on, with the slope and without what is not seen."""
        h, k, lanes = self.heads, self.k, self.lanes
        # so many tokens of the block are up to the row's own
        own = task.position + row // self.task_heads + 1 - first_token
        seen = own
        if self.seen_by is not None:
            seen = k.index(self.seen_by, task.token + row // self.task_heads) - first_token
            if h.both_ways and h.window:
                seen = seen.minimum(own + (h.window - 1))
        if self.slopes is not None:
            far = k.vector(self.mask, 3 * lanes) - (own - 1).cast(F32)
            far = far.minimum(far * -1.0) if h.both_ways else far
            score = score + far * k.load(self.slopes, task.first_query + row % self.task_heads)
        score = score + k.vector(self.mask, lanes - seen.maximum(0).minimum(lanes))
        if h.window:
            before = own - h.window
            if h.chunked:
                before = (own + first_token - 1) // h.window * h.window - first_token
            before = before.maximum(0).minimum(lanes)
            score = score + k.vector(self.mask, 2 * lanes - before)
        return score

    # --- exponentials ---------------------------------------------------------------------------------------

    def exponentiate(self, task: _Task, largest: Sequence[UOp]) -> UOp:
        """Makes weights of the scores: their exponentials. Returns registers with one over each row's sum of them."""
        k, n, lanes = self.k, self.n, self.lanes

        def sink(row: Index) -> UOp:
            return k.load(self.sinks[0], task.first_query + row % self.task_heads)

        totals, peaks, inverses = k.registers(n * lanes), k.registers(n), k.registers(n)
        for q in range(n):
            peak = k.across(k.vector(largest[q], 0), Ops.MAX)
            k.store(peaks, q, peak.maximum(sink(q)) if self.sinks else peak)
        with k.loop(n) as q:
            k.fill(totals, q * lanes, UOp.const(0.0, F32))
        with k.loop(self.blocks) as b, k.loop(n) as q:
            weight = k.exp(k.vector(self.scores, self.score_index(b, q)) + k.load(peaks, q) * -1.0)
            k.store(self.scores, self.score_index(b, q), weight)
            k.store(totals, q * lanes, k.vector(totals, q * lanes) + weight)
        with k.loop(n) as q:
            total = k.across(k.vector(totals, q * lanes), Ops.ADD)
            if self.sinks:
                total = total + k.exp(sink(q) - k.load(peaks, q))
            k.store(inverses, q, total.reciprocal())
        return inverses

    # --- sums of values -------------------------------------------------------------------------------------

    def store_sums(self, task: _Task, inverses: UOp) -> None:
        """Stores the sums of the values by their weights. With scales, the weights are multiplied by these first."""
        h, k, n, lanes = self.heads, self.k, self.n, self.lanes
        wide = gcd(h.dim, lanes)  # elements of a vector of values
        vectors = h.dim // wide
        at_once = self.vectors_at_once(vectors)
        scaled_groups = max(1, at_once * lanes // QUANT_BLOCK)
        scaled = k.registers(scaled_groups * n * lanes) if h.is_quantized else None
        with k.loop(vectors // at_once) as j:
            sums = [k.zeros(wide) for _ in range(n * at_once)]
            with k.loop(self.blocks) as b:
                row = self.cache_row(task, b)
                if scaled is not None:
                    self.scale_weights(scaled, row, b, j, at_once)
                with k.loop(lanes) as t:
                    for v in range(at_once):
                        at = h.value_index(row + t, (j * at_once + v) * wide)
                        value = k.vector(self.values, at, wide).cast(F32)
                        for q, s in enumerate(sums[v * n : (v + 1) * n]):
                            if scaled is not None:
                                weight = k.load(scaled, (v * lanes // QUANT_BLOCK * n + q) * lanes + t)
                            else:
                                weight = k.load(self.scores, self.score_index(b, q) + t)
                            k.store(s, 0, k.vector(s, 0, wide) + value * weight)
            for v in range(at_once):
                for q, s in enumerate(sums[v * n : (v + 1) * n]):
                    result = k.vector(s, 0, wide) * k.load(inverses, q)
                    k.store(self.out, task.queries[q] + (j * at_once + v) * wide, result)

    def vectors_at_once(self, vectors: int) -> int:
        """How many of the `vectors` of a head's values are summed in one loop: as many as stay in registers."""
        fitting = (
            d for d in range(1, vectors + 1) if vectors % d == 0 and (d == 1 or d * self.n <= MAX_SUMS)
        )
        at_once = max(fitting)
        if self.heads.is_quantized and at_once * self.lanes % QUANT_BLOCK:
            # A part of the elements with a scale, not some of two.
            return gcd(at_once, QUANT_BLOCK // self.lanes)
        return at_once

    def scale_weights(self, scaled: UOp, row: Index, block: UOp, j: UOp, at_once: int) -> None:
        """Stores the weights of a block times the scales of each group of the j-th `at_once` vectors of values."""
        h, k, n, lanes = self.heads, self.k, self.n, self.lanes
        assert self.value_scales is not None
        for g in range(max(1, at_once * lanes // QUANT_BLOCK)):
            group = (j * at_once + g * (QUANT_BLOCK // lanes)) * lanes // QUANT_BLOCK
            scale = k.vector(self.value_scales, h.scale_index(row, group)).cast(F32)
            for q in range(n):
                weights = k.vector(self.scores, self.score_index(block, q)) * scale
                k.store(scaled, (g * n + q) * lanes, weights)
