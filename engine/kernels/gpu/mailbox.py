"""Numbers that a device leaves for the host, read without asking the device to stop."""

from __future__ import annotations

import ctypes
import time

import numpy as np
from numpy.typing import NDArray
from tinygrad import Device, Tensor, UOp, dtypes
from tinygrad.device import Buffer, BufferSpec
from tinygrad.dtype import DType

from engine.errors import BackendError

_EMPTY = -1
_PATIENCE_S = 20.0
_SMALL_BYTES = 1 << 20


class Mailbox:
    """`tensor`, int32 (n,), is written by kernels; `take(i)` waits for what they write at i, which must not be
    negative. On CUDA the memory is the host's own, mapped to the device; elsewhere it is copied."""

    def __init__(self, n: int) -> None:
        self._mapped: NDArray[np.int32] | None = None
        if Device.DEFAULT.split(":")[0] == "CUDA":
            allocator = Device[Device.DEFAULT].allocator
            address = allocator._alloc(n * 4, BufferSpec(host=True)).value
            self._mapped = np.ctypeslib.as_array((ctypes.c_int32 * n).from_address(address))
            there = Buffer(Device.DEFAULT, n, dtypes.int32, options=BufferSpec(external_ptr=address))
            self.tensor = Tensor(UOp.from_buffer(there.allocate()))
        else:
            self.tensor = Tensor(np.zeros(n, np.int32)).realize()

    def expect(self, i: int) -> None:
        """Empties place i: to be called before the launch that fills it."""
        if self._mapped is not None:
            self._mapped[i] = _EMPTY

    def take(self, i: int) -> int:
        """Raises BackendError when nothing comes."""
        if self._mapped is None:
            return int(self.tensor.numpy()[i])
        deadline = 0.0
        while True:
            for _ in range(2000):
                if (value := int(self._mapped[i])) != _EMPTY:
                    return value
            now = time.monotonic()
            deadline = deadline or now + _PATIENCE_S
            if now > deadline:
                raise BackendError(
                    "The GPU does not answer.", "Restart the engine; see the system's log for why."
                )


def sent(values: NDArray[np.generic], dtype: DType = dtypes.float32) -> Tensor:
    """A device tensor (n,) of what the host has, which is of `dtype` in memory. To schedule a copy, or to compile a
    kernel that fills it, would take longer than to copy."""
    data = memoryview(bytearray(np.ascontiguousarray(values).tobytes()))
    there = Buffer(Device.DEFAULT, values.size, dtype).allocate()
    there.copy_from(Buffer("PYTHON", values.size, dtype, opaque=data))
    return Tensor(UOp.from_buffer(there))


def zeros(n: int, dtype: DType = dtypes.float32) -> Tensor:
    """A device tensor (n,) of zeros, for which CUDA needs no kernel."""
    if Device.DEFAULT.split(":")[0] != "CUDA":
        if n * dtype.itemsize <= _SMALL_BYTES:
            return sent(np.zeros(n, f"u{dtype.itemsize}"), dtype)
        return Tensor.zeros(n, dtype=dtype).contiguous().realize()
    from tinygrad.runtime.autogen import cuda
    from tinygrad.runtime.ops_cuda import check

    there = Buffer(Device.DEFAULT, n, dtype).allocate()
    check(cuda.cuMemsetD8_v2(there._buf, 0, there.nbytes))
    return Tensor(UOp.from_buffer(there))


def send(tensor: Tensor, values: NDArray[np.int32] | NDArray[np.float32]) -> None:
    """Fills a device tensor (n,) from the host, numbers of 32 bits; kernels launched later see it."""
    source = Buffer("PYTHON", values.size, tensor.dtype, opaque=memoryview(bytearray(values.tobytes())))
    tensor.uop.base.buffer.copy_from(source)
