"""Searches the schedules of products that make a decode step fastest, one product after another.

Candidates are timed in whole steps, because the kernel that is fastest by itself is not always the fastest among its
neighbours. A candidate counts only if the step's logits stay the same. The result is stored for this device.
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
from engine.kernels.compilation import compile_all
from engine.protocol.events import Search
from engine.runtime.model_runner import Interrupted, SearchRequest
from engine.runtime.sampling import Logits
from engine.targets.nvidia.kernels.device import chip
from engine.targets.nvidia.kernels.kernel_sequence import KernelSequence
from engine.targets.nvidia.kernels.products.matvec import Schedule, StackedMatrices
from engine.targets.nvidia.kernels.products.schedules import candidates, save_search_result, search_result
from engine.targets.nvidia.matrices import Product

_CANDIDATES_PER_WIDTH = 12  # for each shape
_TRIAL_S = 20.0  # a candidate that takes longer than this to run and to time hangs
_TOLERANCE = 2e-3  # of the largest logit: sums have another order, and keys and values are half precision
_MIN_GAIN = 0.003  # of a step's time: a smaller gain may be noise


@dataclass(frozen=True)
class SearchTarget:
    """The decode step that is searched. `build_step` makes its kernels with the schedules that are set. The other two
    take a captured step: `check_logits` returns the logits after a few tokens, `step_seconds` the time of a step."""

    products: list[Product]
    build_step: Callable[[], KernelSequence]
    check_logits: Callable[[Callable[[], None]], Logits]
    step_seconds: Callable[[Callable[[], None]], float]


def search(target: SearchTarget, request: SearchRequest) -> None:
    """Finds and sets the schedules of all products."""
    shapes: dict[StackedMatrices, list[Product]] = {}
    for product in target.products:
        shapes.setdefault(product.stack, []).append(product)
    todo: list[list[Product]] = []
    known: list[list[Product]] = []
    for stack, products in shapes.items():
        earlier = search_result(stack)
        (todo if request.again or earlier is None or earlier[1] < request.width else known).append(products)
    cached = len(known)
    for products in known:
        request.report(cached, len(shapes), cached, search_event(products[0], found=True))
    if not todo:
        return
    deadline = time.monotonic() + request.seconds
    interrupted = request.interrupted or (lambda: False)
    expected = target.check_logits(target.build_step().capture())
    todo.sort(key=lambda products: -products[0].stack.n_bytes * len(products))
    for i, products in enumerate(todo):
        if interrupted():
            return
        shape = _ShapeSearch(target, products, expected, request.interrupted)

        def progress(done: int, shape: _ShapeSearch = shape) -> None:
            request.report(
                cached + done, len(shapes), cached, shape.event(max(0.0, deadline - time.monotonic()))
            )

        progress(i)
        share_s = (deadline - time.monotonic()) / (len(todo) - i)
        for _ in shape.run(_CANDIDATES_PER_WIDTH * request.width, time.monotonic() + share_s):
            progress(i)
        if interrupted():
            return
        save_search_result(products[0].stack, products[0].schedule, request.width)
        progress(i + 1)


class _ShapeSearch:
    """The search for the products of one shape, which share a schedule."""

    def __init__(
        self,
        target: SearchTarget,
        products: list[Product],
        expected: Logits,
        interrupted: Interrupted | None,
    ) -> None:
        # A request that comes must not wait for the compiler longer than for one candidate.
        self._at_once = 1 if interrupted else max(4, int(os.environ.get("PARALLEL", "0")))
        self._interrupted: Interrupted = interrupted or (lambda: False)
        self._target, self._products, self._expected = target, products, expected
        self._first = products[0]
        self._tried = self._refused = self._total = 0
        self._seconds_before = self._seconds_after = target.step_seconds(target.build_step().capture())

    def run(self, max_candidates: int, deadline: float) -> Iterator[None]:
        """Tries candidates until `deadline`, yields after each, and sets the best schedule at the end, unless it was
        interrupted."""
        stack = self._first.stack
        schedules = candidates(stack, self._first.schedule, chip())
        todo = [s for s in schedules if not has_failed(disk_cache(), self._key(s))][:max_candidates]
        self._total = len(todo)
        timed: list[tuple[float, Schedule]] = []
        for schedule, step in self._compiled(todo):
            if self._interrupted():
                return
            self._tried += 1
            if (seconds := self._try(schedule, step)) is None:
                self._refused += 1
            else:
                timed.append((seconds, schedule))
            yield
            if time.monotonic() > deadline:
                break
        if not self._interrupted():
            self._adopt([schedule for _, schedule in sorted(timed, key=lambda pair: pair[0])[:2]])

    def _compiled(self, schedules: list[Schedule]) -> Iterator[tuple[Schedule, KernelSequence]]:
        """A step for each schedule, compiled. Several are compiled at once."""
        for start in range(0, len(schedules), self._at_once):
            if self._interrupted():
                return
            steps = []
            for schedule in schedules[start : start + self._at_once]:
                with self._using(schedule):
                    steps.append((schedule, self._target.build_step()))
            if self._interrupted():
                return
            compile_all([step.linear for _, step in steps])
            yield from steps

    def _try(self, schedule: Schedule, step: KernelSequence) -> float | None:
        """The seconds of a step; None if it fails or computes other logits."""
        try:
            with (
                trial(disk_cache(), self._key(schedule), _TRIAL_S, lambda: device_works(Device.DEFAULT)),
                self._using(schedule),
            ):
                run = step.capture()
                if not logits_agree(self._target.check_logits(run), self._expected):
                    raise ValueError("other logits")
                return self._target.step_seconds(run)
        except CandidateFailedError:
            return None

    def _adopt(self, best: list[Schedule]) -> None:
        """Sets the first of `best` that is faster than the current schedule when both are timed in turns."""
        for schedule in best:
            current = self._target.build_step().capture()
            with self._using(schedule):
                candidate = self._target.build_step().capture()
            turns = [
                (self._target.step_seconds(current), self._target.step_seconds(candidate)) for _ in range(3)
            ]
            old, new = (float(np.median(seconds)) for seconds in zip(*turns, strict=True))
            if new < old * (1 - _MIN_GAIN) and logits_agree(
                self._target.check_logits(candidate), self._expected
            ):
                self._seconds_after = self._seconds_before * new / old
                self._set(schedule)
                return

    def _set(self, schedule: Schedule) -> None:
        for product in self._products:
            product.schedule = schedule

    @contextmanager
    def _using(self, schedule: Schedule) -> Iterator[None]:
        current = self._first.schedule
        self._set(schedule)
        try:
            yield
        finally:
            self._set(current)

    def _key(self, schedule: Schedule) -> tuple[object, ...]:
        return self._first.stack.name, schedule

    def event(self, left_s: float) -> Search:
        return search_event(
            self._first,
            tried=self._tried,
            total=self._total,
            refused=self._refused,
            before_us=self._seconds_before * 1e6,
            after_us=self._seconds_after * 1e6,
            left_s=left_s,
        )


def logits_agree(logits: Logits, expected: Logits) -> bool:
    """Whether two steps computed the same, except for rounding."""
    return bool(np.abs(logits - expected).max() <= _TOLERANCE * np.abs(expected).max())


def search_event(
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
    """The `Search` event for a product with its current schedule."""
    s = product.schedule
    held = f", {s.blocks} blocks held" if s.blocks else ", weights early" if s.early else ""
    held += ", tensor cores" if s.tensor else ""
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
