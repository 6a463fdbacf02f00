"""Products of activations with quantized matrices: which kernel serves which device and shape."""

from __future__ import annotations

from math import ceil

from tinygrad import Device, Tensor

from engine.fixes import cpu_vectors
from engine.formats.quantization import Matrix
from engine.kernels.lanes import lane_product, register_lanes


def preferred_lanes() -> int:
    """How many rows of a matrix the default device likes side by side: 1 where threads take rows of their
    own."""
    return register_lanes() if Device.DEFAULT.split(":")[0] == "CPU" else 1


def product(x: Tensor, matrix: Matrix) -> Tensor:
    """x (n, cols) float32 times the matrix's transpose: (n, rows) float32."""
    if matrix.lanes == 1:
        return (x @ matrix.dequantize().transpose()).contiguous()
    cpu_vectors.apply()
    n, rows, cols = int(x.shape[0]), matrix.padded_rows, matrix.padded_cols
    tile = min(n, matrix.lanes)  # as many sums as half the registers hold
    tiles = ceil(n / tile)
    x = x.pad(((0, tiles * tile - n), (0, cols - matrix.cols)))
    sums = []
    if matrix.format and tile == 1:
        x = x.contiguous()
        sums = [x.reshape(tiles, -1, matrix.format.group).sum(-1).contiguous()]
    x = x.reshape(tiles, tile, cols).transpose(1, 2).contiguous()
    kernel = lane_product(matrix.format, tiles * tile, rows, cols, matrix.lanes, tile)
    out = Tensor.empty(tiles * tile, rows, device=x.device)
    out = Tensor.custom_kernel(out, x, *sums, *matrix.planes.values(), fxn=kernel)[0]
    return out[:n, : matrix.rows]
