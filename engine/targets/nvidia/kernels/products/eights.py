"""Activations by eight tokens, as `warpgroup_matmul` reads them.

They lie as [16 tokens, step, token, run, quarter, two columns]. A run is of eight activations, 16 bytes: of each of the
four quarters that take a step (`spread`) two columns, four apart. The runs of a token lie in the order that
`warpgroup_products.added` reads.

So neighbouring columns lie apart, and threads that store their own ones touch memory for each. Where a block has whole
runs, they meet in shared memory before (`Gathered`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tinygrad import UOp

from engine.targets.nvidia.kernels.products.matmul import spread
from engine.targets.nvidia.kernels.uops import F16, load_run, shared, store_run
from engine.targets.nvidia.kernels.weights.matrix_bytes import QUARTER, UNIT, units_of

RUN = 8
"""Activations of a run."""
RUNS = UNIT // RUN
"""Runs of a token and a step."""
SPREAD = 4 * UNIT
"""Columns from a multiple of these on, so many, have whole runs, if a row has a multiple of them."""
_TILE = 16  # tokens


def place_in_runs(column: UOp, cols: int) -> tuple[UOp, UOp]:
    """The run of a column of `cols`, of all of a token, and its place in the run."""
    step, quarter = spread(column // UNIT, column % UNIT // QUARTER, units_of(cols))
    return step * RUNS + column % QUARTER // 8 * 4 + column % 4, quarter * 2 + column % 8 // 4


def run_index(token: UOp, run: UOp, cols: int) -> UOp:
    """The index of the first activation of a run."""
    row = (token // _TILE * units_of(cols) + run // RUNS) * _TILE + token % _TILE
    return row * UNIT + (run % RUNS ^ token % 8) * RUN


def eights_index(token: UOp, column: UOp, cols: int) -> UOp:
    """The index of an activation."""
    run, place = place_in_runs(column, cols)
    return run_index(token, run, cols) + place


@dataclass(frozen=True)
class Gathered:
    """Activations that a block gathers in shared memory, so that a thread stores 16 bytes at a time: of `tokens`
    tokens, one or a multiple of sixteen, `runs` runs each, four or a multiple of eight. `slot`: that of the memory."""

    tokens: int
    runs: int
    slot: int

    def __post_init__(self) -> None:
        assert self.tokens == 1 or self.tokens % _TILE == 0
        assert self.runs == RUNS // 2 or self.runs % RUNS == 0

    @property
    def n_bytes(self) -> int:
        """Bytes of shared memory that they take."""
        return self.tokens * self.runs * RUN * 2

    @property
    def array(self) -> UOp:
        """float16 (tokens * runs * RUN,), in the order of `place`."""
        return shared(self.tokens * self.runs * RUN, self.slot, F16)

    @property
    def _shape(self) -> tuple[int, int]:
        """Tokens of a tile, and runs of a token that are neighbours: as in memory, so that few threads that store at
        once meet in a bank."""
        return min(_TILE, self.tokens), min(RUNS, self.runs)

    def place(self, token: UOp | int, run: UOp, place: UOp) -> UOp:
        """The index of an activation: of the block's tokens and of its runs."""
        tile, together = self._shape
        row = (token // tile * (self.runs // together) + run // together) * tile + token % tile
        return (row * together + (run % together ^ token % together)) * RUN + place

    def stores(
        self, out: UOp, cols: int, gathered: Sequence[UOp], first_token: UOp, first_run: UOp | int, thread: UOp,
        threads: int, is_live: Callable[[UOp], UOp] | None = None,
    ) -> list[UOp]:  # fmt: skip
        """A thread's stores, of `threads`, once the stores to the array are done (`gathered`). The block's tokens and
        runs begin with `first_token` and `first_run` of `out`, float16 activations of `cols` columns. `is_live`:
        whether a token of `out` is to be stored."""
        array, stores = self.array.after(UOp.group(*gathered)), list[UOp]()
        (tile, together), n = self._shape, self.tokens * self.runs
        for i in range(-(-n // threads)):
            number = thread + i * threads
            ok = number < n if (i + 1) * threads > n else None
            number = number if ok is None else number.minimum(n - 1)
            row, at = number // together, number % together
            of_tile = row // tile
            token = of_tile // (self.runs // together) * tile + row % tile
            run = of_tile % (self.runs // together) * together + (at ^ token % together)
            if is_live:
                live = is_live(first_token + token)
                ok = live if ok is None else ok & live
            place = run_index(first_token + token, first_run + run, cols)
            stores += store_run(out, place, load_run(array, number * RUN, RUN), ok)
        return stores
