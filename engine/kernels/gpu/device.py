"""What schedules need to know of the GPU at hand."""

from __future__ import annotations

import ctypes
import functools

from tinygrad import Device

_USUAL = {"sm_87": 16}  # multiprocessors of a chip that comes in one size: AGX Orin 64 GB
_MULTIPROCESSOR_COUNT = 16  # CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT in cuda.h


def capability() -> str:
    """The compute capability of the default device, as in "sm_90"."""
    return str(Device[Device.DEFAULT].renderer.target.arch)


def tensor_cores() -> bool:
    """Whether the default device has those that kernels are written for."""
    return int(capability()[3:]) >= 80


@functools.cache
def multiprocessors() -> int:
    """How many multiprocessors the default device has; a guess where it does not say."""
    device = Device[Device.DEFAULT]
    if Device.DEFAULT.split(":")[0] != "CUDA":
        # a Jetson's (engine.tegra), which has fewer in a mode that saves power
        on_a_jetson = getattr(getattr(device, "iface", None), "multiprocessors", 0)
        return on_a_jetson or _USUAL.get(capability(), 64)
    import tinygrad.runtime.autogen.cuda as cuda

    cuda.cuDeviceGetAttribute(ctypes.byref(n := ctypes.c_int()), _MULTIPROCESSOR_COUNT, device.cu_device)
    return max(1, n.value)
