"""The parts of prefill between its matrix products: embeddings, norms, rotation, and causal attention."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from tinygrad import UOp
from tinygrad.uop.ops import AxisType, Ops

from engine.kernels.attention import SLACK, Heads
from engine.kernels.matmul import LARGEST, fragment_index, wmma
from engine.kernels.matvec import gated
from engine.kernels.packing import QUARTER, UNIT, Packing, units_of
from engine.kernels.uops import (
    F16,
    F32,
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


@functools.cache
def attend_prompt(heads: Heads, tokens: int, warps: int = 2, parts: int = 2, at_once: int = 2) -> Kernel:
    """Causal attention of a prompt over the cache, scores never leaving registers: a first pass over the keys
    finds each query's largest score, a second sums up values. Threads of a warp share queries and differ in
    keys, so that they need to compare notes only after a pass. `warps` of a block have queries of their own;
    `parts` as many again share these and take turns with the keys, `at_once` times sixteen. Buffers: the output,
    float16 fragments of (tokens, query heads * dim); queries as `rotate_prompt` leaves them; the cache's keys;
    its values; the prompt."""
    h, dim = heads, heads.dim
    chunks = dim // 16
    assert dim % 16 == 0 and tokens % (16 * warps) == 0

    def kernel(out: UOp, queries: UOp, keys: UOp, values: UOp, prompt: UOp) -> UOp:
        thread, warp = UOp.special(32, "lidx0"), UOp.special(warps, "lidx1")
        part = UOp.special(parts, "lidx2") if parts > 1 else UOp.const(0)
        block, head = UOp.special(tokens // 16 // warps, "gidx0"), UOp.special(h.query, "gidx1")
        kv = head // h.shared_by
        g, t = thread // 4, thread % 4
        position, n = load_index(prompt, 0, h.length - SLACK), load_index(prompt, 1, tokens + 1)
        tile = block * warps + warp
        first = tile * 16
        # keys up to the last query's own, sixteen at a time; none where the prompt has ended
        seen = (position + (block + 1) * (16 * warps)).minimum(position + n)
        steps = (block * (16 * warps) < n).where((seen + 15) // 16, 0)
        q = [
            [
                load(queries, (((head * (tokens // 16) + tile) * chunks + c) * 32 + thread) * 8 + i)
                for i in range(8)
            ]
            for c in range(chunks)
        ]

        def scores(step: UOp) -> list[list[UOp]]:
            """Of eight keys and eight more: the scores (row g, two keys; row g + 8, two keys). A thread's four
            keys are neighbours, as its values must be."""
            result = []
            for half in (0, 1):
                key = step * 16 + g // 2 * 4 + g % 2 + 2 * half
                acc = [f32(0)] * 4
                for c in range(chunks):
                    place = ((kv * (dim // 4) + c * 4 + t) * h.length + key) * 4
                    acc = wmma(q[c], [load(keys, place + i) for i in range(4)], acc)
                mine = step * 16 + t * 4 + 2 * half
                for i in range(4):
                    query = position + first + g + 8 * (i // 2)
                    acc[i] = (mine + i % 2 <= query).where(acc[i], f32(LOWEST))
                result.append(acc)
            return result

        turn = parts * at_once
        turns = (steps - part + (turn - 1)) // turn
        lanes = warps * 32

        def steps_of(loop: UOp) -> list[UOp]:
            return [(loop * at_once + k) * parts + part for k in range(at_once)]

        def together(mine: Sequence[UOp], slot: int, join: Callable[[Sequence[UOp]], UOp]) -> list[UOp]:
            """Of a number for row g and one for row g + 8, those of all threads that have keys of these rows."""
            notes = shared(parts * lanes * 2, slot)
            place = ((part * warps + warp) * 32 + thread) * 2
            notes = notes.after(UOp.group(*(at(notes, place + r).store(x) for r, x in enumerate(mine))))
            rows = [((k * warps + warp) * 32 + g * 4) * 2 for k in range(parts)]
            return [join([load(notes, row + k * 2 + r) for row in rows for k in range(4)]) for r in (0, 1)]

        loop = UOp.range(turns, 0, AxisType.REDUCE)
        seen_scores = [scores(step) for step in steps_of(loop)]
        best = [
            maximum([s[i][2 * r + k] for s in seen_scores for i in (0, 1) for k in (0, 1)]) for r in (0, 1)
        ]
        top = together([b.reduce(loop, arg=Ops.MAX) for b in best], 0, maximum)

        n_acc = dim // 8 * 4
        acc = registers(n_acc + 2, 1)
        acc = acc.after(UOp.group(*(at(acc, i).store(f32(0)) for i in range(n_acc + 2))))
        loop = UOp.range(turns, 1, AxisType.REDUCE)
        sums = [load(acc.after(loop), i) for i in range(n_acc + 2)]
        for step in steps_of(loop):
            s = scores(step)
            weights = [(s[half][i] - top[i // 2]).exp2().cast(F16) for half in (0, 1) for i in range(4)]
            for j in range(dim // 8):
                place = ((kv * (h.length // 4) + step * 4 + t) * dim + j * 8 + g) * 4
                sums[j * 4 : j * 4 + 4] = wmma(
                    weights, [load(values, place + i) for i in range(4)], sums[j * 4 : j * 4 + 4]
                )
            for r in (0, 1):
                terms = [weights[half * 4 + 2 * r + i].cast(F32) for half in (0, 1) for i in (0, 1)]
                sums[n_acc + r] = chain([sums[n_acc + r], *terms])
        acc = acc.after(UOp.group(*(at(acc, i).store(x) for i, x in enumerate(sums))).end(loop))
        factor = [x.reciprocal() for x in together([load(acc, n_acc + r) for r in (0, 1)], 2, tree)]
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
        results = []
        for j in range(dim // 8):
            for i in range(4):
                r, token = i // 2, first + g + 8 * (i // 2)
                column = head * dim + j * 8 + t * 2 + i % 2
                place = fragment_index(token, column, h.query * dim)
                ok = token < n if parts == 1 else (token < n) & part.eq(0)
                results.append(at(out, place, ok).store((result[j * 4 + i] * factor[r]).cast(F16)))
        return finish(f"prefill_attend_{h.query}_{h.kv}_{dim}_{tokens}", results)

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
