"""Device memory that steps work in, and the vectors that products want their inputs multiplied by."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from tinygrad import Tensor

from engine.kernels.gpu.mailbox import sent
from engine.kernels.gpu.packing import UNIT, Packing, prescale

Floats = NDArray[np.float32]


@dataclass
class Prescales:
    """Prescales of packings, and norms' weights times them: each is put on the device once."""

    norms: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    _prescales: dict[int, Tensor] = field(default_factory=dict)

    def of(self, packing: Packing) -> Tensor:
        if packing.scaling not in self._prescales:
            self._prescales[packing.scaling] = sent(np.asarray(prescale(packing.scaling), np.float32))
        return self._prescales[packing.scaling]

    def norm(self, weight: Floats, scaling: int) -> Tensor:
        """A norm's weight times the prescale of the product that follows."""
        key = (id(weight), scaling)
        if key not in self.norms:
            units = -(-weight.size // UNIT)
            self.norms[key] = sent(
                (weight * np.tile(prescale(scaling), units)[: weight.size]).astype(np.float32)
            )
        return self.norms[key]
