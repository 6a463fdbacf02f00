"""The sizes of a gated delta net, where its state lies, and the formulas that decode and prefill share.

The state of a sequence (`state_memory`) is for each value head a matrix (size keys, size values), then the last
taps - 1 inputs of the convolution, oldest first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tinygrad import UOp

from engine.targets.nvidia.kernels.recurrent.convolved import ConvolvedMemory
from engine.targets.nvidia.kernels.uops import LOG2_E, chain, f32, sigmoid, softplus


@dataclass(frozen=True)
class DeltaHeads(ConvolvedMemory):
    """The heads of a delta net: `key` heads of queries and of keys, `value` heads, of `size` elements each; a
    convolution over `taps` tokens; `eps` of the norms. `shares_in_turn`: as `recurrent.DeltaNet` has it."""

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
    def first_input(self) -> int:
        return self.width * self.size

    @property
    def name(self) -> str:
        of_slots = f"_of_{self.slots}" * (self.slots > 2)
        together = "_together" * (not self.shares_in_turn)
        return f"{self.key}_{self.value}_{self.size}_{self.taps}{of_slots}{together}"

    def key_head(self, head: UOp) -> UOp:
        """The key head that a value head shares."""
        return head % self.key if self.shares_in_turn else head // (self.value // self.key)

    def value_head(self, key_head: UOp, i: UOp) -> UOp:
        """The i-th value head of a key head."""
        return key_head + i * self.key if self.shares_in_turn else key_head * (self.value // self.key) + i


def silu(x: UOp) -> UOp:
    return x * sigmoid(x)


def decay_of(alpha: UOp, bias: UOp, decay: UOp) -> UOp:
    """exp(decay * softplus(alpha + bias))."""
    return (decay * softplus(alpha + bias) * f32(LOG2_E)).exp2()


def convolved(inputs: Sequence[UOp], weights: Sequence[UOp]) -> UOp:
    """SiLU of a channel's convolution; the last input is the token's own."""
    return silu(chain(x * w for x, w in zip(inputs, weights, strict=True)))
