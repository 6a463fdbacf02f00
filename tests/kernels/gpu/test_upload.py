"""Parts of files on their way to the device."""

import ctypes
from itertools import count
from threading import Lock
from types import SimpleNamespace

import numpy as np
import pytest
import tinygrad.runtime.autogen as autogen

from engine.errors import ModelFileError
from engine.targets.nvidia.kernels.weights import upload as module
from engine.targets.nvidia.kernels.weights.upload import Part, upload
from tests.kernels.gpu.buffers import part_of

SLOT = 1000
SIZES = (2500, 1, 1000, 7, 12345, 0, 999)


class Driver:
    """CUDA's calls for copies, on the host's memory. Copies are done late, when their event is waited for."""

    CUevent, CUdeviceptr_v2, CU_EVENT_DISABLE_TIMING = ctypes.c_uint64, ctypes.c_uint64, 2

    def __init__(self):
        self.memory, self.copies, self.events, self.numbers = {}, [], {}, count()
        self.copying = Lock()  # a copy that two threads did could end after its slot has been filled again

    def cuMemHostAlloc(self, address, n, flags):
        memory = ctypes.create_string_buffer(n)
        address._obj.value = ctypes.addressof(memory)
        self.memory[address._obj.value] = memory
        return 0

    def cuMemFreeHost(self, address):
        del self.memory[address.value]
        return 0

    def cuEventCreate(self, event, flags):
        event._obj.value = next(self.numbers)
        return 0

    def cuMemcpyHtoDAsync_v2(self, target, source, n, stream):
        self.copies.append((target.value, source.value, n))
        return 0

    def cuEventRecord(self, event, stream):
        self.events[event.value] = len(self.copies)
        return 0

    def cuEventSynchronize(self, event):
        with self.copying:
            for i in range(self.events.get(event.value, 0)):
                if self.copies[i]:
                    ctypes.memmove(*self.copies[i])
                    self.copies[i] = None
        return 0

    def cuCtxSynchronize(self):
        self.events[-1] = len(self.copies)
        return self.cuEventSynchronize(SimpleNamespace(value=-1))

    cuCtxSetCurrent = cuEventDestroy_v2 = lambda self, _: 0


@pytest.fixture
def driver(monkeypatch):
    driver = Driver()
    monkeypatch.setattr(autogen, "cuda", driver, raising=False)

    class Devices(dict):
        DEFAULT = "CUDA"

    monkeypatch.setattr(module, "Device", Devices(CUDA=SimpleNamespace(context=1)))
    monkeypatch.setattr(module, "_SLOT_BYTES", SLOT)
    return driver


def test_parts_of_any_size_arrive_whole_and_pinned_memory_is_freed(driver):
    parts = [np.random.default_rng(n).integers(0, 256, n, np.uint8) for n in SIZES]
    out = [np.zeros(n, np.uint8) for n in SIZES]
    uploaded = upload(map(part_of, parts))
    for array in out:
        buffer = SimpleNamespace(nbytes=array.size, _buf=SimpleNamespace(value=array.ctypes.data))
        uploaded.next(buffer)
    uploaded.close()
    assert all(map(np.array_equal, parts, out))
    assert not driver.memory


def test_a_file_that_cannot_be_read_ends_it_and_frees_pinned_memory(driver):
    def read(start, out):
        raise ModelFileError("cut short")

    uploaded = upload([Part(5 * SLOT, read)])
    with pytest.raises(ModelFileError):
        uploaded.next(SimpleNamespace(nbytes=5 * SLOT, _buf=SimpleNamespace(value=0)))
    uploaded.close()
    assert not driver.memory
