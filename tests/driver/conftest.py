import ctypes
import os
import threading
from pathlib import Path

import pytest
from tinygrad.device import BufferSpec, TinyELF
from tinygrad.dtype import dtypes
from tinygrad.helpers import Target

from engine.devices import kept_clang
from tests.driver.compiler import SimulatedCompiler, compiler
from tests.driver.simulate import simulated


@pytest.fixture(autouse=True)
def _has_compiler(request):
    if compiler() is None and request.path.stem not in ("test_abi", "test_rules"):
        pytest.skip("kernels need a clang from version 15 on (pip install ziglang)")


class Board:
    """A simulated Jetson and a device opened on it, with kernels in CUDA C. What is left open is closed."""

    def __init__(self, kernel):
        self.kernel, self.devices = kernel, []

    def open(self):
        from engine.tegra.device import NVDevice

        self.devices.append(NVDevice("NV"))
        return self.devices[-1]

    @property
    def gpu(self):
        return self.kernel.gpus[-1]

    def close(self):
        for device in self.devices:
            device.iface.device_fini()


@pytest.fixture
def board():
    with simulated() as kernel:
        board = Board(kernel)
        yield board
        board.close()
        assert kernel.leaks() == []


def held():
    """What this process holds: descriptors, shared mappings, threads. None of them a compiler's."""
    kept_clang.end()
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd" in line]
    return sorted(os.listdir("/proc/self/fd")), len(maps), threading.active_count()  # noqa: PTH208


_libs = {}


def program(device, name, parameters, body, threads=32, values=()):
    """A kernel from its parameters ("float* a, const int n") and body; `values` are the dtypes of its variables."""
    key = (name, parameters, body)
    source = f'extern "C" __global__ void __launch_bounds__({threads}) {name}({parameters}) {{\n{body}\n}}'
    if key not in _libs:
        _libs[key] = SimulatedCompiler().compile(source)
    signature = tuple((f"v{i}", i, dtype, ()) for i, dtype in enumerate(values))
    return device.runtime(TinyELF(_libs[key], name, Target("NV", arch="sm_87"), signature))


def buffer(device, values=b"", size=0):
    """A buffer with these bytes, or of a size."""
    made = device.allocator.alloc(size or len(values), BufferSpec(nolru=True))
    if values:
        device.allocator._copyin(made, memoryview(bytearray(values)))
    return made


def contents(device, made, kind=ctypes.c_uint32):
    out = bytearray(made.size)
    device.allocator._copyout(memoryview(out), made)
    return list((kind * (made.size // ctypes.sizeof(kind))).from_buffer(out))


INT = dtypes.int32
