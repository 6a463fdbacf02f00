"""tinygrad 0.14.0 on NVIDIA GPUs: finds the runtime compiler (NVRTC) and its headers in more folders.

Kernels in half precision include cuda_fp16.h. tinygrad gives the compiler three include folders, or only $CUDA_PATH. If
the header is in none of them, every such kernel fails to compile. With this fix the compiler also gets the folder in
which `engine.devices.cuda_toolkit` found the header ($CUDA_INCLUDE_PATH can name one), and libnvrtc is loaded from
wherever it is installed.
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
    folders = headers()
    if folders and folders[0] not in stock_headers():
        self.compile_options.insert(0, f"-I{folders[0]}")
