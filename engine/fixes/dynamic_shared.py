"""tinygrad 0.14.0 on CUDA: a kernel can have more than 48 KB of shared memory.

tinygrad declares shared memory in a kernel, where CUDA allows 48 KB, though the blocks of every GPU with tensor cores
that we know may have 99 KB and more ("Dynamic Shared Memory" and "Compute Capabilities" in the CUDA C++ Programming
Guide). The launch can give a block more: tinygrad's runtime can, but nothing tells it how much. With this fix a kernel
with the hint `shared_bytes` (`engine.kernels.launch_hints`) gets so many at its launch, and its arrays are parts of
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tinygrad.device import TinyELF
from tinygrad.dtype import AddrSpace
from tinygrad.renderer.cstyle import CUDARenderer
from tinygrad.runtime.ops_cuda import CUDAProgram
from tinygrad.uop.ops import Ops, UOp

from engine.fixes import once
from engine.fixes.rendering import before_rendering
from engine.kernels.launch_hints import HintedInfo, hints_of

_ALIGNMENT = 16  # bytes

_stock_buffer = CUDARenderer.render_buffer
_stock_elf, _stock_init = UOp.to_elf, CUDAProgram.__init__


@once("Shared memory beyond 48 KB")
def apply() -> None:
    """Changes tinygrad in this process."""
    before_rendering(_place_arrays)
    CUDARenderer.render_buffer = _render_buffer
    UOp.to_elf, CUDAProgram.__init__ = _to_elf, _init


def _place_arrays(renderer: Any, uops: Sequence[UOp], info: HintedInfo) -> Sequence[UOp]:
    asked, used = info.hints.shared_bytes, 0
    places: dict[UOp, int] = {}
    for array in (u for u in uops if asked and u.op is Ops.BUFFER and u.addrspace is AddrSpace.LOCAL):
        places[array] = used
        used += -(-array.max_numel() * array.dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
    assert used <= asked, f"{info.name} has {used} bytes of shared memory"
    renderer.shared_places = places
    return uops


def _render_buffer(self: Any, array: UOp) -> str:
    """The declaration of an array. The first one declares all of the launch's shared memory."""
    place = self.shared_places.get(array)
    if place is None:
        return str(_stock_buffer(self, array))
    kind = self.render_dtype(array.dtype)
    declared = f"{kind}* {self[array]} = ({kind}*)(shared_bytes + {place});"
    return (
        declared if place else f"extern __shared__ __align__({_ALIGNMENT}) char shared_bytes[];\n{declared}"
    )


@dataclass
class _Object(TinyELF):  # type: ignore[misc]
    """A compiled program, and the shared memory of its launch."""

    shared_bytes: int = 0


def _to_elf(self: UOp) -> TinyELF:
    return _Object(**vars(_stock_elf(self)), shared_bytes=hints_of(self).shared_bytes)


def _init(self: CUDAProgram, dev: Any, obj: Any, *args: Any, **options: Any) -> None:
    if isinstance(obj, _Object) and obj.shared_bytes:
        options["smem"] = obj.shared_bytes
    _stock_init(self, dev, obj, *args, **options)
