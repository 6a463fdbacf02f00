"""Tiles of activations that a block copies to shared memory while it computes with those of the step before.

All warps of a block multiply the same activations. If each loads them itself, it waits for the L2 cache in each step,
since sums leave no registers for loads that are under way. An asynchronous copy takes none
(`engine.fixes.async_copies`).

There are `_BUFFERS` buffers. In each step a thread asks for its share of the next one, waits for what it asked for in
the step before, and then for the other threads. So a warp may still read the buffer of the step before while another
one fills that of the next.
"""

from __future__ import annotations

from dataclasses import dataclass

from tinygrad import UOp
from tinygrad.uop.ops import Ops

from engine.fixes import async_copies
from engine.targets.nvidia.kernels.uops import F16, at, load_run, shared

_BUFFERS = 3
_TILE = 1024  # halves of 16 tokens and a step
_RUN = async_copies.COPIED_BYTES // 2  # halves that are copied at once


def staged_bytes(tiles: int) -> int:
    """Bytes of shared memory for `tiles` tiles of 16 tokens."""
    return _BUFFERS * tiles * _TILE * 2


@dataclass(frozen=True)
class StagedTiles:
    """Tiles `first` to first + count - 1 of 16 tokens, of fragments `x` (`matmul.fragment_index`) of so many `steps` a
    row. `thread` is the number of the current one of the block's `threads`. `slot`: that of the shared memory."""

    x: UOp
    steps: int
    first: UOp
    count: int
    thread: UOp
    threads: int
    slot: int

    @property
    def _array(self) -> UOp:
        return shared(_BUFFERS * self.count * _TILE, self.slot, F16)

    def begin(self, step: UOp) -> UOp:
        """Asks for the first step of the loop."""
        return self._asked(step, UOp.const(0))

    def of(self, turn: UOp, step: UOp, begun: UOp) -> UOp:
        """The array once it has the tiles of a step, the loop's `turn`-th, and the next one is asked for. `begun`: what
        `begin` gave."""
        following = (step + 1).minimum(self.steps - 1)
        asked = self._asked(following, (turn + 1) % _BUFFERS, begun)
        waited = async_copies.all_but_last(asked)
        return self._array.after(UOp(Ops.BARRIER, src=(waited,)))

    def fragment(self, array: UOp, turn: UOp, tile: UOp, quad: int, lane: UOp) -> list[UOp]:
        """The eight elements of a thread of a warp."""
        place = (turn % _BUFFERS * self.count + tile) * _TILE
        return load_run(array, place + (quad * 32 + lane) * _RUN, _RUN)

    def _asked(self, step: UOp, buffer: UOp, *after: UOp) -> UOp:
        copies, runs = [], _TILE // _RUN
        for i in range(self.count * runs // self.threads):
            run = self.thread + i * self.threads
            source = ((self.first + run // runs) * self.steps + step) * _TILE + run % runs * _RUN
            places = at(self._array, buffer * (self.count * _TILE) + run * _RUN), at(self.x, source)
            copies.append(async_copies.asked(*places, *after))
        return async_copies.group(*copies)
