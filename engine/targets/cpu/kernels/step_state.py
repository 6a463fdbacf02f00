"""What changes between two runs of the same kernels, in memory: the step's state, int32 (SIZE,), and the places of its
tokens, int32 (tokens, 2): the position of each, and the number of its sequence."""

from __future__ import annotations

from collections.abc import Sequence

from tinygrad import UOp

from engine.targets.cpu.kernels.kernel_builder import Index, KernelBuilder

# Indices of the state.
TILES = 0  # the number of tiles of tokens in the step
TOKENS = 1  # the number of tokens in the step, without those that fill its last tile
SIZE = 2


def n_tokens(k: KernelBuilder, state: UOp | None, tile: int) -> Index:
    """The tokens of a step, in whole tiles of `tile` tokens: 1 in decode, whose tile is 1 and which needs no state."""
    return 1 if tile == 1 or state is None else k.index(state, TILES) * tile


def runs_of(k: KernelBuilder, state: Sequence[UOp], rows: bool) -> tuple[Index, Index]:
    """How many sequences a step has, and how many tokens each: one token with `rows`. `state`: that of the step, or
    nothing for one token."""
    tokens: Index = k.index(state[0], TOKENS) if state else 1
    return (tokens, 1) if rows else (1, tokens)


def position_of(k: KernelBuilder, places: UOp, token: Index) -> UOp:
    return k.index(places, token * 2)


def sequence_of(k: KernelBuilder, places: UOp, token: Index) -> UOp:
    return k.index(places, token * 2 + 1)
