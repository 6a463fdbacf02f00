"""Tiles of activations that a block copies to shared memory while it computes with those of the step before.

All warps of a block multiply the same activations. If each loads them itself, it waits for the L2 cache in each step,
since sums leave no registers for loads that are under way. An asynchronous copy takes none
(`engine.fixes.async_copies`).

In each step a thread asks for its share of the next one, waits for what it asked for in the step before, and then for
the other threads (`of`). So a warp may still read the buffer of the step before while another one fills that of the
next. Products of warpgroups may also still read that of the step before when all have met: then there are
`READ_LATER` buffers, and threads ask behind that, for the step after the next one (`read_later`).
"""

from __future__ import annotations

from dataclasses import dataclass

from tinygrad import UOp
from tinygrad.uop.ops import Ops

from engine.fixes import async_copies, warpgroup_products
from engine.targets.nvidia.kernels.uops import F16, at, load_run, shared

BUFFERS, READ_LATER = 3, 4
TILE = 1024  # halves of 16 tokens and a step
_RUN = async_copies.COPIED_BYTES // 2  # halves that are copied at once


def staged_bytes(tiles: int, buffers: int = BUFFERS) -> int:
    """Bytes of shared memory for `tiles` tiles of 16 tokens."""
    return buffers * tiles * TILE * 2


@dataclass(frozen=True)
class StagedTiles:
    """Tiles `first` to first + count - 1 of 16 tokens, of activations `x` of so many `steps` a row, in which those of a
    tile and a step are neighbours (`matmul.fragment_index`, `eights.eights_index`). `thread` is the number of the
    current one of the block's `threads`. `slot`: that of the shared memory, which has so many `buffers`."""

    x: UOp
    steps: int
    first: UOp
    count: int
    thread: UOp
    threads: int
    slot: int
    buffers: int = BUFFERS

    @property
    def _array(self) -> UOp:
        return shared(self.buffers * self.count * TILE, self.slot, F16)

    def begin(self, step: UOp) -> UOp:
        """Asks for the first step of the loop."""
        return self._asked(step, UOp.const(0))

    def of(self, turn: UOp, step: UOp, begun: UOp) -> UOp:
        """The array once it has the tiles of a step, the loop's `turn`-th, and the next one is asked for. `begun`: what
        `begin` gave."""
        following = (step + 1).minimum(self.steps - 1)
        asked = self._asked(following, (turn + 1) % self.buffers, begun)
        waited = async_copies.all_but(1, asked)
        return self._array.after(UOp(Ops.BARRIER, src=(waited,)))

    def begin_two(self, step: UOp) -> UOp:
        """As `begin`, for the first two steps."""
        return self._asked((step + 1).minimum(self.steps - 1), UOp.const(1), self.begin(step))

    def read_later(self, turn: UOp, step: UOp, *before: UOp) -> tuple[UOp, UOp, UOp]:
        """As `of`, for threads whose products of the step before may still read its tiles, and which have asked for two
        steps (`begin_two`). Also what to wait for in order to have asked, and the index of the step's first element.
        `before`: what the thread has done before."""
        met = UOp(Ops.BARRIER, src=(warpgroup_products.shown(async_copies.all_but(1, *before, turn)),))
        following = (step + 2).minimum(self.steps - 1)
        asked = self._asked(following, (turn + 2) % self.buffers, met)
        return self._array.after(met), asked, turn % self.buffers * (self.count * TILE)

    def fragment(self, array: UOp, turn: UOp, tile: UOp, quad: int, lane: UOp) -> list[UOp]:
        """The eight elements of a thread of a warp."""
        place = (turn % self.buffers * self.count + tile) * TILE
        return load_run(array, place + (quad * 32 + lane) * _RUN, _RUN)

    def _asked(self, step: UOp, buffer: UOp, *after: UOp) -> UOp:
        copies, runs = [], TILE // _RUN
        for i in range(self.count * runs // self.threads):
            run = self.thread + i * self.threads
            source = ((self.first + run // runs) * self.steps + step) * TILE + run % runs * _RUN
            places = at(self._array, buffer * (self.count * TILE) + run * _RUN), at(self.x, source)
            copies.append(async_copies.asked(*places, *after))
        return async_copies.group(*copies)
