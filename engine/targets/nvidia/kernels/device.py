"""Properties of the default GPU by which kernels and their schedules are chosen."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass, replace

from tinygrad import Device

from engine.kernels.target import renderer
from engine.targets.nvidia.kernels.rates import Rates, estimated, kept_rates

_KNOWN_COUNTS = {"sm_87": 16}  # multiprocessors by compute capability, for Tegra chips: AGX Orin 64 GB
_DEFAULT_COUNT = 64
_WARPGROUPS = "sm_90"  # the compute capability with `engine.fixes.warpgroup_products`
# CU_DEVICE_ATTRIBUTE_… in cuda.h: MULTIPROCESSOR_COUNT, CLOCK_RATE and MEMORY_CLOCK_RATE in kHz,
# GLOBAL_MEMORY_BUS_WIDTH in bits, MAX_THREADS_PER_MULTIPROCESSOR
_MULTIPROCESSOR_COUNT, _CLOCK, _MEMORY_CLOCK, _BUS_BITS, _THREADS = 16, 13, 36, 37, 39
REGISTERS = 65536  # of a multiprocessor
_COPY_SHARE = 0.83  # of the memory's bandwidth, which a copy reaches (measured on an H200)


@dataclass(frozen=True)
class Chip:
    """What the cut of a product depends on: the compute capability, as "sm_90", the multiprocessors, the warps that
    each holds, whether a kernel can be launched before the one before has ended, the GPU's own rates, None if nothing
    is known of these, and whether warpgroups compute products (`engine.fixes.warpgroup_products`)."""

    capability: str = ""
    multiprocessors: int = _DEFAULT_COUNT
    warps: int = 64
    launches_early: bool = False
    own_rates: Rates | None = None
    has_warpgroups: bool = False

    @property
    def rates(self) -> Rates:
        return self.own_rates or estimated(self.multiprocessors)


@functools.cache
def chip() -> Chip:
    """The default GPU. Its rates are those that were measured on it (`calibration`), or what the driver tells."""
    known = Chip(
        capability(), multiprocessors(), launches_early=launches_early(), has_warpgroups=_has_warpgroups()
    )
    if not is_own_cuda():
        return known
    kept = kept_rates(known.multiprocessors)
    rates = kept.rates if kept else told_rates()
    return replace(known, warps=_attribute(_THREADS) // 32 or known.warps, own_rates=rates)


def told_rates() -> Rates:
    """The rates of the default GPU, which CUDA runs, as they follow from what the driver tells."""
    gbps = 2 * _attribute(_MEMORY_CLOCK) * _attribute(_BUS_BITS) / 8 / 1e6 * _COPY_SHARE
    return estimated(multiprocessors(), gbps, _attribute(_CLOCK) / 1e6)


def _attribute(number: int) -> int:
    """An attribute of the default GPU, which CUDA runs; 0 if the driver does not tell it."""
    import tinygrad.runtime.autogen.cuda as cuda

    n = ctypes.c_int()
    failed = cuda.cuDeviceGetAttribute(ctypes.byref(n), number, Device[Device.DEFAULT].cu_device)
    return 0 if failed else n.value


def capability() -> str:
    """The compute capability that kernels are made for, as "sm_90": the GPU's own, unless DEV names another
    (`engine.backends`)."""
    return str(renderer().target.arch)


def spills_early() -> bool:
    """Whether kernels that take nearly all registers spill some: for such a chip the assembler loads more ahead than
    for later ones (`python -m tools.measure chip_kernels`)."""
    return int(capability()[3:]) < 90


def _has_warpgroups() -> bool:
    """Whether warpgroups compute products, for which CUDA's compiler makes code since 12.0."""
    if not is_own_cuda() or capability() != _WARPGROUPS:
        return False
    import tinygrad.runtime.autogen.nvrtc as nvrtc

    major, minor = ctypes.c_int(), ctypes.c_int()
    return not nvrtc.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)) and major.value >= 12


def is_own_cuda() -> bool:
    """Whether CUDA runs what is made for the GPU itself."""
    return Device.DEFAULT.split(":")[0] == "CUDA" and not stands_in()


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
    return max(1, _attribute(_MULTIPROCESSOR_COUNT))
