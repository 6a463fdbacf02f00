"""Numbers that kernels leave for the host, and those that the host leaves for kernels, without synchronizing with the
device. On CUDA they are in memory of the host that is mapped to the device; elsewhere they are copied."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray
from tinygrad import Device, Tensor, UOp, dtypes
from tinygrad.device import Buffer, BufferSpec
from tinygrad.dtype import DType

from engine.errors import DeviceHangsError
from engine.kernels.device_memory import overwrite, to_device

_EMPTY = -1
_POLLS = 2000  # between two looks at the clock
_TIMEOUT_S = 20.0


class TokenSlots:
    """Kernels write to `tensor`, int32 (n,), and `take` waits for what they write, which must not be -1."""

    def __init__(self, n: int) -> None:
        self.tensor, self._mapped = _mapped(n, dtypes.int32)

    def expect(self, i: int, n: int = 1) -> None:
        """Empties n places from index i on. Call it before the launch that fills them."""
        if self._mapped is not None:
            self._mapped[i : i + n] = _EMPTY

    def take(self, i: int) -> int:
        """Waits for the number at index i. Raises BackendError after 20 s."""
        if (mapped := self._mapped) is None:
            return int(self.tensor.numpy()[i])
        _wait_for(lambda: int(mapped[i]) != _EMPTY)
        return int(mapped[i])

    def take_all(self, i: int, n: int) -> NDArray[np.int32]:
        """Waits for n numbers from index i on, int32 (n,). Raises BackendError after 20 s."""
        if self._mapped is None:
            numbers: NDArray[np.int32] = self.tensor.numpy()
            return numbers[i : i + n]
        places = self._mapped[i : i + n]
        _wait_for(lambda: not (places == _EMPTY).any())
        return places.copy()


class HostRows:
    """Kernels write to `tensor`, float32 (n,), before the numbers of `TokenSlots` that the host waits for."""

    def __init__(self, n: int) -> None:
        self.tensor, self._mapped = _mapped(n, dtypes.float32)

    @property
    def is_mapped(self) -> bool:
        """Whether `read` does not wait for the kernels that run."""
        return self._mapped is not None

    def read(self, width: int, rows: Sequence[int]) -> NDArray[np.float32]:
        """These rows of `width` numbers, float32 (rows, width)."""
        numbers = self.tensor.uop.base.buffer.numpy() if self._mapped is None else self._mapped
        return np.asarray(numbers.view(np.float32).reshape(-1, width)[list(rows)])


class HostWords:
    """Words that kernels read from `tensor`, uint32 (n,), all ones at first. None that reads them may be running while
    the host writes."""

    def __init__(self, n: int) -> None:
        self.tensor, self._mapped = _mapped(n, dtypes.uint32)
        self.write(0, np.full(n, 0xFFFFFFFF, np.uint32))

    def write(self, i: int, words: NDArray[np.uint32]) -> None:
        """Writes words from index i on."""
        if self._mapped is None:
            overwrite(self.tensor, words, i)
        else:
            self._mapped[i : i + words.size] = words.view(np.int32)


def _mapped(n: int, dtype: DType) -> tuple[Tensor, NDArray[np.int32] | None]:
    """A tensor (n,) of 32-bit numbers, and the memory of the host that it is, if it is."""
    if Device.DEFAULT.split(":")[0] != "CUDA":
        return to_device(np.zeros(n, np.int32), dtype), None
    address = Device[Device.DEFAULT].allocator._alloc(n * 4, BufferSpec(host=True)).value
    mapped = np.frombuffer(memoryview((ctypes.c_int32 * n).from_address(address)), np.int32)
    buffer = Buffer(Device.DEFAULT, n, dtype, options=BufferSpec(external_ptr=address))
    return Tensor(UOp.from_buffer(buffer.allocate())), mapped


def _wait_for(is_there: Callable[[], bool]) -> None:
    deadline = 0.0
    while True:
        for _ in range(_POLLS):
            if is_there():
                return
        now = time.monotonic()
        deadline = deadline or now + _TIMEOUT_S
        if now > deadline:
            raise DeviceHangsError
