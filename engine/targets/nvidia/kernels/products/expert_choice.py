"""The choice of a token's experts inside a kernel, by all threads of a block: the most probable ones, and their
probabilities."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tinygrad import UOp
from tinygrad.uop.ops import AxisType

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
    store,
    tree,
)

_SLOTS = 20, 21, 22, 23, 24  # of the arrays in shared memory; the kernels have the lower ones


@dataclass(frozen=True)
class ExpertChoice:
    """The `used` most probable of `n` experts, in shared memory: `ids`, int32 (used,), the most probable first, of
    equal ones the first; and `logits`, float32 (used,)."""

    used: int
    n: int
    ids: UOp
    logits: UOp
    _everyone: UOp  # the logits of all experts
    _own: list[tuple[UOp, UOp]]  # this thread's experts, and whether each is chosen

    @classmethod
    def of(cls, logits: UOp, first: UOp, used: int, n: int, thread: UOp, n_threads: int) -> ExpertChoice:
        """From the router's logits, float32, n of them from `first` on. `thread` is the number of the current one in
        its block of `n_threads`. An expert's rank is the number of those that precede it. Only experts of the groups
        with the largest maxima can be chosen, as many groups as are `used`: the others are not compared."""
        everyone, stores = shared(n, _SLOTS[0]), []
        for e, ok in _shares(n, thread, n_threads):
            stores.append(store(everyone, e, load(logits, first + e, ok), ok))
        everyone = everyone.after(UOp.group(*stores))
        size = next(k for k in (4, 2, 1) if n % k == 0)
        groups, kept = n // size, min(used, n // size)

        def members(group: UOp) -> list[tuple[UOp, UOp]]:
            """The experts of a group, and their logits."""
            values = load_run(everyone, group * size, size)
            return [(group * size + i, x) for i, x in enumerate(values)]

        maxima, stores = shared(groups, _SLOTS[3]), []
        for group, ok in _shares(groups, thread, n_threads):
            group = group if ok is None else group.minimum(groups - 1)
            stores.append(store(maxima, group, maximum([x for _, x in members(group)]), ok))
        maxima = maxima.after(UOp.group(*stores))
        order, stores = shared(groups + 1, _SLOTS[4], I32), []  # and a place for threads without a group
        at_once, groups_at_once = _largest_part(groups), _largest_part(kept)

        def run(step: UOp) -> list[tuple[UOp, UOp]]:
            """Groups, and their maxima."""
            first_group = step * at_once
            values = load_run(maxima, first_group, at_once)
            return [(first_group + i, x) for i, x in enumerate(values)]

        for i, (group, ok) in enumerate(_shares(groups, thread, n_threads)):
            largest = load(maxima, group if ok is None else group.minimum(groups - 1))
            rank = _rank(group, largest, run, groups // at_once, ok, groups, 30 + i)
            stores.append(store(order, rank, group.cast(I32)))
        order = order.after(UOp.group(*stores))

        def rest(step: UOp) -> list[tuple[UOp, UOp]]:
            """Experts of the groups that are left, and their logits."""
            left = load_run(order, step * groups_at_once, groups_at_once)
            return [x for group in left for x in members(group.maximum(0).minimum(groups - 1).cast(INDEX))]

        ids, best, stores, mine = shared(used, _SLOTS[1], I32), shared(used, _SLOTS[2]), [], []
        for i, (place, ok) in enumerate(_shares(kept * size, thread, n_threads)):
            own = load_index(order, (place // size).minimum(kept - 1), groups) * size + place % size
            x = load(everyone, own)
            rank = _rank(own, x, rest, kept // groups_at_once, ok, used, 40 + i)
            mine.append((own, rank < used))
            stores += [store(ids, rank, own.cast(I32), rank < used), store(best, rank, x, rank < used)]
        chosen = UOp.group(*stores)
        return cls(used, n, ids.after(chosen), best.after(chosen), everyone, mine)

    def powers(self, share: UOp, shares: int) -> UOp:
        """The sum of exp(logit - largest logit) of one of `shares` equal shares of all experts."""
        each = -(-self.n // shares)
        places = [share * each + i for i in range(each)]
        if self.n % shares == 0:
            return chain(self._power(load(self._everyone, place)) for place in places)
        inside = [place < self.n for place in places]
        powers = [self._power(load(self._everyone, p, ok)) for p, ok in zip(places, inside, strict=True)]
        return chain(ok.where(power, f32(0)) for ok, power in zip(inside, powers, strict=True))

    def _power(self, logit: UOp) -> UOp:
        return ((logit - load(self.logits, 0)) * f32(LOG2_E)).exp2()

    def probability(self, slot: UOp, total: UOp, least_sum: float | None) -> UOp:
        """The probability of the expert in a slot, from the `total` of all shares' `powers`. The probabilities are
        divided by their sum, or by `least_sum` if it is larger, unless that is None."""
        power = self._power(load(self.logits, slot))
        if least_sum is None:
            return power / total
        kept = chain(self._power(x) for x in load_run(self.logits, 0, self.used))
        return power / kept.maximum(total * f32(least_sum))

    def counted(self, counts: UOp, valid: UOp) -> list[UOp]:
        """The stores that add one to the `counts` of the chosen experts, int32 (n,), if `valid`."""
        return [
            store(counts, e, load(counts, e, valid & is_chosen) + 1, valid & is_chosen)
            for e, is_chosen in self._own
        ]


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
    others: Callable[[UOp], list[tuple[UOp, UOp]]],
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


def _precede(own: UOp, x: UOp, others: list[tuple[UOp, UOp]]) -> list[UOp]:
    return [(other > x) | (other.eq(x) & (number < own)) for number, other in others]
