"""What a kernel says of its launch. It travels with the kernel's graph and its program, in tinygrad's `KernelInfo`, and
so it is part of the keys of both in tinygrad's tables and in the disk cache. The fixes read it there (`hints_of`)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, fields
from typing import Literal

from tinygrad import UOp
from tinygrad.uop.ops import KernelInfo, Ops

Release = Literal["at its end", "after its wait", "before its first barrier"]
"""When a kernel lets the next one start, whose blocks then take the place that is left."""
Together = Literal["", "weights", "all"]
"""Which of a kernel's loads are all under way before it computes."""


@dataclass(frozen=True)
class LaunchHints:
    """`min_blocks`: how many of its blocks a multiprocessor must have room for; 0 if that does not matter
    (`engine.fixes.launch_bounds`). `shared_bytes`: the shared memory of a block, if its arrays are more than the 48 KB
    that CUDA declares; else 0 (`engine.fixes.dynamic_shared`).

    `waits_for`: the names of the buffers that the kernel before in a chain writes, or that an earlier one writes too
    late: it waits for the kernel before where it first accesses one of them, and what it loads until then must be
    older. Without names it waits before everything else. `releases`: when the next kernel may start
    (`engine.fixes.early_launch`). `loads_first`: the names of buffers that it loads before it waits, though it needs
    them late: the kernel before does not write them, and had waited itself when it let this one start. `streams`: those
    of buffers that it only reads, each element once (`engine.fixes.streamed_loads`). `loads_together`: which
    loads, of its weights or of these and all beside them, are under way before it computes
    (`engine.fixes.load_order`). `idle_ends`: whether threads that store nothing end where they last meet
    (`engine.fixes.idle_threads`)."""

    min_blocks: int = 0
    shared_bytes: int = 0
    waits_for: tuple[str, ...] = ()
    releases: Release = "at its end"
    loads_first: tuple[str, ...] = ()
    streams: tuple[str, ...] = ()
    loads_together: Together = ""
    idle_ends: bool = False


NO_HINTS = LaunchHints()
STATIC_SHARED = 48 << 10
"""Bytes of shared memory that a kernel of CUDA can declare."""


def shared_hints(
    n_bytes: int, waits_for: tuple[str, ...] = (), releases: Release = "at its end"
) -> LaunchHints:
    """The hints of a kernel whose arrays in shared memory have so many bytes."""
    shared_bytes = n_bytes if n_bytes > STATIC_SHARED else 0
    return LaunchHints(shared_bytes=shared_bytes, waits_for=waits_for, releases=releases)


@dataclass(frozen=True)
class HintedInfo(KernelInfo):  # type: ignore[misc]
    """tinygrad's description of a kernel with our hints. `buffers`: the names of its buffers, by slot."""

    buffers: tuple[str, ...] = ()
    hints: LaunchHints = NO_HINTS

    def slots(self, names: Collection[str]) -> frozenset[int]:
        """The slots of buffers. A name stands for all of a run (`engine.kernels.kernel.Run`)."""
        return frozenset(i for i, name in enumerate(self.buffers) if name.split(".")[0] in names)


def with_hints(graph: UOp, buffers: tuple[str, ...], hints: LaunchHints) -> UOp:
    """A kernel's graph that carries the names of its buffers, and hints."""
    known = {field.name: getattr(graph.arg, field.name) for field in fields(KernelInfo)}
    return graph.replace(arg=HintedInfo(**known, buffers=buffers, hints=hints))


def hints_of(kernel: UOp) -> LaunchHints:
    """The hints of a kernel's graph (a SINK), or of its program."""
    return info_of(kernel).hints


def info_of(kernel: UOp) -> HintedInfo:
    """What a kernel's graph (a SINK), or its program, says of its launch; if it says nothing, that of no hints."""
    info = (kernel.src[0] if kernel.op is Ops.PROGRAM else kernel).arg
    return info if isinstance(info, HintedInfo) else HintedInfo()
