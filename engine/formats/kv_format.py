"""How the KV cache holds keys and values: the formats, their names, and the bytes that they take.

The one place that knows sizes. The caches of the devices say where the parts of a format lie.
"""

from __future__ import annotations

from enum import Enum

from engine.errors import UsageError

QUANT_BLOCK = 32
"""Neighbouring elements of a head that share a scale, in formats with scales."""


class KVFormat(Enum):
    """A format. Its value is its name for users, which is also llama.cpp's. An element has `bits`, and neighbouring
    elements of a head in a `block`, if there is one, share a float16 scale."""

    F16 = "f16", 16, 0
    """float16; without kernels of our own float32, if all matrices of the model are."""

    Q8_0 = "q8_0", 8, QUANT_BLOCK
    """int8, with the largest magnitude / 127 as the scale (ggml's block_q8_0)."""

    bits: int
    block: int

    def __new__(cls, name: str, bits: int, block: int) -> KVFormat:
        format = object.__new__(cls)
        format._value_, format.bits, format.block = name, bits, block
        return format

    @staticmethod
    def parse(name: str) -> KVFormat:
        """Raises UsageError, which lists the names."""
        if name not in NAMES:
            raise UsageError(f"There is no KV cache format {name!r}.", f"Choose one of {', '.join(NAMES)}.")
        return next(format for format in KVFormat if format.value == name)

    @property
    def is_quantized(self) -> bool:
        """Whether elements are in blocks with a scale."""
        return self.block > 0

    def bytes(self, elements: int) -> int:
        """Bytes of so many elements, in whole blocks."""
        return elements * self.bits // 8 + self.scales(elements) * 2

    def scales(self, elements: int) -> int:
        """Scales of so many elements."""
        return elements // self.block if self.block else 0

    def fits(self, head_dim: int) -> bool:
        """Whether heads of `head_dim` elements are whole blocks."""
        return not self.block or head_dim % self.block == 0


NAMES = tuple(format.value for format in KVFormat)
"""The formats' names, the default first."""
