"""A quantized matrix times one vector, for decode: several threads share a row.

    matrices (`StackedMatrices`)  x  prologue  x  epilogue  ->  a kernel with a `Schedule`

Matrices: those that multiply the same vector are stacked in one product, each with a `WeightLayout` of its own. A block
works on rows of one matrix, and branches to the code for its layout.

Prologue: the RMS norm of the vector. The kernel that produced the vector has permuted it and multiplied it by the
norm's weight and the prescale (`permuted`, `prescale`). Only one factor is left, which follows from partial sums of
squares that the producer also stored.

Epilogue: what the kernel does with the rows of a block: `STORE`, `STORE_SQUARES`, `add_residual`,
`activated`, `EMBED`, `as_logits`.

In a mixture of experts (`ChosenExperts`) a product has the matrices of all experts, and reads those of the chosen ones.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tinygrad import UOp
from tinygrad.uop.ops import AxisType, Ops

from engine.kernels.compilation import Kernel
from engine.kernels.gpu.chosen_experts import ChosenExperts, ExpertRows
from engine.kernels.gpu.delta_net import HeadNorm
from engine.kernels.gpu.uops import (
    I32,
    Activation,
    after_store,
    f32,
    finish,
    gated,
    inverse_rms,
    load,
    load_run,
    shared,
    sigmoid,
    soft_capped,
    store,
    tree,
)
from engine.kernels.gpu.weight_layout import UNIT, WeightLayout, permuted, permuted_size, units_of

LOWEST_LOGIT = -3e38  # below any logit
MAX_BLOCK = 256  # columns of the largest quantization block


@dataclass(frozen=True)
class Schedule:
    """A group of `threads` threads shares a row, a block has `groups` groups, and each thread works on `rows` rows at
    once. `blocks`: the minimum of resident blocks on a multiprocessor (`engine.fixes.launch_bounds`); 0 for none.
    `early`: whether it loads weights before it waits for the kernel before (`engine.fixes.early_launch`)."""

    threads: int
    groups: int
    rows: int
    blocks: int = 0
    early: bool = False

    @property
    def block_rows(self) -> int:
        return self.groups * self.rows

    def name(self, first_weights: int) -> str:
        """For the name of a kernel whose buffers from `first_weights` on are weights: what it asks for is the end."""
        name = f"{self.threads}_{self.groups}_{self.rows}" + f"_w{first_weights}" * self.early
        return f"{name}_mb{self.blocks}" if self.blocks else name

    def fits(self) -> bool:
        """Whether CUDA can launch such blocks, and each row of a block has a thread for its epilogue."""
        return self.block_rows <= self.threads * self.groups <= 1024


@dataclass(frozen=True)
class StackedMatrices:
    """Matrices of `cols` columns, one below the other: (layout, rows) of each. With `experts`, each of the n has one
    such matrix, one after the other. If the results of experts are added, that of a `shared` expert may be too:
    (layout, columns) of its matrix. `beside`: matrices with vectors of their own, whose rows follow."""

    matrices: tuple[tuple[WeightLayout, int], ...]
    cols: int
    experts: ChosenExperts | None = None
    shared: tuple[WeightLayout, int] | None = None
    beside: StackedMatrices | None = None

    def __post_init__(self) -> None:
        assert self.experts is None or len(self.matrices) == 1, "an expert's gate and up differ in type"
        assert self.shared is None or (self.experts and self.experts.added)
        if self.beside:
            assert self.slots == 1 and not self.shared
            assert not (self.beside.experts or self.beside.beside)

    @classmethod
    def single(
        cls, layout: WeightLayout, rows: int, cols: int, experts: ChosenExperts | None = None
    ) -> StackedMatrices:
        return cls(((layout, rows),), cols, experts)

    @property
    def rows(self) -> int:
        """Rows of the result, of one expert."""
        return sum(rows for _, rows in self.matrices) + (self.beside.rows if self.beside else 0)

    @property
    def n_bytes(self) -> int:
        """Bytes of the weights that the product reads."""
        used = self.experts.used if self.experts else 1
        shared = self.shared[0].n_bytes(self.rows, self.shared[1]) if self.shared else 0
        others = shared + (self.beside.n_bytes if self.beside else 0)
        return used * sum(layout.n_bytes(rows, self.cols) for layout, rows in self.matrices) + others

    @property
    def prescale_bits(self) -> list[int]:
        """The prescales of the matrices (`WeightLayout.prescale_bits`). A product reads its vector once for each,
        multiplied by that prescale."""
        return sorted({layout.prescale_bits for layout, _ in self.matrices})

    @property
    def name(self) -> str:
        name = " + ".join(f"{layout.name} {rows}x{self.cols}" for layout, rows in self.matrices)
        e = self.experts
        shared = f" and {self.shared[0].name} x{self.shared[1]}" if self.shared else ""
        if e:
            name += f" {e.used} of {e.n}{' added' if e.added else ''}{shared}"
        return f"{name} beside {self.beside.name}" if self.beside else name

    @property
    def slots(self) -> int:
        """Results of the product: one for each chosen expert, unless they are added. Each has blocks of its own."""
        return self.experts.used if self.experts and not self.experts.added else 1

    @property
    def units(self) -> int:
        """Units of a row that threads share: of all experts whose results are added."""
        return units_of(self.cols) * (self.experts.used if self.experts and self.experts.added else 1)

    def n_blocks(self, schedule: Schedule) -> int:
        """Blocks of the product, for one slot. No block has rows of two matrices."""
        own = sum(-(-rows // schedule.block_rows) for _, rows in self.matrices)
        return own + (self.beside.n_blocks(schedule) if self.beside else 0)


@dataclass(frozen=True)
class BlockRows:
    """The rows of block `block`: `count` rows from `first` on, below `end` (None if all blocks are whole), of `total`
    rows. The partial sums are in shared memory, and `product(i, valid)` gives the i-th row's product to any thread.
    `thread` is the number of the current one, `slot` the result's (`StackedMatrices.slots`), if there are several."""

    count: int
    total: int
    first: UOp
    end: UOp | None
    block: UOp
    thread: UOp
    product: Callable[[UOp, UOp], UOp]
    slot: UOp | None = None

    def index(self, i: UOp) -> UOp:
        return self.first + i

    def valid(self, i: UOp, step: int = 1) -> UOp:
        """Whether the block has an i-th row, or an i-th run of `step` rows."""
        ok = i < self.count // step
        return ok if self.end is None else ok & (self.index(i * step) < self.end)


@dataclass(frozen=True)
class Epilogue:
    """The last part of a product's kernel: `stores(outs, ins, rows)` gives the kernel's stores to `n_outs` buffers,
    which may depend on `n_ins` others. A run of `pair` rows must be in one block."""

    n_outs: int
    n_ins: int
    pair: int
    stores: Callable[[Sequence[UOp], Sequence[UOp], BlockRows], list[UOp]]


def _store(outs: Sequence[UOp], ins: Sequence[UOp], rows: BlockRows) -> list[UOp]:
    i = rows.thread
    ok, row = rows.valid(i), rows.index(i)
    value = rows.product(i, ok)
    for bias in ins:
        value = value + load(bias, row, ok)
    return [store(outs[0], row, value, ok)]


def _add_residual(outs: Sequence[UOp], ins: Sequence[UOp], rows: BlockRows) -> list[UOp]:
    h, sums_of_squares, *copies = outs
    i = rows.thread
    ok, row = rows.valid(i), rows.index(i)
    value = load(h, row, ok) + rows.product(i, ok)
    for bias in ins[len(copies) :]:
        value = value + load(bias, row, ok)
    stores = [store(h, row, value, ok), _store_sum_of_squares(sums_of_squares, value, ok, rows)]
    for out, weight in zip(copies, ins, strict=False):
        stores.append(store(out, permuted(row, rows.total), value * load(weight, row, ok), ok))
    return stores


def _store_squares(outs: Sequence[UOp], ins: Sequence[UOp], rows: BlockRows) -> list[UOp]:
    i = rows.thread
    ok, row = rows.valid(i), rows.index(i)
    value = rows.product(i, ok)
    return [store(outs[0], row, value, ok), _store_sum_of_squares(outs[1], value, ok, rows)]


def _store_sum_of_squares(out: UOp, value: UOp, ok: UOp, rows: BlockRows) -> UOp:
    """Stores the sum of the squares of a block's values, of which each thread with `ok` has one."""
    i = rows.thread
    square = ok.where(value * value, f32(0))
    squares = after_store(shared(rows.count, slot=1), i, square, i < rows.count)
    return store(out, rows.block, tree(load_run(squares, 0, rows.count)), i.eq(0))


STORE, STORE_BIASED = Epilogue(1, 0, 1, _store), Epilogue(1, 1, 1, _store)
"""out[row] = product, or product + bias[row]. outs: out, float32 (rows,); ins: the bias, float32 (rows,)."""

STORE_SQUARES = Epilogue(2, 0, 1, _store_squares)
"""As STORE, for `engine.kernels.gpu.post_norm`. outs: out, float32 (rows,); partial sums of its squares, float32
(blocks,)."""


@functools.cache
def as_logits(softcap: float = 0.0) -> Epilogue:
    """Stores logits, with a soft cap if there is one, and the largest of each block, without it, with its row. outs:
    the logits, float32 (rows,); the largest, float32 (blocks,); their rows, int32 (blocks,)."""

    def stores(outs: Sequence[UOp], ins: Sequence[UOp], rows: BlockRows) -> list[UOp]:
        logits, largest, largest_row = outs
        i = rows.thread
        ok, row, first = rows.valid(i), rows.index(i), i.eq(0)
        value = rows.product(i, ok)
        masked = ok.where(value, f32(LOWEST_LOGIT))
        values = after_store(shared(rows.count, slot=1), i, masked, i < rows.count)
        block_max, block_row = argmax([(load(values, k), UOp.const(k, I32)) for k in range(rows.count)])
        return [
            store(logits, row, soft_capped(value, softcap), ok),
            store(largest, rows.block, block_max, first),
            store(largest_row, rows.block, block_row + rows.first.cast(I32), first),
        ]

    return Epilogue(3, 0, 1, stores)


def add_residual(copies: int = 1, bias: bool = False) -> Epilogue:
    """Adds the product to the residual stream, and prepares the stream for the next products: permuted, and multiplied
    by the next norm's weight and by their prescales. outs: the stream, float32 (rows,); partial sums of its squares,
    float32 (blocks,); `copies` permuted vectors, one for each prescale; ins: for each copy the norm's weight times the
    prescale, float32 (rows,); with `bias`, what is added to the product, float32 (rows,)."""
    return Epilogue(2 + copies, copies + bias, 1, _add_residual)


@functools.cache
def activated(activation: Activation) -> Epilogue:
    """activation(gate) * up, from rows that alternate between gate and up, permuted and prescaled for the next product.
    outs: that vector, of experts (used, permuted_size(rows / 2)); ins: its prescale, float32 (UNIT,)."""

    def stores(outs: Sequence[UOp], ins: Sequence[UOp], rows: BlockRows) -> list[UOp]:
        i = rows.thread
        ok = rows.valid(i, 2)
        column = rows.first // 2 + i
        value = gated(rows.product(i * 2, ok), rows.product(i * 2 + 1, ok), activation)
        value = value * load(ins[0], column % UNIT, ok)
        n = rows.total // 2
        place = permuted(column, n)
        if rows.slot is not None:
            place = place + rows.slot * permuted_size(n)
        return [store(outs[0], place, value, ok)]

    return Epilogue(1, 1, 2, stores)


def _embed(outs: Sequence[UOp], ins: Sequence[UOp], rows: BlockRows) -> list[UOp]:
    i = rows.thread
    ok, row = rows.valid(i), rows.index(i)
    value = gated(rows.product(i, ok), load(ins[0], row, ok), "gelu") * load(ins[1], row % UNIT, ok)
    return [store(outs[0], permuted(row, rows.total), value, ok)]


EMBED = Epilogue(1, 2, 1, _embed)
"""gelu(product) * e, permuted and prescaled for the next product. outs: that vector; ins: e, float32 (rows,); the
prescale, float32 (UNIT,)."""


@functools.cache
def routed(n: int, activation: Activation) -> Epilogue:
    """Of the first `n` rows, those of a router and of a shared expert's gate, the product; of the others, which
    alternate between that expert's gate and up, as `activated`. They are another matrix. outs: logits, float32 (n,);
    the vector, float32 (permuted_size((rows - n) / 2),); ins: its prescale, float32 (UNIT,)."""

    def stores(outs: Sequence[UOp], ins: Sequence[UOp], rows: BlockRows) -> list[UOp]:
        i, is_logit = rows.thread, rows.first < n
        ok = rows.valid(i) & is_logit
        results = [store(outs[0], rows.index(i), rows.product(i, ok), ok)]
        ok = rows.valid(i, 2) & (rows.first >= n)
        column = ((rows.first - n) // 2 + i).maximum(0)
        value = gated(rows.product(i * 2, ok), rows.product(i * 2 + 1, ok), activation)
        value = value * load(ins[0], column % UNIT, ok)
        return [*results, store(outs[1], permuted(column, (rows.total - n) // 2), value, ok)]

    return Epilogue(2, 1, 2, stores)


@functools.cache
def activate(n: int, activation: Activation = "silu", threads: int = 256) -> Kernel:
    """activation(gate) * up, if the two are separate matrices. Buffers: the permuted and prescaled result; gate, then
    up, float32 (2 * n,); the prescale, float32 (UNIT,)."""

    def kernel(out: UOp, rows: UOp, prescale: UOp) -> UOp:
        column = UOp.special(-(-n // threads), "gidx0") * threads + UOp.special(threads, "lidx0")
        ok = None if n % threads == 0 else column < n
        value = gated(load(rows, column, ok), load(rows, column + n, ok), activation)
        value = value * load(prescale, column % UNIT, ok)
        return finish(f"activate_{n}", [store(out, permuted(column, n), value, ok)])

    return kernel


def argmax(candidates: Sequence[tuple[UOp, UOp]]) -> tuple[UOp, UOp]:
    """The (value, index) pair with the largest value, and of equal values the first. The pairs are sorted by index."""
    pairs = list(candidates)
    while len(pairs) > 1:
        joined = []
        for (a, i), (b, j) in zip(pairs[0::2], pairs[1::2], strict=False):
            later = b > a
            joined.append((later.where(b, a), later.where(j, i)))
        pairs = joined + pairs[len(pairs) // 2 * 2 :]
    return pairs[0]


@functools.cache
def matvec(
    stack: StackedMatrices,
    schedule: Schedule,
    epilogue: Epilogue,
    name: str,
    n_norm_sums: int = 0,
    eps: float = 0.0,
    heads: HeadNorm | None = None,
) -> Kernel:
    """The product of stacked matrices with a vector x. Buffers: the epilogue's outs; x, float32 (permuted_size(cols),),
    permuted and prescaled, for each of the stack's prescales; if x is still to be RMS-normed over its `cols` elements,
    with `eps`, the partial sums of its squares, float32 (n_norm_sums,), or if its `heads` are, of those of all heads;
    the epilogue's ins; the planes of all matrices.

    With experts, the outs are followed by the chosen experts, int32 (used,), and their probabilities, float32
    (used,). If the results are added, these are read, and x is (used, permuted_size(cols)), not normed; else they
    are written, a count of how often each expert was chosen, int32 (n,), follows, and after the partial sums the
    router's logits, float32 (n,), and the experts' scales, float32 (n,), if they are scaled. Then come biases of all
    experts, float32 (n, rows), if there are any. Results that are not added need an epilogue that stores them by slot:
    `activated`. With a shared expert, x is followed by its vector, and by the logits of `routed`, of which the last is
    its gate's; its planes are the last. The vectors and the planes of matrices `beside` follow those of the others."""
    s, cols, chosen, beside = schedule, stack.cols, stack.experts, stack.beside
    matrices = [(stack, *matrix) for matrix in stack.matrices]
    matrices += [(beside, *matrix) for matrix in beside.matrices] if beside else []
    assert not (n_norm_sums and beside) or beside.cols == cols
    assert stack.slots == 1 or epilogue.pair == 2
    assert s.fits() and s.block_rows % epilogue.pair == 0, s
    whole = all(rows % s.block_rows == 0 for _, _, rows in matrices)

    def kernel(*buffers: UOp) -> UOp:
        outs, rest = buffers[: epilogue.n_outs], list(buffers[epilogue.n_outs :])
        t, group = UOp.special(s.threads, "lidx0"), UOp.special(s.groups, "lidx1")
        thread = group * s.threads + t
        results = [rest.pop(0) for _ in range(2 if chosen.added else 3)] if chosen else []
        xs = {(of, bits): rest.pop(0) for of in (stack, beside) if of for bits in of.prescale_bits}
        of_shared = [rest.pop(0), rest.pop(0)] if stack.shared else []
        norm_sums = rest.pop(0) if n_norm_sums else None
        head_sums = rest.pop(0) if heads else None
        n_threads, experts = s.threads * s.groups, None
        if chosen:
            experts = ExpertRows(chosen, results, rest, matrices[0][2], thread, n_threads)
        ins, planes = rest[: epilogue.n_ins], rest[epilogue.n_ins :]
        n_before, block = len(buffers) - len(planes), UOp.special(stack.n_blocks(s), "gidx0")
        products = [f32(0)] * s.rows
        first, end, factor = block * s.block_rows, UOp.const(matrices[0][2]), f32(matrices[0][1].scale)
        blocks_before = rows_before = 0
        for k, (of, layout, rows) in enumerate(matrices):
            n_planes = len(layout.shapes(rows, of.cols))
            matrix_planes, planes = planes[:n_planes], planes[n_planes:]
            matrix_block, starts_here = block - blocks_before, block >= blocks_before
            first_row = matrix_block * s.block_rows + group * s.rows
            blocks_before += -(-rows // s.block_rows)
            active = starts_here & (block < blocks_before) if len(matrices) > 1 else None
            x = xs[of, layout.prescale_bits]
            clamped = [first_row + r for r in range(s.rows)]
            if rows % s.block_rows:
                clamped = [(row < rows).where(row, rows - 1) for row in clamped]
            factor_of = (
                functools.partial(heads.factor, head_sums) if heads and head_sums is not None else None
            )
            sums = (
                experts.sums(layout, of.cols, x, matrix_planes, clamped, t, s.threads, active)
                if experts and of.experts
                else _row_sums(layout, of.cols, x, matrix_planes, clamped, t, s.threads, active, k, factor_of)
            )
            if stack.shared:
                assert chosen
                sums = _with_shared(
                    stack.shared, sums, of_shared, chosen.n, planes, clamped, t, s, layout.scale
                )
            products = [a + b for a, b in zip(products, sums, strict=True)] if k else sums
            if k:
                factor = starts_here.where(f32(layout.scale), factor)
                if not whole:
                    first = starts_here.where(matrix_block * s.block_rows + rows_before, first)
                    end = starts_here.where(UOp.const(rows_before + rows), end)
            rows_before += rows
        chooses = experts is not None and experts.choice is not None
        stride = s.block_rows + (3 if chooses else 1)  # odd: neighbouring threads store to different banks
        partial = shared(s.threads * stride, slot=0)
        stores = [store(partial, t * stride + group * s.rows + r, p) for r, p in enumerate(products)]
        if norm_sums is not None:
            thread_sum = _thread_sum(norm_sums, n_norm_sums, t, s, group)
            stores.append(store(partial, t * stride + s.block_rows, thread_sum, group.eq(0)))
        if experts and experts.choice:
            powers = experts.choice.powers(t, s.threads)
            stores.append(store(partial, t * stride + s.block_rows + 1, powers, group.eq(0)))
        partial = partial.after(UOp.group(*stores))

        def total(column: UOp, valid: UOp | None) -> UOp:
            return tree([load(partial, column + k * stride, valid) for k in range(s.threads)])

        rms = inverse_rms(total(UOp.const(s.block_rows), None), cols, eps) if n_norm_sums else None

        def product(i: UOp, valid: UOp) -> UOp:
            value = total(i, valid) * factor
            value = value if rms is None else value * rms
            return value if experts is None else experts.biased(value, first + i)

        end_of_rows = None if whole else end
        slot = experts.slot if experts else None
        result = BlockRows(s.block_rows, stack.rows, first, end_of_rows, block, thread, product, slot)
        names = "_".join(layout.name for _, layout, _ in matrices)
        mixture = f"_{chosen.used}_of_{chosen.n}" if chosen else ""
        mixture += f"_{stack.shared[0].name}x{stack.shared[1]}" if stack.shared else ""
        full_name = f"{name}_{names}_{stack.rows}x{cols}{mixture}_{s.name(n_before)}"
        vectors = chosen.used if chosen and chosen.added else 1
        sizes = [permuted_size(of.cols) * (vectors if of is stack else 1) for of, _ in xs]
        n_bytes = stack.n_bytes + 4 * sum(sizes)
        n_ops = sum(2 * rows * of.cols * (of.experts.used if of.experts else 1) for of, _, rows in matrices)
        stores = epilogue.stores(outs, ins, result)
        if experts and experts.choice:
            stores += experts.stores(block, total(UOp.const(s.block_rows + 1), None))
        return finish(full_name, stores, n_bytes, n_ops)

    return kernel


def _row_sums(
    layout: WeightLayout, cols: int, x: UOp, planes: Sequence[UOp], rows: Sequence[UOp], t: UOp, threads: int,
    active: UOp | None, axis: int, factor_of: Callable[[UOp, UOp | None], UOp] | None = None,
) -> list[UOp]:  # fmt: skip
    """The partial sums of rows of one matrix, by thread t of `threads`. `factor_of`: what a unit of the vector is to be
    multiplied by. If the block is not `active`, its loop has no steps and the sums are zeros, so that it costs only a
    branch."""
    units = units_of(cols)
    steps = -(-units // threads)
    if active is not None:  # tinygrad moves code that precedes a loop of one step at most into the loop
        steps = max(steps, 2)
        if units <= MAX_BLOCK // UNIT:  # d does not depend on the step: it is loaded before
            rows = [active.where(row, 0) for row in rows]
    trips = steps if active is None else active.where(UOp.const(steps), UOp.const(0))
    step = UOp.range(trips, axis, AxisType.REDUCE) if steps > 1 else None
    unit = t if step is None else t + step * threads
    inside = None if units == threads * steps else unit < units
    xs = [load(x, (j // 4 * units + unit) * 4 + j % 4, inside) for j in range(UNIT)]
    group_sums = layout.group_sums(xs)
    products = [layout.load_unit(planes, row, units, unit, inside).dot(xs, group_sums) for row in rows]
    if factor_of is not None:
        factor = factor_of(unit, inside)
        products = [p * factor for p in products]
    return products if step is None else [p.reduce(step, arg=Ops.ADD) for p in products]


def _with_shared(
    shared: tuple[WeightLayout, int], sums: Sequence[UOp], buffers: Sequence[UOp], gate: int, planes: Sequence[UOp],
    rows: Sequence[UOp], t: UOp, s: Schedule, scale: float,
) -> list[UOp]:  # fmt: skip
    """The partial sums of experts, which are to be multiplied by `scale`, and those of a shared one, times the sigmoid
    of its gate's logit."""
    (layout, cols), (x, logits) = shared, buffers
    own = _row_sums(layout, cols, x, planes, rows, t, s.threads, None, 1)
    factor = sigmoid(load(logits, gate)) * f32(layout.scale / scale)
    return [a + b * factor for a, b in zip(sums, own, strict=True)]


def _thread_sum(sums: UOp, n: int, t: UOp, s: Schedule, group: UOp) -> UOp:
    """The sum of a thread's share of `sums`, float32 (n,), which the threads of the first group divide."""
    each = -(-n // s.threads)
    first = group.eq(0)
    values = []
    for i in range(each):
        index = t * each + i
        values.append(load(sums, index, first if n % s.threads == 0 else first & (index < n)))
    return tree(values)
