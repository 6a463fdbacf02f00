"""The search for the schedules that make a decode step fastest, one product of the model after the other.

Candidates are timed in whole steps, since what is fastest alone is not always fastest among its neighbours, and a
candidate counts only if the step's logits stay what they were. What is found holds for this device, and is kept.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from tinygrad import Device

from engine.candidate_trial import CandidateFailedError, device_works, has_failed, trial
from engine.disk_cache import disk_cache
from engine.events import Search
from engine.kernels.compilation import compile_all
from engine.kernels.gpu.kernel_sequence import KernelSequence
from engine.kernels.gpu.matvec import Schedule, Stack
from engine.kernels.gpu.schedules import candidates, note_searched, searched
from engine.model.fused.packed_model import Product
from engine.model.model_runner import SearchReport
from engine.model.sampling import Logits

_CANDIDATES_A_WIDTH = 12  # of each product
_TRIAL_S = 20.0  # for a candidate that takes longer than this to compute and to time, something is wrong
_TOLERANCE = 2e-3  # of the largest logit: the order of sums changes, and keys and values are half precision
_GAIN = 0.003  # of a step's time, below which a candidate is not worth it


@dataclass(frozen=True)
class Bench:
    """What the search needs of a model's steps. `step` gives the kernels of a step as schedules are now; `answer`
    the logits after a few tokens of a step that is captured; `seconds` what it takes, one after the other."""

    products: list[Product]
    step: Callable[[], KernelSequence]
    answer: Callable[[Callable[[], None]], Logits]
    seconds: Callable[[Callable[[], None]], float]


def search(bench: Bench, width: int, seconds: float, report: SearchReport, again: bool = False) -> None:
    """Sets the schedules of all products. `report(done, total, cached, search)` is called as it goes: how many
    shapes are done, of how many, how many were known, and the one at hand. Nothing is searched that was searched
    before as widely, unless `again`."""
    shapes: dict[Stack, list[Product]] = {}
    for product in bench.products:
        shapes.setdefault(product.stack, []).append(product)
    todo = []
    for stack, alike in shapes.items():
        known = searched(stack)
        if again or known is None or known[1] < width:
            todo.append(alike)
    cached = len(shapes) - len(todo)
    for alike in shapes.values():
        if alike not in todo:
            report(cached, len(shapes), cached, _told(alike[0], found=True))
    if not todo:
        return
    deadline = time.monotonic() + seconds
    wanted = bench.answer(bench.step().capture())
    todo.sort(key=lambda alike: -alike[0].stack.n_bytes * len(alike))
    for i, alike in enumerate(todo):
        one = _OneShape(bench, alike, wanted)

        def tell(done: int, one: _OneShape = one) -> None:
            report(cached + done, len(shapes), cached, one.told(max(0.0, deadline - time.monotonic())))

        tell(i)
        share = (deadline - time.monotonic()) / (len(todo) - i)
        for _ in one.run(_CANDIDATES_A_WIDTH * width, time.monotonic() + share):
            tell(i)
        note_searched(alike[0].stack, alike[0].schedule, width)
        tell(i + 1)


class _OneShape:
    """The search for the products of one shape, which share a schedule."""

    def __init__(self, bench: Bench, products: list[Product], wanted: Logits) -> None:
        self._bench, self._products, self._wanted = bench, products, wanted
        self._first = products[0]
        self._tried = self._refused = 0
        self._total = 0
        self._before = self._after = bench.seconds(bench.step().capture())

    def run(self, most: int, deadline: float) -> Iterator[None]:
        """Sets the best schedule among `most`, the one that is set included, as far as time allows. A turn for each
        candidate."""
        stack, current = self._first.stack, self._first.schedule
        untried = candidates(stack.rows, stack.cols, current)
        todo = [s for s in untried if not has_failed(disk_cache(), self._key(s))][:most]
        self._total = len(todo)
        timed: list[tuple[float, Schedule]] = []
        batch = max(4, int(os.environ.get("PARALLEL", "0")))
        for start in range(0, len(todo), batch):
            steps = []
            for schedule in todo[start : start + batch]:
                with self._set(schedule):
                    steps.append((schedule, self._bench.step()))
            compile_all([step.linear for _, step in steps])
            for schedule, step in steps:
                self._tried += 1
                if (taken := self._try(schedule, step)) is None:
                    self._refused += 1
                else:
                    timed.append((taken, schedule))
                yield
                if time.monotonic() > deadline:
                    break
            if time.monotonic() > deadline:
                break
        self._adopt(sorted(timed, key=lambda found: found[0])[:2])

    def _try(self, schedule: Schedule, step: KernelSequence) -> float | None:
        """Seconds of a step, None if it does not give the results that it should."""
        try:
            with (
                trial(disk_cache(), self._key(schedule), _TRIAL_S, lambda: device_works(Device.DEFAULT)),
                self._set(schedule),
            ):
                run = step.capture()
                if not agree(self._bench.answer(run), self._wanted):
                    raise ValueError("other logits")
                return self._bench.seconds(run)
        except CandidateFailedError:
            return None

    def _adopt(self, best: list[tuple[float, Schedule]]) -> None:
        """Takes the best if it is better than what is set, timed in turns with it."""
        for _, schedule in best:
            now = self._bench.step().capture()
            with self._set(schedule):
                then = self._bench.step().capture()
            turns = [(self._bench.seconds(now), self._bench.seconds(then)) for _ in range(3)]
            old, new = (float(np.median(times)) for times in zip(*turns, strict=True))
            if new < old * (1 - _GAIN) and agree(self._bench.answer(then), self._wanted):
                self._after = self._before * new / old
                for product in self._products:
                    product.schedule = schedule
                return

    @contextmanager
    def _set(self, schedule: Schedule) -> Iterator[None]:
        before = self._first.schedule
        for product in self._products:
            product.schedule = schedule
        try:
            yield
        finally:
            for product in self._products:
                product.schedule = before

    def _key(self, schedule: Schedule) -> tuple[object, ...]:
        return self._first.stack.name, schedule

    def told(self, left: float) -> Search:
        return _told(
            self._first,
            tried=self._tried,
            total=self._total,
            refused=self._refused,
            before_us=self._before * 1e6,
            after_us=self._after * 1e6,
            left_s=left,
        )


def agree(logits: Logits, wanted: Logits) -> bool:
    """Whether two steps computed the same, but for rounding."""
    return bool(np.abs(logits - wanted).max() <= _TOLERANCE * np.abs(wanted).max())


def _told(
    product: Product,
    *,
    tried: int = 0,
    total: int = 0,
    refused: int = 0,
    before_us: float = 0.0,
    after_us: float = 0.0,
    left_s: float = 0.0,
    found: bool = False,
) -> Search:
    s = product.schedule
    held = f", {s.blocks} blocks held" if s.blocks else ""
    return Search(
        what=f"{product.name} {product.stack.name}",
        choice=f"{s.threads} threads x {s.groups} rows, {s.rows} each{held}",
        tried=tried,
        total=total,
        refused=refused,
        before_us=before_us,
        after_us=after_us,
        left_s=left_s,
        found=found,
    )
