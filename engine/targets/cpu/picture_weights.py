"""The matrices of an encoder of pictures as products of patches read them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tinygrad import Tensor

from engine.description.vision import ImageStep, Linear
from engine.formats.dequantize import dequantized
from engine.loading.weights import FileWeights
from engine.targets.cpu.kernels.activations import buffer_names
from engine.targets.cpu.kernels.patches import stride_of
from engine.targets.cpu.kernels.product import ROUNDED
from engine.targets.cpu.kernels.thread_pool import ThreadPool
from engine.targets.cpu.kernels.weight_layout import LaneLayout
from engine.targets.cpu.kernels.weight_repacking import repack

_F32, _F16 = 0, 1  # ggml's numbers


@dataclass
class PictureMatrix:
    """A matrix (rows, cols) with rows of zeros up to `stride`, and with columns of zeros up to whole units."""

    layout: LaneLayout
    rows: int
    cols: int
    stream: Tensor

    @property
    def stride(self) -> int:
        return stride_of(self.rows)

    @property
    def is_rounded(self) -> bool:
        """Floats of 16 bits are multiplied as integers (`product`)."""
        return self.layout.format is None and self.layout.ggml_type != _F32

    @property
    def inputs(self) -> tuple[str, ...]:
        """The buffers of `Activations` that its product reads."""
        return ROUNDED if self.is_rounded else buffer_names([self.layout], self.layout.lanes)


class PictureWeights:
    """Reads matrices from a file."""

    def __init__(self, weights: FileWeights, pool: ThreadPool, lanes: int) -> None:
        self._weights, self._pool, self._lanes = weights, pool, lanes

    def matrix(self, linear: Linear) -> PictureMatrix:
        weight = linear.weight
        every = range(weight.rows)
        raw = self._weights.read(weight, every).reshape(weight.rows, weight.row_bytes)
        type, rows, cols = weight.type, weight.rows, weight.cols
        sources = np.arange(stride_of(rows), dtype=np.int32)
        if weight.order:
            sources[:rows] = weight.order.apply(sources[:rows])
        if linear.transposed:
            raw, type = _transposed(raw, type, cols)
            rows, cols, sources = cols, rows, np.arange(stride_of(cols), dtype=np.int32)
        made = self._packed(raw, type, rows, cols, sources)
        self._weights.release(weight, every)
        return made

    def convolution(self, step: ImageStep) -> PictureMatrix:
        """The columns of a convolution place by place, as `gather` puts channels, each a row of an image; in a file
        they are channel by channel."""
        weight, places = step.weight, step.kernel**2
        if places == 1:
            return self.matrix(Linear(weight))
        every, channels = range(weight.rows), weight.cols // places
        raw = (
            self._weights.read(weight, every).reshape(weight.rows, channels, places, -1).transpose(0, 2, 1, 3)
        )
        raw = np.pad(raw, ((0, 0), (0, 0), (0, stride_of(channels) - channels), (0, 0)))
        cols, sources = places * stride_of(channels), np.arange(stride_of(weight.rows), dtype=np.int32)
        made = self._packed(raw.reshape(weight.rows, -1), weight.type, weight.rows, cols, sources)
        self._weights.release(weight, every)
        return made

    def of_channels(self, step: ImageStep) -> NDArray[np.float32]:
        """The weights of a convolution of single channels, float32 (kernel², stride)."""
        every = range(step.weight.rows)
        raw = np.ascontiguousarray(self._weights.read(step.weight, every))
        weights = dequantized(raw, step.weight.type).reshape(step.weight.rows, -1).T
        self._weights.release(step.weight, every)
        return np.pad(weights, ((0, 0), (0, stride_of(step.weight.rows) - step.weight.rows)))

    def _packed(
        self, raw: NDArray[np.uint8], type: int, rows: int, cols: int, sources: NDArray[np.int32]
    ) -> PictureMatrix:
        layout = LaneLayout(type, self._lanes)
        missing = 0 if layout.format else (stride_of(cols) - cols) * layout.dtype.itemsize
        raw = np.pad(raw, ((0, len(sources) - rows), (0, missing)))
        stream = repack(self._pool, raw.reshape(-1), layout, sources, stride_of(cols))
        return PictureMatrix(layout, rows, stride_of(cols), stream)


def _transposed(raw: NDArray[np.uint8], type: int, cols: int) -> tuple[NDArray[np.uint8], int]:
    """The bytes of the columns of a matrix, of a float type."""
    matrix = dequantized(np.ascontiguousarray(raw).reshape(-1), type).reshape(-1, cols).T
    type = _F16 if type == _F16 else _F32
    matrix = np.ascontiguousarray(matrix, np.float16 if type == _F16 else np.float32)
    return matrix.view(np.uint8), type
