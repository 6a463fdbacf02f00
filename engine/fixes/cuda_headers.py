"""tinygrad 0.14.0 on NVIDIA GPUs: the runtime compiler and its headers are found where they are.

Kernels in half precision include cuda_fp16.h. tinygrad tells the compiler of three folders, or of $CUDA_PATH alone,
and where the header lies in none of them every such kernel fails to compile. With this fix the compiler is told of
the folder in which the header was found (`engine.devices.cuda_toolkit`; $CUDA_INCLUDE_PATH names one). A libnvrtc
that lies in none of the linker's folders is loaded from where it is.
"""

from __future__ import annotations

from typing import Any

from tinygrad.runtime.autogen import nvrtc
from tinygrad.runtime.support.c import DLL
from tinygrad.runtime.support.compiler_cuda import NVRTCCompiler

from engine.devices.cuda_toolkit import headers, runtime_compilers, stock_headers
from engine.fixes import once

_stock_init = NVRTCCompiler.__init__


@once("Where CUDA's compiler and headers are")
def apply() -> None:
    """Changes tinygrad in this process."""
    NVRTCCompiler.__init__ = _init
    if "nvrtc" not in DLL._loaded_:
        nvrtc.dll.__init__("nvrtc", [str(path) for path in runtime_compilers()])


def _init(self: NVRTCCompiler, *args: Any, **options: Any) -> None:
    _stock_init(self, *args, **options)
    found = headers()
    if found and found[0] not in stock_headers():
        self.compile_options.insert(0, f"-I{found[0]}")
