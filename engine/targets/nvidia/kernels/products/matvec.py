"""A quantized matrix times one vector, for decode: several threads share a row.

    matrices (`StackedMatrices`)  x  prologue  x  epilogue  ->  a kernel with a `Schedule`

Matrices: those that multiply the same vector are stacked in one product, each with a `WeightLayout` of its own. A block
works on rows of one matrix, and branches to the code for its layout.

Prologue: the RMS norm of the vector. The kernel that produced the vector has permuted it and multiplied it by the
norm's weight and the input_scale (`permuted`, `input_scale`). Only one factor is left, which follows from partial sums
of squares that the producer also stored.

Epilogue: what the kernel does with the rows of a block: `STORE`, `STORE_SQUARES`, `add_residual`,
`activated`, `EMBED`, `as_logits`.

In a mixture of experts (`ChosenExperts`) a product has the matrices of all experts, and reads those of the chosen ones.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tinygrad import UOp
from tinygrad.uop.ops import AxisType, Ops

from engine.fixes import async_copies
from engine.kernels.kernel import Kernel, Name, call_by_name
from engine.kernels.launch_hints import LaunchHints, Release
from engine.targets.nvidia.kernels.products import digit_rows
from engine.targets.nvidia.kernels.products.chosen_experts import ChosenExperts, ExpertRows
from engine.targets.nvidia.kernels.products.epilogues import BlockRows, Epilogue
from engine.targets.nvidia.kernels.products.head_norm import HeadNorm
from engine.targets.nvidia.kernels.uops import (
    after_store,
    f32,
    finish,
    inverse_rms,
    load,
    shared,
    sigmoid,
    store,
    tree,
)
from engine.targets.nvidia.kernels.weights.matrix_bytes import units_of
from engine.targets.nvidia.kernels.weights.weight_layout import WeightLayout, permuted_size

_EVEN, _MANY_BLOCKS = 16, 64


@dataclass(frozen=True)
class Schedule:
    """A group of `threads` threads shares a row, a block has `groups` groups, and each thread works on `rows` rows at
    once. `blocks`: the minimum of resident blocks on a multiprocessor (`engine.fixes.launch_bounds`); 0 for none.
    `early`: whether it loads weights before it waits for the kernel before, `early_end`: whether what its end adds to
    them, `starts_next`: whether the next kernel may start as soon as it has waited (`engine.fixes.early_launch`).
    `brings`: how many megabytes of the next product's weights it brings to the L2 cache, from its beginning on."""

    threads: int
    groups: int
    rows: int
    blocks: int = 0
    early: bool = False
    starts_next: bool = False
    early_end: bool = False
    brings: int = 0

    @property
    def block_rows(self) -> int:
        return self.groups * self.rows

    @property
    def name(self) -> str:
        """For the name of a kernel."""
        name = f"{self.threads}_{self.groups}_{self.rows}" + "_early" * self.early
        name += "_next" * self.starts_next + "_end" * self.early_end
        name += f"_brings_{self.brings}" * bool(self.brings)
        return f"{name}_{self.blocks}_blocks" if self.blocks else name

    def divides(self, rows: int) -> bool:
        """Whether a matrix of so many rows has whole blocks, or its number is so odd that few schedules have, and so
        many blocks that the last one counts little."""
        return rows % self.block_rows == 0 or bool(rows % _EVEN and rows > _MANY_BLOCKS * self.block_rows)

    def fits(self) -> bool:
        """Whether CUDA can launch such blocks, and each row of a block has a thread for its epilogue."""
        return self.block_rows <= self.threads * self.groups <= 1024


class Brought(NamedTuple):
    """How many bytes of each plane of a product to come each block brings to the L2 cache, multiples of
    `COPIED_BYTES`, and whether they are kept there while others come and go."""

    block_bytes: tuple[int, ...]
    keeps: bool


class SharedExpert(NamedTuple):
    """The last matrix of an expert that computes every token: its layout and columns, and whether its result is
    multiplied by the sigmoid of a gate."""

    layout: WeightLayout
    cols: int
    is_gated: bool = True


@dataclass(frozen=True)
class StackedMatrices:
    """Matrices of `cols` columns, one below the other: (layout, rows) of each. With `experts`, each of the n has
    such matrices, those of all one after the other. If the results of experts are added, that of a `shared` expert may
    be too. `beside`: matrices with vectors of their own, whose rows follow. `digits`:
    whether the vector comes in digits (`digit_rows`)."""

    matrices: tuple[tuple[WeightLayout, int], ...]
    cols: int
    experts: ChosenExperts | None = None
    shared: SharedExpert | None = None
    beside: StackedMatrices | None = None
    digits: bool = False

    def __post_init__(self) -> None:
        assert not self.experts or len({rows for _, rows in self.matrices}) == 1
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
        shared = self.shared.layout.n_bytes(self.rows, self.shared.cols) if self.shared else 0
        others = shared + (self.beside.n_bytes if self.beside else 0)
        return used * sum(layout.n_bytes(rows, self.cols) for layout, rows in self.matrices) + others

    @property
    def input_scale_bits(self) -> list[int]:
        """The input_scales of the matrices (`WeightLayout.input_scale_bits`). A product reads its vector once for each,
        multiplied by that input_scale."""
        return sorted({layout.input_scale_bits for layout, _ in self.matrices})

    @property
    def name(self) -> str:
        name = " + ".join(f"{layout.name} {rows}x{self.cols}" for layout, rows in self.matrices)
        e = self.experts
        shared = f" and {self.shared.layout.name} x{self.shared.cols}" if self.shared else ""
        if e:
            name += f" {e.used} of {e.n}{' added' if e.added else ''}{shared}"
        name += " in digits" * self.digits
        return f"{name} beside {self.beside.name}" if self.beside else name

    @property
    def fits_digits(self) -> bool:
        """Whether its vector may come in digits."""
        ((layout, _), *others) = self.matrices
        is_odd = others or self.shared or self.beside or (self.experts and self.experts.all_of_them)
        return not is_odd and digit_rows.serves(layout, self.cols)

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


@functools.cache
def matvec(
    stack: StackedMatrices,
    schedule: Schedule,
    epilogue: Epilogue,
    name: str,
    n_norm_sums: int = 0,
    eps: float = 0.0,
    heads: HeadNorm | None = None,
    starts_next: bool = False,
    divides: WeightLayout | None = None,
    loads_first: tuple[str, ...] = (),
    brings: Brought | None = None,
) -> Kernel:
    """The product of stacked matrices with a vector. Buffers: the epilogue's outs; x, float32 (permuted_size(cols),),
    the vector permuted and scaled, for each of the stack's input_scales; norm_sums, if x is still to be RMS-normed over
    its `cols` elements with `eps`: the partial sums of its squares, float32 (n_norm_sums,); head_sums, those of all
    heads, if its `heads` are to be; the epilogue's ins; planes, those of all matrices. For matrices `beside`, beside_x
    is their vector, and their planes follow.

    With experts also: experts, the chosen ones, int32 (used,), and their probabilities, float32 (used,). If the results
    are added, these are read, and x is (used, permuted_size(cols)), not normed. Else they are written, and counts, how
    often each expert was chosen, int32 (n,); router is its logits, float32 (n,); choice_bias, float32 (n,), is that of
    the choice (`Scores`), and the experts have scales, float32 (n,), if they are scaled. biases, float32 (n, rows), are
    of all experts. Results that are not added need an epilogue that stores them by slot. With a
    shared expert, shared_x is its vector, and if that is gated, router the logits of `routed`, of which the last is its
    gate's; its planes follow those of the experts.

    If the stack takes its vector in digits (`digit_rows`), x are these, and their factors. The kernel also `divides`
    another vector of as many columns, scaled for that layout, for a product to come: other; other_digits and
    other_factors are as `digit_rows.divide` makes them.

    What it `brings` to the L2 cache are the beginnings of the planes that are `brought`. `loads_first`: as in its
    hints.

    If the kernel or its schedule `starts_next`, the next one may start as soon as this one has waited
    (`engine.fixes.early_launch`). One whose schedule is early waits later, and lets it start when its threads first
    meet, unless the schedule says otherwise."""
    s, cols, chosen, beside = schedule, stack.cols, stack.experts, stack.beside
    matrices = [(stack, *matrix) for matrix in stack.matrices]
    matrices += [(beside, *matrix) for matrix in beside.matrices] if beside else []
    assert not (n_norm_sums and beside) or beside.cols == cols
    assert stack.slots == 1 or epilogue.by_slot
    assert s.fits() and s.block_rows % epilogue.pair == 0, s
    whole = all(rows % s.block_rows == 0 for _, _, rows in matrices)
    assert not stack.digits or stack.fits_digits

    def kernel(
        x: Sequence[UOp], beside_x: Sequence[UOp], shared_x: UOp | None, norm_sums: UOp | None,
        head_sums: UOp | None, planes: list[UOp], router: UOp | None, experts: UOp | None,
        probabilities: UOp | None, counts: UOp | None, scales: UOp | None, biases: UOp | None,
        choice_bias: UOp | None, other: UOp | None,
        other_digits: UOp | None, other_factors: UOp | None, brought: list[UOp] | None,
        **others: UOp | list[UOp] | None,
    ) -> UOp:  # fmt: skip
        t, group = UOp.special(s.threads, "lidx0"), UOp.special(s.groups, "lidx1")
        thread = group * s.threads + t
        row_places = [group * s.rows + r for r in range(s.rows)]
        vectors_of = [[vector] for vector in x]
        own = [
            (stack, *pair)
            for pair in zip(stack.input_scale_bits, [x] if stack.digits else vectors_of, strict=True)
        ]
        if beside:
            own += [(beside, bits, [v]) for bits, v in zip(beside.input_scale_bits, beside_x, strict=True)]
        xs = {(of, bits): vectors for of, bits, vectors in own}
        chosen_rows = None
        if chosen:
            buffers = experts, probabilities, counts, router, scales, biases, choice_bias
            own_rows = sum(rows for _, rows in stack.matrices)
            chosen_rows = ExpertRows(chosen, matrices[0][2], own_rows, thread, s.threads * s.groups, *buffers)
        block = UOp.special(stack.n_blocks(s), "gidx0")
        products = [f32(0)] * s.rows
        first, end = block * s.block_rows, UOp.const(matrices[0][2])
        factor = f32(1.0 if stack.digits else matrices[0][1].scale)
        blocks_before = rows_before = 0
        for k, (of, layout, rows) in enumerate(matrices):
            n_planes = len(layout.shapes(rows, of.cols))
            matrix_planes, planes = planes[:n_planes], planes[n_planes:]
            matrix_block, starts_here = block - blocks_before, block >= blocks_before
            first_row = matrix_block * s.block_rows
            blocks_before += -(-rows // s.block_rows)
            active = starts_here & (block < blocks_before) if len(matrices) > 1 else None
            own_x = xs[of, layout.input_scale_bits]
            clamped = [first_row + r for r in row_places]
            if rows % s.block_rows:
                clamped = [(row < rows).where(row, rows - 1) for row in clamped]
            factor_of = (
                functools.partial(heads.factor, head_sums) if heads and head_sums is not None else None
            )
            sums = (
                chosen_rows.sums(
                    layout,
                    of.cols,
                    own_x,
                    matrix_planes,
                    clamped,
                    t,
                    s.threads,
                    active,
                    k,
                )
                if chosen_rows and of.experts
                else _row_sums(
                    layout, of.cols, own_x, matrix_planes, clamped, t, s.threads, active, k, factor_of
                )
            )
            if stack.shared:
                assert chosen and shared_x is not None
                gate = None if router is None else load(router, chosen.n)
                sums = _with_shared(stack.shared, sums, shared_x, gate, planes, clamped, t, s, layout.scale)
            products = [a + b for a, b in zip(products, sums, strict=True)] if k else sums
            if k:
                factor = starts_here.where(f32(layout.scale), factor)
                if not whole:
                    first = starts_here.where(matrix_block * s.block_rows + rows_before, first)
                    end = starts_here.where(UOp.const(rows_before + rows), end)
            rows_before += rows
        choice = chosen_rows.choice if chosen_rows else None
        powers = choice.powers(t, s.threads) if choice else None
        of_block = 1 if powers is None else 3  # columns beside those of the rows
        stride = s.block_rows + of_block  # odd: neighbouring threads store to different banks
        partial = shared(s.threads * stride, slot=0)
        # Multiplied here, and not once they are added: tinygrad gathers the constants of a product at its end. That of
        # two sums and an input_scale, as `activated` has it, would be a denormal before.
        stores = [
            store(partial, t * stride + r, p * factor) for r, p in zip(row_places, products, strict=True)
        ]
        if norm_sums is not None:
            thread_sum = _thread_sum(norm_sums, n_norm_sums, t, s, group)
            stores.append(store(partial, t * stride + s.block_rows, thread_sum, group.eq(0)))
        if powers is not None:
            stores.append(store(partial, t * stride + s.block_rows + 1, powers, group.eq(0)))
        if divides:  # here, beside loads that are under way
            assert other is not None and other_digits is not None and other_factors is not None
            n_threads = s.threads * s.groups
            places = block * n_threads + thread, stack.n_blocks(s) * n_threads
            stores += digit_rows.division(divides, cols, other_digits, other_factors, other, *places)
        partial, parts, between = partial.after(UOp.group(*stores)), s.threads, (stride, 1)
        if (n := chunks(stack, s)) > 1:
            partial, parts, between = _added(partial, stride, n, s, thread), n, (1, n)

        def total(column: UOp, valid: UOp | None) -> UOp:
            apart, columns = between
            return tree([load(partial, column * columns + k * apart, valid) for k in range(parts)])

        rms = inverse_rms(total(UOp.const(s.block_rows), None), cols, eps) if n_norm_sums else None

        def product(i: UOp, valid: UOp) -> UOp:
            value = total(i, valid)
            value = value if rms is None else value * rms
            return value if chosen_rows is None else chosen_rows.biased(value, first + i)

        end_of_rows = None if whole else end
        slot = chosen_rows.slot if chosen_rows else None
        result = BlockRows(s.block_rows, stack.rows, first, end_of_rows, block, thread, product, slot)
        names = "_".join(layout.name for _, layout, _ in matrices)
        mixture = f"_{chosen.used}_of_{chosen.n}" if chosen else ""
        mixture += f"_{stack.shared.layout.name}x{stack.shared.cols}" if stack.shared else ""
        full_name = f"{name}_{names}_{stack.rows}x{cols}{mixture}_{s.name}{'_digits' * stack.digits}"
        vectors = chosen.vectors if chosen else 1
        sizes = [permuted_size(of.cols) * (vectors if of is stack else 1) for of, _ in xs]
        n_bytes = stack.n_bytes + 4 * sum(sizes)
        n_ops = sum(2 * rows * of.cols * (of.experts.used if of.experts else 1) for of, _, rows in matrices)
        stores = call_by_name(epilogue.stores, others, result)
        if chosen_rows and choice:
            of_all = None if powers is None else total(UOp.const(s.block_rows + 1), None)
            stores += chosen_rows.stores(block, of_all)
        requests = []
        if brings and brought:  # by a thread of each block
            number = block if slot is None else slot * stack.n_blocks(s) + block
            for plane, n in zip(brought, brings.block_bytes, strict=True):
                place = plane.index(number * (n // plane.dtype.itemsize))
                requests.append(async_copies.brought(place, n, thread.eq(0), brings.keeps))
        return finish(full_name, stores, n_bytes, n_ops, requests)

    n_planes = sum(len(layout.shapes(1, of.cols)) for of, layout, _ in matrices)
    if stack.shared:
        n_planes += len(stack.shared.layout.shapes(1, stack.shared.cols))
    is_choosing = chosen is not None and chosen.chooses
    has_lists = chosen is not None and not chosen.all_of_them
    results: tuple[Name, ...] = ("experts", "probabilities", is_choosing and "counts") if has_lists else ()
    vectors: tuple[Name, ...] = (
        ("x", 2 if stack.digits else len(stack.input_scale_bits)),
        ("beside_x", len(beside.input_scale_bits) if beside else 0),
        stack.shared is not None and "shared_x",
        stack.shared is not None and stack.shared.is_gated and "router",
        n_norm_sums > 0 and "norm_sums",
        heads is not None and "head_sums",
        is_choosing and "router",
        chosen is not None and chosen.scaled and "scales",
        chosen is not None and chosen.bias and "biases",
        chosen is not None and is_choosing and chosen.scores.biased and "choice_bias",
    )
    made: tuple[Name, ...] = ("other_digits", "other_factors") if divides else ()
    vectors = (*vectors, divides is not None and "other")
    before = (*epilogue.outs, *results, *made, *vectors, *epilogue.ins)
    names = tuple(name if isinstance(name, str) else name[0] for name in before if name)
    release: Release = "before its first barrier" if s.early else "at its end"
    if s.starts_next or (starts_next and not s.early):
        release = "after its wait"
    waits_for = tuple(name for name in names if s.early and name not in loads_first)
    hints = LaunchHints(s.blocks, 0, waits_for, release, tuple(n for n in names if n in loads_first))
    outputs = (*epilogue.outs, *(results if is_choosing else ()), *made)
    inputs = (*(() if is_choosing else results), *vectors, *epilogue.ins, ("planes", n_planes))
    inputs = (*inputs, ("brought", len(brings.block_bytes) if brings else 0))
    return Kernel(kernel, outputs, inputs, hints)


def _row_sums(
    layout: WeightLayout, cols: int, x: Sequence[UOp], planes: Sequence[UOp], rows: Sequence[UOp], t: UOp,
    threads: int, active: UOp | None, axis: int, factor_of: Callable[[UOp, UOp | None], UOp] | None = None,
) -> list[UOp]:  # fmt: skip
    """The partial sums of rows of one matrix, by thread t of `threads`. `x`: the vector, or its digits and their
    factors. `factor_of`: what a unit of the vector is to be multiplied by. If the block is not `active`, its loop has
    no steps and the sums are zeros, so that it costs only a branch."""
    units = units_of(cols)
    steps = -(-units // threads)
    if active is not None:  # tinygrad moves code that precedes a loop of one step at most into the loop
        steps = max(steps, 2)
        rows = layout.rows_of_active(rows, units, active)
    trips = steps if active is None else active.where(UOp.const(steps), UOp.const(0))
    step = UOp.range(trips, axis, AxisType.REDUCE) if steps > 1 else None
    unit = t if step is None else t + step * threads
    inside = None if units == threads * steps else unit < units
    dot = digit_rows.vector_unit(layout, x, units, unit, inside)
    products = [dot(layout.load_unit(planes, row, units, unit, inside)) for row in rows]
    if factor_of is not None:
        factor = factor_of(unit, inside)
        products = [p * factor for p in products]
    return products if step is None else [p.reduce(step, arg=Ops.ADD) for p in products]


def chunks(stack: StackedMatrices, s: Schedule) -> int:
    """How many threads add the sums of a row, before one adds theirs: the compiler makes a chain of additions of those
    of one thread, each of which waits for the one before. 1 where this was not timed: beside a choice of experts, or
    where a thread is late anyway since it does not load weights early."""
    if stack.experts or not s.early:
        return 1
    return next(n for n in (16, 8, 4, 2, 1) if n == 1 or n * (s.block_rows + 1) <= s.threads * s.groups)


def _added(partial: UOp, stride: int, chunks: int, s: Schedule, thread: UOp) -> UOp:
    """Sums of threads, [thread, column of `stride`], in parts: [column, chunk]."""
    column, chunk, ok = thread // chunks, thread % chunks, thread < stride * chunks
    places = [chunk + first for first in range(0, s.threads, chunks)]
    inside = [ok if place.vmax < s.threads else ok & (place < s.threads) for place in places]
    terms = [
        load(partial, place * stride + column, valid) for place, valid in zip(places, inside, strict=True)
    ]
    return after_store(shared(stride * chunks, slot=2), thread, tree(terms), ok)


def _with_shared(
    shared: SharedExpert, sums: Sequence[UOp], x: UOp, gate: UOp | None, planes: Sequence[UOp],
    rows: Sequence[UOp], t: UOp, s: Schedule, scale: float,
) -> list[UOp]:  # fmt: skip
    """The partial sums of experts, which are to be multiplied by `scale`, and those of a shared one, times the sigmoid
    of its `gate`'s logit if it has one."""
    own = _row_sums(shared.layout, shared.cols, [x], planes, rows, t, s.threads, None, 1)
    factor = f32(shared.layout.scale / scale)
    factor = factor if gate is None else sigmoid(gate) * factor
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
