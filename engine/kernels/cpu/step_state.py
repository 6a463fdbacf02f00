"""What changes between two runs of the same kernels: int32 numbers in memory, the step's state."""

from __future__ import annotations

from tinygrad import UOp

from engine.kernels.cpu.kernel_builder import Index, KernelBuilder

# Indices of the state.
POSITION = 1  # the number of tokens before the step
TILES = 2  # the number of tiles of tokens in the step
TOKENS = 3  # the number of tokens in the step, without those that fill its last tile
SIZE = 4


def n_tokens(k: KernelBuilder, state: UOp | None, tile: int) -> Index:
    """The tokens of a step, in whole tiles of `tile` tokens: 1 in decode, whose tile is 1 and which needs no state."""
    return 1 if tile == 1 or state is None else k.index(state, TILES) * tile
