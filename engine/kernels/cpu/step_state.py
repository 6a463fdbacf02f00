"""What changes between two runs of the same kernels: int32 numbers in memory, the step's state."""

from __future__ import annotations

from tinygrad import UOp

from engine.kernels.cpu.kernel_builder import Index, KernelBuilder

# Indices of the state.
TILES = 0  # the number of tiles of tokens in the step
TOKENS = 1  # the number of tokens in the step, without those that fill its last tile
PLACES = 2  # of each token its position, and the number of its sequence


def state_size(tokens: int) -> int:
    """The numbers of a state, for steps of up to so many tokens."""
    return PLACES + 2 * tokens


def n_tokens(k: KernelBuilder, state: UOp | None, tile: int) -> Index:
    """The tokens of a step, in whole tiles of `tile` tokens: 1 in decode, whose tile is 1 and which needs no state."""
    return 1 if tile == 1 or state is None else k.index(state, TILES) * tile


def position_of(k: KernelBuilder, state: UOp, token: Index) -> UOp:
    return k.index(state, token * 2 + PLACES)


def sequence_of(k: KernelBuilder, state: UOp, token: Index) -> UOp:
    return k.index(state, token * 2 + (PLACES + 1))
