"""tinygrad 0.14.0 on CUDA: copies from global to shared memory, or to the L2 cache, that take no registers, and go on
while a kernel computes.

tinygrad has no operation for them: a value on its way to shared memory passes through a register, and a thread waits
for it before it stores it. Each operation here is one instruction of the GPU (PTX ISA, "cp.async"; from compute
capability 8.0 on, to the cache from 9.0 on), put into a kernel's graph as Ops.CUSTOM. Asking for copies, closing their
group and waiting for a group are effects, so the graph orders them by their sources. What a kernel asks to be brought
to the cache it asks for at its beginning (`engine.fixes.early_launch`).
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
_BRING = (
    'asm volatile("{{ .reg .pred p; setp.ne.u32 p, %1, 0; '
    '@p cp.async.bulk.prefetch.L2.global [%0], %2; }}" :: "l"({0}), "r"((uint){1}), "r"({2}));'
)
_BRING_AND_KEEP = (
    'asm volatile("{{ .reg .pred p; .reg .b64 kept; setp.ne.u32 p, %1, 0; '
    "createpolicy.fractional.L2::evict_last.b64 kept, 1.0; "
    '@p cp.async.bulk.prefetch.L2.global.L2::cache_hint [%0], %2, kept; }}" :: "l"({0}), "r"((uint){1}), "r"({2}));'
)


def brought(source: UOp, n_bytes: int, ok: UOp, keeps: bool) -> UOp:
    """Asks for bytes from an element on, a multiple of `COPIED_BYTES`, to be brought to the L2 cache if it is `ok`; if
    it `keeps` them, until they are read, while others come and go."""
    # tinygrad includes the header of halves where a value is one, not for an address.
    sources = source, ok, UOp.const(n_bytes), UOp.const(0, source.dtype)
    return UOp(Ops.CUSTOM, dtypes.void, sources, _BRING_AND_KEEP if keeps else _BRING)


def brings(uop: UOp) -> bool:
    """Whether an operation asks for bytes to be brought to the L2 cache."""
    return uop.op is Ops.CUSTOM and uop.arg in (_BRING, _BRING_AND_KEEP)


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
