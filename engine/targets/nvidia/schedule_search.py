"""Searches the schedules of products that make a decode step fastest, one product after another.

Candidates are timed in steps of a few layers and the head, because the kernel that is fastest by itself is not always
the fastest among its neighbours, and beside the step as it is, because clocks change. First come those that the model
of the GPU finds cheap, then those like the best so far. The next ones are compiled while one is timed. A candidate
counts only if the step's logits stay the same, and is taken only if the whole step is faster, too. The result is stored
for this device.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from itertools import chain, islice

import numpy as np
from tinygrad import Device, UOp

from engine.cache.candidate_trial import CandidateFailedError, device_works, has_failed, trial
from engine.cache.disk_cache import disk_cache
from engine.errors import PreemptedError
from engine.kernels.compilation import (
    begin_compiling,
    interruptible,
    left_to_compilers,
    processes_are_done,
    wait_for_compilers,
)
from engine.protocol.events import Search
from engine.runtime.model_runner import Interrupted, SearchRequest
from engine.runtime.sampling import Logits
from engine.targets.nvidia.kernels.device import chip
from engine.targets.nvidia.kernels.kernel_sequence import KernelSequence, forgetting
from engine.targets.nvidia.kernels.products.schedules import (
    candidates,
    neighbours,
    save_search_result,
    search_result,
)
from engine.targets.nvidia.kernels.products.stacked_matrices import (
    Schedule,
    StackedMatrices,
    usual_release,
)
from engine.targets.nvidia.matrices import Product

_CANDIDATES_PER_WIDTH = 12  # for each shape
_BEST = 2  # candidates so far whose neighbours are tried, and which may be taken at the end
_BASE_EVERY = 4  # candidates, the step as it is is timed again
_TRIAL_S = 20.0  # a candidate that takes longer than this to run and to time hangs
_TOLERANCE = 2e-3  # of the largest logit: sums have another order, and keys and values are half precision
_MIN_GAIN = 0.002  # of a short step's time: a smaller gain may be noise

Run = Callable[[], None]


@dataclass(frozen=True)
class SearchTarget:
    """The decode step that is searched. `build_step` makes its kernels with the schedules that are set, `short_step`
    those of a step of a few layers and the head. The other two take a captured step: `check_logits` returns the logits
    after a few tokens, `step_seconds` the time of a step."""

    products: list[Product]
    build_step: Callable[[], KernelSequence]
    short_step: Callable[[], KernelSequence]
    check_logits: Callable[[Run], Logits]
    step_seconds: Callable[[Run], float]


def search(target: SearchTarget, request: SearchRequest) -> None:
    """Finds and sets the schedules of all products: first of those that were measured with other kernels, and that take
    longest."""
    shapes = _shapes(target)
    known = [] if request.again else [shape for shape in shapes if shape.is_known(request.width)]
    todo = _that_matter(target, [shape for shape in shapes if shape not in known])
    todo.sort(key=lambda shape: (not shape.is_outdated, -shape.weight))
    for shape in known:
        total = len(known) + len(todo)
        request.report(len(known), total, len(known), search_event(shape.first, found=True))
    if todo:
        with (
            interruptible(request.interrupted) if request.interrupted else nullcontext(),
            suppress(PreemptedError),  # the shape at hand is as it was
        ):
            _search(target, request, todo, len(known))


def _search(target: SearchTarget, request: SearchRequest, todo: list[_Shape], cached: int) -> None:
    deadline, interrupted = time.monotonic() + request.seconds, request.interrupted or (lambda: False)
    steps, most = _Steps.of(target), _CANDIDATES_PER_WIDTH * request.width
    searches = [_ShapeSearch(target, steps, shape, interrupted, most) for shape in todo]
    for done, (shape, one) in enumerate(zip(todo, searches, strict=True)):
        if interrupted():
            return

        def progress(done: int, one: _ShapeSearch = one) -> None:
            event = one.event(max(0.0, deadline - time.monotonic()))
            request.report(cached + done, cached + len(todo), cached, event)

        one.begin()
        progress(done)
        share = shape.weight / sum(later.weight for later in todo[done:])
        ends_at = time.monotonic() + (deadline - time.monotonic()) * share
        with forgetting():
            for _ in one.run(ends_at):
                progress(done)
        if interrupted():
            return
        for following in searches[done + 1 : done + 2]:
            following.compile_next()
        one.adopt()
        if one.tried:  # else there was no time for it
            save_search_result(shape.stack, shape.first.schedule, request.width)
        progress(done + 1)


class _Shape:
    """The products of one shape, which share a schedule. `weight`: the time that their search gets, in comparison: what
    small ones may gain is more of their time. `is_outdated`: whether an earlier search had other kernels than these."""

    def __init__(self, stack: StackedMatrices, products: list[Product]) -> None:
        self.stack, self.products, self.first = stack, products, products[0]
        rates = chip().rates
        self.weight = math.sqrt(len(products) * (stack.n_bytes / rates.copy_gbps / 1e3 + rates.link_us))
        self._earlier = search_result(stack)
        self.is_outdated = self._earlier is not None and self._earlier.is_outdated

    def is_known(self, width: int) -> bool:
        return self._earlier is not None and self._earlier.width >= width and not self.is_outdated

    def set(self, schedule: Schedule) -> None:
        for product in self.products:
            product.schedule = schedule

    @contextmanager
    def using(self, schedule: Schedule) -> Iterator[None]:
        current = self.first.schedule
        self.set(schedule)
        try:
            yield
        finally:
            self.set(current)


def _shapes(target: SearchTarget) -> list[_Shape]:
    found: dict[StackedMatrices, list[Product]] = {}
    for product in target.products:
        found.setdefault(product.stack, []).append(product)
    return [_Shape(stack, products) for stack, products in found.items()]


def _that_matter(target: SearchTarget, shapes: list[_Shape]) -> list[_Shape]:
    """The shapes on whose schedules the step depends: not that of an embedding, of which it reads a row, nor those of a
    draft head. Builds a step for each."""
    kernels: Callable[[], list[UOp]] = lambda: [call.src[0] for call in target.short_step().calls]
    with left_to_compilers():
        now, found = kernels() if shapes else [], []
        for shape in shapes:
            for other in candidates(shape.stack, shape.first.schedule, chip())[:1]:
                with shape.using(other):
                    if kernels() != now:
                        found.append(shape)
    return found


@dataclass
class _Steps:
    """The steps with the schedules that are set, captured, and what they compute."""

    short: Run
    whole: Run
    short_logits: Logits
    whole_logits: Logits

    @classmethod
    def of(cls, target: SearchTarget) -> _Steps:
        short, whole = target.short_step().capture(), target.build_step().capture()
        return cls(short, whole, target.check_logits(short), target.check_logits(whole))


class _ShapeSearch:
    """The search for one shape, beside `steps`, which have what was found for others. Tries up to `most` candidates."""

    def __init__(
        self, target: SearchTarget, steps: _Steps, shape: _Shape, interrupted: Interrupted, most: int
    ) -> None:
        self._target, self._steps, self._shape, self._interrupted = target, steps, shape, interrupted
        self._most, self._refused = most, 0
        self._cheap = candidates(shape.stack, shape.first.schedule, chip())
        # The time of a step with each schedule, in comparison with the one in use.
        self._times: dict[Schedule, float] = {shape.first.schedule: 1.0}
        self._ahead: dict[Schedule, UOp] = {}  # those that are compiled, and the kernels of a step with each
        self._before_s = self._after_s = self._base_s = 0.0

    def begin(self) -> None:
        """Times the step as it is."""
        self._before_s = self._after_s = self._target.step_seconds(self._steps.whole)

    def run(self, ends_at: float) -> Iterator[None]:
        """Tries candidates until `ends_at`, or until it is interrupted, and yields after each."""
        while time.monotonic() < ends_at and not self._interrupted():
            self.compile_next()
            if not self._ahead:
                return
            if schedule := next((s for s, linear in self._ahead.items() if processes_are_done(linear)), None):
                del self._ahead[schedule]
                self._times[schedule] = self._time(schedule)
                yield
            else:
                wait_for_compilers()

    def compile_next(self) -> None:
        """Has the next candidates compiled: those like the best so far, and those that the model finds cheap."""
        stack = self._shape.stack
        near = (other for best in self._best() for other in neighbours(stack, best, chip()))
        first = chain(near, self._cheap) if self.tried else self._cheap
        untried = (s for s in first if s not in self._times and s not in self._ahead)
        todo = (s for s in untried if not has_failed(disk_cache(), self._key(s)))
        room = min(max(1, int(os.environ.get("PARALLEL", "0"))), self._most - self.tried) - len(self._ahead)
        for schedule in islice(todo, max(0, room)):
            with self._shape.using(schedule), left_to_compilers():
                self._ahead[schedule] = self._target.short_step().linear
            begin_compiling([self._ahead[schedule]])

    def _best(self) -> list[Schedule]:
        return sorted(self._times, key=self._times.__getitem__)[:_BEST]

    @property
    def tried(self) -> int:
        return len(self._times) - 1

    def _time(self, schedule: Schedule) -> float:
        """The time of a short step beside that of the one as it is; infinite if it fails or computes other logits."""
        target = self._target
        if self.tried % _BASE_EVERY == 0:
            self._base_s = target.step_seconds(self._steps.short)
        with self._shape.using(schedule):
            step = target.short_step()
        try:
            with trial(disk_cache(), self._key(schedule), _TRIAL_S, lambda: device_works(Device.DEFAULT)):
                run = step.capture()
                if not logits_agree(target.check_logits(run), self._steps.short_logits):
                    raise ValueError("other logits")
                return target.step_seconds(run) / self._base_s
        except CandidateFailedError:
            self._refused += 1
            return math.inf

    def adopt(self) -> None:
        """Sets the first of the best schedules with which the short step is faster, and the whole step too, when each
        is timed in turns with the one as it is."""
        target, steps = self._target, self._steps
        for schedule in self._best():
            if self._times[schedule] >= 1:
                return
            with self._shape.using(schedule):
                new = _Steps.of(target)
            is_same = logits_agree(new.short_logits, steps.short_logits) and logits_agree(
                new.whole_logits, steps.whole_logits
            )
            if not is_same or self._gain(steps.short, new.short) < _MIN_GAIN:
                continue
            if (gain := self._gain(steps.whole, new.whole)) > 0:
                self._after_s *= 1 - gain
                self._shape.set(schedule)
                steps.short, steps.whole = new.short, new.whole
                return

    def _gain(self, current: Run, candidate: Run) -> float:
        """How much less time a step takes than the current one, as a share. Raises PreemptedError if interrupted."""
        seconds: list[tuple[float, float]] = []
        for _ in range(3):
            if self._interrupted():
                raise PreemptedError("A search stopped.")
            seconds.append((self._target.step_seconds(current), self._target.step_seconds(candidate)))
        old, new = np.median(seconds, axis=0)
        return float(1 - new / old)

    def _key(self, schedule: Schedule) -> tuple[object, ...]:
        return self._shape.stack.name, schedule

    def event(self, left_s: float) -> Search:
        return search_event(
            self._shape.first,
            tried=self.tried,
            total=min(self._most, len(self._cheap)),
            refused=self._refused,
            before_us=self._before_s * 1e6,
            after_us=self._after_s * 1e6,
            left_s=left_s,
            outdated=self._shape.is_outdated,
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
    outdated: bool = False,
) -> Search:
    """The `Search` event for a product with its current schedule."""
    s = product.schedule
    held = f", {s.blocks} blocks held" if s.blocks else ", weights early" if s.early else ""
    held += ", its end too" * s.early_end
    held += f", the next kernel {s.releases}" if s.releases != usual_release(s.early) else ""
    held += f", {s.brings} MB of the next weights" if s.brings else ""
    held += f", {s.together} loads together" if s.together else ""
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
        outdated=outdated,
    )
