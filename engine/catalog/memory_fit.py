"""Whether a model fits into the memory that it would run from."""

from __future__ import annotations

import os

from engine.devices import cuda_driver

SHARE_BESIDE_WEIGHTS = 0.1
"""Of the weights, for the KV cache of an ordinary context and what is computed: a rough figure, as the real
one is known only when the model is loaded."""


def fits(model_bytes: int, memory_bytes: int) -> bool:
    """Whether a model of `model_bytes` can be expected to run from `memory_bytes` (0: not known, then True)."""
    return not memory_bytes or model_bytes * (1 + SHARE_BESIDE_WEIGHTS) <= memory_bytes


def memory_bytes(backend: str) -> int:
    """All memory of the device that `backend` ("auto", "CPU", "CUDA", "NV") runs on: the first GPU's, the
    machine's own where there is none or it is shared. 0 where it is not told."""
    gpu = 0 if backend.upper() == "CPU" else cuda_driver.memory_bytes()
    return gpu or _machine_bytes()


def _machine_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return 0
