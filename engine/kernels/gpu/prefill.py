"""The parts of prefill between its matrix products: embeddings, norms, rotation, and causal attention."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tinygrad import UOp
from tinygrad.uop.ops import AxisType, Ops

from engine.kernels.gpu.attention import SLACK, Heads
from engine.kernels.gpu.matmul import LARGEST, fragment_index, wmma
from engine.kernels.gpu.matvec import gated
from engine.kernels.gpu.packing import QUARTER, UNIT, Packing, units_of
from engine.kernels.gpu.uops import (
    F16,
    LOWEST,
    at,
    chain,
    f32,
    finish,
    load,
    load_index,
    maximum,
    registers,
    shared,
    tree,
)

Kernel = Callable[..., UOp]
_LOG2_E = 1.4426950408889634
_SHARED_BYTES = 40 << 10  # of a block, of the 48 KB that every GPU gives


@functools.cache
def embed_prompt(packing: Packing, tokens: int, vocab: int, cols: int) -> Kernel:
    """Buffers: the residual stream, float32 (tokens, cols); the tokens, int32 (tokens,); the embedding's planes."""
    units = units_of(cols)
    quarters = units * (UNIT // QUARTER)
    threads = min(quarters, 128)

    def kernel(h: UOp, ids: UOp, *planes: UOp) -> UOp:
        thread, token, chunk = (
            UOp.special(threads, "lidx0"),
            UOp.special(tokens, "gidx0"),
            UOp.special(-(-quarters // threads), "gidx1"),
        )
        index = chunk * threads + thread
        safe = index if quarters % threads == 0 else index.minimum(quarters - 1)
        row = load(ids, token).maximum(0).minimum(vocab - 1).cast(thread.dtype)
        values = packing.quarter(planes, row, units, safe // 4, safe % 4)
        stores = []
        for j, value in enumerate(values):
            column = index * QUARTER + j
            stores.append(
                at(
                    h, token * cols + column, None if cols % (threads * QUARTER) == 0 else column < cols
                ).store(value)
            )
        return finish(f"prefill_embed_{packing.name}_{tokens}_{cols}", stores)

    return kernel


@functools.cache
def norm_prompt(tokens: int, cols: int, parts: int, eps: float) -> Kernel:
    """Takes the sums of a product up into the residual stream and norms it for the next one. Buffers: the next
    product's activations, float16 fragments; the stream, float32 (tokens, cols); `parts` sums (parts, tokens,
    cols) where there are any; the norm's weight (cols,)."""
    threads = max(32, min(256, -(-cols // 4 // 32) * 32))
    quads = -(-cols // 4 // threads)

    def kernel(x: UOp, h: UOp, *rest: UOp) -> UOp:
        sums, weight = (rest[0], rest[1]) if parts else (None, rest[0])
        thread, token = UOp.special(threads, "lidx0"), UOp.special(tokens, "gidx0")
        stores, values, squares = [], [], []
        for q in range(quads):
            first = (thread + q * threads) * 4
            for i in range(4):
                column = first + i
                ok = None if cols % (threads * 4) == 0 else column < cols
                value = load(h, token * cols + column, ok)
                if sums is not None:
                    value = chain(
                        [value, *(load(sums, (p * tokens + token) * cols + column, ok) for p in range(parts))]
                    )
                    stores.append(at(h, token * cols + column, ok).store(value))
                values.append((column, ok, value))
                squares.append(value * value)
        partial, second = shared(threads, slot=0), shared(32, slot=1)
        partial = partial.after(at(partial, thread).store(chain(squares)))
        mine = tree([load(partial, thread + 32 * k, thread < 32) for k in range(threads // 32)])
        second = second.after(at(second, thread, thread < 32).store(mine))
        mean = tree([load(second, k) for k in range(32)]) * f32(1.0 / cols)
        norm = (mean + f32(eps)).sqrt().reciprocal()
        for column, ok, value in values:
            normed = (value * norm * load(weight, column, ok)).cast(F16)
            stores.append(at(x, fragment_index(token, column, cols), ok).store(normed))
        return finish(f"prefill_norm_{tokens}_{cols}_{parts}", stores)

    return kernel


@functools.cache
def rotate_prompt(
    heads: Heads, tokens: int, parts: tuple[int, ...], sizes: tuple[int, ...], bias: bool
) -> Kernel:
    """Queries and keys of a prompt rotated (and normed, where the model does); keys and values into the cache.
    The products come in runs of `sizes` rows, each as sums (parts, tokens, size). Buffers: queries, float16
    fragments of each head; the cache's keys; its values; the sums of each run; tables of cos and sin; the prompt;
    the bias; the norms' weights (2, dim)."""
    h, dim, half = heads, heads.dim, heads.dim // 2
    total = h.query + 2 * h.kv
    per_block = max(1, 256 // dim)  # heads a block does
    blocks = -(-total // per_block)

    def kernel(queries: UOp, keys: UOp, values: UOp, *rest: UOp) -> UOp:
        sums, (cos, sin, prompt, *rest_) = rest[: len(sizes)], rest[len(sizes) :]
        biases, norms = (rest_[0], rest_[1:]) if bias else (None, rest_)
        d, which = UOp.special(dim, "lidx0"), UOp.special(per_block, "lidx1")
        token, block = UOp.special(tokens, "gidx0"), UOp.special(blocks, "gidx1")
        head = block * per_block + which
        inside = head < total
        n = load_index(prompt, 1, tokens + 1)
        position = (load_index(prompt, 0, h.length - SLACK) + token).minimum(h.length - SLACK - 1)
        live = inside & (token < n)

        def row(place: UOp) -> UOp:
            result, start = None, 0
            for run, count, size in zip(sums, parts, sizes, strict=True):
                here = (place >= start) & (place < start + size) & inside if len(sizes) > 1 else inside
                part = chain(
                    load(run, (p * tokens + token) * size + (place - start), here) for p in range(count)
                )
                result = part if result is None else result + part
                start += size
            assert result is not None
            return result if biases is None else result + load(biases, place, inside)

        own, partner = row(head * dim + d), (d < half).where(d + half, d - half)
        other = row(head * dim + partner)
        is_query, is_key = head < h.query, (head >= h.query) & (head < h.query + h.kv)
        if norms:
            squares = shared(per_block * dim, slot=0)
            squares = squares.after(at(squares, which * dim + d).store(own * own))
            mean = tree(
                [chain(load(squares, which * dim + j + k) for k in range(4)) for j in range(0, dim, 4)]
            )
            norm = (mean * f32(1.0 / dim) + f32(h.norm_eps or 0.0)).sqrt().reciprocal()
            weight = is_query.where(UOp.const(0), UOp.const(dim))
            turned, turned_other = (
                v * load(norms[0], weight + e) * norm for v, e in ((own, d), (other, partner))
            )
        else:
            turned, turned_other = own, other
        angle = position * half + d % half
        c, s = load(cos, angle), load(sin, angle)
        z = turned * c + (d < half).where(turned_other * f32(-1), turned_other) * s
        query = (z * f32(dim**-0.5 * _LOG2_E)).cast(F16)
        stores = [
            at(queries, query_index(h, tokens, head, token, d), live & is_query).store(query),
            at(keys, h.key_index(head - h.query, position, d), live & is_key).store(z.cast(F16)),
            at(
                values, h.value_index(head - (h.query + h.kv), position, d), live & (head >= h.query + h.kv)
            ).store(own.cast(F16)),
        ]
        return finish(f"prefill_rotate_{h.query}_{h.kv}_{dim}_{tokens}", stores)

    return kernel


def query_index(heads: Heads, tokens: int, head: UOp, token: UOp, d: UOp) -> UOp:
    """Where `attend_prompt` wants an element of a query: [head, 16 tokens, 16 dimensions, thread, element]; thread
    4g + t has the t-th four of the dimensions."""
    thread, i = token % 8 * 4 + d % 16 // 4, d % 4
    element = i // 2 * 4 + token % 16 // 8 * 2 + i % 2
    return (((head * (tokens // 16) + token // 16) * (heads.dim // 16) + d // 16) * 32 + thread) * 8 + element


@dataclass(frozen=True)
class Cut:
    """How a prompt's attention is cut: a warp takes 16 * `rows` queries of a head, `warps` of a block as many each
    over the same keys; `parts` as many again share these and take turns with the keys, `at_once` times sixteen."""

    rows: int
    warps: int
    parts: int
    at_once: int

    def shared_bytes(self, dim: int) -> int:
        """Of a block's shared memory: what parts leave for the first of them, and largest scores."""
        sums = (self.parts - 1) * self.rows * accumulators(dim)
        return (sums + self.parts * 2 * self.rows) * self.warps * 32 * 4


@functools.cache
def tile_prompt(heads: Heads, blocks: int) -> Kernel:
    """Keys and values of all tokens so far in the order in which threads of `attend_prompt` hold them, so that a
    warp's load is of neighbouring bytes: in the cache those of four threads lie in lines of their own, and lines are
    what a load takes its time for. Buffers: tiles of keys, float16 (key heads, length / 16, dim / 16, thread, 8); of
    values; the cache's keys; its values; the prompt. A block takes every `blocks`-th step of sixteen tokens."""
    h, chunks = heads, heads.dim // 16

    def kernel(key_tiles: UOp, value_tiles: UOp, keys: UOp, values: UOp, prompt: UOp) -> UOp:
        thread, c = UOp.special(32, "lidx0"), UOp.special(chunks, "lidx1")
        block, kv = UOp.special(blocks, "gidx0"), UOp.special(h.kv, "gidx1")
        g, t = thread // 4, thread % 4
        seen = load_index(prompt, 0, h.length - SLACK) + load_index(prompt, 1, SLACK)
        steps = (seen + 15) // 16
        loop = UOp.range((steps - block + (blocks - 1)) // blocks, 0, AxisType.LOOP)
        step = loop * blocks + block
        key = ((kv * (h.dim // 4) + c * 4 + t) * h.length + step * 16 + 2 * g) * 4
        value = ((kv * (h.length // 4) + step * 4 + t) * h.dim + c * 16 + 2 * g) * 4
        place = tile_index(h, kv, step, c, thread)
        stores = [at(key_tiles, place + i).store(load(keys, key + i)) for i in range(8)]
        stores += [at(value_tiles, place + i).store(load(values, value + i)) for i in range(8)]
        return finish(f"prefill_tile_{h.kv}_{h.dim}_{blocks}", [UOp.group(*stores).end(loop)])

    return kernel


def tile_index(heads: Heads, kv: UOp, step: UOp, chunk: UOp | int, thread: UOp) -> UOp:
    """Where eight elements of a thread lie for `attend_prompt`: of two neighbouring keys four dimensions, or of two
    neighbouring dimensions four values."""
    return (((kv * (heads.length // 16) + step) * (heads.dim // 16) + chunk) * 32 + thread) * 8


def accumulators(dim: int) -> int:
    """Of a thread, for sixteen queries: their values' sums, and the weights' as if values had a column of ones."""
    return (dim // 8 + 1) * 4


def cut_for(heads: Heads, tokens: int) -> Cut:
    """Keys are loaded once for all queries of a warp: that is what many queries are bound by, so a warp takes as many
    as its registers hold. Of few queries there are too few warps: more of them share the keys."""
    few = tokens <= 64
    rows, warps, at_once = (1, 1, 1) if few else (2 if heads.dim <= 64 else 1, 2, 2)
    cuts = [Cut(rows, warps, parts, at_once) for parts in ((8, 4, 2, 1) if few else (2, 1))]
    return next((cut for cut in cuts if cut.shared_bytes(heads.dim) <= _SHARED_BYTES), cuts[-1])


@functools.cache
def attend_prompt(heads: Heads, tokens: int, cut: Cut) -> Kernel:
    """Causal attention of a prompt over the cache, scores never leaving registers: a first pass over the keys
    finds each query's largest score, a second sums up values. Threads of a warp share queries and differ in
    keys, so that they need to compare notes only after a pass. Query heads that share keys are neighbours in a
    block, which loads these once. Buffers: the output, float16 fragments of (tokens, query heads * dim); queries as
    `rotate_prompt` leaves them; keys and values as `tile_prompt` leaves them; the prompt."""
    h, dim, rows, warps, parts = heads, heads.dim, cut.rows, cut.warps, cut.parts
    chunks, tiles = dim // 16, tokens // (16 * cut.rows)
    blocks = h.shared_by * tiles // warps  # of a key head
    assert dim % 16 == 0 and tokens % (16 * rows) == 0 and h.shared_by * tiles % warps == 0

    def kernel(out: UOp, queries: UOp, keys: UOp, values: UOp, prompt: UOp) -> UOp:
        thread, warp = UOp.special(32, "lidx0"), UOp.special(warps, "lidx1") if warps > 1 else UOp.const(0)
        part = UOp.special(parts, "lidx2") if parts > 1 else UOp.const(0)
        block, kv = UOp.special(blocks, "gidx0"), UOp.special(h.kv, "gidx1")
        unit = (blocks - 1 - block) * warps + warp  # what takes longest begins first
        head, tile = kv * h.shared_by + unit % h.shared_by, unit // h.shared_by * rows
        g, t = thread // 4, thread % 4
        position, n = load_index(prompt, 0, h.length - SLACK), load_index(prompt, 1, tokens + 1)
        first, live = tile * 16, tile * 16 < n
        # keys up to the last query's own, sixteen at a time; the first query sees all of the `whole` steps' keys
        turn = parts * cut.at_once
        whole = live.where((position + first + 1) // (16 * turn), 0)
        seen = (position + first + 16 * rows).minimum(position + n)
        rest = live.where((seen + (16 * turn - 1)) // (16 * turn) - whole, 0)
        q = [
            [
                load(queries, (((head * (tokens // 16) + tile + r) * chunks + c) * 32 + thread) * 8 + i)
                for i in range(8)
            ]
            for r in range(rows)
            for c in range(chunks)
        ]

        def scores(step: UOp, masked: bool) -> list[list[UOp]]:
            """Of each row of queries (g of a tile, g + 8, g of the next) the scores of a thread's four neighbouring
            keys."""
            pairs = []
            for c in range(chunks):
                place = tile_index(h, kv, step, c, thread)
                pairs.append([load(keys, place + i) for i in range(8)])
            result = []
            for r in range(rows):
                acc = [[f32(0)] * 4 for _ in (0, 1)]
                for c in range(chunks):
                    for half in (0, 1):
                        acc[half] = wmma(q[r * chunks + c], pairs[c][half * 4 : half * 4 + 4], acc[half])
                for side in (0, 1):
                    four = [acc[e % 2][2 * side + e // 2] for e in range(4)]
                    if masked:
                        ahead = position + first + (16 * r + 8 * side) + g - (step * 16 + t * 4)
                        four = [(ahead >= e).where(x, f32(LOWEST)) for e, x in enumerate(four)]
                    result.append(four)
            return result

        lanes = warps * 32

        def steps_of(loop: UOp) -> list[UOp]:
            return [(loop * cut.at_once + k) * parts + part for k in range(cut.at_once)]

        def together(
            mine: Sequence[UOp], slot: int, join: Callable[[Sequence[UOp]], UOp], threads: int
        ) -> list[UOp]:
            """Of a number for each row, those of all `threads` of four, and of all parts, that have keys of it."""
            n = len(mine)
            notes = shared(parts * lanes * n, slot)
            place = ((part * warps + warp) * 32 + thread) * n
            notes = notes.after(UOp.group(*(at(notes, place + r).store(x) for r, x in enumerate(mine))))
            others = [((k * warps + warp) * 32 + g * 4 + j) * n for k in range(parts) for j in range(threads)]
            return [join([load(notes, other + r) for other in others]) for r in range(n)]

        best: list[UOp] = []
        for axis, (count, offset, masked) in enumerate(((whole, None, False), (rest, whole, True))):
            loop = UOp.range(count, axis, AxisType.REDUCE)
            found = [scores(s, masked) for s in steps_of(loop if offset is None else loop + offset)]
            largest = [maximum([x for s in found for x in s[r]]) for r in range(2 * rows)]
            best += [x.reduce(loop, arg=Ops.MAX) for x in largest]
        top = together(
            [a.alu(Ops.MAX, b) for a, b in zip(best[: 2 * rows], best[2 * rows :], strict=True)],
            0,
            maximum,
            4,
        )

        per_row = accumulators(dim) // 4
        n_acc = rows * per_row * 4
        ones = [f32(1).cast(F16)] * 4
        acc = registers(n_acc, 1)
        acc = acc.after(UOp.group(*(at(acc, i).store(f32(0)) for i in range(n_acc))))
        for axis, (count, offset, masked) in enumerate(((whole, None, False), (rest, whole, True)), 2):
            loop = UOp.range(count, axis, AxisType.REDUCE)
            sums = [load(acc.after(loop), i) for i in range(n_acc)]
            for step in steps_of(loop if offset is None else loop + offset):
                s = scores(step, masked)
                weights = [[(x - top[r]).exp2().cast(F16) for x in s[r]] for r in range(2 * rows)]
                # a thread's four keys as the tensor cores take them: two of row g, two of g + 8, and again
                lefts = [
                    [weights[2 * r + side][k + i] for k in (0, 2) for side in (0, 1) for i in (0, 1)]
                    for r in range(rows)
                ]
                for j in range(per_row):
                    if j == per_row - 1:
                        right = ones
                    elif j % 2 == 0:
                        place = tile_index(h, kv, step, j // 2, thread)
                        pair = [load(values, place + i) for i in range(8)]
                        right = pair[:4]
                    else:
                        right = pair[4:]
                    for r in range(rows):
                        k = (r * per_row + j) * 4
                        sums[k : k + 4] = wmma(lefts[r], right, sums[k : k + 4])
            acc = acc.after(UOp.group(*(at(acc, i).store(x) for i, x in enumerate(sums))).end(loop))
        result = [load(acc, i) for i in range(n_acc)]
        if parts > 1:
            others = shared((parts - 1) * n_acc * lanes, slot=3)
            place = ((part - 1) * n_acc) * lanes + warp * 32 + thread
            others = others.after(
                UOp.group(*(at(others, place + i * lanes, part > 0).store(x) for i, x in enumerate(result)))
            )
            place = warp * 32 + thread
            result = [
                chain([x, *(load(others, (k * n_acc + i) * lanes + place) for k in range(parts - 1))])
                for i, x in enumerate(result)
            ]
        stores = []
        for r in range(rows):
            mine = result[r * per_row * 4 : (r + 1) * per_row * 4]
            factor = [mine[-4 + 2 * side].reciprocal() for side in (0, 1)]
            for j in range(chunks):
                for side in (0, 1):
                    for e in range(4):
                        value = mine[(2 * j + e % 2) * 4 + 2 * side + e // 2] * factor[side]
                        token, column = (tile + r) * 16 + g + 8 * side, head * dim + j * 16 + t * 4 + e
                        place = fragment_index(token, column, h.query * dim)
                        ok = live if parts == 1 else live & part.eq(0)
                        stores.append(at(out, place, ok).store(value.cast(F16)))
        shape = f"{rows}_{warps}_{parts}_{cut.at_once}"
        return finish(f"prefill_attend_{h.query}_{h.kv}_{dim}_{tokens}_{shape}", stores)

    return kernel


@functools.cache
def activate_prompt(tokens: int, n: int, parts: tuple[int, int]) -> Kernel:
    """SiLU(gate) * up where the two come from products of their own. Buffers: float16 fragments (tokens, n); the
    sums of gate, float32 (parts, tokens, n), and of up."""

    def kernel(out: UOp, gate: UOp, up: UOp) -> UOp:
        column = UOp.special(-(-n // 256), "gidx0") * 256 + UOp.special(256, "lidx0")
        token = UOp.special(tokens, "gidx1")
        ok = None if n % 256 == 0 else column < n
        a, b = (
            chain(load(sums, (p * tokens + token) * n + column, ok) for p in range(count))
            for sums, count in zip((gate, up), parts, strict=True)
        )
        value = gated(a, b).maximum(-LARGEST).minimum(LARGEST).cast(F16)
        return finish(
            f"prefill_activate_{tokens}_{n}", [at(out, fragment_index(token, column, n), ok).store(value)]
        )

    return kernel
