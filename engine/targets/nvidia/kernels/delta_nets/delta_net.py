"""The sizes of a gated delta net, where its state lies, and the formulas that decode and prefill share.

The state of a sequence after t tokens is in slot t % slots of its memory: for each value head a matrix (size keys, size
values), then the last taps - 1 inputs of the convolution, oldest first. So a step reads one slot and writes the next,
and one that ran ahead in vain leaves the state before it intact. A check of guesses leaves a state after each of its
tokens, so it can end with any. At position 0 the state is zeros, whatever the memory holds.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from tinygrad import UOp

from engine.kernels.kernel import Kernel
from engine.targets.nvidia.kernels.pieces import MAX_POSITION
from engine.targets.nvidia.kernels.uops import (
    INDEX,
    LOG2_E,
    chain,
    f32,
    finish,
    load,
    load_index,
    load_run,
    sigmoid,
    store_run,
)


@dataclass(frozen=True)
class DeltaHeads:
    """The heads of a delta net: `key` heads of queries and of keys, `value` heads, of `size` elements each; a
    convolution over `taps` tokens; `eps` of the norms. Its memory has room for `slots` states of each of
    `sequences`. `shares_in_turn`: see `engine.description.sublayers.DeltaNet`."""

    key: int
    value: int
    size: int
    taps: int
    eps: float
    sequences: int = 1
    slots: int = 2
    shares_in_turn: bool = True

    def __post_init__(self) -> None:
        assert self.value % self.key == 0 and self.size % 16 == 0

    @property
    def channels(self) -> int:
        """Inputs of the convolution: all queries, keys and values."""
        return (2 * self.key + self.value) * self.size

    @property
    def width(self) -> int:
        """Elements of the result of all value heads."""
        return self.value * self.size

    @property
    def rows(self) -> int:
        """Rows of the product with the input: the channels, the gate, beta and alpha."""
        return self.channels + self.width + 2 * self.value

    @property
    def half(self) -> int:
        """Elements of the state of a sequence."""
        return self.width * self.size + (self.taps - 1) * self.channels

    @property
    def memory_size(self) -> int:
        """Elements of the memory, float32."""
        return self.sequences * self.slots * self.half

    @property
    def name(self) -> str:
        of_slots = f"_of_{self.slots}" * (self.slots > 2)
        together = "_together" * (not self.shares_in_turn)
        return f"{self.key}_{self.value}_{self.size}_{self.taps}{of_slots}{together}"

    def key_head(self, head: UOp) -> UOp:
        """That of a value head."""
        return head % self.key if self.shares_in_turn else head // (self.value // self.key)

    def value_head(self, key_head: UOp, i: UOp) -> UOp:
        """The i-th value head of a key head."""
        return key_head + i * self.key if self.shares_in_turn else key_head * (self.value // self.key) + i

    def state_at(self, position: UOp, sequence: UOp) -> UOp:
        """The index of the first element of the state of a sequence before the token at `position`."""
        return (sequence * self.slots + position % self.slots) * self.half

    def conv_at(self, state: UOp, tap: int, channel: UOp) -> UOp:
        """The index of an input of the convolution in a state."""
        return state + self.width * self.size + tap * self.channels + channel


def silu(x: UOp) -> UOp:
    return x * sigmoid(x)


def decay_of(alpha: UOp, bias: UOp, decay: UOp) -> UOp:
    """exp(decay * softplus(alpha + bias))."""
    x = alpha + bias
    magnitude = x.maximum(x * f32(-1))
    softplus = x.maximum(0.0) + (f32(1) + (magnitude * f32(-LOG2_E)).exp2()).log2() * f32(1 / LOG2_E)
    return (decay * softplus * f32(LOG2_E)).exp2()


def convolved(inputs: Sequence[UOp], weights: Sequence[UOp]) -> UOp:
    """SiLU of a channel's convolution; the last input is the token's own."""
    return silu(chain(x * w for x, w in zip(inputs, weights, strict=True)))


@functools.cache
def copy_state(heads: DeltaHeads, slots: int, saves: bool) -> Kernel:
    """Copies the state of a sequence to a checkpoint, or back. Buffers: memory, float32 (memory_size,);
    checkpoints, float32 (slots * half,); place, int32 (3,): the number of tokens, the checkpoint and the sequence."""
    threads = 256
    size = threads * 4

    def kernel(memory: UOp, checkpoints: UOp, place: UOp) -> UOp:
        index = UOp.special(-(-heads.half // size), "gidx0") * size + UOp.special(threads, "lidx0") * 4
        ok = None if heads.half % size == 0 else index < heads.half
        state = heads.state_at(load_index(place, 0, MAX_POSITION), load_index(place, 2, heads.sequences))
        checkpoint = load_index(place, 1, slots) * heads.half
        ends = (checkpoints, checkpoint), (memory, state)
        (target, to), (source, from_) = ends if saves else reversed(ends)
        stores = store_run(target, to + index, load_run(source, from_ + index, 4, ok), ok)
        name = f"{'save' if saves else 'load'}_state_{heads.name}_{slots}"
        return finish(name, stores, n_bytes=8 * heads.half)

    ends = ("checkpoints", "memory") if saves else ("memory", "checkpoints")
    return Kernel(kernel, ends[:1], (*ends[1:], "place"))


def sequence_of(heads: DeltaHeads, state: UOp, index: UOp | int) -> UOp:
    """The sequence of a token, if there are several."""
    return load(state, index).cast(INDEX) if heads.sequences > 1 else UOp.const(0, INDEX)
