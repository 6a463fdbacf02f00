"""The factors by which products want their input vectors multiplied, on the device."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from tinygrad import Tensor

from engine.kernels.device_memory import to_device
from engine.targets.nvidia.kernels.matrix_bytes import UNIT
from engine.targets.nvidia.kernels.weight_layout import WeightLayout, prescale


class Prescales:
    """Prescales of weight layouts (`kernels.weight_layout.prescale`) and norms' weights multiplied by them.
    Each is copied to the device once."""

    def __init__(self) -> None:
        self.norms: dict[tuple[int, int], Tensor] = {}
        self._by_bits: dict[int, Tensor] = {}

    def of(self, layout: WeightLayout) -> Tensor:
        """The prescale of the input of a product, float32 (UNIT,)."""
        if layout.prescale_bits not in self._by_bits:
            self._by_bits[layout.prescale_bits] = to_device(prescale(layout.prescale_bits))
        return self._by_bits[layout.prescale_bits]

    def norm_weight(self, weight: NDArray[np.float32], bits: int) -> Tensor:
        """A norm's weight times the prescale of the product that follows the norm, float32 (weight.size,)."""
        key = id(weight), bits
        if key not in self.norms:
            units = -(-weight.size // UNIT)
            self.norms[key] = to_device(weight * np.tile(prescale(bits), units)[: weight.size])
        return self.norms[key]
