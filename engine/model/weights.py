"""The weights of a model file: the bytes of its matrices and the floats of its vectors."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray
from tinygrad import dtypes

from engine.errors import ModelFileError
from engine.formats.gguf import GGUF, TensorInfo, damaged, printable
from engine.formats.quantization import FLOATS, QUANTIZED
from engine.model.spec import ModelSpec, Vector, Weight


class Weights:
    """Reads a model's weights from its file, and reports the number of bytes read so far with every matrix."""

    def __init__(self, file: GGUF, spec: ModelSpec, report: Callable[[int], None]) -> None:
        """Raises ModelFileError if a matrix is of a type that the engine does not run."""
        self.file, self.spec = file, spec
        self._report, self._bytes_read = report, 0
        for weight in spec.weights():
            if weight.type not in QUANTIZED and weight.type not in FLOATS:
                types = ", ".join(["F32", "F16", "BF16", *(format.name for format in QUANTIZED.values())])
                raise ModelFileError(
                    f"{printable(file.path.name)} holds {weight.tensor} as "
                    f"{file.tensors[weight.tensor].type_name}, which orin-chat does not run.",
                    f"Choose a file with other quantization types: {types}.",
                )

    def matrix_bytes(self, weight: Weight) -> NDArray[np.uint8]:
        """The bytes of a matrix in the file, uint8 (weight.n_bytes,), not copied."""
        data = self._data(self.file.tensors[weight.tensor], weight.first * weight.row_bytes, weight.n_bytes)
        self._bytes_read += weight.n_bytes
        self._report(self._bytes_read)
        return data

    def release(self, weight: Weight) -> None:
        """Removes the pages of a matrix's tensor from memory, once its bytes have been copied."""
        self.file.tensors[weight.tensor].release()

    def vector(self, vector: Vector) -> NDArray[np.float32]:
        """float32 (vector.size,). Raises ModelFileError."""
        info = self.file.tensors[vector.tensor]
        if info.type not in FLOATS:
            raise damaged(self.file.path, f"it holds {vector.tensor} as {info.type_name}, not as floats")
        data = self._data(info, 0, info.n_bytes)
        if FLOATS[info.type] == dtypes.bfloat16:  # the upper half of a float32
            values = (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        else:
            values = data.view(np.float32 if info.type == 0 else np.float16).astype(np.float32)
        values = values[vector.first : vector.first + vector.size]
        if vector.order:
            values = vector.order.apply(values)
        return values * np.float32(vector.factor)

    def joined_vectors(
        self, parts: Sequence[tuple[Vector | None, int]], default: float
    ) -> NDArray[np.float32] | None:
        """Vectors of these sizes one after another, float32 (sum of sizes,); `default` in place of those that are None.
        None if all are. Raises ModelFileError."""
        if not any(vector for vector, _ in parts):
            return None
        return np.concatenate(
            [self.vector(vector) if vector else np.full(size, default, np.float32) for vector, size in parts]
        )

    @staticmethod
    def _data(info: TensorInfo, start: int, n_bytes: int) -> NDArray[np.uint8]:
        # tinygrad's CUDA device copies only from memory that is marked as writable, though it just reads it.
        buffer = (ctypes.c_uint8 * n_bytes).from_address(info.data.ctypes.data + start)
        return np.ctypeslib.as_array(buffer)
