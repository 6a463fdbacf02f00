"""Attention over the cached keys and values, for one token or a tile of them.

A task is one key head and the query rows that share it: the query heads of its group, for as many tokens as fit the
registers. It has three passes: the scores of the cached tokens, `lanes` tokens side by side; their exponentials; and
the weighted sum of the values, `lanes` elements side by side. With a window, a task reads only the blocks of `lanes`
tokens that hold keys of its windows.

The tokens of a step are those of a prompt, or `rows` of different sequences, of which each is a task of its own.
"""

from __future__ import annotations

import functools
from math import gcd

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
    h, lanes = heads, heads.lanes
    task_heads, tokens = task_shape(heads, threads, tile, rows)
    n = task_heads * tokens
    looks_ahead = heads.ahead > 0 and not rows
    wide = gcd(h.dim, lanes)  # elements of a vector of values
    vectors = h.dim // wide
    at_once = max(d for d in range(1, vectors + 1) if vectors % d == 0 and (d == 1 or d * n <= MAX_SUMS))
    if h.is_quantized:  # whole blocks of elements with a scale, or a part of one
        at_once = gcd(at_once, QUANT_BLOCK // lanes) if at_once * lanes % QUANT_BLOCK else at_once
    groups, in_group = (h.dim // QUANT_BLOCK, QUANT_BLOCK) if h.is_quantized else (1, h.dim)
    width = h.query * h.dim

    def kernel(part: UOp, parts: UOp, *buffers: UOp) -> UOp:
        out, scores, keys, values, *rest = buffers
        key_scales, value_scales = (rest.pop(0) if h.is_quantized else None for _ in range(2))
        tables, state = rest.pop(0), None if rows else rest.pop(0)
        places, queries, score_mask, *rest = rest
        seen_by = rest.pop() if looks_ahead else None
        slopes = rest.pop() if h.slopes else None
        sinks = rest
        assert len(sinks) == h.sinks
        k = KernelBuilder(lanes)
        k.scratch(scores)
        task_blocks = max_blocks(h, n_entries(k, tables), tokens, rows)
        row: Index = part // (h.query // task_heads) if rows else 0
        start, sequence = position_of(k, places, row), sequence_of(k, places, row)
        step_tokens = n_tokens(k, state, tile)
        # A loop's length must not depend on an outer loop, so all tasks read the keys up to the last token's.
        end = start + step_tokens
        all_blocks = (end + (lanes - 1)) // lanes
        blocks = all_blocks.minimum(task_blocks) if h.window else all_blocks
        base = part * (n * task_blocks * lanes)
        tasks = (rows or step_tokens // tokens) * (h.query // task_heads)
        part_tasks = (tasks + parts - 1 - part) // parts  # with rows, one
        with k.loop(part_tasks) as i:
            task = part if rows else i * parts + part
            block, head_block = task // (h.query // task_heads), task % (h.query // task_heads)
            kv = head_block // (h.query // h.kv // task_heads)
            token = block * tokens  # the task's first token
            seen_from = start if rows else start + token
            first: Index = 0  # the first block that is read
            if h.window:
                oldest = seen_from // h.window * h.window if h.chunked else seen_from - (h.window - 1)
                first = (oldest.maximum(0) // lanes).minimum(all_blocks - blocks)
            query_at = [
                (token + t) * width + (head_block * task_heads + q) * h.dim
                for t in range(tokens)
                for q in range(task_heads)
            ]

            def sink(q: Index) -> UOp:
                return k.load(sinks[0], head_block * task_heads + q % task_heads)

            def score_index(b: Index, q: Index) -> Index:
                return base + (b * n + q) * lanes

            # scores
            largest = [k.registers(lanes) for _ in range(n)]
            for m in largest:
                k.fill(m, 0, UOp.const(_MASKED, F32))
            with k.loop(blocks) as b:
                first_token = (first + b) * lanes
                row = h.row(k, tables, sequence, kv, first_token)
                sums = [k.zeros() for _ in range(n)]
                with k.loop(groups) as group:
                    scale = None
                    if key_scales is not None:
                        scale = k.vector(key_scales, h.scale_index(row, group)).cast(F32)
                    with k.loop(in_group) as i:
                        d = group * in_group + i
                        key = k.vector(keys, h.key_index(row, d)).cast(F32)
                        if scale is not None:
                            key = key * scale
                        for q, s in enumerate(sums):
                            k.store(s, 0, k.vector(s, 0) + key * k.load(queries, query_at[q] + d))
                for q, s in enumerate(sums):
                    # a query attends to the tokens up to its own
                    own = seen_from + q // task_heads + 1 - first_token
                    seen = own
                    if seen_by is not None:
                        seen = k.index(seen_by, token + q // task_heads) - first_token
                        if h.both_ways and h.window:
                            seen = seen.minimum(own + (h.window - 1))
                    score = capped(k, k.vector(s, 0), h.softcap) if h.softcap else k.vector(s, 0)
                    if slopes is not None:
                        far = k.vector(score_mask, 3 * lanes) - (own - 1).cast(F32)
                        far = far.minimum(far * -1.0) if h.both_ways else far
                        score = score + far * k.load(slopes, head_block * task_heads + q % task_heads)
                    score = score + k.vector(score_mask, lanes - seen.maximum(0).minimum(lanes))
                    if h.window:
                        before = own - h.window
                        if h.chunked:
                            before = (own + first_token - 1) // h.window * h.window - first_token
                        before = before.maximum(0).minimum(lanes)
                        score = score + k.vector(score_mask, 2 * lanes - before)
                    k.store(scores, score_index(b, q), score)
                    k.store(largest[q], 0, k.vector(largest[q], 0).maximum(score))

            # exponentials of the scores
            totals, peaks, inverses = k.registers(n * lanes), k.registers(n), k.registers(n)
            for q in range(n):
                peak = k.across(k.vector(largest[q], 0), Ops.MAX)
                k.store(peaks, q, peak.maximum(sink(q)) if sinks else peak)
            with k.loop(n) as q:
                k.fill(totals, q * lanes, UOp.const(0.0, F32))
            with k.loop(blocks) as b, k.loop(n) as q:
                weight = k.exp(k.vector(scores, score_index(b, q)) + k.load(peaks, q) * -1.0)
                k.store(scores, score_index(b, q), weight)
                k.store(totals, q * lanes, k.vector(totals, q * lanes) + weight)
            with k.loop(n) as q:
                total = k.across(k.vector(totals, q * lanes), Ops.ADD)
                if sinks:
                    total = total + k.exp(sink(q) - k.load(peaks, q))
                k.store(inverses, q, total.reciprocal())

            # the weighted sum of values; with scales, the weights are multiplied by them
            scaled_groups = max(1, at_once * lanes // QUANT_BLOCK)
            scaled = k.registers(scaled_groups * n * lanes if h.is_quantized else 1)
            with k.loop(vectors // at_once) as j:
                sums = [k.zeros(wide) for _ in range(n * at_once)]
                with k.loop(blocks) as b:
                    row = h.row(k, tables, sequence, kv, (first + b) * lanes)
                    if value_scales is not None:
                        for g in range(scaled_groups):
                            group = (j * at_once + g * (QUANT_BLOCK // lanes)) * lanes // QUANT_BLOCK
                            scale_at = h.scale_index(row, group)
                            scale = k.vector(value_scales, scale_at).cast(F32)
                            for q in range(n):
                                weights = k.vector(scores, score_index(b, q)) * scale
                                k.store(scaled, (g * n + q) * lanes, weights)
                    with k.loop(lanes) as t:
                        for v in range(at_once):
                            at = h.value_index(row + t, (j * at_once + v) * wide)
                            value = k.vector(values, at, wide).cast(F32)
                            for q in range(n):
                                s = sums[v * n + q]
                                if value_scales is not None:
                                    weight = k.load(scaled, (v * lanes // QUANT_BLOCK * n + q) * lanes + t)
                                else:
                                    weight = k.load(scores, score_index(b, q) + t)
                                k.store(s, 0, k.vector(s, 0, wide) + value * weight)
                for v in range(at_once):
                    for q in range(n):
                        result = k.vector(sums[v * n + q], 0, wide) * k.load(inverses, q)
                        k.store(out, query_at[q] + (j * at_once + v) * wide, result)
        return k.finish(f"attention_{h.query}_{h.kv}_{h.dim}_{tile}")

    return kernel
