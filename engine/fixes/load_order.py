"""tinygrad 0.14.0 on CUDA: a kernel can ask for all that it loads before it computes.

NVIDIA's assembler moves loads down between the arithmetic, so that a kernel takes fewer registers. A product then has a
few loads of weights under way at a time, and waits for memory several times in place of once. With this fix a kernel
whose hint says so (`LaunchHints.loads_together`) has an operation behind the loads of weights, or of these and of all
others beside them, over which the assembler moves none: `pmevent`, which tells a profiler of an event, and nothing else
(PTX ISA, "Miscellaneous Instructions"). Barriers, fences of memory and `nanosleep` do not hold them. Eight layers of
Qwen3 4B Q4_K_M on an H200, with gate and up so: 288 : 278 microseconds. Products that come to many registers so lose.
"""

from __future__ import annotations

from collections.abc import Sequence

from tinygrad.renderer.cstyle import CUDARenderer
from tinygrad.uop.ops import Ops, UOp

from engine.fixes import once
from engine.fixes.rendering import before_rendering
from engine.kernels.launch_hints import HintedInfo

HOLD = UOp(Ops.CUSTOM, arg='asm volatile("pmevent 7;" ::: "memory");')
_ENDS = (Ops.RANGE, Ops.END, Ops.BARRIER, Ops.STORE, Ops.IF, Ops.ENDIF)  # of a run of operations


@once("Loads before arithmetic")
def apply() -> None:
    """Changes tinygrad in this process."""
    before_rendering(_together)


def _together(_: CUDARenderer, uops: Sequence[UOp], info: HintedInfo) -> Sequence[UOp]:
    """The operations, with what holds the loads of each run of them that has loads of weights."""
    if not info.hints.loads_together:
        return uops
    result, first = list[UOp](), 0  # `first`: of the run
    for i, uop in enumerate(uops):
        if uop.op in _ENDS or i == len(uops) - 1:
            result += [*_held(uops[first:i], info), uop]
            first = i + 1
    return result


def _held(run: Sequence[UOp], info: HintedInfo) -> list[UOp]:
    loads = [(i, uop.src[0].buf_uop) for i, uop in enumerate(run) if uop.op is Ops.LOAD]
    of_buffers = [(i, int(buffer.arg.slot)) for i, buffer in loads if buffer.op is Ops.PARAM]
    weights = [i for i, slot in of_buffers if slot in info.slots(("planes",))]
    if not weights:
        return [*run]
    behind = 1 + (weights[-1] if info.hints.loads_together == "weights" else of_buffers[-1][0])
    return [*run[:behind], HOLD, *run[behind:]]
