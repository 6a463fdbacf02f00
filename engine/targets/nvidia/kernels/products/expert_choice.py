"""The choice of a token's experts inside a kernel, by all threads of a block: the most probable ones, or those of the
best scores, and their probabilities."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from tinygrad import UOp
from tinygrad.uop.ops import AxisType, Ops

from engine.targets.nvidia.kernels.uops import (
    I32,
    INDEX,
    LOG2_E,
    chain,
    f32,
    load,
    load_index,
    load_run,
    maximum,
    registers,
    shared,
    sigmoid,
    store,
    tree,
)

_SLOTS = 20, 21, 22, 23, 24, 25, 26, 27  # of the arrays in shared memory; the kernels have the lower ones
_GROUPS, _LEFT = 30, 40  # of the arrays in which ranks are counted

_Others = Callable[[UOp], list[tuple[UOp, UOp]]]
"""Gives the numbers, and their values, that are compared in a step."""
Scoring = Literal["softmax", "sigmoid"]


@dataclass(frozen=True)
class Scores:
    """What experts are compared by, and what their results are multiplied by: see `Experts` in
    `engine.description.sublayers`, whose fields these are. `biased`: it has a `choice_bias`."""

    scoring: Scoring = "softmax"
    biased: bool = False
    factor: float = 1.0
    groups: int = 1
    used_groups: int = 1

    @property
    def are_logits(self) -> bool:
        """Whether the experts with the largest logits are chosen."""
        return self.scoring == "softmax" and not self.biased and self.groups == 1


BY_LOGITS = Scores()


@dataclass(frozen=True)
class ExpertChoice:
    """The `used` best of `n` experts, in shared memory: `ids`, int32 (used,), the best first, of equal ones the first;
    and `values`, float32 (used,): their logits if they are compared by these, else their probabilities among all."""

    used: int
    n: int
    scores: Scores
    ids: UOp
    values: UOp
    _everyone: UOp  # the logits of all experts, or their scores
    _own: list[tuple[UOp, UOp]]  # this thread's experts, and whether each is chosen

    @classmethod
    def of(
        cls, logits: UOp, first: UOp, used: int, n: int, thread: UOp, n_threads: int,
        scores: Scores = BY_LOGITS, bias: UOp | None = None,
    ) -> ExpertChoice:  # fmt: skip
        """From the router's logits, float32, n of them from `first` on. `thread` is the number of the current one in
        its block of `n_threads`. `bias`: that of the choice, float32 (n,). An expert's rank is the number of those that
        precede it. Only experts of the best groups are compared: the scores' own, or else groups of some neighbours, as
        many as experts are `used`, of which those with the largest maxima are the best. Several threads share the
        comparisons of each, if there are enough: gate and up load no weights before the choice is made."""
        everyone, stores = shared(n, _SLOTS[0]), []
        shares = _shares(n, thread, n_threads)
        for e, ok in shares:
            stores.append(store(everyone, e, load(logits, first + e, ok), ok))
        everyone = probabilities = everyone.after(UOp.group(*stores))
        if not scores.are_logits:
            everyone, probabilities = _scored(everyone, scores.scoring, bias, n, shares)
        size = next(k for k in (4, 2, 1) if n % k == 0)
        groups, kept = n // size, min(used, n // size)
        if scores.groups > 1:
            size, groups, kept = n // scores.groups, scores.groups, scores.used_groups

        def members(group: UOp) -> list[tuple[UOp, UOp]]:
            """The experts of a group, and their values."""
            values = load_run(everyone, group * size, size)
            return [(group * size + i, x) for i, x in enumerate(values)]

        how_good = _best_two if scores.groups > 1 else maximum
        best_of, stores = shared(groups, _SLOTS[3]), []
        for group, ok in _shares(groups, thread, n_threads):
            group = group if ok is None else group.minimum(groups - 1)
            stores.append(store(best_of, group, how_good([x for _, x in members(group)]), ok))
        best_of = best_of.after(UOp.group(*stores))
        order, stores = shared(groups + 1, _SLOTS[4], I32), []  # and a place for threads without a group
        parts = 1 if scores.groups > 1 else _parts(n_threads, groups, kept, size)
        at_once, groups_at_once = groups // parts, kept // parts
        if parts == 1:
            at_once, groups_at_once = _largest_part(groups), 1 if scores.groups > 1 else _largest_part(kept)

        def ranks(
            n: int, own_of: Callable[[UOp], UOp], values: UOp, others: _Others, steps: int, last: int, slot: int
        ) -> Iterator[tuple[UOp, UOp]]:  # fmt: skip
            """Those of n numbers that are this thread's, and their ranks."""
            if parts > 1:
                own = own_of(thread % n)
                x = load(values, own)
                yield own, _rank_in_parts(own, x, others, parts, n, thread, n_threads, last, slot)
                return
            for i, (place, ok) in enumerate(_shares(n, thread, n_threads)):
                own = own_of(place if ok is None else place.minimum(n - 1))
                yield own, _rank(own, load(values, own), others, steps, ok, last, slot + i)

        def run(step: UOp) -> list[tuple[UOp, UOp]]:
            """Groups, and how good they are."""
            first_group = step * at_once
            values = load_run(best_of, first_group, at_once)
            return [(first_group + i, x) for i, x in enumerate(values)]

        for group, rank in ranks(
            groups, lambda place: place, best_of, run, groups // at_once, groups, _GROUPS
        ):
            stores.append(store(order, rank, group.cast(I32)))
        order = order.after(UOp.group(*stores))

        def rest(step: UOp) -> list[tuple[UOp, UOp]]:
            """Experts of the groups that are left, and their values."""
            own = load_run(order, step * groups_at_once, groups_at_once)
            return [x for group in own for x in members(group.maximum(0).minimum(groups - 1).cast(INDEX))]

        def left(place: UOp) -> UOp:
            """One of the experts of the groups that are left."""
            return load_index(order, place // size, groups) * size + place % size

        ids, best, stores, mine = shared(used, _SLOTS[1], I32), shared(used, _SLOTS[2]), [], []
        for own, rank in ranks(kept * size, left, everyone, rest, kept // groups_at_once, used, _LEFT):
            mine.append((own, rank < used))
            value = load(everyone if scores.are_logits else probabilities, own)
            stores += [store(ids, rank, own.cast(I32), rank < used), store(best, rank, value, rank < used)]
        chosen = UOp.group(*stores)
        return cls(used, n, scores, ids.after(chosen), best.after(chosen), everyone, mine)

    def powers(self, share: UOp, shares: int) -> UOp | None:
        """The sum of exp(logit - largest logit) of one of `shares` equal shares of all experts; None if probabilities
        need no sum of these."""
        if not self.scores.are_logits:
            return None
        each = -(-self.n // shares)
        places = [share * each + i for i in range(each)]
        if self.n % shares == 0:
            return chain(self._power(load(self._everyone, place)) for place in places)
        inside = [place < self.n for place in places]
        powers = [self._power(load(self._everyone, p, ok)) for p, ok in zip(places, inside, strict=True)]
        return chain(ok.where(power, f32(0)) for ok, power in zip(inside, powers, strict=True))

    def _power(self, logit: UOp) -> UOp:
        return ((logit - load(self.values, 0)) * f32(LOG2_E)).exp2()

    def probability(self, slot: UOp, total: UOp | None, least_sum: float | None) -> UOp:
        """The probability of the expert in a slot, times the scores' factor, from the `total` of all shares' `powers`.
        The probabilities are divided by their sum, or by `least_sum` if it is larger, unless that is None."""
        value, kept = load(self.values, slot), load_run(self.values, 0, self.used)
        if total is None:
            divisor = None if least_sum is None else chain(kept).maximum(f32(least_sum))
        else:
            value = self._power(value)
            kept_sum = None if least_sum is None else chain(map(self._power, kept))
            divisor = total if kept_sum is None else kept_sum.maximum(total * f32(least_sum or 0))
        value = value if divisor is None else value / divisor
        return value if self.scores.factor == 1 else value * f32(self.scores.factor)

    def counted(self, counts: UOp, valid: UOp) -> list[UOp]:
        """The stores that add one to the `counts` of the chosen experts, int32 (n,), if `valid`."""
        return [
            store(counts, e, load(counts, e, valid & is_chosen) + 1, valid & is_chosen)
            for e, is_chosen in self._own
        ]


def _scored(
    logits: UOp, scoring: Scoring, bias: UOp | None, n: int, shares: Sequence[tuple[UOp, UOp | None]]
) -> tuple[UOp, UOp]:
    """What experts are compared by, and their probabilities: float32 (n,) in shared memory, of their `logits` there.
    The experts of a thread are its `shares`."""
    own = [(e if ok is None else e.minimum(n - 1), ok) for e, ok in shares]
    values = [load(logits, e) for e, _ in own]
    if scoring == "softmax":
        largest, powers = _joined(logits, n, Ops.MAX, 50), shared(n, _SLOTS[6])
        values = [((x - largest) * f32(LOG2_E)).exp2() for x in values]
        stores = [store(powers, e, x, ok) for (e, ok), x in zip(own, values, strict=True)]
        total = _joined(powers.after(UOp.group(*stores)), n, Ops.ADD, 51)
        values = [x / total for x in values]
    else:
        values = [sigmoid(x) for x in values]
    probabilities, stores = shared(n, _SLOTS[5]), []
    for (e, ok), x in zip(own, values, strict=True):
        stores.append(store(probabilities, e, x, ok))
    if bias is None:
        probabilities = probabilities.after(UOp.group(*stores))
        return probabilities, probabilities
    compared = shared(n, _SLOTS[7])
    for (e, ok), x in zip(own, values, strict=True):
        stores.append(store(compared, e, x + load(bias, e), ok))
    stored = UOp.group(*stores)
    return compared.after(stored), probabilities.after(stored)


def _joined(values: UOp, n: int, op: Ops, axis: int) -> UOp:
    """The sum or the maximum of n values."""
    at_once = _largest_part(n)
    step = UOp.range(n // at_once, axis, AxisType.REDUCE)
    of_step = tree(load_run(values, step * at_once, at_once), lambda a, b: a.alu(op, b))
    return of_step.reduce(step, arg=op)


def _best_two(values: Sequence[UOp]) -> UOp:
    """The sum of the two largest values."""
    largest, second = values[0].maximum(values[1]), values[0].minimum(values[1])
    for x in values[2:]:
        largest, second = largest.maximum(x), second.maximum(largest.minimum(x))
    return largest + second


def _largest_part(n: int) -> int:
    """The largest divisor of n that leaves a loop of more than one step, if there is one."""
    return next(k for k in range(max(n // 2, 1), 0, -1) if n % k == 0)


def _shares(n: int, thread: UOp, n_threads: int) -> list[tuple[UOp, UOp | None]]:
    """The numbers below n that a thread of a block has, each with whether it is one (None if it always is)."""
    numbers = [thread + first for first in range(0, n, n_threads)]
    return [(k, None if (i + 1) * n_threads <= n else k < n) for i, k in enumerate(numbers)]


def _rank(
    own: UOp,
    x: UOp,
    others: _Others,
    steps: int,
    valid: UOp | None,
    last: int,
    slot: int,
) -> UOp:
    """How many of the `others` of all steps, numbers and their values, precede number `own` with the value x: those
    with larger values, and of equal ones those with smaller numbers. Threads that are not `valid` skip the steps, and
    get `last`. It comes out of a register: tinygrad would simplify the kernel before it by the gates that it is for."""
    if steps == 1:  # tinygrad moves code that precedes a loop of one step at most into the loop
        rank = tree([p.cast(I32) for p in _precede(own, x, others(UOp.const(0)))])
        trips, rank = None, rank if valid is None else valid.where(rank, UOp.const(last, I32))
    else:
        trips = UOp.const(steps) if valid is None else valid.where(UOp.const(steps), UOp.const(0))
        rank = UOp.const(0, I32) if valid is None else valid.where(UOp.const(0, I32), UOp.const(last, I32))
    count = registers(1, slot, I32)
    count = count.after(store(count, 0, rank))
    if trips is not None:
        step = UOp.range(trips, slot, AxisType.LOOP)
        found = tree([p.cast(I32) for p in _precede(own, x, others(step))])
        count = count.after(store(count, 0, load(count.after(step), 0) + found).end(step))
    return load(count, 0).cast(INDEX)


def _parts(n_threads: int, groups: int, kept: int, size: int) -> int:
    """How many threads share the comparisons of a group, and of an expert of those that are kept: equal parts."""
    largest = max(groups, kept * size)
    return next((k for k in (8, 4, 2) if largest * k <= n_threads and groups % k == kept % k == 0), 1)


def _rank_in_parts(
    own: UOp, x: UOp, others: _Others, parts: int, n: int, thread: UOp, n_threads: int, last: int, slot: int
) -> UOp:
    """As `_rank`, where thread k has the number k % n and compares it with part k // n of the `others`. Threads beyond
    n get `last`."""
    ok = None if n * parts == n_threads else thread < n * parts
    part = thread // n if ok is None else (thread // n).minimum(parts - 1)
    found = tree([p.cast(I32) for p in _precede(own, x, others(part))])
    counts = shared(n * parts, slot, I32)
    counts = counts.after(UOp.group(store(counts, thread, found, ok)))
    total = tree([load(counts, thread % n + k * n) for k in range(parts)])
    rank = registers(1, slot, I32)
    rank = rank.after(store(rank, 0, (thread < n).where(total, UOp.const(last, I32))))
    return load(rank, 0).cast(INDEX)


def _precede(own: UOp, x: UOp, others: list[tuple[UOp, UOp]]) -> list[UOp]:
    return [(other > x) | (other.eq(x) & (number < own)) for number, other in others]
