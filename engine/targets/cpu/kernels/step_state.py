"""What changes between two runs of the same kernels, in memory: the step's state, int32 (SIZE,), and the places of its
tokens, int32 (tokens, 2): the position of each, and the number of its sequence."""

from __future__ import annotations

from tinygrad import UOp

from engine.targets.cpu.kernels.kernel_builder import Index, KernelBuilder

# Indices of the state.
TILES = 0  # the number of tiles of tokens in the step
TOKENS = 1  # the number of tokens in the step, without those that fill its last tile
SIZE = 2


def n_tokens(k: KernelBuilder, state: UOp | None, tile: int) -> Index:
    """The tokens of a step, in whole tiles of `tile` tokens: 1 in decode, whose tile is 1 and which needs no state."""
    return 1 if tile == 1 or state is None else k.index(state, TILES) * tile


def position_of(k: KernelBuilder, places: UOp, token: Index) -> UOp:
    return k.index(places, token * 2)


def sequence_of(k: KernelBuilder, places: UOp, token: Index) -> UOp:
    return k.index(places, token * 2 + 1)
