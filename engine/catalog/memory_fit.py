"""Whether a model fits into the memory that it would run from."""

from __future__ import annotations

import ctypes
import os

SHARE_BESIDE_WEIGHTS = 0.1
"""Of the weights, for the KV cache of an ordinary context and what is computed: a rough figure, as the real
one is known only when the model is loaded."""


def fits(model_bytes: int, memory_bytes: int) -> bool:
    """Whether a model of `model_bytes` can be expected to run from `memory_bytes` (0: not known, then True)."""
    return not memory_bytes or model_bytes * (1 + SHARE_BESIDE_WEIGHTS) <= memory_bytes


def memory_bytes(backend: str) -> int:
    """All memory of the device that `backend` ("auto", "CPU", "CUDA", "NV") runs on: the first GPU's, the
    machine's own where there is none or it is shared. 0 where it is not told."""
    gpu = 0 if backend.upper() == "CPU" else _gpu_bytes()
    return gpu or _machine_bytes()


def _gpu_bytes() -> int:
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
        device, total = ctypes.c_int(), ctypes.c_size_t()
        if cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), 0):
            return 0
        return 0 if cuda.cuDeviceTotalMem_v2(ctypes.byref(total), device) else total.value
    except (OSError, AttributeError):
        return 0


def _machine_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return 0
