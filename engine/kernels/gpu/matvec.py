"""A quantized matrix times one vector, the heart of decode: many threads a row.

    matrices (`Stack`)  x  prologue  x  epilogue  ->  a kernel under a `Schedule`

Matrices: those of one vector lie one below the other, each in a form of its own (`Packing`). A block works on rows
of one of them, and branches to what its form takes.

Prologue: what was done to the vector before. Its producer has laid it out and scaled it as the matrix wants
(`permuted`, `prescale`) and multiplied it by the norm's weight; what is left of an RMS norm, one factor,
comes from partial sums of squares that the producer left as well (`sum_parts`).

Epilogue: what becomes of the rows that a block has computed: `Store`, `Residual`, `GateUp`, `Best`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from tinygrad import UOp
from tinygrad.uop.ops import AxisType, Ops

from engine.kernels.gpu.packing import UNIT, Packing, permuted, permuted_size, units_of
from engine.kernels.gpu.uops import I32, at, f32, finish, load, shared, tree

Kernel = Callable[..., UOp]


@dataclass(frozen=True)
class Schedule:
    """`threads` share a row, a block has `groups` of them, each thread works on `rows` rows at once. A
    multiprocessor is to hold `blocks` blocks (0: whatever the compiler makes of it)."""

    threads: int
    groups: int
    rows: int
    blocks: int = 0

    @property
    def block_rows(self) -> int:
        return self.groups * self.rows

    @property
    def suffix(self) -> str:
        return f"_mb{self.blocks}" if self.blocks else ""

    def fits(self) -> bool:
        return self.block_rows <= self.threads * self.groups <= 1024


@dataclass(frozen=True)
class Stack:
    """Matrices of `cols` columns, one below the other: (packing, rows) of each."""

    matrices: tuple[tuple[Packing, int], ...]
    cols: int

    @classmethod
    def of(cls, packing: Packing, rows: int, cols: int) -> Stack:
        return cls(((packing, rows),), cols)

    @property
    def rows(self) -> int:
        return sum(rows for _, rows in self.matrices)

    @property
    def n_bytes(self) -> int:
        return sum(packing.n_bytes(rows, self.cols) for packing, rows in self.matrices)

    @property
    def scalings(self) -> list[int]:
        """Of the vectors that a product takes, the same one in several scales: see `prescale`."""
        return sorted({packing.scaling for packing, _ in self.matrices})

    @property
    def name(self) -> str:
        return " + ".join(f"{packing.name} {rows}x{self.cols}" for packing, rows in self.matrices)

    def n_blocks(self, schedule: Schedule) -> int:
        """No block has rows of two matrices."""
        return sum(-(-rows // schedule.block_rows) for _, rows in self.matrices)


@dataclass(frozen=True)
class Rows:
    """The rows of a block, `count` from `first` on and below `end`, of `total`: thread `thread` of block `block` may
    ask for them once they are in shared memory. `end` is None where all blocks are whole."""

    count: int
    total: int
    first: UOp
    end: UOp | None
    block: UOp
    thread: UOp
    product: Callable[[UOp, UOp], UOp]

    def index(self, i: UOp) -> UOp:
        return self.first + i

    def valid(self, i: UOp, step: int = 1) -> UOp:
        """Whether the block has the i-th of its rows (or run of `step` rows)."""
        ok = i < self.count // step
        return ok if self.end is None else ok & (self.index(i * step) < self.end)


class Epilogue(Protocol):
    """`outs` buffers it writes, `ins` buffers it reads beside the product's own; called with both, it gives the
    kernel's stores. A run of `pair` rows must not be split between blocks."""

    @property
    def outs(self) -> int: ...
    @property
    def ins(self) -> int: ...
    @property
    def pair(self) -> int: ...

    def __call__(self, outs: Sequence[UOp], ins: Sequence[UOp], rows: Rows) -> list[UOp]: ...

    def __hash__(self) -> int: ...


@dataclass(frozen=True)
class Store:
    """out[row] = product, plus bias[row] where there is one. outs: out; ins: the bias."""

    biased: bool = False
    outs = 1
    pair = 1

    @property
    def ins(self) -> int:
        return int(self.biased)

    def __call__(self, outs: Sequence[UOp], ins: Sequence[UOp], rows: Rows) -> list[UOp]:
        i = rows.thread
        ok, row = rows.valid(i), rows.index(i)
        value = rows.product(i, ok)
        if self.biased:
            value = value + load(ins[0], row, ok)
        return [at(outs[0], row, ok).store(value)]


@dataclass(frozen=True)
class Residual:
    """The residual stream takes the product up, and is left ready for the next products: multiplied by the next
    norm's weight, in the layout and scale each wants. outs: the stream h, partial sums of its squares (one a
    block), and `copies` vectors for what follows; ins: for each of them the norm's weight, prescaled."""

    copies: int = 1
    pair = 1

    @property
    def outs(self) -> int:
        return 2 + self.copies

    @property
    def ins(self) -> int:
        return self.copies

    def __call__(self, outs: Sequence[UOp], ins: Sequence[UOp], rows: Rows) -> list[UOp]:
        h, parts, *nexts = outs
        i = rows.thread
        ok, row = rows.valid(i), rows.index(i)
        value = load(h, row, ok) + rows.product(i, ok)
        squares = shared(rows.count, slot=1)
        squares = squares.after(at(squares, i, i < rows.count).store(ok.where(value * value, f32(0))))
        sum_of_squares = tree([load(squares, k) for k in range(rows.count)])
        stores = [at(h, row, ok).store(value), at(parts, rows.block, i.eq(0)).store(sum_of_squares)]
        place = permuted(row, rows.total)
        for out, weight in zip(nexts, ins, strict=True):
            stores.append(at(out, place, ok).store(value * load(weight, row, ok)))
        return stores


@dataclass(frozen=True)
class GateUp:
    """SiLU(gate) * up, of rows that hold gate and up in turn, laid out and scaled for the product that follows.
    outs: that vector; ins: its prescale (UNIT,)."""

    outs = 1
    ins = 1
    pair = 2

    def __call__(self, outs: Sequence[UOp], ins: Sequence[UOp], rows: Rows) -> list[UOp]:
        i = rows.thread
        ok = rows.valid(i, 2)
        column = rows.first // 2 + i
        value = gated(rows.product(i * 2, ok), rows.product(i * 2 + 1, ok))
        value = value * load(ins[0], column % UNIT, ok)
        return [at(outs[0], permuted(column, rows.total // 2), ok).store(value)]


@dataclass(frozen=True)
class Best:
    """Logits, and the largest of each block with its row. outs: logits, the largest, its row; no ins."""

    outs = 3
    ins = 0
    pair = 1

    def __call__(self, outs: Sequence[UOp], ins: Sequence[UOp], rows: Rows) -> list[UOp]:
        logits, best, best_row = outs
        i = rows.thread
        ok, row = rows.valid(i), rows.index(i)
        value = rows.product(i, ok)
        values = shared(rows.count, slot=1)
        values = values.after(at(values, i, i < rows.count).store(ok.where(value, f32(-3e38))))
        found, where = argmax([(load(values, k), UOp.const(k, I32)) for k in range(rows.count)])
        first = i.eq(0)
        return [
            at(logits, row, ok).store(value),
            at(best, rows.block, first).store(found),
            at(best_row, rows.block, first).store(where + rows.first.cast(I32)),
        ]


def gated(gate: UOp, up: UOp) -> UOp:
    """SiLU(gate) * up."""
    return gate * (f32(1) + (gate * f32(-1.4426950408889634)).exp2()).reciprocal() * up


@functools.cache
def activate(n: int, threads: int = 256) -> Kernel:
    """SiLU(gate) * up where the two come from products of their own. Buffers: as `GateUp`'s out; gate and up,
    float32 (2 * n,); the prescale (UNIT,)."""

    def kernel(out: UOp, rows: UOp, prescale: UOp) -> UOp:
        column = UOp.special(-(-n // threads), "gidx0") * threads + UOp.special(threads, "lidx0")
        ok = None if n % threads == 0 else column < n
        value = gated(load(rows, column, ok), load(rows, column + n, ok)) * load(prescale, column % UNIT, ok)
        return finish(f"activate_{n}", [at(out, permuted(column, n), ok).store(value)])

    return kernel


def argmax(candidates: Sequence[tuple[UOp, UOp]]) -> tuple[UOp, UOp]:
    """Of (value, index) pairs in the order of their indices, the largest; of equal ones the first."""
    pairs = list(candidates)
    while len(pairs) > 1:
        joined = []
        for (a, i), (b, j) in zip(pairs[0::2], pairs[1::2], strict=False):
            later = b > a
            joined.append((later.where(b, a), later.where(j, i)))
        pairs = joined + pairs[len(pairs) // 2 * 2 :]
    return pairs[0]


def inverse_rms(sum_of_squares: UOp, n: int, eps: float) -> UOp:
    return (sum_of_squares * f32(1.0 / n) + f32(eps)).sqrt().reciprocal()


@functools.cache
def matvec(
    stack: Stack, schedule: Schedule, epilogue: Epilogue, name: str, n_parts: int = 0, eps: float = 0.0
) -> Kernel:
    """The kernel body. Its buffers: the epilogue's outs; the vector x, float32 (permuted_size(cols),), for each of
    the stack's scalings; the sums of squares, float32 (n_parts,), where `n_parts` says that x still wants its RMS
    norm (over `cols`, `eps`); the epilogue's ins; the matrices' planes."""
    s, cols, matrices = schedule, stack.cols, stack.matrices
    assert s.fits() and s.block_rows % epilogue.pair == 0, s
    whole = all(rows % s.block_rows == 0 for _, rows in matrices)

    def kernel(*buffers: UOp) -> UOp:
        outs, rest = buffers[: epilogue.outs], list(buffers[epilogue.outs :])
        xs = {scaling: rest.pop(0) for scaling in stack.scalings}
        parts = rest.pop(0) if n_parts else None
        ins, planes = rest[: epilogue.ins], rest[epilogue.ins :]
        t, group, block = (
            UOp.special(s.threads, "lidx0"),
            UOp.special(s.groups, "lidx1"),
            UOp.special(stack.n_blocks(s), "gidx0"),
        )
        products = [f32(0)] * s.rows
        first, end, factor = block * s.block_rows, UOp.const(matrices[0][1]), f32(matrices[0][0].scale)
        blocks_before = rows_before = 0
        for k, (packing, rows) in enumerate(matrices):
            own = planes[: len(packing.shapes(rows, cols))]
            planes = planes[len(own) :]
            own_block, later = block - blocks_before, block >= blocks_before
            blocks_before += -(-rows // s.block_rows)
            here = later & (block < blocks_before) if len(matrices) > 1 else None
            x = xs[packing.scaling]
            sums = _row_sums(packing, rows, cols, s, own_block, group, t, x, own, here, k)
            products = [a + b for a, b in zip(products, sums, strict=True)] if k else sums
            if k:
                factor = later.where(f32(packing.scale), factor)
                if not whole:
                    first = later.where(own_block * s.block_rows + rows_before, first)
                    end = later.where(UOp.const(rows_before + rows), end)
            rows_before += rows
        stride = s.block_rows + 1
        partial = shared(s.threads * stride, slot=0)
        stores = [at(partial, t * stride + group * s.rows + r).store(p) for r, p in enumerate(products)]
        if parts is not None:
            stores.append(
                at(partial, t * stride + s.block_rows, group.eq(0)).store(_share(parts, n_parts, t, s, group))
            )
        partial = partial.after(UOp.group(*stores))

        def total(column: UOp, ok: UOp | None) -> UOp:
            return tree([load(partial, column + k * stride, ok) for k in range(s.threads)])

        rms = inverse_rms(total(UOp.const(s.block_rows), None), cols, eps) if n_parts else None

        def product(i: UOp, ok: UOp) -> UOp:
            value = total(i, ok) * factor
            return value if rms is None else value * rms

        thread = group * s.threads + t
        result = Rows(s.block_rows, stack.rows, first, None if whole else end, block, thread, product)
        names = "_".join(packing.name for packing, _ in matrices)
        full = f"{name}_{names}_{stack.rows}x{cols}_{s.threads}_{s.groups}_{s.rows}{s.suffix}"
        n_bytes = stack.n_bytes + permuted_size(cols) * 4 * len(xs)
        return finish(full, epilogue(outs, ins, result), n_bytes, 2 * stack.rows * cols)

    return kernel


def _row_sums(
    packing: Packing,
    rows: int,
    cols: int,
    s: Schedule,
    block: UOp,
    group: UOp,
    t: UOp,
    x: UOp,
    planes: Sequence[UOp],
    here: UOp | None,
    axis: int,
) -> list[UOp]:
    """A thread's share of its rows in one matrix, `block` being counted from the matrix's first; zeros where the
    block is not `here`, whose loop has no steps then, so that it costs a branch."""
    units = units_of(cols)
    steps = -(-units // s.threads)
    if here is not None:  # of a loop with one step at most, tinygrad puts what belongs before it inside
        steps = max(steps, 2)
    trips = steps if here is None else here.where(UOp.const(steps), UOp.const(0))
    step = UOp.range(trips, axis, AxisType.REDUCE) if steps > 1 else None
    unit = t if step is None else t + step * s.threads
    inside = None if units == s.threads * steps else unit < units
    xs = [load(x, (j // 4 * units + unit) * 4 + j % 4, inside) for j in range(UNIT)]
    sums = packing.group_sums(xs)
    products = []
    for r in range(s.rows):
        row = block * s.block_rows + group * s.rows + r
        if rows % s.block_rows:
            row = (row < rows).where(row, rows - 1)
        products.append(packing.load_unit(planes, row, units, unit, inside).dot(xs, sums))
    return products if step is None else [p.reduce(step, arg=Ops.ADD) for p in products]


def _share(parts: UOp, n_parts: int, t: UOp, s: Schedule, group: UOp) -> UOp:
    """A thread's share of the sum of `parts`."""
    each = -(-n_parts // s.threads)
    first = group.eq(0)
    values = []
    for i in range(each):
        place = t * each + i
        values.append(load(parts, place, first if n_parts % s.threads == 0 else first & (place < n_parts)))
    return tree(values)
