"""What encoders of pictures compute between products: norms, activations, heads, and sums.

Rows of patches come in chunks of whole tiles. Arrays of all of a picture's patches are read and written from the row
FIRST of the state on, arrays of a chunk from their beginning. A row takes whole units of columns (`stride_of`), zeros
after its own, so that it can be the input of a product. The threads share tiles.

The kernels read all sizes from buffers: they are compiled once, for pictures and encoders of all sizes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import gcd
from typing import Literal

from tinygrad import UOp
from tinygrad.uop.ops import Ops

from engine.kernels.compilation import KernelFunction
from engine.targets.cpu.kernels.activations import gated, store_unit
from engine.targets.cpu.kernels.kernel_builder import F32, Index, KernelBuilder, add, even_share
from engine.targets.cpu.kernels.step_state import SIZE, TILES
from engine.targets.cpu.kernels.stream_size import UNIT

FIRST = SIZE
"""Index of the state of encoders, int32 (FIRST + 1,): the row of the picture's arrays that the chunk begins at."""

Activation = Literal["gelu", "exact gelu", "quick gelu", "silu", "relu2"]


def stride_of(cols: int) -> int:
    """Elements from one row of patches to the next."""
    return -(-cols // UNIT) * UNIT


@dataclass(frozen=True)
class RowNorm:
    """As `engine.description.vision.Norm`, without its vectors' names."""

    eps: float | None
    weighted: bool
    biased: bool
    centred: bool


@dataclass(frozen=True)
class Preparation:
    """How rows become the activations of a product, the buffers `outputs` of `Activations`: normed, clamped, put
    through an activation, multiplied by other rows, which are clamped too, and clamped again. `whole`: the rows are
    those of a picture."""

    outputs: tuple[str, ...]
    whole: bool = False
    norm: RowNorm | None = None
    activation: Activation | None = None
    is_gated: bool = False
    clamps: tuple[bool, bool, bool] = (False, False, False)


@functools.cache
def prepare(how: Preparation, lanes: int) -> KernelFunction:
    """Buffers: the outputs; the units and the columns of a row, int32 (2,); the state; the rows, float32; the other
    rows, if gated; the norm's weight and its bias, float32 (stride,), if it has them; if anything is clamped, the
    limits of the rows, the others and the result, float32 (3, 2, lanes)."""

    def kernel(part: UOp, parts: UOp, *buffers: UOp) -> UOp:
        k, n_outputs = KernelBuilder(lanes), len(how.outputs)
        outs, rest = dict(zip(how.outputs, buffers, strict=False)), list(buffers[n_outputs:])
        shape, state, rows = rest.pop(0), rest.pop(0), rest.pop(0)
        others = rest.pop(0) if how.is_gated else None
        norm = RowNorms(k, how.norm, rest) if how.norm else None
        limits = rest.pop(0) if any(how.clamps) else None
        assert not rest
        units, cols = k.index(shape, 0), k.index(shape, 1)
        start: Index = k.index(state, FIRST) if how.whole else 0

        def clamped(v: UOp, which: int) -> UOp:
            return _clamped(k, v, limits, which) if how.clamps[which] and limits is not None else v

        first, count = even_share(k.index(state, TILES), part, parts)
        with k.loop(count) as i, k.loop(lanes) as token:
            tile = first + i
            at = (start + tile * lanes + token) * (units * UNIT)
            if norm:
                norm.measure(lambda n: k.vector(rows, at + n), units * UNIT, cols)
            with k.loop(units) as unit:
                values = []
                for column in (unit * UNIT + j * lanes for j in range(UNIT // lanes)):
                    value = k.vector(rows, at + column)
                    if norm:
                        value = norm.normed(value, column)
                    value = clamped(value, 0)
                    if how.activation:
                        value = activated(k, how.activation, value)
                    if others is not None:
                        value = value * clamped(k.vector(others, at + column), 1)
                    values.append(clamped(value, 2))
                store_unit(k, outs, values, (tile * units + unit) * lanes, lanes, token)
        kind = f"{'normed' if norm else 'plain'}_{(how.activation or 'rows').replace(' ', '_')}"
        return k.finish(f"prepare_patches_{kind}")

    return kernel


@functools.cache
def add_rows(
    norm: RowNorm | None,
    clamps: bool,
    lanes: int,
    replaces: bool = False,
    activation: Activation | None = None,
    whole: bool = False,
) -> KernelFunction:
    """A picture's rows += those of a chunk, which are clamped, normed and put through an `activation` before; if it
    `replaces` them, = instead of +=. `whole`: these, too, are those of a picture. Buffers: the picture's, float32; the
    units and the columns of a row, int32 (2,); the state; the chunk's; the norm's weight and bias if there are any; the
    limits, float32 (2, lanes), if there are any."""

    def kernel(part: UOp, parts: UOp, x: UOp, shape: UOp, state: UOp, rows: UOp, *buffers: UOp) -> UOp:
        k, rest = KernelBuilder(lanes), list(buffers)
        k.scratch(x)
        measured = RowNorms(k, norm, rest) if norm else None
        limits = rest.pop(0) if clamps else None
        stride, cols = k.index(shape, 0) * UNIT, k.index(shape, 1)
        first, count = even_share(k.index(state, TILES), part, parts)
        with k.loop(count) as i, k.loop(lanes) as token:
            row = (first + i) * lanes + token
            of_x = (k.index(state, FIRST) + row) * stride
            at = of_x if whole else row * stride

            def value(n: Index) -> UOp:
                v = k.vector(rows, at + n)
                return v if limits is None else _clamped(k, v, limits, 0)

            if measured:
                measured.measure(value, stride, cols)
            with k.loop(stride // lanes) as j:
                column = j * lanes
                v = measured.normed(value(column), column) if measured else value(column)
                v = activated(k, activation, v) if activation else v
                k.store(x, of_x + column, v if replaces else k.vector(x, of_x + column) + v)
        return k.finish("replace_patches" if replaces else "add_patches")

    return kernel


@dataclass(frozen=True)
class PatchHeads:
    """Heads of attention: the norm of queries and keys over a head and that of values, whether queries and keys are
    rotated, and whether the results of these products are clamped. `sharing`: how many heads have the same keys and
    values."""

    heads: int
    dim: int
    scale: float
    qk_norm: RowNorm | None
    v_norm: RowNorm | None
    turned: bool
    clamps: bool
    lanes: int
    sharing: int = 1

    @property
    def kv_heads(self) -> int:
        """Heads of keys, and of values."""
        return self.heads // self.sharing

    @property
    def of_keys(self) -> PatchHeads:
        """The heads of keys, as if they were heads of queries."""
        return replace(self, heads=self.kv_heads, sharing=1)

    @property
    def padded_dim(self) -> int:
        """Elements of a value in memory: whole vectors."""
        return -(-self.dim // self.lanes) * self.lanes

    @property
    def width(self) -> int:
        """Elements of the queries of a row, of its keys, or of its values, as the products leave them."""
        return stride_of(self.heads * self.dim)

    def by_vectors(self, k: KernelBuilder, columns: Callable[[UOp | int, int], None]) -> None:
        """In a kernel: `columns` gets the first column of each vector of a head, and how many columns are in it."""
        if vectors := self.dim // self.lanes:
            with k.loop(vectors) as j:
                columns(j * self.lanes, self.lanes)
        if rest := self.dim % self.lanes:
            columns(self.dim - rest, rest)


Which = Literal["queries", "keys", "all"]
"""Heads of queries, those of keys and values, or of all three."""


@functools.cache
def split_heads(h: PatchHeads, which: Which = "all") -> KernelFunction:
    """Makes queries, keys and values of a chunk's products, or `which` of them. Buffers: queries, float32 (heads,
    tiles, dim, lanes); keys, and values, float32 (heads of keys, tiles, lanes, padded_dim); the tiles of a picture,
    int32 (1,); the state; the products, float32 (rows, width of each of these); the cosines and sines of the picture's
    rows, float32 (rows, dim / 2) each, if they are turned; weights and biases of the norms of queries, of keys and of
    values; the limits of the three, float32 (3, 2, lanes), if they are clamped."""
    lanes = h.lanes
    halves = 2 if h.turned else 1
    half = h.dim // halves
    n = gcd(half, lanes)  # elements at a time

    made = {"queries": (0,), "keys": (1, 2), "all": (0, 1, 2)}[which]

    def kernel(part: UOp, parts: UOp, *buffers: UOp) -> UOp:
        k, outs, rest = KernelBuilder(lanes), buffers[: len(made)], list(buffers[len(made) :])
        tiles, state, y = (rest.pop(0) for _ in range(3))
        turns = [rest.pop(0) for _ in range(2)] if h.turned else []
        norms = [RowNorms(k, of, rest, n) if of else None for of in (h.qk_norm, h.qk_norm, h.v_norm)]
        limits = rest.pop(0) if h.clamps else None
        for place, (of, out) in enumerate(zip(made, outs, strict=True)):
            norm, tasks = norms[of], Tasks(k, h.kv_heads if of else h.heads, tiles, state, part, parts)
            with k.loop(tasks.count) as i, k.loop(lanes) as token:
                tile, row = tasks.tile(i), tasks.tile_of_chunk(i) * lanes + token
                at = row * (len(made) * h.width) + place * h.width + tasks.head(i) * h.dim

                def value(column: Index, at: UOp = at, of: int = of) -> UOp:
                    x = k.vector(y, at + column, n)
                    return x if limits is None else _clamped(k, x, limits, of, n)

                if norm:
                    norm.measure(value, h.dim, UOp.const(h.dim))
                with k.loop(half // n) as j:
                    columns = [j * n + i * half for i in range(halves)]
                    xs = [norm.normed(value(column), column) if norm else value(column) for column in columns]
                    if turns and of < 2:
                        cos, sin = (k.vector(t, (tasks.start * lanes + row) * half + j * n, n) for t in turns)
                        a, b = xs
                        xs = [a * cos - b * sin, b * cos + a * sin]
                    for column, x in zip(columns, xs, strict=True):
                        if of == 2:
                            k.store(out, (tile * lanes + token) * h.padded_dim + column, x)
                            continue
                        x = x * h.scale if of == 0 and h.scale != 1.0 else x
                        to = (tile * h.dim + column) * lanes + token
                        for e in range(n):
                            k.store(out, to + e * lanes, x if n == 1 else k.part(x, e, 1))
        return k.finish(f"split_heads_{h.dim}")

    return kernel


class Tasks:
    """The tiles of a chunk, of each of so many heads: those of a part. `start`: the number of the chunk's first tile in
    the picture."""

    def __init__(self, k: KernelBuilder, heads: int, tiles: UOp, state: UOp, part: UOp, parts: UOp) -> None:
        self._in_chunk, self._of_head = k.index(state, TILES), k.index(tiles, 0)
        self.start = k.index(state, FIRST) // k.lanes
        self._first, self.count = even_share(self._in_chunk * heads, part, parts)

    def head(self, i: UOp) -> UOp:
        return (self._first + i) // self._in_chunk

    def tile_of_chunk(self, i: UOp) -> UOp:
        return (self._first + i) % self._in_chunk

    def tile(self, i: UOp) -> UOp:
        """The number of the i-th tile among those of all heads of the picture."""
        return self.head(i) * self._of_head + self.start + self.tile_of_chunk(i)


class RowNorms:
    """A norm of rows: `measure` one, then take elements of it `normed`."""

    def __init__(self, k: KernelBuilder, norm: RowNorm, buffers: list[UOp], lanes: int = 0) -> None:
        """Takes the norm's vectors from `buffers`. `lanes`: elements at a time."""
        self._k, self._norm, self._lanes = k, norm, lanes or k.lanes
        self._weight = buffers.pop(0) if norm.weighted else None
        self._bias = buffers.pop(0) if norm.biased else None
        self._mean, self._factor = k.registers(1), k.registers(1)

    def measure(self, value: Callable[[Index], UOp], stride: Index, cols: UOp) -> None:
        """Computes the factor, and the mean, of a row of `cols` elements, with zeros up to `stride`. `value`: the
        elements from a column on."""
        if self._norm.eps is None:
            return
        k, share = self._k, cols.cast(F32).reciprocal()
        if self._norm.centred:
            k.store(self._mean, 0, self._sum(value, stride) * share)
        squares = self._sum(lambda column: (v := self._centred(value(column))) * v, stride)
        if self._norm.centred:  # the zeros at the end are none, without the mean
            mean = k.load(self._mean, 0)
            squares = squares - mean * mean * (UOp.const(0) + stride - cols).cast(F32)
        k.store(self._factor, 0, (squares * share + self._norm.eps).sqrt().reciprocal())

    def normed(self, v: UOp, column: Index) -> UOp:
        v = v if self._norm.eps is None else self._centred(v) * self._k.load(self._factor, 0)
        v = v if self._weight is None else v * self._k.vector(self._weight, column, self._lanes)
        return v if self._bias is None else v + self._k.vector(self._bias, column, self._lanes)

    def _centred(self, v: UOp) -> UOp:
        return v + self._k.load(self._mean, 0) * -1.0 if self._norm.centred else v

    def _sum(self, value: Callable[[Index], UOp], stride: Index) -> UOp:
        k, lanes = self._k, self._lanes
        total = k.zeros(lanes)
        with k.loop(stride // lanes) as i:
            k.store(total, 0, k.vector(total, 0, lanes) + value(i * lanes))
        return k.vector(total, 0, lanes) if lanes == 1 else k.across(k.vector(total, 0, lanes), Ops.ADD)


def _clamped(k: KernelBuilder, v: UOp, limits: UOp, which: int, n: int = 0) -> UOp:
    low, high = (k.vector(limits, (which * 2 + end) * k.lanes, n) for end in range(2))
    return v.maximum(low).minimum(high)


def activated(k: KernelBuilder, how: Activation, x: UOp) -> UOp:
    """An activation function of a vector."""
    if how != "exact gelu":
        return gated(k, how, x, UOp.const(1.0, F32))
    # 0.5 x (1 + erf(x / sqrt(2))) = 0.5 (x + |x| erf(|x| / sqrt(2))), with an error of 1.5e-7: Abramowitz and Stegun,
    # Handbook of Mathematical Functions, 7.1.26.
    size = x.maximum(x * -1.0)
    z = size * 0.5**0.5
    t = (z * 0.3275911 + 1.0).reciprocal()
    series = t * 1.061405429
    for factor in (-1.453152027, 1.421413741, -0.284496736, 0.254829592):
        series = (series + factor) * t
    return add([x, size, size * series * k.exp(z * z * -1.0) * -1.0]) * 0.5
