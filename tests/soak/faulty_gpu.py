"""The engine process on an NVIDIA GPU that fails when a file appears: its driver then reports errors, or its stream
never ends, as behind a kernel that hangs. The file has the name of the fault.

A process that starts meanwhile fails once it has opened the GPU, but a kernel that hangs is of one process only.
Nothing here may import tinygrad before the engine does: it would miss the variables that the engine sets for it, and
take the CPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import runpy
import sys
import threading
import time
from pathlib import Path

FILE = "ORIN_CHAT_GPU_FAULT"
"""The environment variable that names the file."""
TAKEN = ".taken"
"""The file beside it, which comes once the process has the fault. It has the id of the process."""
ERRORS = {"a kernel fails": 719, "the device falls off": 999}  # CUDA_ERROR_LAUNCH_FAILED, CUDA_ERROR_UNKNOWN
HANGS = "a kernel hangs"
FAULTS = (*ERRORS, HANGS)
_STAY = ("cuGetErrorString", "cuGetErrorName")


def _wait(file: Path) -> None:
    fault, started = "", time.time()
    while not fault:
        time.sleep(0.002)
        if _has_opened_the_gpu():
            with contextlib.suppress(FileNotFoundError):
                if (found := file.read_text()) != HANGS or file.stat().st_mtime > started:
                    fault = found
    if fault == HANGS:
        _hang()
    else:
        _fail(ERRORS[fault])
    file.with_suffix(TAKEN).write_text(str(os.getpid()))


def _has_opened_the_gpu() -> bool:
    module = sys.modules.get("tinygrad.runtime.ops_cuda")
    return bool(module and (device := getattr(module, "CUDADevice", None)) and device.devices)


def _fail(code: int) -> None:
    from tinygrad.runtime.autogen import cuda

    for name in dir(cuda):
        if name.startswith("cu") and name not in _STAY and callable(getattr(cuda, name)):
            setattr(cuda, name, lambda *_: code)


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def _never_ends(_: object) -> None:
    threading.Event().wait()


def _hang() -> None:
    from tinygrad.runtime.ops_cuda import CUDADevice

    driver = ctypes.CDLL("libcuda.so.1")
    driver.cuCtxSetCurrent(CUDADevice.devices[0].context)
    driver.cuLaunchHostFunc(None, _never_ends, None)


if __name__ == "__main__":
    threading.Thread(target=_wait, args=(Path(os.environ[FILE]),), daemon=True).start()
    runpy.run_module("engine.protocol.worker", run_name="__main__", alter_sys=True)
