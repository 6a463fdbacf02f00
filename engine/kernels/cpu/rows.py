"""Steps between products: a token's embedding, activations made ready for products, queries and keys
rotated."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from math import gcd

from tinygrad import UOp
from tinygrad.uop.ops import Ops

from engine.kernels.cpu.packing import PAIRS, UNIT, Packing
from engine.kernels.cpu.product import TILES, silu
from engine.kernels.cpu.program import F16, F32, I16, I32, Index, Program, share
from engine.kernels.cpu.thread_pool import Kernel

POSITION = 1  # where the state says how many tokens came before
# The largest activations as integers. With several tokens, scales of 8 bits go into weights of 6 (Q6_K), and sums of
# 32 products must fit 32 bits: 32 * 128 * 16383 * 32 < 2**31.
_LARGEST_ALONE, _LARGEST = 32767, 16383


def tokens_of(k: Program, state: UOp, tile: int) -> Index:
    return 1 if tile == 1 else k.index(state, TILES) * tile


@functools.cache
def embed(packing: Packing, tile: int) -> Kernel:
    """Rows of the embedding. Buffers: out, float32 (tokens, cols); the sizes (rows, blocks of a row), int32;
    with a tile of more than 1 the state; the tokens, int32; the stream."""

    def kernel(part: UOp, parts: UOp, out: UOp, shape: UOp, *buffers: UOp) -> UOp:
        k = Program(packing.lanes)
        *state, tokens, stream = buffers
        rows, blocks = (k.index(shape, i) for i in range(2))
        cols = blocks * packing.block
        columns = UNIT if packing.format else 1
        first, count = share(cols // columns, part, parts)
        with k.loop(tokens_of(k, state[0], tile) if state else 1) as t, k.loop(count) as i:
            row = k.index(tokens, t).maximum(0).minimum(rows - 1)
            group, lane, unit = row // packing.lanes, row % packing.lanes, first + i
            for c, value in enumerate(packing.columns(k, stream, group, blocks, unit, lane)):
                k.store(out, t * cols + unit * columns + c, value)
        return k.finish(f"embed_{packing.name}_{tile}")

    return kernel


@dataclass(frozen=True)
class Prepared:
    """What `prepare` makes of the rows (tokens, cols) it is given, for products that read `outputs` (names of
    the fields of `product.Activations`): the rows themselves; or `eps` says that they are to be normed (root
    mean square) and multiplied by a weight; or `gated`, that each is silu of one row times another."""

    outputs: tuple[str, ...]
    eps: float | None = None
    gated: bool = False


@functools.cache
def prepare(what: Prepared, lanes: int, tile: int) -> Kernel:
    """Activations made ready for products. Buffers: the outputs in their order; the size (units of 32
    columns), int32; with a tile of more than 1 the state; rows; the other rows, if gated, or the norm's
    weight, if normed."""
    vectors = UNIT // lanes

    def kernel(part: UOp, parts: UOp, *buffers: UOp) -> UOp:
        k = Program(lanes)
        outs, rest = dict(zip(what.outputs, buffers, strict=False)), list(buffers[len(what.outputs) :])
        units = k.index(rest.pop(0), 0)
        cols = units * UNIT
        state = rest.pop(0) if tile > 1 else None
        rows, *other = rest
        first, count = share(units, part, parts)
        turns: Index = 1 if state is None else k.index(state, TILES)
        factor = k.registers(1)
        with k.loop(turns) as turn, k.loop(tile) as t:
            at = (turn * tile + t) * cols
            if what.eps is not None:
                mean = _sum_of_squares(k, rows, at, cols) * cols.cast(F32).reciprocal()
                k.store(factor, 0, (mean + what.eps).sqrt().reciprocal())
            with k.loop(count) as done:
                unit = first + done
                values = []
                for i in range(vectors):
                    column = unit * UNIT + i * lanes
                    value = k.vector(rows, at + column)
                    if what.eps is not None:
                        value = value * k.load(factor, 0) * k.vector(other[0], column)
                    if what.gated:
                        value = silu(k, value) * k.vector(other[0], at + column)
                    values.append(value)
                _store_unit(k, outs, values, turn, units, unit, tile, t)
        kind = "normed" if what.eps is not None else "gated" if what.gated else "plain"
        return k.finish(f"prepare_{kind}_{len(outs)}_{tile}")

    return kernel


def _sum_of_squares(k: Program, rows: UOp, at: Index, n: Index, lanes: int = 0) -> UOp:
    """Of n elements: a multiple of 32, or of `lanes` where that is told."""
    chains, lanes = (1, lanes) if lanes else (UNIT // k.lanes, k.lanes)
    sums = [k.registers(lanes) for _ in range(chains)]
    for s in sums:
        k.fill(s, 0, UOp.const(0.0, F32), lanes)
    with k.loop(n // (lanes * chains)) as i:
        for c, s in enumerate(sums):
            v = k.vector(rows, at + (i * chains + c) * lanes, lanes)
            k.store(s, 0, k.vector(s, 0, lanes) + v * v)
    total = functools.reduce(lambda a, b: a + b, [k.vector(s, 0, lanes) for s in sums])
    return k.across(total, Ops.ADD)


def _store_unit(
    k: Program,
    outs: dict[str, UOp],
    values: list[UOp],
    turn: Index,
    units: Index,
    unit: UOp,
    tile: int,
    t: Index,
) -> None:
    """Stores 32 columns of a token in the forms that `outs` names."""
    place = (turn * units + unit) * tile
    if "floats" in outs:
        for part, value in enumerate(values):
            at = place * UNIT + part * k.lanes * tile + t
            if tile == 1:
                k.store(outs["floats"], at, value)
            else:
                k.store_elements(outs["floats"], at, tile, value)
    if "values" not in outs:
        return
    largest = k.across(
        functools.reduce(lambda a, b: a.maximum(b), [v.maximum(v * -1.0) for v in values]), Ops.MAX
    )
    limit = _LARGEST_ALONE if tile == 1 else _LARGEST
    scale = largest * (1 / limit)
    inverse = (largest.maximum(UOp.const(1e-30, F32))).reciprocal() * float(limit)
    integers = [
        (v * inverse + 32768.5).cast(I32) - 32768 for v in values
    ]  # to the nearest: a cast drops fractions
    for part, q in enumerate(integers):
        at = place * UNIT + part * k.lanes * tile + t * 2
        if tile == 1:
            k.store(outs["values"], at, q.cast(I16))
        else:
            k.store_elements(outs["values"], at, 2 * tile, q.cast(I16), together=2)
    k.store(outs["scales"], place + t, scale)
    half = len(integers) // 2 or 1
    if len(integers) == 1:
        raise ValueError("vectors of more than 16 lanes")
    sums = [
        k.across(functools.reduce(lambda a, b: a + b, integers[i : i + half]), Ops.ADD) for i in (0, half)
    ]
    if "sums" in outs:
        for i, s in enumerate(sums):
            k.store(outs["sums"], unit * (UNIT // PAIRS) + i, s)
    if "scaled_sums" in outs:
        k.store(outs["scaled_sums"], place + t, (sums[0] + sums[1]).cast(F32) * scale)


# --- heads ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Heads:
    """A model's attention: `query` heads share `kv` heads of keys and values, of `dim` elements each;
    `norm_eps` where queries and keys are normed. The cache of a layer has room for `length` tokens, a
    multiple of `lanes`: keys as (kv, length / lanes, dim, lanes), values as (kv, length, dim), float16."""

    query: int
    kv: int
    dim: int
    length: int
    lanes: int
    norm_eps: float | None

    @property
    def rows(self) -> int:
        """Rows of a token's queries, keys and values."""
        return (self.query + 2 * self.kv) * self.dim

    @property
    def cache_size(self) -> int:
        """Elements of a layer's keys, and of its values."""
        return self.kv * self.length * self.dim

    def key_at(self, head: Index, block: Index, d: Index) -> Index:
        """`lanes` tokens' keys of a block."""
        return ((head * (self.length // self.lanes) + block) * self.dim + d) * self.lanes

    def value_at(self, head: Index, token: Index, d: Index) -> Index:
        return (head * self.length + token) * self.dim + d


@functools.cache
def rotate(heads: Heads, tile: int) -> Kernel:
    """Norms and rotates queries and keys and puts keys and values into the cache. Buffers: queries, float32
    (tokens, query * dim), scaled; keys and values, the caches; the state; rows, float32 (tokens, heads.rows);
    cos and sin, float32 (length, dim / 2); the norms' weights for queries and keys, float32 (dim,), where
    there are norms."""
    h, half = heads, heads.dim // 2
    n = gcd(half, h.lanes)

    def kernel(
        part: UOp,
        parts: UOp,
        queries: UOp,
        keys: UOp,
        values: UOp,
        state: UOp,
        rows: UOp,
        cos: UOp,
        sin: UOp,
        *norms: UOp,
    ) -> UOp:
        k = Program(h.lanes)
        start = k.index(state, POSITION)

        def turned(
            at: Index, token: Index, j: UOp, weight: UOp | None, factor: UOp | None
        ) -> tuple[UOp, UOp]:
            """Elements j and j + half on of a head, n each."""
            a, b = (k.vector(rows, at + offset + j, n) for offset in (0, half))
            if weight is not None and factor is not None:
                a, b = (
                    v * k.load(factor, 0) * k.vector(weight, offset + j, n)
                    for v, offset in ((a, 0), (b, half))
                )
            c, s = (k.vector(table, (start + token) * half + j, n) for table in (cos, sin))
            return a * c - b * s, b * c + a * s

        def norm_factor(at: Index) -> UOp | None:
            if h.norm_eps is None:
                return None
            factor = k.registers(1)
            mean = _sum_of_squares(k, rows, at, h.dim, n) * (1.0 / h.dim)
            k.store(factor, 0, (mean + h.norm_eps).sqrt().reciprocal())
            return factor

        with k.loop(tokens_of(k, state, tile)) as t:
            first, count = share(h.query, part, parts)
            with k.loop(count) as i:
                head = first + i
                at = t * h.rows + head * h.dim
                factor = norm_factor(at)
                with k.loop(half // n) as j:
                    a, b = turned(at, t, j * n, norms[0] if norms else None, factor)
                    to = t * (h.query * h.dim) + head * h.dim + j * n
                    k.store(queries, to, a * h.dim**-0.5)
                    k.store(queries, to + half, b * h.dim**-0.5)
            first, count = share(h.kv, part, parts)
            with k.loop(count) as i:
                head = first + i
                token = start + t
                at = t * h.rows + (h.query + head) * h.dim
                factor = norm_factor(at)
                with k.loop(half // n) as j:
                    for v, offset in zip(
                        turned(at, t, j * n, norms[1] if norms else None, factor), (0, half), strict=True
                    ):
                        to = h.key_at(head, token // h.lanes, j * n + offset) + token % h.lanes
                        k.store_elements(keys, to, h.lanes, v.cast(F16))
                with k.loop(h.dim // n) as j:
                    v = k.vector(rows, at + h.kv * h.dim + j * n, n)
                    k.store(values, h.value_at(head, token, j * n), v.cast(F16))
        return k.finish(f"rotate_{h.query}_{h.kv}_{h.dim}_{tile}")

    return kernel
