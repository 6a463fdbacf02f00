"""The sums of attention in one pass over the keys, on tensor cores: what kernels of prompts and of patches share.

A warp has queries of a head, and goes over the keys some at a time: a step. Scores, weights and weighted sums stay in
registers. The threads of a warp that share queries have different keys. They learn the largest score of each query
through tensor cores: a product with ones and zeros hands numbers on. If it has grown, earlier sums are scaled down.
Weights are operands of the product with the values where they are: the thread that computes a key's score needs its
weight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tinygrad import UOp
from tinygrad.uop.ops import Ops

from engine.targets.nvidia.kernels.products.matmul import wmma
from engine.targets.nvidia.kernels.uops import (
    F16,
    F32,
    LOWEST,
    chain,
    f32,
    load_run,
    maximum,
    registers,
    store_run,
    zeroed_registers,
)

Operands = Callable[[int, int], list[list[UOp]]]
"""Two right tiles of tensor cores, of the s-th sixteen keys of a step and the c-th sixteen dimensions: of even keys and
of odd ones, or of even dimensions of values and of odd ones."""

LEAST_TOTAL = 1e-30  # in place of 0, for rows that are no tokens: their queries see nothing
_TOP_UNIT = 16.0  # a largest score passes through a float16, in this unit: up to a million
_LEAST_TOP = -1e6
_SUM_UNIT = 256.0  # the same for sums of weights


def quad_maxima(own: Sequence[UOp], g: UOp, t: UOp) -> list[UOp]:
    """The largest of the values of four threads 4g + t, of rows g and g + 8."""
    zero, one = (f32(x).cast(F16) for x in (0, 1))
    halves = [(x.maximum(_LEAST_TOP) * f32(1 / _TOP_UNIT)).cast(F16) for x in own]
    left = [halves[0], zero, halves[1], zero, zero, zero, zero, zero]
    # Columns 2t and 2t + 1 of the product are a thread's: the values of threads 0 and 1, then those of 2 and 3.
    chosen = [t.eq(g % 2 + first).where(one, zero) for first in (0, 2)]
    pairs = [wmma(left, [x, zero, zero, zero], [f32(0)] * 4) for x in chosen]
    return [maximum([x for pair in pairs for x in pair[k : k + 2]]) * f32(_TOP_UNIT) for k in (0, 2)]


def quad_sums(own: Sequence[UOp]) -> list[UOp]:
    """The sums of the values of four threads, of rows g and g + 8: in two float16, which are as accurate as needed."""
    zero, one = (f32(x).cast(F16) for x in (0, 1))
    scaled = [x * f32(1 / _SUM_UNIT) for x in own]
    upper = [x.cast(F16) for x in scaled]
    lower = [(x - u.cast(F32)).cast(F16) for x, u in zip(scaled, upper, strict=True)]
    left = [upper[0], lower[0], upper[1], lower[1], zero, zero, zero, zero]
    return [x * f32(_SUM_UNIT) for x in wmma(left, [one] * 4, [f32(0)] * 4)[::2]]


def step_scores(
    queries: Sequence[Sequence[UOp]], keys: Operands, rows: int, steps: int, chunks: int,
    shown: Callable[[int, int, list[UOp]], list[UOp]],
) -> list[list[UOp]]:  # fmt: skip
    """For each row of a thread's queries (row g of the first tile, its row g + 8, row g of the second tile, and so on)
    the scores of its keys: four neighbours of each sixteen of a step. `queries`: left tiles [row, chunk]. `shown` hides
    some of the four of the s-th sixteen from the i-th row."""
    result: list[list[UOp]] = [[] for _ in range(2 * rows)]
    for s in range(steps):
        acc = [[[f32(0)] * 4 for _ in (0, 1)] for _ in range(rows)]
        for c in range(chunks):
            for odd, tile in enumerate(keys(s, c)):
                for r in range(rows):
                    acc[r][odd] = wmma(queries[r * chunks + c], tile, acc[r][odd])
        for i in range(2 * rows):
            r, side = divmod(i, 2)
            result[i] += shown(s, i, [acc[r][e % 2][2 * side + e // 2] for e in range(4)])
    return result


class AttentionSums:
    """The weighted sums of a warp's queries so far, for `chunks` times sixteen dimensions of the values, with the sums
    of weights and the largest scores. A warp has 16 * `rows` queries."""

    def __init__(self, rows: int, steps: int, chunks: int, slot: int) -> None:
        """Takes registers of `slot` and of the next two."""
        self._rows, self._steps, self._chunks = rows, steps, chunks
        self._sums = zeroed_registers(rows * chunks * 8, slot)
        self._totals = zeroed_registers(2 * rows, slot + 1)
        tops = registers(2 * rows, slot + 2)
        self._tops = tops.after(UOp.group(*store_run(tops, 0, [f32(LOWEST)] * (2 * rows))))

    def largest(self, *before: UOp) -> list[UOp]:
        """The largest scores so far, of each row of queries."""
        return load_run(self._tops.after(*before), 0, 2 * self._rows)

    def added(
        self, scores: Sequence[Sequence[UOp]], old: Sequence[UOp], values: Operands, g: UOp, t: UOp,
        *before: UOp,
    ) -> tuple[list[UOp], list[UOp]]:  # fmt: skip
        """The stores that add a step's scores and values, and the sums that they store. `old`: the largest scores
        before."""
        rows, chunks, top = self._rows, self._chunks, list[UOp]()
        for r in range(rows):
            top += quad_maxima([maximum(x) for x in scores[2 * r : 2 * r + 2]], g, t)
        top = [a.alu(Ops.MAX, b) for a, b in zip(old, top, strict=True)]
        factors = [(a - b).exp2() for a, b in zip(old, top, strict=True)]
        weights = [[(x - b).exp2() for x in row] for row, b in zip(scores, top, strict=True)]
        so_far = load_run(self._totals.after(*before), 0, 2 * rows)
        totals = [chain([x * f, *row]) for x, f, row in zip(so_far, factors, weights, strict=True)]
        sums = load_run(self._sums.after(*before), 0, rows * chunks * 8)
        sums = [x * factors[i // (chunks * 8) * 2 + i % 4 // 2] for i, x in enumerate(sums)]
        halves = [[x.cast(F16) for x in row] for row in weights]
        for s in range(self._steps):
            # a left tile's elements of a thread: two of row g, two of row g + 8, and the same again
            lefts = [
                [halves[2 * r + side][4 * s + k + i] for k in (0, 2) for side in (0, 1) for i in (0, 1)]
                for r in range(rows)
            ]
            for c in range(chunks):
                for odd, tile in enumerate(values(s, c)):
                    for r in range(rows):
                        k = ((r * chunks + c) * 2 + odd) * 4
                        sums[k : k + 4] = wmma(lefts[r], tile, sums[k : k + 4])
        stores = store_run(self._totals, 0, totals) + store_run(self._sums, 0, sums)
        return stores + store_run(self._tops, 0, top), sums

    def ends(self, *done: UOp) -> tuple[list[UOp], list[UOp], list[UOp]]:
        """After all steps: the weighted sums, [row, chunk, 8], and of each row of queries the sum of its weights, over
        the threads that share it, and the largest score."""
        rows, totals = self._rows, list[UOp]()
        sums = load_run(self._sums.after(*done), 0, rows * self._chunks * 8)
        of_thread = load_run(self._totals.after(*done), 0, 2 * rows)
        for r in range(rows):
            totals += quad_sums(of_thread[2 * r : 2 * r + 2])
        return sums, totals, self.largest(*done)
