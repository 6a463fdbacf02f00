"""Device tensors filled from the host without kernels. Scheduling a copy, or compiling a kernel that fills memory,
would take longer than the copy itself."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray
from tinygrad import Device, Tensor, UOp, dtypes
from tinygrad.device import Buffer, LRUAllocator
from tinygrad.dtype import DType

_SMALL_BYTES = 1 << 20
_ALIGNMENT = 64  # numbers of 32 bits: 256 bytes, at which kernels may access a vector


def to_device(values: NDArray[np.generic], dtype: DType = dtypes.float32) -> Tensor:
    """A device tensor (n,) with the bytes of a host array, which are numbers of `dtype`."""
    buffer = Buffer(Device.DEFAULT, values.size, dtype).allocate()
    if _is_read_at_once(values):
        _copy(values, buffer)
    else:
        data = memoryview(bytearray(np.ascontiguousarray(values).tobytes()))
        buffer.copy_from(Buffer("PYTHON", values.size, dtype, opaque=data))
    return Tensor(UOp.from_buffer(buffer))


def device_zeros(n: int, dtype: DType = dtypes.float32) -> Tensor:
    """A device tensor (n,) of zeros."""
    if Device.DEFAULT.split(":")[0] != "CUDA":
        if n * dtype.itemsize <= _SMALL_BYTES:
            return to_device(np.zeros(n, f"u{dtype.itemsize}"), dtype)
        return Tensor.zeros(n, dtype=dtype).contiguous().realize()
    from tinygrad.runtime.autogen import cuda
    from tinygrad.runtime.ops_cuda import check

    buffer = Buffer(Device.DEFAULT, n, dtype).allocate()
    check(cuda.cuMemsetD8_v2(buffer._buf, 0, buffer.nbytes))
    return Tensor(UOp.from_buffer(buffer))


def unallocated(n: int, dtype: DType = dtypes.float32) -> Tensor:
    """A device tensor (n,) without memory, for kernels that are compiled and not run."""
    return Tensor(UOp.from_buffer(Buffer(Device.DEFAULT, n, dtype)))


def aligned(n: int) -> int:
    """The least multiple of what parts of buffers begin at, in numbers of 32 bits, that is not below n."""
    return -(-n // _ALIGNMENT) * _ALIGNMENT


def part_of(tensor: Tensor, first: int, n: int) -> Tensor:
    """n neighbouring numbers of a device tensor of 32-bit numbers, from `first` on, which is aligned."""
    part = tensor.uop.base.buffer.view(n, tensor.dtype, first * 4).ensure_allocated()
    return Tensor(UOp.from_buffer(part))


class DeviceCounts:
    """`arrays`: int32 device tensors of these sizes, zeros at first. They are parts of one buffer, so one copy reads
    them all."""

    def __init__(self, sizes: Sequence[int]) -> None:
        *self._firsts, total = accumulate(map(aligned, sizes), initial=0)
        self._sizes = sizes
        self.arrays: list[Tensor] = []
        if sizes:
            self._all = device_zeros(total, dtypes.int32)
            self.arrays = [part_of(self._all, *place) for place in zip(self._firsts, sizes, strict=True)]

    def read(self) -> list[NDArray[np.int32]]:
        """The numbers of each array, after all kernels that were launched before."""
        if not self._sizes:
            return []
        numbers = self._all.uop.base.buffer.numpy()
        return [numbers[first : first + n] for first, n in zip(self._firsts, self._sizes, strict=True)]


def free_cached_memory() -> None:
    """Gives back the memory that tinygrad keeps for later buffers of the same size."""
    allocator = Device[Device.DEFAULT].allocator
    if isinstance(allocator, LRUAllocator):
        allocator.free_cache()


def read_rows(tensor: Tensor, count: int, rows: Sequence[int]) -> NDArray[np.float32]:
    """These rows of a float32 device tensor of `count` rows, (rows, n), after all kernels that were launched before.
    Others are not copied."""
    whole = tensor.uop.base.buffer
    n = whole.size // count
    parts = [whole.view(n, whole.dtype, row * n * 4).ensure_allocated() for row in rows]
    return np.stack([part.numpy() for part in parts])


def overwrite(tensor: Tensor, values: NDArray[np.generic], first: int = 0) -> None:
    """Copies host numbers of the same size to a device tensor (n,), from its element `first` on. Kernels that are
    launched later see them, and those that run do not."""
    buffer, host = tensor.uop.base.buffer, np.ascontiguousarray(values).reshape(-1)
    if _is_read_at_once(host):
        _copy(host, buffer, first)
        return
    if host.size < buffer.size:
        buffer = buffer.view(host.size, tensor.dtype, host.itemsize * first).ensure_allocated()
    buffer.copy_from(Buffer("PYTHON", host.size, tensor.dtype, opaque=host.view(np.uint8).data))


def _is_read_at_once(values: NDArray[np.generic]) -> bool:
    """Whether `_copy` can copy them: CUDA's driver reads so much of ordinary memory before it returns. tinygrad's copy
    takes longer, and keeps pinned memory until the device is synchronized, which decode steps never do."""
    return Device.DEFAULT.split(":")[0] == "CUDA" and values.nbytes <= _SMALL_BYTES


def _copy(values: NDArray[np.generic], buffer: Buffer, first: int = 0) -> None:
    from tinygrad.runtime.autogen import cuda
    from tinygrad.runtime.ops_cuda import check

    host = np.ascontiguousarray(values)
    target = cuda.CUdeviceptr_v2(buffer._buf.value + host.itemsize * first)
    check(cuda.cuMemcpyHtoDAsync_v2(target, host.ctypes.data, host.nbytes, None))
