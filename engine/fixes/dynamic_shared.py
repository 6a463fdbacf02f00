"""tinygrad 0.14.0 on CUDA: a kernel can have more than 48 KB of shared memory.

tinygrad declares shared memory in a kernel, where CUDA allows 48 KB, though the blocks of every GPU with tensor cores
that we know may have 99 KB and more ("Dynamic Shared Memory" and "Compute Capabilities" in the CUDA C++ Programming
Guide). The launch can give a block more: tinygrad's runtime can, but nothing tells it how much. With this fix a kernel
whose name ends in `_smN` gets N bytes at its launch, and its arrays are parts of them.
"""

from __future__ import annotations

import re
from typing import Any

from tinygrad.renderer.cstyle import CUDARenderer
from tinygrad.runtime.ops_cuda import CUDAProgram

from engine.fixes import once

_SIZES = {"half": 2, "float": 4}
_NAME = re.compile(r"_sm(\d+)$")

_stock_render, _stock_init = CUDARenderer.render_kernel, CUDAProgram.__init__


@once("Shared memory beyond 48 KB")
def apply() -> None:
    """Changes tinygrad in this process."""
    global _stock_render
    _stock_render = CUDARenderer.render_kernel  # another fix may have changed it since the import
    CUDARenderer.render_kernel, CUDAProgram.__init__ = _render, _init


def _render(self: CUDARenderer, function_name: str, *args: Any, **kwargs: Any) -> str:
    source: str = _stock_render(self, function_name, *args, **kwargs)
    asked, used = _NAME.search(function_name), 0
    if asked is None:
        return source

    def part(array: re.Match[str]) -> str:
        nonlocal used
        kind, name, first = array[1], array[2], used
        used += -(-_SIZES[kind] * int(array[3]) // 16) * 16
        return f"{kind}* {name} = ({kind}*)(shared_bytes + {first});"

    source = re.sub(r"__shared__ __align__\(16\) (\w+) (\w+)\[(\d+)\];", part, source)
    assert used <= int(asked[1]), f"{function_name} has {used} bytes of shared memory"
    declared = "  extern __shared__ __align__(16) char shared_bytes[];\n"
    return re.sub(r"(__global__ [^{]*\{\n)", lambda opening: opening[1] + declared, source, count=1)


def _init(self: CUDAProgram, dev: Any, obj: Any, *args: Any, **options: Any) -> None:
    if asked := _NAME.search(obj.name):
        options["smem"] = int(asked[1])
    _stock_init(self, dev, obj, *args, **options)
