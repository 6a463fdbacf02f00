"""The choice of a token's experts inside a kernel, by all threads of a block: the most probable ones, and their
probabilities."""

from __future__ import annotations

from dataclasses import dataclass

from tinygrad import UOp

from engine.kernels.gpu.uops import (
    I32,
    INDEX,
    LOG2_E,
    LOWEST,
    chain,
    f32,
    load,
    load_run,
    shared,
    store,
    tree,
)

_SLOTS = 20, 21, 22  # of the arrays in shared memory; the kernels have the lower ones


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
        its block of `n_threads`. An expert's rank is the number of those that precede it."""
        experts = [thread + i * n_threads for i in range(-(-n // n_threads))]
        whole = n % n_threads == 0
        inside = [None if whole else e < n for e in experts]
        own = [load(logits, first + e, ok) for e, ok in zip(experts, inside, strict=True)]
        own = [x if ok is None else ok.where(x, f32(LOWEST)) for x, ok in zip(own, inside, strict=True)]
        everyone = shared(n, _SLOTS[0])
        stores = [store(everyone, e, x, ok) for e, x, ok in zip(experts, own, inside, strict=True)]
        everyone = everyone.after(UOp.group(*stores))
        others = load_run(everyone, 0, n)
        ids, best, stores, mine = shared(used, _SLOTS[1], I32), shared(used, _SLOTS[2]), [], []
        for e, x in zip(experts, own, strict=True):
            precedes = [(other > x) | (other.eq(x) & (e > j)) for j, other in enumerate(others)]
            rank = tree([p.cast(I32) for p in precedes]).cast(INDEX)
            mine.append((e, rank < used))
            stores += [store(ids, rank, e.cast(I32), rank < used), store(best, rank, x, rank < used)]
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
        stores = []
        for e, is_chosen in self._own:
            ok = valid & (e < self.n)
            stores.append(store(counts, e, load(counts, e, ok) + is_chosen.cast(I32), ok))
        return stores
