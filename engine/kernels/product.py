"""Products of activations with quantized matrices in tensor graphs: dequantized on the way, scheduled by tinygrad."""

from __future__ import annotations

from tinygrad import Tensor

from engine.formats.quantization import Matrix


def product(x: Tensor, matrix: Matrix) -> Tensor:
    """x (n, cols) float32 times the matrix's transpose: (n, rows) float32."""
    return (x @ matrix.dequantize().transpose()).contiguous()
