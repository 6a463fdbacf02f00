"""Profiles a captured step kernel by kernel: the role of each kernel (`kernel_roles`), its time, and the bytes that it
must move."""

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TypeVar, cast

from tinygrad import Device, UOp
from tinygrad.engine.jit import graph_split_rewrite
from tinygrad.engine.realize import ExecContext, get_call_arg_uops, get_call_outs_ins, pm_exec
from tinygrad.helpers import GlobalCounters
from tinygrad.uop.ops import Ops, sym_infer

from engine.errors import PreemptedError
from engine.measure.kernel_roles import BufferUse, buffers_of, roles_of
from engine.protocol.events import KernelProfile, KernelRole, KernelTime, Profile

ROUNDS_S = 0.4  # the time for the rounds, but at least MIN_ROUNDS
MIN_ROUNDS, MAX_ROUNDS = 3, 25
MIN_GRAPH_CALLS = 32  # kernels in a graph that is timed
MAX_SOURCE_CHARS = 20_000
T = TypeVar("T")
_ANSI = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class Replay:
    """A captured step that can be run again.

    `calls`: its kernels with their buffers; `uses`: the model's buffers; `tokens`: the tokens of the step; `run`:
    launches the step as generation does; `variables` and `inputs`: what the kernels take beside their buffers; `reset`:
    makes the device ready for another round; `call_s`: runs call i and returns its seconds, if tinygrad would run it
    differently.
    """

    calls: Sequence[UOp]
    uses: Mapping[UOp, BufferUse]
    tokens: int
    run: Callable[[], object]
    variables: Mapping[str, int] = field(default_factory=dict)
    inputs: tuple[UOp, ...] = ()
    reset: Callable[[], None] = lambda: None
    call_s: Callable[[int], float] | None = None


def profile(
    request: Profile, replay: Replay, position: int, interrupted: Callable[[], bool] = lambda: False
) -> KernelProfile:
    """Times the kernels of `replay`, a step at `position`. Kernels with the same name and role are counted together.
    Raises PreemptedError when `interrupted`, which is called before each kernel, returns true."""
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
    """The microseconds that the kernels of each group take in a step. `groups` are indices of calls."""
    device = Device[Device.DEFAULT]
    if replay.call_s is None and device.graph is not None and Device.DEFAULT.split(":")[0] != "CPU":
        return [_graph_us(replay, members, ROUNDS_S / len(groups), interrupted) for members in groups]
    kernels_us = _kernels_us(replay, interrupted)
    return [sum(median(kernels_us[i]) for i in members) for members in groups]


def _graph_us(
    replay: Replay, members: Sequence[int], limit_s: float, interrupted: Callable[[], bool]
) -> float:
    """The microseconds of a group, run as a graph of its own. On a GPU a launch takes longer than most kernels of a
    decode step, so the graph repeats the group often enough to hide its launch. As in generation, each kernel reads the
    weights of another layer than the one before it."""
    repeats = -(-MIN_GRAPH_CALLS // len(members))
    calls = tuple(replay.calls[i] for i in members) * repeats
    linear = graph_split_rewrite(UOp(Ops.LINEAR, src=calls))

    def one_round() -> float:
        _check(interrupted)
        return sum(_call_us(replay, call) for call in linear.src) / repeats

    return median(_rounds(one_round, replay.reset, limit_s))


def _call_us(replay: Replay, call: UOp) -> float:
    context = ExecContext(dict(replay.variables), replay.inputs, update_stats=False, jit=True, wait=True)
    started = time.perf_counter()
    by_device = [t for t in pm_exec.rewrite(call, context) or () if t is not None]
    if not by_device:  # a copy, which no device times
        Device[Device.DEFAULT].synchronize()
    return (max(by_device) if by_device else time.perf_counter() - started) * 1e6


def _kernels_us(replay: Replay, interrupted: Callable[[], bool]) -> list[list[float]]:
    """The microseconds of each kernel in each round. Kernels run in the order of the step, so that each finds the
    caches as in generation."""
    kernels_us: list[list[float]] = [[] for _ in replay.calls]

    def one_round() -> list[float]:
        round_us = []
        for i, call in enumerate(replay.calls):
            _check(interrupted)
            round_us.append(replay.call_s(i) * 1e6 if replay.call_s else _call_us(replay, call))
        return round_us

    for round_us in _rounds(one_round, replay.reset):
        for times, us in zip(kernels_us, round_us, strict=True):
            times.append(us)
    return kernels_us


def _walls_us(replay: Replay, interrupted: Callable[[], bool]) -> list[float]:
    """The microseconds of the whole step in each round."""

    def one_round() -> float:
        _check(interrupted)
        started = time.perf_counter()
        replay.run()
        Device[Device.DEFAULT].synchronize()
        return (time.perf_counter() - started) * 1e6

    kernel_count = GlobalCounters.kernel_count
    walls = _rounds(one_round, replay.reset)
    GlobalCounters.kernel_count = kernel_count
    return walls


def _check(interrupted: Callable[[], bool]) -> None:
    if interrupted():
        raise PreemptedError("The profile was given up for a prompt.", "It is made while the engine is idle.")


def _rounds(one_round: Callable[[], T], reset: Callable[[], None], limit_s: float = ROUNDS_S) -> list[T]:
    """The results of as many rounds as fit `limit_s`, after a warm-up round."""
    reset()
    one_round()
    results: list[T] = []
    started = time.perf_counter()
    while len(results) < MIN_ROUNDS or (
        len(results) < MAX_ROUNDS and time.perf_counter() - started < limit_s
    ):
        reset()
        results.append(one_round())
    return results


# --- properties of a kernel ----------------------------------------------------------------------------


def _bytes(replay: Replay, call: UOp, role: KernelRole, position: int) -> int:
    """The bytes that a kernel must move: each argument once, and of the model's buffers the rows that the step uses.
    Which experts the tokens of a prompt share is not known, so they count as different ones, as long as there are
    more: the experts of a chunk are nearly always all."""
    outs, ins = get_call_outs_ins(call)
    total = 0.0
    arguments = get_call_arg_uops(call)
    for argument in dict.fromkeys(arguments):
        slots = [slot for slot, other in enumerate(arguments) if other is argument]
        n_bytes = int(argument.max_numel()) * argument.dtype.itemsize
        use = next((replay.uses[b] for b in buffers_of(argument) if b in replay.uses), None)
        if use is not None and use.rows_used != "all" and role != "output head":
            only_written = all(slot in outs and slot not in ins for slot in slots)
            only_new = use.rows_used == "token" or (use.rows_used == "context" and only_written)
            rows = replay.tokens * use.each if only_new else position + replay.tokens
            if use.window:
                rows = min(rows, use.window - 1 + replay.tokens)
            n_bytes = n_bytes * min(rows, use.rows) // use.rows
        total += n_bytes
    program = call.src[0]
    if program.op is Ops.PROGRAM and replay.variables and program.arg.vars:
        # Intermediate buffers have the size for the longest context; the loops of the kernels have the actual one.
        loop_bytes = sym_infer(program.src[0].arg.estimates.mem, dict(replay.variables))
        total = min(total, loop_bytes) if loop_bytes else total
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
