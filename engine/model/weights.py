"""The tensors of a model file by name, with their shapes and types checked."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray
from tinygrad import dtypes

from engine.errors import ModelFileError
from engine.formats.gguf import GGUF, TensorInfo, damaged, printable
from engine.formats.quantization import FLOATS, QUANTIZED
from engine.model.config import ModelConfig


class Weights:
    """Reads tensors from a file, and reports the number of bytes read so far with every matrix."""

    def __init__(self, file: GGUF, config: ModelConfig, report: Callable[[int], None]) -> None:
        self.file, self.config = file, config
        self._report, self._bytes_read = report, 0

    def __contains__(self, name: str) -> bool:
        return name in self.file.tensors

    def matrix_type(self, name: str, rows: int, cols: int) -> tuple[int, bool]:
        """The ggml type of a matrix (rows, cols), and whether its rows are in the order of interleaved rotary pairs
        (`formats.rope_order`). Raises ModelFileError."""
        info = self._tensor(name, (rows, cols))
        if info.type not in QUANTIZED and info.type not in FLOATS:
            types = ", ".join(["F32", "F16", "BF16", *(format.name for format in QUANTIZED.values())])
            raise ModelFileError(
                f"{self._file_name} holds {name} as {info.type_name}, which orin-chat does not run.",
                f"Choose a file with other quantization types: {types}.",
            )
        interleaved = self.config.interleaved_rope and name.endswith(("attn_q.weight", "attn_k.weight"))
        return info.type, interleaved

    def matrix_bytes(self, name: str, rows: int, cols: int) -> NDArray[np.uint8]:
        """The bytes of a matrix (rows, cols) in the file, uint8 (bytes,), not copied. Raises ModelFileError."""
        data = self._data(self._tensor(name, (rows, cols)))
        self._report(self._bytes_read)
        return data

    def release(self, name: str) -> None:
        """Removes a tensor's pages from memory, once its bytes have been copied."""
        self.file.tensors[name].release()

    def vector(self, name: str, size: int) -> NDArray[np.float32]:
        """A vector, float32 (size,). Raises ModelFileError."""
        info = self._tensor(name, (size,))
        if info.type not in FLOATS:
            raise damaged(self.file.path, f"it holds {name} as {info.type_name}, not as floats")
        data = self._data(info)
        if FLOATS[info.type] == dtypes.bfloat16:  # the upper half of a float32
            return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        return data.view(np.float32 if info.type == 0 else np.float16).astype(np.float32)

    def joined_vectors(self, parts: Sequence[tuple[str, int]], default: float) -> NDArray[np.float32] | None:
        """Vectors (name, size) one after another, float32 (sum of sizes,); `default` in place of those that the file
        does not have. None if it has none of them. Raises ModelFileError."""
        if not any(name in self for name, _ in parts):
            return None
        return np.concatenate(
            [
                self.vector(name, size) if name in self else np.full(size, default, np.float32)
                for name, size in parts
            ]
        )

    @property
    def _file_name(self) -> str:
        return printable(self.file.path.name)

    def _tensor(self, name: str, shape: tuple[int, ...]) -> TensorInfo:
        info = self.file.tensors.get(name)
        if info is None or info.shape != shape:
            problem = f"has no {name}" if info is None else f"has {name} with the shape {info.shape}"
            raise ModelFileError(
                f"{self._file_name} {problem}; the model needs it with the shape {shape}.",
                "The file is damaged, or of a variant that orin-chat does not run. Get another copy.",
            )
        return info

    def _data(self, info: TensorInfo) -> NDArray[np.uint8]:
        self._bytes_read += info.n_bytes
        # tinygrad's CUDA device copies only from memory that is marked as writable, though it just reads it.
        buffer = (ctypes.c_uint8 * info.n_bytes).from_address(info.data.ctypes.data)
        return np.ctypeslib.as_array(buffer)
