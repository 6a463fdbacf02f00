"""Products of a prompt's tokens as the kernels after them read them: partial sums of runs of rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from tinygrad import UOp

from engine.targets.nvidia.kernels.uops import chain, load, within


@dataclass(frozen=True)
class Runs:
    """A product of a prompt's tokens: runs of `sizes` rows, each as partial sums, float32 (parts, tokens, size).
    `starts`: the first row of each, if a run does not follow the one before it. With a `limit`, its rows are cut to
    -limit to limit."""

    tokens: int
    parts: tuple[int, ...]
    sizes: tuple[int, ...]
    starts: tuple[int, ...] = ()
    limit: float = 0.0

    def within(self, *ranges: range) -> tuple[Runs, list[int]]:
        """The runs that have rows in one of the ranges, and which these are."""
        places = list(zip(self._starts, self.sizes, strict=True))
        own = [
            i
            for i, (start, n) in enumerate(places)
            if any(start < r.stop and start + n > r.start for r in ranges)
        ]
        parts, sizes, starts = (
            tuple(values[i] for i in own) for values in (self.parts, self.sizes, self._starts)
        )
        return Runs(self.tokens, parts, sizes, starts, self.limit), own

    @property
    def _starts(self) -> tuple[int, ...]:
        return self.starts or tuple(accumulate(self.sizes[:-1], initial=0))

    def load(self, sums: Sequence[UOp], bias: UOp | None, token: UOp, row: UOp, inside: UOp) -> UOp:
        """A row of the product, if it is `inside`: the sum of its parts, plus the bias, within the limit."""
        return self._load(sums, bias, token, row, row, inside)

    def load_run(
        self, sums: Sequence[UOp], bias: UOp | None, token: UOp, row: UOp, n: int, inside: UOp
    ) -> list[UOp]:
        """As `load`, `n` neighbouring rows of one run."""
        return [self._load(sums, bias, token, row, row + i, inside) for i in range(n)]

    def _load(
        self, sums: Sequence[UOp], bias: UOp | None, token: UOp, first: UOp, row: UOp, inside: UOp
    ) -> UOp:
        """A row in the run that has the `first`."""
        result = None
        for run, count, size, start in zip(sums, self.parts, self.sizes, self._starts, strict=True):
            if first.vmax < start or first.vmin >= start + size:
                continue
            in_run = (first >= start) & (first < start + size) & inside if len(self.sizes) > 1 else inside
            part = chain(
                load(run, (p * self.tokens + token) * size + (row - start), in_run) for p in range(count)
            )
            result = part if result is None else result + part
        assert result is not None
        return within(result if bias is None else result + load(bias, row, inside), self.limit)
