"""Device tensors filled from the host without kernels. Scheduling a copy, or compiling a kernel that fills memory,
would take longer than the copy itself."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from tinygrad import Device, Tensor, UOp, dtypes
from tinygrad.device import Buffer
from tinygrad.dtype import DType

_SMALL_BYTES = 1 << 20


def to_device(values: NDArray[np.generic], dtype: DType = dtypes.float32) -> Tensor:
    """A device tensor (n,) with the bytes of a host array, which are numbers of `dtype`."""
    data = memoryview(bytearray(np.ascontiguousarray(values).tobytes()))
    buffer = Buffer(Device.DEFAULT, values.size, dtype).allocate()
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


def overwrite(tensor: Tensor, values: NDArray[np.int32] | NDArray[np.float32]) -> None:
    """Copies host numbers of 32 bits to a device tensor (n,). Kernels that are launched later see them."""
    source = Buffer("PYTHON", values.size, tensor.dtype, opaque=memoryview(bytearray(values.tobytes())))
    tensor.uop.base.buffer.copy_from(source)
