"""A step kernel by kernel: what each is for, how long it takes, how many bytes it must move.

Kernels are told apart by the buffers they work on, of which the model says what they are for (`Use`): who
reads the query matrix is the query projection, whatever a scheduler calls the kernel. A kernel that works on
none of them, as a maximum of the attention's scores, belongs to what it lies between.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Literal, TypeVar, cast

from tinygrad import Device, UOp
from tinygrad.engine.jit import graph_split_rewrite
from tinygrad.engine.realize import ExecContext, get_call_arg_uops, get_call_outs_ins, pm_exec
from tinygrad.helpers import GlobalCounters
from tinygrad.uop.ops import Ops, sym_infer

from engine.errors import PreemptedError
from engine.events import KernelProfile, KernelRole, KernelTime, Profile

SECONDS = 0.4  # for the rounds, unless fewer than MIN_ROUNDS fit in
MIN_ROUNDS, MAX_ROUNDS = 3, 25
GRAPH_CALLS = 32  # kernels that are launched together at least
MAX_SOURCE_CHARS = 20_000
T = TypeVar("T")
_ANSI = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class Use:
    """What a buffer of the model is for. A step touches all of it, or the rows of its tokens ("token") out of
    `rows`, or those of the tokens up to its last ("past"); or it reads those and writes its own ("context")."""

    role: KernelRole
    touched: Literal["all", "token", "past", "context"] = "all"
    rows: int = 1


@dataclass(frozen=True)
class Replay:
    """A captured step that can be run again. `calls` are its kernels, with what they take besides buffers;
    `run` launches them as an answer does; `reset` makes the device ready for another round. `time` runs one of
    the calls and says how many seconds it took, where tinygrad itself would run it in another way."""

    calls: Sequence[UOp]
    uses: Mapping[UOp, Use]
    tokens: int
    run: Callable[[], object]
    variables: Mapping[str, int] = field(default_factory=dict)
    inputs: tuple[UOp, ...] = ()
    reset: Callable[[], None] = lambda: None
    time: Callable[[int], float] | None = None


def profile(
    request: Profile, replay: Replay, position: int, interrupted: Callable[[], bool] = lambda: False
) -> KernelProfile:
    """Times the kernels of `replay`, a step at `position`. Raises PreemptedError when `interrupted`, asked
    before each kernel, says so."""
    roles = roles_of(replay.calls, replay.uses)
    groups: dict[tuple[str, KernelRole], list[int]] = {}
    for i, call in enumerate(replay.calls):
        groups.setdefault((_name(call), roles[i]), []).append(i)
    totals_us = _totals_us(replay, list(groups.values()), interrupted)
    walls_us = _walls_us(replay, interrupted)
    return KernelProfile(
        request_id=request.request_id,
        step=request.step,
        position=position,
        tokens=replay.tokens,
        kernels=tuple(
            KernelTime(
                name=name,
                role=role,
                calls=len(members),
                total_us=total_us,
                bytes=sum(_bytes(replay, replay.calls[i], role, position) for i in members),
                source=_source(replay.calls[members[0]]),
                options=_options(replay.calls[members[0]]),
            )
            for ((name, role), members), total_us in zip(groups.items(), totals_us, strict=True)
        ),
        wall_us=median(walls_us),
        rounds=len(walls_us),
    )


# --- time ----------------------------------------------------------------------------------------------


def _totals_us(
    replay: Replay, groups: Sequence[Sequence[int]], interrupted: Callable[[], bool]
) -> list[float]:
    """Microseconds that the kernels of each group take in a step."""
    device = Device[Device.DEFAULT]
    if replay.time is None and device.graph is not None and Device.DEFAULT.split(":")[0] != "CPU":
        return [_graph_us(replay, members, SECONDS / len(groups), interrupted) for members in groups]
    kernels_us = _kernels_us(replay, interrupted)
    return [sum(median(kernels_us[i]) for i in members) for members in groups]


def _graph_us(
    replay: Replay, members: Sequence[int], seconds: float, interrupted: Callable[[], bool]
) -> float:
    """On a GPU a launch takes longer than most kernels of a decode step. So alike kernels run as a graph of their
    own, as they do in an answer: the weights of layer after layer, often enough to hide the launch of the graph."""
    repeats = -(-GRAPH_CALLS // len(members))
    calls = tuple(replay.calls[i] for i in members) * repeats
    linear = graph_split_rewrite(UOp(Ops.LINEAR, src=calls))

    def one_round() -> float:
        _give_way(interrupted)
        return sum(_call_us(replay, call) for call in linear.src) / repeats

    return median(_rounds(one_round, replay.reset, seconds))


def _call_us(replay: Replay, call: UOp) -> float:
    context = ExecContext(dict(replay.variables), replay.inputs, update_stats=False, jit=True, wait=True)
    started = time.perf_counter()
    by_device = [t for t in pm_exec.rewrite(call, context) or () if t is not None]
    if not by_device:  # a copy, which no device times
        Device[Device.DEFAULT].synchronize()
    return (max(by_device) if by_device else time.perf_counter() - started) * 1e6


def _kernels_us(replay: Replay, interrupted: Callable[[], bool]) -> list[list[float]]:
    """Microseconds of each kernel, round by round: one after the other in their order, so that each finds the
    caches as it does in an answer."""
    times: list[list[float]] = [[] for _ in replay.calls]

    def one_round() -> list[float]:
        taken = []
        for i, call in enumerate(replay.calls):
            _give_way(interrupted)
            taken.append(replay.time(i) * 1e6 if replay.time else _call_us(replay, call))
        return taken

    for taken in _rounds(one_round, replay.reset):
        for series, us in zip(times, taken, strict=True):
            series.append(us)
    return times


def _walls_us(replay: Replay, interrupted: Callable[[], bool]) -> list[float]:
    def one_round() -> float:
        _give_way(interrupted)
        started = time.perf_counter()
        replay.run()
        Device[Device.DEFAULT].synchronize()
        return (time.perf_counter() - started) * 1e6

    counted = GlobalCounters.kernel_count
    walls = _rounds(one_round, replay.reset)
    GlobalCounters.kernel_count = counted
    return walls


def _give_way(interrupted: Callable[[], bool]) -> None:
    if interrupted():
        raise PreemptedError("The profile was given up for a prompt.", "It is made while the engine is idle.")


def _rounds(one_round: Callable[[], T], reset: Callable[[], None], seconds: float = SECONDS) -> list[T]:
    """Results of as many rounds as there is time for, after one that warms up."""
    reset()
    one_round()
    results: list[T] = []
    started = time.perf_counter()
    while len(results) < MIN_ROUNDS or (
        len(results) < MAX_ROUNDS and time.perf_counter() - started < seconds
    ):
        reset()
        results.append(one_round())
    return results


# --- roles ---------------------------------------------------------------------------------------------


def roles_of(calls: Sequence[UOp], uses: Mapping[UOp, Use]) -> list[KernelRole]:
    """What each kernel is for: by the largest of the model's buffers that it works on, else by its neighbours
    in the flow of data."""
    known: list[KernelRole | None] = []
    for call in calls:
        role = _own_role(call, uses)
        if role == "embedding" and any(r not in (None, "embedding", "element-wise") for r in known):
            role = "output head"  # which may be the same matrix
        known.append(role)
    sources, readers = _flow(calls)
    return [
        role or _role_between(_nearest(i, sources, known), _nearest(i, readers, known))
        for i, role in enumerate(known)
    ]


def _own_role(call: UOp, uses: Mapping[UOp, Use]) -> KernelRole | None:
    if call.src[0].op is Ops.COPY:
        return "copy"
    found = [uses[b] for arg in get_call_arg_uops(call) for b in _buffers(arg) if b in uses]
    matrices = [use for use in found if use.role not in ("norm", "attention")]
    caches = [use for use in found if use.role == "attention"]
    return next((use.role for use in (*matrices, *caches, *found)), None)


def _role_between(before: set[KernelRole], after: set[KernelRole]) -> KernelRole:
    if "attention" in before and "attention" in after:
        return "attention"
    if before and before <= {"output head", "sampling"}:
        return "sampling"
    return "element-wise"


def _flow(calls: Sequence[UOp]) -> tuple[list[set[int]], list[set[int]]]:
    """For each kernel, those whose results it reads, and those that read its results."""
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


def _nearest(start: int, edges: list[set[int]], known: Sequence[KernelRole | None]) -> set[KernelRole]:
    """The roles that are met first along `edges`."""
    roles: set[KernelRole] = set()
    seen, ahead = {start}, list(edges[start])
    while ahead:
        if (i := ahead.pop()) in seen:
            continue
        seen.add(i)
        if (role := known[i]) is None:
            ahead += edges[i]
        else:
            roles.add(role)
    return roles


def _buffers(argument: UOp) -> list[UOp]:
    return [u for u in argument.toposort() if u.op is Ops.BUFFER]


# --- what else is known of a kernel --------------------------------------------------------------------


def _bytes(replay: Replay, call: UOp, role: KernelRole, position: int) -> int:
    """What a kernel must move: each argument once, of the model's buffers the rows that the step touches."""
    outs, ins = get_call_outs_ins(call)
    total = 0.0
    arguments = get_call_arg_uops(call)
    for argument in dict.fromkeys(arguments):
        slots = [slot for slot, other in enumerate(arguments) if other is argument]
        n_bytes = int(argument.max_numel()) * argument.dtype.itemsize
        use = next((replay.uses[b] for b in _buffers(argument) if b in replay.uses), None)
        if use is not None and use.touched != "all" and role != "output head":
            written = all(slot in outs and slot not in ins for slot in slots)
            own = use.touched == "token" or (use.touched == "context" and written)
            rows = replay.tokens if own else position + replay.tokens
            n_bytes = n_bytes * min(rows, use.rows) // use.rows
        total += n_bytes
    program = call.src[0]
    if program.op is Ops.PROGRAM and replay.variables and program.arg.vars:
        # Intermediates of a step at any position are as long as the longest; the kernel's loops are not.
        by_loops = sym_infer(program.src[0].arg.estimates.mem, dict(replay.variables))
        total = min(total, by_loops) if by_loops else total
    return int(total)


def _name(call: UOp) -> str:
    program = call.src[0]
    return _ANSI.sub("", program.arg.name) if program.op is Ops.PROGRAM else program.op.name.lower()


def _source(call: UOp) -> str:
    source = next((u.arg for u in call.src[0].src if u.op is Ops.SOURCE), "")
    return cast(str, source)[:MAX_SOURCE_CHARS]


def _options(call: UOp) -> tuple[str, ...]:
    if call.src[0].op is not Ops.PROGRAM:
        return ()
    applied = getattr(call.src[0].src[0].arg, "applied_opts", ())
    return tuple(f"{opt.op.name} axis {opt.axis}, {opt.arg}" for opt in applied)
