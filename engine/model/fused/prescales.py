"""The factors by which products want their input vectors multiplied, on the device."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from tinygrad import Tensor

from engine.kernels.gpu.mailbox import sent
from engine.kernels.gpu.packing import UNIT, Packing, prescale


class Prescales:
    """Prescales of packings (`kernels.gpu.packing.prescale`) and norms' weights multiplied by them. Each is copied to
    the device once."""

    def __init__(self) -> None:
        self.norms: dict[tuple[int, int], Tensor] = {}
        self._by_scaling: dict[int, Tensor] = {}

    def of(self, packing: Packing) -> Tensor:
        """The prescale of the input of a product, float32 (UNIT,)."""
        if packing.scaling not in self._by_scaling:
            self._by_scaling[packing.scaling] = sent(prescale(packing.scaling))
        return self._by_scaling[packing.scaling]

    def norm_weight(self, weight: NDArray[np.float32], scaling: int) -> Tensor:
        """A norm's weight times the prescale of the product that follows the norm, float32 (weight.size,)."""
        key = id(weight), scaling
        if key not in self.norms:
            units = -(-weight.size // UNIT)
            self.norms[key] = sent(weight * np.tile(prescale(scaling), units)[: weight.size])
        return self.norms[key]
