"""What encoders of pictures on a CPU consist of: their memory, and products of rows with what comes before them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType

from engine.description.encoder_input import Floats
from engine.description.sublayers import Vector
from engine.description.vision import Activation, Limits, Norm, VisionSpec
from engine.loading.weights import FileWeights
from engine.targets.cpu.kernels import memory
from engine.targets.cpu.kernels.activations import buffer_type
from engine.targets.cpu.kernels.kernel_sequence import CompiledSequence, KernelSequence
from engine.targets.cpu.kernels.lanes import MOST_TILES, register_lanes
from engine.targets.cpu.kernels.patches import FIRST, Preparation, RowNorm, prepare, stride_of
from engine.targets.cpu.kernels.product import product, shape_of, span_of
from engine.targets.cpu.kernels.step_state import TILES
from engine.targets.cpu.kernels.stream_size import UNIT
from engine.targets.cpu.kernels.thread_pool import default_pool
from engine.targets.cpu.picture_chunks import most_rows
from engine.targets.cpu.picture_weights import PictureMatrix, PictureWeights


@dataclass
class Rows:
    """Rows of patches in memory, float32 (rows, stride): those of a chunk, or of a `whole` picture."""

    data: Tensor
    cols: int
    whole: bool = False


class PictureKernels:
    """The memory of an encoder, and the kernels that its parts share. Rows go through them in chunks (`run`)."""

    def __init__(self, weights: FileWeights, spec: VisionSpec) -> None:
        self.pool, self.lanes = default_pool(), register_lanes()
        self.vectors = {vector: weights.vector(vector) for vector in spec.vectors()}
        self.weights = PictureWeights(weights, self.pool, self.lanes)
        self.parts, self.most_rows = 4 * self.pool.count, most_rows(spec, self.lanes)
        self.rounds_attention = not spec.is_float32
        self.state = memory.zeros(FIRST + 1, dtypes.int32)
        self._buffers: dict[tuple[str, int, DType], Tensor] = {}
        self._sizes: dict[tuple[int, ...], Tensor] = {}

    @property
    def buffers(self) -> list[Tensor]:
        """The memory of all rows and vectors so far, without that of weights."""
        return list(self._buffers.values())

    def sequence(self) -> KernelSequence:
        return KernelSequence(self.pool)

    def run(self, sequence: CompiledSequence, chunk: range) -> None:
        state = memory.view(self.state)
        state[TILES], state[FIRST] = len(chunk) // self.lanes, chunk.start
        sequence()

    def prepare(
        self,
        sequence: KernelSequence,
        matrix: PictureMatrix,
        rows: Rows,
        others: Rows | Norm | None = None,
        *,
        activation: Activation | None = None,
        limits: tuple[Limits | None, Limits | None, Limits | None] = (None, None, None),
    ) -> None:
        """The activations of a product with `matrix`: see `Preparation`."""
        norm, gated = (others, None) if isinstance(others, Norm) else (None, others)
        clamps = (bool(limits[0]), bool(limits[1]), bool(limits[2]))
        how = Preparation(matrix.inputs, rows.whole, row_norm(norm), activation, gated is not None, clamps)
        sequence.add(
            prepare(how, self.lanes), *self.activations(matrix), self.row_sizes(rows.cols), self.state,
            rows.data, *([gated.data] if gated else []), *self.vectors_of(norm), *self.limits(limits),
            parts=self.parts,
        )  # fmt: skip

    def product(
        self,
        sequence: KernelSequence,
        bias: Vector | None,
        matrix: PictureMatrix,
        out: Tensor,
        first: int = 0,
        width: int = 0,
        concurrent: bool = False,
    ) -> None:
        """`first` and `width`: the column of the output at which the result begins, and the columns of the output."""
        shape = shape_of(matrix.stride, matrix.cols, matrix.layout, False, first, width or matrix.stride)
        added = np.zeros(width or matrix.stride, np.float32)
        if bias:
            added[first : first + bias.size] = self.vectors[bias]
        kernel = product(matrix.layout, self.lanes, span_of(matrix.cols), rounded=matrix.is_rounded)
        sequence.add(
            kernel, out, self.ints(*shape), self.state, *self.activations(matrix),
            memory.array(added, dtypes.float32), matrix.stream, parts=2 * self.parts, concurrent=concurrent,
        )  # fmt: skip

    # --- memory ------------------------------------------------------------------------------------------

    def whole(self, name: str, cols: int, type: DType = dtypes.float32) -> Tensor:
        """Memory for all patches of the largest picture, of which a picture uses as much as it needs."""
        return self.buffer(name, self.most_rows * cols, type)

    def chunk(self, name: str, cols: int) -> Tensor:
        """Memory for the patches of a chunk. Rows of different lengths have different memory, so that the zeros after
        their ends stay."""
        return self.buffer(name, MOST_TILES * self.lanes * stride_of(cols))

    def activations(self, matrix: PictureMatrix) -> list[Tensor]:
        buffers = []
        for name in matrix.inputs:
            type, columns = buffer_type(name)
            n = MOST_TILES * self.lanes * matrix.cols // columns
            buffers.append(self.buffer(name, n, type))
        return buffers

    def buffer(self, name: str, n: int, type: DType = dtypes.float32) -> Tensor:
        if (name, n, type) not in self._buffers:
            self._buffers[name, n, type] = memory.zeros(n, type)
        return self._buffers[name, n, type]

    def row_sizes(self, cols: int) -> Tensor:
        return self.ints(stride_of(cols) // UNIT, cols)

    def ints(self, *values: int) -> Tensor:
        if values not in self._sizes:
            self._sizes[values] = memory.array(np.array(values), dtypes.int32)
        return self._sizes[values]

    def vectors_of(self, norm: Norm | None) -> list[Tensor]:
        of = (norm.weight, norm.bias) if norm else ()
        return [memory.array(self.padded(self.vectors[v]), dtypes.float32) for v in of if v]

    def padded(self, vector: Floats) -> Floats:
        return np.pad(vector, (0, stride_of(len(vector)) - len(vector)))

    def limits(self, limits: Sequence[Limits | None]) -> list[Tensor]:
        """The memory of limits, none if there are none."""
        if not any(limits):
            return []
        values = np.array([of or (-np.inf, np.inf) for of in limits], np.float32)
        return [memory.array(values.repeat(self.lanes), dtypes.float32)]


def row_norm(norm: Norm | None) -> RowNorm | None:
    if norm is None:
        return None
    return RowNorm(norm.eps, norm.weight is not None, norm.bias is not None, norm.centred)
