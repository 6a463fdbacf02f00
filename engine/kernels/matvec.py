"""A quantized matrix times one vector, the heart of decode: many threads a row.

    matrix form (`Packing`)  x  prologue  x  epilogue  ->  a kernel under a `Schedule`

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

from engine.kernels.packing import UNIT, Packing, permuted, permuted_size, units_of
from engine.kernels.uops import I32, at, f32, finish, load, shared, tree

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
class Rows:
    """The rows of a block: thread `thread` of block `block` may ask for them once they are in shared memory."""

    count: int
    total: int
    block: UOp
    thread: UOp
    product: Callable[[UOp, UOp], UOp]

    def index(self, i: UOp) -> UOp:
        return self.block * self.count + i

    def valid(self, i: UOp, step: int = 1) -> UOp:
        """Whether the block has the i-th of its rows (or run of `step` rows)."""
        ok = i < self.count // step
        return ok if self.total % self.count == 0 else ok & (self.index(i * step) < self.total)


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
    """out[offset + row] = product, plus bias[bias + row] unless `bias` is None. outs: out; ins: the bias."""

    offset: int = 0
    bias: int | None = None
    outs = 1
    pair = 1

    @property
    def ins(self) -> int:
        return int(self.bias is not None)

    def __call__(self, outs: Sequence[UOp], ins: Sequence[UOp], rows: Rows) -> list[UOp]:
        i = rows.thread
        ok, row = rows.valid(i), rows.index(i)
        value = rows.product(i, ok)
        if self.bias is not None:
            value = value + load(ins[0], row + self.bias, ok)
        return [at(outs[0], row + self.offset, ok).store(value)]


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
        column = rows.block * (rows.count // 2) + i
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
            at(best_row, rows.block, first).store(where + (rows.block * rows.count).cast(I32)),
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
    packing: Packing,
    rows: int,
    cols: int,
    schedule: Schedule,
    epilogue: Epilogue,
    name: str,
    n_parts: int = 0,
    eps: float = 0.0,
) -> Kernel:
    """The kernel body. Its buffers: the epilogue's outs; the vector x, float32 (permuted_size(cols),); the sums
    of squares, float32 (n_parts,), where `n_parts` says that x still wants its RMS norm (over `cols`, `eps`);
    the epilogue's ins; the matrix's planes."""
    s, units = schedule, units_of(cols)
    steps = -(-units // s.threads)
    assert s.fits() and s.block_rows % epilogue.pair == 0, s
    n_blocks = -(-rows // s.block_rows)

    def kernel(*buffers: UOp) -> UOp:
        outs, rest = buffers[: epilogue.outs], list(buffers[epilogue.outs :])
        x, parts = rest.pop(0), rest.pop(0) if n_parts else None
        ins, planes = rest[: epilogue.ins], rest[epilogue.ins :]
        t, group, block = (
            UOp.special(s.threads, "lidx0"),
            UOp.special(s.groups, "lidx1"),
            UOp.special(n_blocks, "gidx0"),
        )
        step = UOp.range(steps, 0, AxisType.REDUCE) if steps > 1 else None
        unit = t if step is None else t + step * s.threads
        inside = None if units % s.threads == 0 else unit < units
        first_row = block * s.block_rows + group * s.rows
        xs = [load(x, (j // 4 * units + unit) * 4 + j % 4, inside) for j in range(UNIT)]
        sums = packing.group_sums(xs)
        products = []
        for r in range(s.rows):
            row = first_row + r
            if rows % s.block_rows:
                row = (row < rows).where(row, rows - 1)
            products.append(packing.load_unit(planes, row, units, unit, inside).dot(xs, sums))
        if step is not None:
            products = [p.reduce(step, arg=Ops.ADD) for p in products]
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

        factor = f32(packing.scale)
        rms = inverse_rms(total(UOp.const(s.block_rows), None), cols, eps) if n_parts else None

        def product(i: UOp, ok: UOp) -> UOp:
            value = total(i, ok) * factor
            return value if rms is None else value * rms

        result = Rows(s.block_rows, rows, block, group * s.threads + t, product)
        full = f"{name}_{packing.name}_{rows}x{cols}_{s.threads}_{s.groups}_{s.rows}{s.suffix}"
        n_bytes = packing.n_bytes(rows, cols) + permuted_size(cols) * 4
        return finish(full, epilogue(outs, ins, result), n_bytes, 2 * rows * cols)

    return kernel


def _share(parts: UOp, n_parts: int, t: UOp, s: Schedule, group: UOp) -> UOp:
    """A thread's share of the sum of `parts`."""
    each = -(-n_parts // s.threads)
    first = group.eq(0)
    values = []
    for i in range(each):
        place = t * each + i
        values.append(load(parts, place, first if n_parts % s.threads == 0 else first & (place < n_parts)))
    return tree(values)
