"""Layers whose state has the last taps - 1 inputs of a causal convolution of each channel, oldest first."""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from tinygrad import UOp

from engine.kernels.kernel import Kernel
from engine.targets.nvidia.kernels.pieces import MAX_POSITION, PIECE_ROWS, Piece
from engine.targets.nvidia.kernels.products.runs import Runs
from engine.targets.nvidia.kernels.recurrent.state_memory import StateMemory, sequence_of
from engine.targets.nvidia.kernels.uops import (
    INDEX,
    chain,
    finish,
    load,
    load_run,
    registers,
    store,
    store_run,
)

_THREADS = 128  # of a block, each with a channel


class Convolved(NamedTuple):
    """What a thread works on in a row of a prompt: its channel, and whether there is one (None: always), the row,
    whether that is a token's, and the convolution of the channel there."""

    channel: UOp
    has_channel: UOp | None
    row: UOp
    valid: UOp
    total: UOp


class ConvolvedMemory(StateMemory):
    """A state with the inputs of a convolution of so many `channels` over `taps` tokens, from element `first_input`
    on."""

    taps: int

    @property
    @abstractmethod
    def channels(self) -> int: ...

    @property
    def first_input(self) -> int:
        return 0

    @property
    def state_size(self) -> int:
        return self.first_input + (self.taps - 1) * self.channels

    def new_input(self, runs: Runs, sums: Sequence[UOp], row: UOp, channel: UOp, valid: UOp) -> UOp:
        """A channel's input of the convolution of a token, whose product with the layer's input is in a row."""
        return runs.load(sums, None, row, channel, valid)

    def input_at(self, state: UOp, tap: int, channel: UOp) -> UOp:
        """The index of an input in a state."""
        return state + self.first_input + tap * self.channels + channel

    def input_of(
        self, runs: Runs, sums: Sequence[UOp], memory: UOp, piece: Piece, before: UOp, channel: UOp, token: UOp,
        valid: UOp,
    ) -> UOp:  # fmt: skip
        """A channel's input of a `valid` token of a piece, or of one before it if it is negative. `before`: where the
        state before the piece is."""
        new = self.new_input(runs, sums, piece.first + token.maximum(0), channel, valid & (token >= 0))
        if token.vmin >= 0:
            return new
        tap = (token + (self.taps - 1)).maximum(0).minimum(self.taps - 2)
        place, is_held = self.input_at(before, 0, channel), valid & (piece.position > 0) & (token < 0)
        return (token < 0).where(load(memory, place + tap * self.channels, is_held), new)

    def keep(
        self, runs: Runs, sums: Sequence[UOp], memory: UOp, piece: Piece, before: UOp, channel: UOp, end: UOp,
        after: UOp, ok: UOp | None, slot: int, done: Sequence[UOp] = (),
    ) -> list[UOp]:  # fmt: skip
        """Stores a channel's inputs of the last tokens before `end`, if it is `ok`, to the state that begins at
        `after`, once the effects `done` have happened. This may be the state before the piece, so all are read before
        one is written, to registers of a `slot`."""
        valid, kept = UOp.const(True) if ok is None else ok, registers(self.taps - 1, slot)
        at = runs, sums, memory, piece, before, channel
        inputs = [self.input_of(*at, end + (k - (self.taps - 1)), valid) for k in range(self.taps - 1)]
        read = UOp.group(*store_run(kept, 0, inputs))
        target = memory.after(read, *done)
        return [
            store(target, self.input_at(after, k, channel), x, ok)
            for k, x in enumerate(load_run(kept.after(read), 0, self.taps - 1))
        ]

    @property
    def channel(self) -> tuple[UOp, UOp | None]:
        """The channel of a thread of a kernel, and whether there is one (None: always)."""
        blocks = -(-self.channels // _THREADS)
        channel = UOp.special(blocks, "gidx0") * _THREADS + UOp.special(_THREADS, "lidx0")
        return channel, None if self.channels % _THREADS == 0 else channel < self.channels

    def convolved(self, runs: Runs, memory: UOp, sums: Sequence[UOp], prompt: UOp, weights: UOp) -> Convolved:
        """What a thread works on in a grid of channels and rows. `weights`: float32 (channels, taps); the others as in
        `keep_inputs`."""
        (channel, ok), row = self.channel, UOp.special(runs.tokens, "gidx1")
        piece = Piece.of(prompt, row, runs.tokens, MAX_POSITION)
        before = self.state_at(piece.position, sequence_of(self, prompt, piece.sequence_at))
        token = piece.token(row)
        valid = token < piece.count if ok is None else ok & (token < piece.count)
        at = runs, sums, memory, piece, before, channel
        window = [self.input_of(*at, token + (k - self.taps + 1), valid) for k in range(self.taps)]
        of_channel = load_run(weights, channel * self.taps, self.taps, ok)
        total = chain(x * w for x, w in zip(window, of_channel, strict=True))
        return Convolved(channel, ok, row, valid, total)


@functools.cache
def keep_inputs(of: ConvolvedMemory, runs: Runs, several: bool, checks: bool) -> Kernel:
    """Stores the state after the piece that begins at the first row, or after `several`. If it `checks`, the piece is
    the rows of a check, and each leaves a state. Buffers: memory; sums, those of each run of the product with the
    input; prompt, the step's state (`pieces`)."""
    tokens = runs.tokens
    units = -(-tokens // PIECE_ROWS) if several else 1
    assert not checks or of.slots > tokens

    def kernel(memory: UOp, sums: Sequence[UOp], prompt: UOp) -> UOp:
        channel, ok = of.channel
        row = UOp.special(units, "gidx1") * PIECE_ROWS if units > 1 else UOp.const(0, INDEX)
        piece = Piece.of(prompt, row, tokens, MAX_POSITION)
        sequence, is_own = sequence_of(of, prompt, piece.sequence_at), (piece.count > 0) & piece.first.eq(row)
        is_own = is_own if ok is None else is_own & ok
        before = of.state_at(piece.position, sequence)
        at, stores = (runs, sums, memory, piece, before, channel), list[UOp]()
        ends = [(UOp.const(t + 1, INDEX), is_own & (t < piece.count)) for t in range(tokens)]
        for slot, (end, is_token) in enumerate(ends if checks else [(piece.count, is_own)]):
            stores += of.keep(*at, end, of.state_at(piece.position + end, sequence), is_token, slot)
        name = f"keep_{of.name}_{tokens}" + "_several" * several + "_checks" * checks
        return finish(name, stores)

    return Kernel(kernel, ("memory",), (("sums", len(runs.sizes)), "prompt"))
