"""From tensors of a file to weights on the device, checked on the way."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from tinygrad import Tensor, dtypes

from engine.errors import ModelFileError
from engine.formats.gguf import GGUF, TensorInfo
from engine.formats.quantization import FLOATS, QUANTIZED
from engine.formats.rope_order import half_split
from engine.kernels.quantized_matrix import QuantizedMatrix
from engine.model.config import ModelConfig


class Weights:
    """Reads a file's tensors by name and tells `report` how many bytes it has read so far."""

    def __init__(self, file: GGUF, config: ModelConfig, report: Callable[[int], None]) -> None:
        self.file, self.config = file, config
        self._report, self._bytes_read = report, 0

    def matrix(self, name: str, rows: int, cols: int) -> QuantizedMatrix:
        """The matrix `name` (rows, cols), repacked on the device. Raises ModelFileError."""
        raw, ggml_type = self.stored(name, rows, cols)
        return QuantizedMatrix(raw, ggml_type, rows, cols).realize()

    def type_of(self, name: str) -> int | None:
        """The ggml type of a tensor, None where the file has none of that name."""
        info = self.file.tensors.get(name)
        return info.type if info else None

    def stored(self, name: str, rows: int, cols: int) -> tuple[Tensor, int]:
        """The matrix `name` (rows, cols) as the file holds it, uint8 (bytes,), but for the order of query and
        key rows, with its ggml type. Raises ModelFileError."""
        data, ggml_type, interleaved = self.stored_bytes(name, rows, cols)
        raw = Tensor(data)
        return (
            half_split(raw.reshape(rows, -1), self.config.head_dim).flatten() if interleaved else raw
        ), ggml_type

    def stored_bytes(self, name: str, rows: int, cols: int) -> tuple[NDArray[np.uint8], int, bool]:
        """The matrix `name` (rows, cols) as the file holds it, uint8 (bytes,), and its kind. Raises
        ModelFileError."""
        kind = self.kind(name, rows, cols)
        data = self._raw(self._tensor(name, (rows, cols)))
        self._report(self._bytes_read)
        return data, *kind

    def kind(self, name: str, rows: int, cols: int) -> tuple[int, bool]:
        """The ggml type of the matrix `name` (rows, cols), and whether its rows are those of heads whose rotated
        pairs lie side by side. Raises ModelFileError."""
        info = self._tensor(name, (rows, cols))
        if info.type not in QUANTIZED and info.type not in FLOATS:
            known = ", ".join(["F32", "F16", "BF16", *(format.name for format in QUANTIZED.values())])
            raise ModelFileError(
                f"{self.file.path.name} holds {name} as {info.type_name}, which orin-chat does not run yet.",
                f"Choose a file with other quantization types: {known}.",
            )
        interleaved = self.config.interleaved_rope and name.endswith(("attn_q.weight", "attn_k.weight"))
        return info.type, interleaved

    def vector(self, name: str, size: int) -> Tensor | None:
        """The vector `name`, float32 (size,), or None where the file has none. Raises ModelFileError."""
        return self.required_vector(name, size) if name in self.file.tensors else None

    def required_vector(self, name: str, size: int) -> Tensor:
        return Tensor(self.floats(name, size)).realize()

    def floats(self, name: str, size: int) -> NDArray[np.float32]:
        """The vector `name`, float32 (size,), on the host. Raises ModelFileError."""
        info = self._tensor(name, (size,))
        if info.type not in FLOATS:
            raise ModelFileError(
                f"{self.file.path.name} holds {name} as {info.type_name} where floats belong.",
                "It is damaged.",
            )
        data = self._raw(info)
        if FLOATS[info.type] == dtypes.bfloat16:  # a float32's upper half
            return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        return data.view(np.float32 if info.type == 0 else np.float16).astype(np.float32)

    def _tensor(self, name: str, shape: tuple[int, ...]) -> TensorInfo:
        info = self.file.tensors.get(name)
        if info is None or info.shape != shape:
            found = "has no" if info is None else f"has a shape of {info.shape} for"
            raise ModelFileError(
                f"{self.file.path.name} {found} {name}; the model needs it as {shape}.",
                "The file is damaged or of a variant that orin-chat does not run; get another copy.",
            )
        return info

    def _raw(self, info: TensorInfo) -> NDArray[np.uint8]:
        self._bytes_read += info.n_bytes
        # tinygrad's CUDA device copies only from memory that may be written, even though it just reads it
        place = (ctypes.c_uint8 * info.n_bytes).from_address(info.data.ctypes.data)
        return np.ctypeslib.as_array(place)
