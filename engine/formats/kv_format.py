"""How the KV cache holds keys and values: the formats, their names, and the bytes that they take.

The one place that knows sizes. The caches of the devices say where the parts of a format lie.
"""

from __future__ import annotations

from enum import Enum

from engine.errors import UsageError

QUANT_BLOCK = 32
"""Neighbouring elements of a head that share a scale, in formats with scales."""


class KVFormat(Enum):
    """A format. Its value is its name for users, which is also llama.cpp's."""

    F16 = "f16"
    """float16; without kernels of our own float32, if all matrices of the model are."""

    Q8_0 = "q8_0"
    """int8 in blocks of 32 elements of a head with a float16 scale, the largest magnitude / 127 (ggml's block_q8_0)."""

    @staticmethod
    def parse(name: str) -> KVFormat:
        """Raises UsageError, which lists the names."""
        try:
            return KVFormat(name)
        except ValueError:
            raise UsageError(
                f"There is no KV cache format {name!r}.", f"Choose one of {', '.join(NAMES)}."
            ) from None

    @property
    def is_quantized(self) -> bool:
        """Whether elements are integers in blocks of `QUANT_BLOCK`, each with a float16 scale."""
        return self is not KVFormat.F16

    def bytes(self, elements: int) -> int:
        """Bytes of so many elements, in whole blocks."""
        return elements * 2 if self is KVFormat.F16 else elements // QUANT_BLOCK * (QUANT_BLOCK + 2)

    def fits(self, head_dim: int) -> bool:
        """Whether heads of `head_dim` elements are whole blocks."""
        return not self.is_quantized or head_dim % QUANT_BLOCK == 0


NAMES = tuple(format.value for format in KVFormat)
"""The formats' names, the default first."""
