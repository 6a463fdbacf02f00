"""The factors by which products want their input vectors multiplied, on the device."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from tinygrad import Tensor

from engine.kernels.device_memory import to_device
from engine.targets.nvidia.kernels.weights.matrix_bytes import UNIT
from engine.targets.nvidia.kernels.weights.weight_layout import WeightLayout, input_scale


class InputScales:
    """The input scales of weight layouts (`weight_layout.input_scale`) and norms' weights multiplied by them.
    Each is copied to the device once."""

    def __init__(self) -> None:
        self.norms: dict[tuple[int, int], Tensor] = {}
        self._by_bits: dict[int, Tensor] = {}

    def of(self, layout: WeightLayout) -> Tensor:
        """The input_scale of the input of a product, float32 (UNIT,)."""
        if layout.input_scale_bits not in self._by_bits:
            self._by_bits[layout.input_scale_bits] = to_device(input_scale(layout.input_scale_bits))
        return self._by_bits[layout.input_scale_bits]

    def norm_weight(self, weight: NDArray[np.float32], bits: int) -> Tensor:
        """A norm's weight times the input_scale of the product that follows the norm, float32 (weight.size,)."""
        key = id(weight), bits
        if key not in self.norms:
            units = -(-weight.size // UNIT)
            self.norms[key] = to_device(weight * np.tile(input_scale(bits), units)[: weight.size])
        return self.norms[key]
