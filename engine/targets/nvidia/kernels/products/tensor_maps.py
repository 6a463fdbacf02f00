"""Descriptors of matrices for copies of tiles (`engine.fixes.tensor_copies`), which CUDA's driver makes (CUDA driver
API, "Tensor Map Object Management")."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
from tinygrad import Tensor, dtypes

from engine.devices import cuda_driver
from engine.errors import BackendError
from engine.kernels.device_memory import to_device
from engine.targets.nvidia.kernels.weights.matrix_bytes import UNIT, units_of

MAP_WORDS = 32
_ALIGNMENT = 64  # bytes
# CU_TENSOR_MAP_… in cuda.h
_FLOAT16 = 6
_NOT_INTERLEAVED = 0
_SWIZZLED = 3  # rows of 128 bytes
_PROMOTED = 2  # the same
_ZEROS = 0


def described(address: int, sizes: Sequence[int], strides: Sequence[int], tile: Sequence[int]) -> bytes:
    """The descriptor of a float16 tensor at an address, its innermost dimension first: its sizes and those of a tile,
    and the strides of the other dimensions, bytes. Raises BackendError if the driver refuses it."""
    n, memory = len(sizes), ctypes.create_string_buffer(MAP_WORDS * 4 + _ALIGNMENT)
    place = -(-ctypes.addressof(memory) // _ALIGNMENT) * _ALIGNMENT
    longs, words = ctypes.c_uint64 * n, ctypes.c_uint32 * n
    steps = (ctypes.c_uint64 * (n - 1))(*strides)
    driver = cuda_driver.library()
    assert driver is not None
    failed = driver.cuTensorMapEncodeTiled(
        ctypes.c_void_p(place), _FLOAT16, n, ctypes.c_void_p(address), longs(*sizes), steps, words(*tile),
        words(*[1] * n), _NOT_INTERLEAVED, _SWIZZLED, _PROMOTED, _ZEROS,
    )  # fmt: skip
    if failed:
        raise BackendError(f"CUDA's driver does not describe a matrix of {sizes}: error {failed}.")
    return ctypes.string_at(place, MAP_WORDS * 4)


def address_of(tensor: Tensor) -> int:
    """Where a tensor lies in the memory of a GPU that CUDA runs."""
    return int(tensor.uop.base.buffer._buf.value)


def operand_maps(
    weights: Tensor, rows: int, x: Tensor, tokens: int, cols: int, tile: tuple[int, int]
) -> bytes:
    """The descriptors of both operands of `copied_matmul`, the matrix's rows in pairs. `tile`: its rows and tokens."""
    row, (of_rows, of_tokens) = units_of(cols) * UNIT, tile
    sizes, strides = (row, 8, 2, rows // 16), (4 * row, 2 * row, 32 * row)
    left = described(address_of(weights), sizes, strides, (UNIT, 8, 2, of_rows // 16))
    return left + described(address_of(x), (row, tokens), (2 * row,), (UNIT, of_tokens))


def on_device(maps: bytes) -> Tensor:
    """The words of descriptors, uint32."""
    return to_device(np.frombuffer(maps, np.uint32), dtypes.uint32)
