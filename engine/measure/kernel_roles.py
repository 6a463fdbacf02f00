"""The roles of a step's kernels, as query projection or attention.

The role of a kernel follows from the buffers that it works on, whatever the scheduler calls the kernel: the model
declares what each buffer is for (`BufferUse`), and a kernel that reads the query matrix is the query projection. A
kernel that works on no such buffer, as one that finds the largest attention score, gets its role from the kernels
around it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from tinygrad import UOp
from tinygrad.engine.realize import get_call_arg_uops, get_call_outs_ins
from tinygrad.uop.ops import Ops

from engine.protocol.events import KernelRole


@dataclass(frozen=True)
class BufferUse:
    """What a buffer of the model is for, and which of its `rows` a step uses: all of them; the rows of the step's
    tokens ("token"), which may choose `each` of them; or for reading the rows of all tokens up to the last, and for
    writing its own ("context"). With a `window`, a token uses those of no more tokens than that, its own included."""

    role: KernelRole
    rows_used: Literal["all", "token", "context"] = "all"
    rows: int = 1
    window: int = 0
    each: int = 1


def roles_of(calls: Sequence[UOp], uses: Mapping[UOp, BufferUse]) -> list[KernelRole]:
    """The role of each kernel: that of the model's buffer that it works on, or else of its neighbours in the data
    flow."""
    roles: list[KernelRole | None] = []
    for call in calls:
        role = _role_by_buffers(call, uses)
        if role == "embedding" and any(r not in (None, "embedding", "element-wise") for r in roles):
            role = "output head"  # a tied output head is the embedding matrix
        roles.append(role)
    sources, readers = _data_flow(calls)
    return [
        role or _role_between(_nearest_roles(i, sources, roles), _nearest_roles(i, readers, roles))
        for i, role in enumerate(roles)
    ]


def buffers_of(argument: UOp) -> list[UOp]:
    """The buffers behind an argument of a call, which may be a view."""
    return [u for u in argument.toposort() if u.op is Ops.BUFFER]


def _role_by_buffers(call: UOp, uses: Mapping[UOp, BufferUse]) -> KernelRole | None:
    """Matrices come first, then caches, then norms: a product may norm its input, and read a bias. The first product of
    experts may choose them too."""
    if call.src[0].op is Ops.COPY:
        return "copy"
    used = [uses[b] for arg in get_call_arg_uops(call) for b in buffers_of(arg) if b in uses]
    routers = [use for use in used if use.role == "router"]
    matrices = [use for use in used if use.role not in ("norm", "attention", "delta net", "router")]
    caches = [use for use in used if use.role in ("attention", "delta net")]
    return next((use.role for use in (*matrices, *routers, *caches, *used)), None)


def _role_between(before: set[KernelRole], after: set[KernelRole]) -> KernelRole:
    mixers: tuple[KernelRole, ...] = ("attention", "delta net")
    if role := next((role for role in mixers if role in before and role in after), None):
        return role
    if before == {"router"}:  # chooses experts, or sorts tokens by expert
        return "router"
    if before and before <= {"output head", "sampling"}:
        return "sampling"
    return "element-wise"


def _data_flow(calls: Sequence[UOp]) -> tuple[list[set[int]], list[set[int]]]:
    """For each kernel, the kernels whose results it reads, and those that read its results."""
    sources: list[set[int]] = [set() for _ in calls]
    readers: list[set[int]] = [set() for _ in calls]
    writer: dict[UOp, int] = {}
    for i, call in enumerate(calls):
        arguments = get_call_arg_uops(call)
        outs, ins = get_call_outs_ins(call)
        for slot in ins:
            if (source := writer.get(arguments[slot])) is not None:
                sources[i].add(source)
                readers[source].add(i)
        for slot in outs:
            writer[arguments[slot]] = i
    return sources, readers


def _nearest_roles(start: int, edges: list[set[int]], roles: Sequence[KernelRole | None]) -> set[KernelRole]:
    """The first known roles on all paths along `edges`."""
    nearest: set[KernelRole] = set()
    seen, ahead = {start}, list(edges[start])
    while ahead:
        if (i := ahead.pop()) in seen:
            continue
        seen.add(i)
        if (role := roles[i]) is None:
            ahead += edges[i]
        else:
            nearest.add(role)
    return nearest
