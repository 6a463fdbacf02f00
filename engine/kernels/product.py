"""Products of activations with quantized matrices."""

from __future__ import annotations

from tinygrad import Tensor

from engine.formats.quantization import Matrix


def preferred_lanes() -> int:
    """How many rows of a matrix the default device likes side by side."""
    return 1


def product(x: Tensor, matrix: Matrix) -> Tensor:
    """x (n, cols) float32 times the matrix's transpose: (n, rows) float32."""
    return (x @ matrix.dequantize().transpose()).contiguous()
