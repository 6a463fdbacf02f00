"""A quantized matrix times one vector, for decode: several threads share a row.

    matrices (`StackedMatrices`)  x  prologue  x  epilogue  ->  a kernel with a `Schedule`

Matrices: those that multiply the same vector are stacked in one product, each with a `WeightLayout` of its own. A block
works on rows of one matrix, and branches to the code for its layout.

Prologue: the RMS norm of the vector. The kernel that produced the vector has permuted it and multiplied it by the
norm's weight and the input_scale (`permuted`, `input_scale`). Only one factor is left, which follows from partial sums
of squares that the producer also stored.

Epilogue: what the kernel does with the rows of a block: `STORE`, `STORE_SQUARES`, `add_residual`, `activated`, `EMBED`,
`as_logits`.

In a mixture of experts (`ChosenExperts`) a product has the matrices of all experts, and reads those of the chosen ones.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
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
from engine.targets.nvidia.kernels.products.stacked_matrices import Schedule, SharedExpert, StackedMatrices
from engine.targets.nvidia.kernels.uops import (
    INDEX,
    U32,
    after_store,
    f32,
    finish,
    inverse_rms,
    load,
    mask,
    shared,
    shift_right,
    sigmoid,
    store,
    tree,
)
from engine.targets.nvidia.kernels.weights.matrix_bytes import units_of
from engine.targets.nvidia.kernels.weights.weight_layout import WeightLayout, permuted_size


class Brought(NamedTuple):
    """How many bytes of each plane of a product to come each block brings to the L2 cache, multiples of
    `COPIED_BYTES`, and whether they are kept there while others come and go. If the planes are of `experts`, so many
    that the kernel chooses of, blocks bring the beginning of what those that are chosen have."""

    block_bytes: tuple[int, ...]
    keeps: bool
    experts: int = 0


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
    of all experts. Results that are not added need an epilogue that stores them by slot. With a shared expert, shared_x
    is its vector, and if that is gated, router the logits of `routed`, of which the last is its gate's; its planes
    follow those of the experts.

    If the stack takes its vector in digits (`digit_rows`), x are these, and their factors. The kernel also `divides`
    another vector of as many columns, scaled for that layout, for a product to come: other; other_digits and
    other_factors are as `digit_rows.divide` makes them.

    What it `brings` to the L2 cache are the beginnings of the planes that are `brought`. `loads_first`: as in its
    hints.

    Where the schedule lets the next kernel start at this one's end, that may start as soon as this one has waited if it
    `starts_next` (`engine.fixes.early_launch`)."""
    s, chosen, beside = schedule, stack.experts, stack.beside
    assert not (n_norm_sums and beside) or beside.cols == stack.cols
    assert stack.slots == 1 or epilogue.by_slot
    assert s.fits() and s.block_rows % epilogue.pair == 0, s
    assert not stack.digits or stack.fits_digits

    def kernel(
        x: Sequence[UOp], beside_x: Sequence[UOp], shared_x: UOp | None, norm_sums: UOp | None,
        head_sums: UOp | None, planes: list[UOp], router: UOp | None, experts: UOp | None,
        probabilities: UOp | None, counts: UOp | None, scales: UOp | None, biases: UOp | None,
        choice_bias: UOp | None, other: UOp | None,
        other_digits: UOp | None, other_factors: UOp | None, brought: list[UOp] | None,
        **others: UOp | list[UOp] | None,
    ) -> UOp:  # fmt: skip
        block, mixture = _Block(stack, s), None
        if chosen:
            of_experts = experts, probabilities, counts, router, scales, biases, choice_bias
            mixture = block.mixture(chosen, *of_experts)
        of_heads = functools.partial(heads.factor, head_sums) if heads and head_sums is not None else None
        norm_share = functools.partial(block.share, norm_sums, n_norm_sums) if norm_sums is not None else None
        sums, norm_sum = block.sums(x, beside_x, planes, mixture, of_heads, norm_share)
        if stack.shared:
            assert chosen and shared_x is not None
            gate = None if router is None else load(router, chosen.n)
            sums = block.with_shared(stack.shared, sums, shared_x, gate, planes)
        choice = mixture.choice if mixture else None
        powers = choice.powers(block.t, s.threads) if choice else None
        division = []
        if divides:  # here, beside loads that are under way
            assert other is not None and other_digits is not None and other_factors is not None
            division = block.division(divides, other_digits, other_factors, other)
        total = block.totals(sums, norm_sum, powers, division)
        rms = inverse_rms(total(UOp.const(s.block_rows), None), stack.cols, eps) if n_norm_sums else None

        def product(i: UOp, valid: UOp) -> UOp:
            value = total(i, valid)
            value = value if rms is None else value * rms
            return value if mixture is None else mixture.biased(value, block.first + i)

        slot = mixture.slot if mixture else None
        rows = BlockRows(
            s.block_rows, stack.rows, block.first, block.end, block.number, block.thread, product, slot
        )
        stores = call_by_name(epilogue.stores, others, rows)
        if mixture and choice:
            of_all = None if powers is None else total(UOp.const(s.block_rows + 1), None)
            stores += mixture.stores(block.number, of_all)
        requests = block.requests(brings, brought, mixture) if brings and brought else []
        return finish(_full_name(name, stack, s), stores, *_estimates(stack), requests)

    names = _names(stack, epilogue, n_norm_sums > 0, heads is not None, divides is not None)
    weights = ("planes", _n_planes(stack)), ("brought", len(brings.block_bytes) if brings else 0)
    hints = _hints(s, names.awaited, starts_next, loads_first)
    return Kernel(kernel, names.outs, (*names.ins, *weights), hints)


class _Part(NamedTuple):
    """One of the matrices of a product: the stack that it is of, its layout and rows, and how many rows and blocks are
    before its own."""

    of: StackedMatrices
    layout: WeightLayout
    rows: int
    rows_before: int
    blocks_before: int


class _Block:
    """A block of `matvec`: `number`, of all blocks of a slot. Its rows begin with `first`, of all in the result, and
    are below `end`, unless all blocks are whole. This is thread `t` of a `group`, and `thread` of the block. `places`:
    those of the group's rows among the block's."""

    def __init__(self, stack: StackedMatrices, schedule: Schedule) -> None:
        self.stack, self.schedule, self.parts = stack, schedule, list[_Part]()
        rows_before = blocks_before = 0
        for of in stack.stacks:
            for layout, rows in of.matrices:
                self.parts.append(_Part(of, layout, rows, rows_before, blocks_before))
                rows_before, blocks_before = rows_before + rows, blocks_before + schedule.blocks_of(rows)
        self.t, self.group = UOp.special(schedule.threads, "lidx0"), UOp.special(schedule.groups, "lidx1")
        self.thread = self.group * schedule.threads + self.t
        self.places = [self.group * schedule.rows + r for r in range(schedule.rows)]
        self.number = UOp.special(stack.n_blocks(schedule), "gidx0")
        self.first, self.end = self.number * schedule.block_rows, None
        if any(part.rows % schedule.block_rows for part in self.parts):
            self.first = self._of_part(self.first, lambda part: self._first_of(part) + part.rows_before)
            self.end = self._of_part(
                UOp.const(self.parts[0].rows), lambda part: UOp.const(part.rows_before + part.rows)
            )

    @property
    def is_in_one_step(self) -> bool:
        """Whether a thread has one unit of a row."""
        return all(units_of(of.cols) <= self.schedule.threads for of in self.stack.stacks)

    def _of_part(self, of_first: UOp, of: Callable[[_Part], UOp]) -> UOp:
        """A value for the matrix whose rows the block has, of which that of the first one is given."""
        value = of_first
        for part in self.parts[1:]:
            value = (self.number >= part.blocks_before).where(of(part), value)
        return value

    def _first_of(self, part: _Part) -> UOp:
        """The block's first row in a matrix."""
        return (self.number - part.blocks_before) * self.schedule.block_rows

    def _rows_of(self, part: _Part) -> list[UOp]:
        """The rows of this group in a matrix; the last one in place of rows behind it."""
        rows = [self._first_of(part) + place for place in self.places]
        if part.rows % self.schedule.block_rows == 0:
            return rows
        return [(row < part.rows).where(row, part.rows - 1) for row in rows]

    def mixture(self, chosen: ChosenExperts, *buffers: UOp | None) -> ExpertRows:
        """The rows of the chosen experts, whose `buffers` are those of `ExpertRows`."""
        rows, threads = [rows for _, rows in self.stack.matrices], self.schedule.block_threads
        return ExpertRows(chosen, rows[0], sum(rows), self.thread, threads, *buffers)

    def sums(
        self, x: Sequence[UOp], beside_x: Sequence[UOp], planes: Sequence[UOp], mixture: ExpertRows | None,
        of_heads: Callable[[UOp, UOp | None], UOp] | None, norm_share: Callable[[UOp | None], UOp] | None,
    ) -> tuple[list[UOp], UOp | None]:  # fmt: skip
        """This thread's partial sums of its rows, added over the matrices: those of which the block has no rows give
        zeros. `of_heads`: what a unit of the vector is to be multiplied by. And its share of the norm's sums, if it
        has one (`norm_share`): in branches, where it is loaded beside the vector."""
        left, results = iter(planes), list[UOp]()
        is_in_branches = norm_share is not None and len(self.parts) > 1 and self.is_in_one_step
        for k, part in enumerate(self.parts):
            of, layout, rows = part.of, part.layout, self._rows_of(part)
            own_planes = [*itertools.islice(left, len(layout.shapes(part.rows, of.cols)))]
            vectors = x if of is self.stack else beside_x
            if not of.digits:
                vectors = [vectors[of.input_scale_bits.index(layout.input_scale_bits)]]
            active, end = None, part.blocks_before + self.schedule.blocks_of(part.rows)
            if len(self.parts) > 1:
                active = (self.number >= part.blocks_before) & (self.number < end)
            arguments = layout, of.cols, vectors, own_planes, rows, self.t, self.schedule.threads, active, k
            if mixture and of.experts:
                sums = mixture.sums(*arguments)
            else:
                sums = _row_sums(*arguments, of_heads, norm_share if is_in_branches else None)
            results = [a + b for a, b in zip(results, sums, strict=True)] if results else sums
        if norm_share is None:
            return results, None
        return (results[:-1], results[-1]) if is_in_branches else (results, norm_share(None))

    def with_shared(
        self, shared: SharedExpert, sums: Sequence[UOp], x: UOp, gate: UOp | None, planes: Sequence[UOp]
    ) -> list[UOp]:
        """The partial sums of experts and those of a shared one, times the sigmoid of its `gate`'s logit if it has one.
        Its planes are the last ones."""
        (part,), threads = self.parts, self.schedule.threads
        own_planes = planes[-len(shared.layout.shapes(1, shared.cols)) :]
        rows = self._rows_of(part)
        own = _row_sums(shared.layout, shared.cols, [x], own_planes, rows, self.t, threads, None, 1)
        # `totals` multiplies by that of the experts, which sums of digits do not have.
        factor = f32(shared.layout.scale / (1.0 if self.stack.digits else part.layout.scale))
        factor = factor if gate is None else sigmoid(gate) * factor
        return [a + b * factor for a, b in zip(sums, own, strict=True)]

    def share(self, sums: UOp, n: int, step: UOp | None) -> UOp:
        """The sum of a thread's share of `sums`, float32 (n,), which the threads of the first group divide. `step`: of
        the branch that it is loaded in, the first one."""
        each, first = -(-n // self.schedule.threads), self.group.eq(0)
        begin = self.t * each
        if step is not None:
            begin = begin + step * (each * self.schedule.threads)
        values = []
        for i in range(each):
            index = begin + i
            inside = first if n % self.schedule.threads == 0 else first & (index < n)
            values.append(load(sums, index, inside))
        return tree(values)

    def division(self, layout: WeightLayout, digits: UOp, factors: UOp, x: UOp) -> list[UOp]:
        """This thread's stores of `digit_rows.divide`, of the threads of all blocks."""
        n_threads = self.schedule.block_threads
        thread, threads = (
            self.number * n_threads + self.thread,
            self.stack.n_blocks(self.schedule) * n_threads,
        )
        return digit_rows.division(layout, self.stack.cols, digits, factors, x, thread, threads)

    def totals(
        self, sums: Sequence[UOp], norm_sum: UOp | None, powers: UOp | None, others: Sequence[UOp]
    ) -> Callable[[UOp, UOp | None], UOp]:
        """Adds what threads have, in shared memory: columns of the block's rows, and behind them of the norm's sums and
        of the choice's powers, which threads of the first group have. `others`: stores that are done meanwhile. What it
        returns gives any thread the total of a column, if that is valid."""
        s = self.schedule
        of_block = 1 if powers is None else 3  # columns beside those of the rows
        stride = s.block_rows + of_block  # odd: neighbouring threads store to different banks
        partial = shared(s.threads * stride, slot=0)
        # Multiplied here, and not once they are added: tinygrad gathers the constants of a product at its end. That of
        # two sums and an input_scale, as `activated` has it, would be a denormal before.
        factor = f32(1.0 if self.stack.digits else self.parts[0].layout.scale)
        factor = self._of_part(factor, lambda part: f32(part.layout.scale))
        row, is_first = self.t * stride, self.group.eq(0)
        stores = [store(partial, row + r, p * factor) for r, p in zip(self.places, sums, strict=True)]
        if norm_sum is not None:
            stores.append(store(partial, row + s.block_rows, norm_sum, is_first))
        if powers is not None:
            stores.append(store(partial, row + s.block_rows + 1, powers, is_first))
        partial, parts, between = partial.after(UOp.group(*stores, *others)), s.threads, (stride, 1)
        if (n := chunks(self.stack, s)) > 1:
            partial, parts, between = self._added(partial, stride, n), n, (1, n)

        def total(column: UOp, valid: UOp | None) -> UOp:
            apart, columns = between
            return tree([load(partial, column * columns + k * apart, valid) for k in range(parts)])

        return total

    def _added(self, partial: UOp, stride: int, chunks: int) -> UOp:
        """Sums of threads, [thread, column of `stride`], in parts: [column, chunk]."""
        thread, threads = self.thread, self.schedule.threads
        column, chunk, ok = thread // chunks, thread % chunks, thread < stride * chunks
        places = [chunk + first for first in range(0, threads, chunks)]
        inside = [ok if place.vmax < threads else ok & (place < threads) for place in places]
        terms = [
            load(partial, place * stride + column, valid) for place, valid in zip(places, inside, strict=True)
        ]
        return after_store(shared(stride * chunks, slot=2), thread, tree(terms), ok)

    def requests(self, brings: Brought, planes: Sequence[UOp], mixture: ExpertRows | None) -> list[UOp]:
        """What the block asks to be brought to the L2 cache, by one of its threads."""
        number, expert, requests = self.number, UOp.const(0), []
        slot = mixture.slot if mixture else None
        if mixture and slot is not None and brings.experts:
            expert = mixture.expert(slot)
        elif slot is not None:
            number = slot * self.stack.n_blocks(self.schedule) + number
        for plane, n in zip(planes, brings.block_bytes, strict=True):
            of_expert = int(plane.max_numel()) // max(brings.experts, 1)
            place = plane.index(expert * of_expert + number * (n // plane.dtype.itemsize))
            requests.append(async_copies.brought(place, n, self.thread.eq(0), brings.keeps))
        return requests


def _full_name(name: str, stack: StackedMatrices, s: Schedule) -> str:
    """The kernel's name, for its profile."""
    names = "_".join(layout.name for of in stack.stacks for layout, _ in of.matrices)
    mixture = f"_{stack.experts.used}_of_{stack.experts.n}" if stack.experts else ""
    mixture += f"_{stack.shared.layout.name}x{stack.shared.cols}" if stack.shared else ""
    return f"{name}_{names}_{stack.rows}x{stack.cols}{mixture}_{s.name}{'_digits' * stack.digits}"


def _estimates(stack: StackedMatrices) -> tuple[int, int]:
    """The bytes that the kernel must move, and the operations that it must do, for its profile."""
    n_bytes, n_ops = stack.n_bytes, 0
    for of in stack.stacks:
        used, vectors = (of.experts.used, of.experts.vectors) if of.experts else (1, 1)
        n_bytes += 4 * permuted_size(of.cols) * vectors * len(of.input_scale_bits)
        n_ops += sum(2 * rows * of.cols * used for _, rows in of.matrices)
    return n_bytes, n_ops


def _n_planes(stack: StackedMatrices) -> int:
    """Planes of all matrices."""
    matrices = [(layout, of.cols) for of in stack.stacks for layout, _ in of.matrices]
    matrices += [(stack.shared.layout, stack.shared.cols)] if stack.shared else []
    return sum(len(layout.shapes(1, cols)) for layout, cols in matrices)


class _Names(NamedTuple):
    """The names of a product's buffers: those that it writes, those that it reads, but for planes of weights, and all
    of these, which kernels before it may write."""

    outs: tuple[Name, ...]
    ins: tuple[Name, ...]
    awaited: tuple[Name, ...]


def _names(
    stack: StackedMatrices, epilogue: Epilogue, has_norm: bool, has_heads: bool, divides: bool
) -> _Names:
    """`has_norm`: x is still to be normed, `has_heads`: by heads. `divides`: another vector into digits."""
    chosen = stack.experts
    chooses, has_lists = chosen is not None and chosen.chooses, chosen is not None and not chosen.all_of_them
    lists: tuple[Name, ...] = ("experts", "probabilities", chooses and "counts") if has_lists else ()
    divided: tuple[Name, ...] = ("other_digits", "other_factors") if divides else ()
    ins = (*_vectors(stack, has_norm, has_heads), divides and "other", *epilogue.ins)
    awaited = (*epilogue.outs, *lists, *divided, *ins)
    if chooses:
        return _Names((*epilogue.outs, *lists, *divided), ins, awaited)
    return _Names((*epilogue.outs, *divided), (*lists, *ins), awaited)


def _vectors(stack: StackedMatrices, has_norm: bool, has_heads: bool) -> tuple[Name, ...]:
    """The names of the buffers with vectors, and of what belongs to them."""
    chosen, shared, beside = stack.experts, stack.shared, stack.beside
    chooses = chosen is not None and chosen.chooses
    return (
        ("x", 2 if stack.digits else len(stack.input_scale_bits)),
        ("beside_x", len(beside.input_scale_bits) if beside else 0),
        shared is not None and "shared_x",
        shared is not None and shared.is_gated and "router",
        has_norm and "norm_sums",
        has_heads and "head_sums",
        chooses and "router",
        chosen is not None and chosen.scaled and "scales",
        chosen is not None and chosen.bias and "biases",
        chosen is not None and chooses and chosen.scores.biased and "choice_bias",
    )


def _hints(
    s: Schedule, buffers: Sequence[Name], starts_next: bool, loads_first: tuple[str, ...]
) -> LaunchHints:
    """When the kernel waits and lets the next one start. `buffers`: those that others may write, all but planes."""
    names = tuple(name if isinstance(name, str) else name[0] for name in buffers if name)
    release: Release = "after its wait" if starts_next and s.releases == "at its end" else s.releases
    waits_for = tuple(name for name in names if s.early and name not in loads_first)
    first = tuple(name for name in names if name in loads_first)
    return LaunchHints(
        s.blocks, 0, waits_for, release, first, ("planes",) * s.streams, s.together, idle_ends=s.early
    )


def _row_sums(
    layout: WeightLayout, cols: int, x: Sequence[UOp], planes: Sequence[UOp], rows: Sequence[UOp], t: UOp,
    threads: int, active: UOp | None, axis: int, factor_of: Callable[[UOp, UOp | None], UOp] | None = None,
    beside: Callable[[UOp | None], UOp] | None = None,
) -> list[UOp]:  # fmt: skip
    """The partial sums of rows of one matrix, by thread t of `threads`. `x`: the vector, or its digits and their
    factors. `factor_of`: what a unit of the vector is to be multiplied by. If the block is not `active`, its loop has
    no steps and the sums are zeros, so that it costs only a branch. `beside`: another value that is added over the
    steps, the last of the sums."""
    units = units_of(cols)
    steps = -(-units // threads)
    trips: int | UOp = steps
    if active is not None:
        rows = layout.rows_of_active(rows, units, active)
        trips = active.where(UOp.const(steps), UOp.const(0)) if steps > 1 else _once(active)
    step = UOp.range(trips, axis, AxisType.REDUCE) if steps > 1 or active is not None else None
    unit = t if step is None else t + step * threads
    inside = None if units == threads * steps else unit < units
    dot = digit_rows.vector_unit(layout, x, units, unit, inside)
    products = [dot(layout.load_unit(planes, row, units, unit, inside)) for row in rows]
    if factor_of is not None:
        factor = factor_of(unit, inside)
        products = [p * factor for p in products]
    if beside is not None:
        products.append(beside(step))
    return products if step is None else [p.reduce(step, arg=Ops.ADD) for p in products]


def _once(condition: UOp) -> UOp:
    """1 where a condition holds, else 0, of a loop that is a branch. It is in the bits of a float, since tinygrad moves
    code that precedes a loop into it if it knows that this has one step at most."""
    one = condition.where(f32(1), f32(0)).bitcast(U32)
    return mask(shift_right(one, 29), 3).cast(INDEX)


def chunks(stack: StackedMatrices, s: Schedule) -> int:
    """How many threads add the sums of a row, before one adds theirs: the compiler makes a chain of additions of those
    of one thread, each of which waits for the one before. 1 for the results of each expert: gate and up of Qwen3 30B
    take longer with more."""
    if stack.experts and not stack.experts.added:
        return 1
    return next(n for n in (16, 8, 4, 2, 1) if n == 1 or n * (s.block_rows + 1) <= s.block_threads)
