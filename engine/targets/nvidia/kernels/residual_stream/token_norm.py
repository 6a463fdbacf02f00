"""Norms of the values of a token, in a kernel whose blocks have a token each."""

from __future__ import annotations

from collections.abc import Sequence

from tinygrad import UOp

from engine.targets.nvidia.kernels.uops import (
    after_store,
    chain,
    f32,
    inverse_rms,
    load,
    load_run,
    shared,
    tree,
)


class TokenNorm:
    """The threads of a block share a token's `cols` values: each has runs of four. `places`: the columns of a thread's
    values, each with whether there is one (None: always)."""

    def __init__(self, cols: int, eps: float) -> None:
        self.threads = max(32, min(256, -(-cols // 4 // 32) * 32))
        self.thread, self._cols, self._eps = UOp.special(self.threads, "lidx0"), cols, eps
        quads = -(-cols // 4 // self.threads)
        columns = [(self.thread + q * self.threads) * 4 + i for q in range(quads) for i in range(4)]
        whole = cols % (self.threads * 4) == 0
        self.places = [(column, None if whole else column < cols) for column in columns]

    def factor(self, values: Sequence[UOp], slot: int, eps: float | None = None) -> UOp:
        """The factor of the RMS norm of values, of which this thread has those at its `places`. Takes `slot` and the
        next one."""
        squares = self.total([value * value for value in values], slot)
        return inverse_rms(squares, self._cols, self._eps if eps is None else eps)

    def centred(self, values: Sequence[UOp], slot: int) -> tuple[list[UOp], UOp]:
        """Values without their mean, and the factor of their RMS norm then. Takes `slot` to slot + 3."""
        mean = self.total(values, slot) * f32(1 / self._cols)
        without = [
            value - mean if ok is None else ok.where(value - mean, f32(0))
            for value, (_, ok) in zip(values, self.places, strict=True)
        ]
        return without, self.factor(without, slot + 2)

    def total(self, values: Sequence[UOp], slot: int) -> UOp:
        """The sum of all threads' values. Takes `slot` and the next one."""
        n, thread = self.threads, self.thread
        partial = after_store(shared(n, slot), thread, chain(values))
        lane_sum = tree([load(partial, thread + 32 * k, thread < 32) for k in range(n // 32)])
        lane_sums = after_store(shared(32, slot + 1), thread, lane_sum, thread < 32)
        return tree(load_run(lane_sums, 0, 32))
