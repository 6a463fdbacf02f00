"""Finds the fastest schedule of a product on the device at hand: candidates are compiled together, checked
against the schedule that always works, and timed one after the other as a chain that outgrows the L2 cache."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from tinygrad import Device, Tensor, UOp, dtypes
from tinygrad.engine.realize import compile_linear
from tinygrad.uop.ops import Ops

from engine.kernels.gpu import multiprocessors
from engine.kernels.launch import Launches
from engine.kernels.matvec import Best, Epilogue, GateUp, Residual, Schedule, Store, matvec
from engine.kernels.packing import UNIT, Packing, permuted_size, prescale, units_of
from engine.kernels.schedules import matvec_schedule

_CHAIN_BYTES = 300e6  # beyond any L2 cache
_CHAIN_KERNELS = 16
_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Case:
    """A product of a model: `kind` is its epilogue's ("store", "residual", "gate_up", "best"), `n_parts` > 0
    where it takes the norm's factor from that many sums."""

    packing: Packing
    rows: int
    cols: int
    kind: str
    n_parts: int


@dataclass(frozen=True)
class Timed:
    schedule: Schedule
    seconds: float


def candidates(case: Case) -> Iterator[Schedule]:
    """Schedules that fit a shape: blocks of 64 to 512 threads, no thread without work, enough blocks for a
    large GPU."""
    units = units_of(case.cols)
    for threads in (8, 16, 24, 32, 48, 64, 96, 128):
        if units % threads and units > 8:
            continue
        for groups in (1, 2, 4, 8, 16):
            for rows in (1, 2, 4, 8):
                s = Schedule(threads, groups, rows)
                if not 64 <= threads * groups <= 512 or not s.fits() or case.rows % s.block_rows:
                    continue
                if case.kind == "gate_up" and s.block_rows % 2:
                    continue
                if case.rows // s.block_rows < 64 or (case.rows > 50_000 and rows < 4):
                    continue
                yield s
                if rows <= 2:
                    yield from (Schedule(threads, groups, rows, n // (threads * groups)) for n in (640, 1024))


def tune(case: Case, seconds: float, pick: Callable[[Schedule], bool] = lambda _: True) -> list[Timed]:
    """The candidates that give right results, fastest first, as far as `seconds` allow."""
    deadline = time.monotonic() + seconds
    bench = _Bench(case)
    baseline = matvec_schedule(case.packing, case.rows, case.cols, multiprocessors=multiprocessors())
    wanted = bench.result(baseline)
    todo = [baseline, *(s for s in dict.fromkeys(candidates(case)) if s != baseline and pick(s))]
    todo = todo[:1] + [todo[i] for i in np.random.default_rng(0).permutation(range(1, len(todo)))]
    timed = []
    for start in range(0, len(todo), 32):
        batch = todo[start : start + 32]
        compile_linear(UOp(Ops.LINEAR, src=tuple(call for s in batch for call in bench.chain(s, 1).calls)))
        for schedule in batch:
            error = np.abs(bench.result(schedule) - wanted).max() / np.abs(wanted).max()
            if error < _TOLERANCE:
                timed.append(Timed(schedule, bench.time(schedule)))
        if time.monotonic() > deadline:
            break
    return sorted(timed, key=lambda t: t.seconds)


class _Bench:
    """Buffers of a product, several copies of its matrix, and what it takes to run it under a schedule."""

    def __init__(self, case: Case) -> None:
        self.case, rng = case, np.random.default_rng(0)
        self.copies = int(min(8, max(2, _CHAIN_BYTES // case.packing.n_bytes(case.rows, case.cols) + 1)))

        def plane(n: int, half: bool) -> Tensor:
            few = (
                rng.standard_normal(min(n, 1 << 16)).astype(np.float16) / 100
                if half
                else rng.integers(0, 1 << 32, min(n, 1 << 20), np.uint32)
            )
            return Tensor(np.resize(few, n)).realize()

        if case.packing.format is None:  # any word would do for integers, not for floats
            kind = dtypes.float16 if case.packing.bits == 16 else dtypes.float32
            n = case.rows * permuted_size(case.cols)
            values = rng.standard_normal(1 << 16)
            self.matrices = [
                [
                    Tensor(np.resize(values, n).astype(np.float32))
                    .cast(kind)
                    .contiguous()
                    .bitcast(dtypes.uint32)
                    .contiguous()
                    .realize()
                ]
                for _ in range(self.copies)
            ]
        else:
            shapes = case.packing.shapes(case.rows, case.cols)
            self.matrices = [[plane(n, d == dtypes.float16) for n, d in shapes] for _ in range(self.copies)]
        x = rng.standard_normal(permuted_size(case.cols)).astype(np.float32)
        factors = prescale(case.packing.scaling).reshape(UNIT // 4, 1, 4)
        x = x.reshape(UNIT // 4, -1, 4) * factors
        self.x = Tensor(np.ascontiguousarray(x.reshape(-1))).realize()
        self.parts = Tensor.ones(max(case.n_parts, 1)).contiguous().realize()
        self.weight = Tensor.ones(max(case.rows, UNIT)).contiguous().realize()
        self.out = Tensor.zeros(case.rows).contiguous().realize()
        self.other = Tensor.zeros(permuted_size(case.rows)).contiguous().realize()
        self.prescale = Tensor.ones(UNIT).contiguous().realize()
        self.small: dict[int, tuple[Tensor, Tensor]] = {}

    def _launch(self, launches: Launches, s: Schedule, planes: list[Tensor]) -> None:
        case, blocks = self.case, -(-self.case.rows // s.block_rows)
        if blocks not in self.small:
            self.small[blocks] = (
                Tensor.zeros(blocks).contiguous().realize(),
                Tensor.zeros(blocks, dtype=dtypes.int32).contiguous().realize(),
            )
        sums, indices = self.small[blocks]
        epilogues: dict[str, tuple[Epilogue, list[Tensor], list[Tensor]]] = {
            "store": (Store(), [self.out], []),
            "residual": (Residual(), [self.out, sums, self.other], [self.weight]),
            "gate_up": (GateUp(), [self.other], [self.prescale]),
            "best": (Best(), [self.out, sums, indices], []),
        }
        epilogue, outs, ins = epilogues[case.kind]
        kernel = matvec(case.packing, case.rows, case.cols, s, epilogue, case.kind, case.n_parts, 1e-5)
        parts = [self.parts] if case.n_parts else []
        launches.add(kernel, *outs, self.x, *parts, *ins, *planes)

    def chain(self, schedule: Schedule, n: int) -> Launches:
        launches = Launches()
        for i in range(n):
            self._launch(launches, schedule, self.matrices[i % self.copies])
        return launches

    def result(self, schedule: Schedule) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
        self.out.assign(Tensor.zeros(self.case.rows)).realize()
        self.chain(schedule, 1).captured()()
        out = self.other if self.case.kind == "gate_up" else self.out
        return np.asarray(out.numpy(), np.float32)

    def time(self, schedule: Schedule) -> float:
        """Seconds a product takes within a chain."""
        run = self.chain(schedule, _CHAIN_KERNELS).captured()
        best = float("inf")
        for _ in range(6):
            Device[Device.DEFAULT].synchronize()
            started = time.perf_counter()
            for _ in range(4):
                run()
            Device[Device.DEFAULT].synchronize()
            best = min(best, (time.perf_counter() - started) / 4 / _CHAIN_KERNELS)
        return best
