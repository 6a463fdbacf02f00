"""Properties of the default GPU by which kernels and their schedules are chosen."""

from __future__ import annotations

import ctypes
import functools

from tinygrad import Device

_KNOWN_COUNTS = {"sm_87": 16}  # multiprocessors by compute capability, for Tegra chips: AGX Orin 64 GB
_DEFAULT_COUNT = 64
_MULTIPROCESSOR_COUNT = 16  # CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT in cuda.h


def capability() -> str:
    """The compute capability that kernels are made for, as "sm_90": the GPU's own, unless DEV names another
    (`engine.backends`)."""
    return str(Device[Device.DEFAULT].renderer.target.arch)


def spills_early() -> bool:
    """Whether kernels that take nearly all registers spill some: for such a chip the assembler loads more ahead than
    for later ones (`python -m tools.measure chip_kernels`)."""
    return int(capability()[3:]) < 90


def stands_in() -> bool:
    """Whether the GPU runs what another one of an earlier compute capability would run."""
    own = Device[Device.DEFAULT].arch
    return own is not None and own != capability()


def launches_early() -> bool:
    """Whether a kernel can be launched before the one before has ended (`engine.fixes.early_launch`)."""
    return Device.DEFAULT.split(":")[0] == "CUDA" and int(capability()[3:]) >= 90


def shared_limit() -> int:
    """The most bytes of shared memory of a block: what every GPU with these kernels has, where tinygrad can ask for
    more than 48 KB (`engine.fixes.dynamic_shared`)."""
    return (48 if Device.DEFAULT.split(":")[0] == "NV" else 99) << 10


@functools.cache
def multiprocessors() -> int:
    """The number of multiprocessors; a guess if the device does not report it, or stands in for another."""
    device = Device[Device.DEFAULT]
    if stands_in():
        return _KNOWN_COUNTS.get(capability(), _DEFAULT_COUNT)
    if Device.DEFAULT.split(":")[0] != "CUDA":
        # On a Jetson (engine.tegra) some power modes switch multiprocessors off.
        reported = getattr(getattr(device, "iface", None), "multiprocessors", 0)
        return reported or _KNOWN_COUNTS.get(capability(), _DEFAULT_COUNT)
    import tinygrad.runtime.autogen.cuda as cuda

    cuda.cuDeviceGetAttribute(ctypes.byref(n := ctypes.c_int()), _MULTIPROCESSOR_COUNT, device.cu_device)
    return max(1, n.value)
