"""Has the engine measure itself while it is idle: its copy bandwidth, then its kernels."""

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

from engine.protocol.client import Engine, Measurable
from engine.protocol.events import Event, Failed, Finished, Ready, Step

IDLE_S = 0.7
"""How long the engine must be idle before it measures itself."""


class Measurements(Protocol):
    """Takes what was measured."""

    def observe(self, event: Event) -> None: ...

    def note(self, text: str) -> None:
        """Says why there is no profile, or that one is to be measured."""
        ...


class IdleProfiler:
    """Gives the results to `measurements`. `engine()` is the engine in use; `is_idle()`: it is ready and has no
    request."""

    def __init__(
        self, engine: Callable[[], Engine], is_idle: Callable[[], bool], measurements: Measurements
    ) -> None:
        self._engine, self._is_idle, self._measurements = engine, is_idle, measurements
        self._needs_bandwidth = False
        self._was_disturbed = False  # other programs may have worked while the bandwidth was measured
        self._steps: list[Step] = []  # to be profiled, the next one first
        self._task: asyncio.Task[None] | None = None
        self._idle_since: float | None = None

    @property
    def is_measuring(self) -> bool:
        return self._task is not None and not self._task.done()

    def observe(self, event: Event) -> None:
        if isinstance(event, Ready):
            self._needs_bandwidth, self._steps = True, ["decode"]
        elif isinstance(event, Finished):  # a decode step takes longer now, since the context is longer
            self._steps = ["decode", *(step for step in self._steps if step != "decode")]

    def request(self, step: Step) -> None:
        self._steps.append(step)
        self._measurements.note("will be measured when the engine is idle")

    def measure_if_idle(self, *, with_kernels: bool, is_quiet: bool) -> None:
        """Starts the next measurement, if the engine has been idle for `IDLE_S`. Call it again and again. `is_quiet`:
        other programs leave the machine alone. A bandwidth measured while they did not is measured once more then."""
        now, engine = time.monotonic(), self._engine()
        if not self._is_idle():
            self._idle_since = None
            return
        self._idle_since = now if self._idle_since is None else self._idle_since
        if now - self._idle_since < IDLE_S or self.is_measuring:
            return
        if not isinstance(engine, Measurable):
            if self._steps:
                self._steps.clear()
                self._measurements.note(f"{engine.name} cannot measure its kernels")
        elif self._needs_bandwidth or (self._was_disturbed and is_quiet):
            self._needs_bandwidth, self._was_disturbed = False, not is_quiet
            self._task = asyncio.ensure_future(self._measure_bandwidth(engine))
        elif self._steps and with_kernels:
            self._task = asyncio.ensure_future(self._profile(engine, self._steps[0]))

    async def _measure_bandwidth(self, engine: Measurable) -> None:
        measured = await engine.measure()
        if self._is_in_use(engine):
            self._measurements.observe(measured)

    async def _profile(self, engine: Measurable, step: Step) -> None:
        profile = await engine.profile(step)
        if not self._is_in_use(engine) or not self._is_idle():
            return  # a prompt interrupted it; `step` is still in the list
        self._steps = [other for other in self._steps if other != step]
        if isinstance(profile, Failed):
            self._measurements.note(f"{step}: {profile.message}")
        else:
            self._measurements.observe(profile)

    def _is_in_use(self, engine: object) -> bool:
        return engine is self._engine()
