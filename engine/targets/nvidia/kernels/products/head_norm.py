"""A norm over heads that is left to the product which reads them."""

from __future__ import annotations

from dataclasses import dataclass

from tinygrad import UOp

from engine.targets.nvidia.kernels.uops import inverse_rms, load_run, tree
from engine.targets.nvidia.kernels.weights.matrix_bytes import UNIT


@dataclass(frozen=True)
class HeadNorm:
    """What a product is left to do: its vector consists of heads of `size` elements, each to be RMS-normed with `eps`.
    Of each there are `parts` partial sums of squares."""

    size: int
    parts: int
    eps: float

    def factor(self, sums: UOp, unit: UOp, inside: UOp | None) -> UOp:
        """What a unit of the vector is to be multiplied by. `sums`: float32 (heads, parts)."""
        parts = load_run(sums, unit * UNIT // self.size * self.parts, self.parts, inside)
        return inverse_rms(tree(parts), self.size, self.eps)
