"""Whether a model fits into the memory of the device that would run it."""

import os

from engine.devices import cuda_driver

OVERHEAD = 0.1
"""Memory for the KV cache of an ordinary context and for activations, as a fraction of the weights, of a model that is
not on this machine: its description (`engine.model.memory_need`) is not known."""


def fits(memory_bytes: int, model_bytes: int, need_bytes: int = 0) -> bool:
    """Whether a model can be expected to run in `memory_bytes` (0: not known, and then it can). It needs `need_bytes`;
    if these are 0 (not known), its file of `model_bytes` tells roughly."""
    return not memory_bytes or (need_bytes or model_bytes * (1 + OVERHEAD)) <= memory_bytes


def memory_bytes(backend: str) -> int:
    """The total memory of the device that `backend` ("auto", "CPU", "CUDA", "NV") runs on: the first GPU's, or the
    machine's if there is no GPU or it has no memory of its own. 0 if the system does not say."""
    gpu = 0 if backend.upper() == "CPU" else cuda_driver.memory_bytes()
    return gpu or _machine_bytes()


def _machine_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return 0
