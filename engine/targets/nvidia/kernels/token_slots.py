"""Numbers that kernels leave for the host, which reads them without synchronizing with the device."""

from __future__ import annotations

import ctypes
import time

import numpy as np
from numpy.typing import NDArray
from tinygrad import Device, Tensor, UOp, dtypes
from tinygrad.device import Buffer, BufferSpec

from engine.errors import BackendError

_EMPTY = -1
_POLLS = 2000  # between two looks at the clock
_TIMEOUT_S = 20.0


class TokenSlots:
    """Kernels write to `tensor`, int32 (n,), and `take(i)` waits for what they write at index i, which must not be
    negative. On CUDA the memory is host memory mapped to the device; elsewhere it is copied."""

    def __init__(self, n: int) -> None:
        self._mapped: NDArray[np.int32] | None = None
        if Device.DEFAULT.split(":")[0] == "CUDA":
            allocator = Device[Device.DEFAULT].allocator
            address = allocator._alloc(n * 4, BufferSpec(host=True)).value
            self._mapped = np.ctypeslib.as_array((ctypes.c_int32 * n).from_address(address))
            buffer = Buffer(Device.DEFAULT, n, dtypes.int32, options=BufferSpec(external_ptr=address))
            self.tensor = Tensor(UOp.from_buffer(buffer.allocate()))
        else:
            self.tensor = Tensor(np.zeros(n, np.int32)).realize()

    def expect(self, i: int) -> None:
        """Empties index i. Call it before the launch that fills it."""
        if self._mapped is not None:
            self._mapped[i] = _EMPTY

    def take(self, i: int) -> int:
        """Waits for the number at index i. Raises BackendError after 20 s."""
        if self._mapped is None:
            return int(self.tensor.numpy()[i])
        deadline = 0.0
        while True:
            for _ in range(_POLLS):
                if (value := int(self._mapped[i])) != _EMPTY:
                    return value
            now = time.monotonic()
            deadline = deadline or now + _TIMEOUT_S
            if now > deadline:
                raise BackendError(
                    "The GPU does not answer.", "Restart the engine; see the system's log for why."
                )
