"""tinygrad 0.14.0 on CUDA: copies from global to shared memory that take no registers, and go on while a kernel
computes.

tinygrad has no operation for them: a value on its way to shared memory passes through a register, and a thread waits
for it before it stores it. Each operation here is one instruction of the GPU (PTX ISA, "cp.async"; from compute
capability 8.0 on), put into a kernel's graph as Ops.CUSTOM. Asking for copies, closing their group and waiting for a
group are effects, so the graph orders them by their sources.
"""

from __future__ import annotations

from tinygrad import UOp, dtypes
from tinygrad.uop.ops import Ops

COPIED_BYTES = 16
"""The size of one copy. Both of its addresses are multiples of it."""

_COPY = (
    'asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" '
    ':: "r"((uint)__cvta_generic_to_shared({0})), "l"({1}) : "memory");'
)
_CLOSE = 'asm volatile("cp.async.commit_group;" ::: "memory");'
_WAIT = 'asm volatile("cp.async.wait_group {n};" ::: "memory");'


def asked(target: UOp, source: UOp, *after: UOp) -> UOp:
    """Asks for a copy of `COPIED_BYTES` to an element of shared memory, after other effects."""
    return UOp(Ops.CUSTOM, dtypes.void, (target, source, *after), _COPY)


def group(*copies: UOp) -> UOp:
    """Closes the group of copies that the thread has asked for since the last one."""
    return UOp(Ops.CUSTOM, dtypes.void, copies, _CLOSE)


def all_but(n: int, *after: UOp) -> UOp:
    """Waits, after other effects, for all groups of the thread but the latest n. Other threads' copies are there after
    a barrier."""
    return UOp(Ops.CUSTOM, dtypes.void, after, _WAIT.replace("{n}", str(n)))
