"""Has an idle engine search for faster kernels, until a key is pressed."""

import asyncio
import time
from collections.abc import Callable
from typing import Literal

from engine.devices.mains import is_on_mains
from engine.protocol.client import Engine, Tunable
from engine.protocol.events import Event, Failed, Ready, Tuned

WhenIdle = Literal["mains", "always", "never"]
"""When an idle engine searches: on mains power, on a battery too, or never."""

IDLE_S = 20.0
"""How long no key was pressed and nothing was answered before a search begins."""
SEARCH_S = 600.0  # of one search; the next one goes on where it ended
_MIN_GAIN = 0.002  # the least share of a step's time that is told


class IdleTuner:
    """`engine()` is the engine in use; `is_idle()`: it is ready and has no request; `when()`: what the preset or the
    settings say. `tell` gets a sentence when a search has gained something."""

    def __init__(
        self,
        engine: Callable[[], Engine],
        is_idle: Callable[[], bool],
        when: Callable[[], WhenIdle],
        tell: Callable[[str], None],
        on_mains: Callable[[], bool] = is_on_mains,
    ) -> None:
        self._engine, self._is_idle, self._when, self._tell = engine, is_idle, when, tell
        self._on_mains = on_mains
        self._is_done = False  # nothing is left to search, or it failed
        self._quiet_since = time.monotonic()
        self._task: asyncio.Task[None] | None = None

    @property
    def is_searching(self) -> bool:
        return self._task is not None and not self._task.done()

    def observe(self, event: Event) -> None:
        if isinstance(event, Ready):
            self._is_done, self._quiet_since = False, time.monotonic()

    def key_pressed(self) -> None:
        """Stops a search: the engine ends it after the candidate at hand."""
        self._quiet_since, engine = time.monotonic(), self._engine()
        if self.is_searching and isinstance(engine, Tunable):
            engine.stop_tuning()

    def search_if_idle(self) -> None:
        """Begins a search if the machine and the engine were left alone for `IDLE_S`. Call it again and again."""
        now, engine = time.monotonic(), self._engine()
        if not self._is_idle():
            self._quiet_since = now
        if self._is_done or self.is_searching or now - self._quiet_since < IDLE_S:
            return
        when = self._when()
        if when == "never" or (when == "mains" and not self._on_mains()) or not isinstance(engine, Tunable):
            self._quiet_since = now  # asked again later
            return
        self._task = asyncio.ensure_future(self._search(engine))

    async def _search(self, engine: Tunable) -> None:
        result = await engine.tune(SEARCH_S)
        if not self._is_in_use(engine):
            return
        self._is_done = isinstance(result, Failed) or not result.left
        if isinstance(result, Tuned) and (text := gain(result)):
            self._tell(text)

    def _is_in_use(self, engine: object) -> bool:
        return engine is self._engine()


def gain(result: Tuned) -> str:
    """What a search has gained, as a sentence; "" if nothing."""
    if result.after_us >= result.before_us * (1 - _MIN_GAIN):
        return ""
    percent = (1 - result.after_us / result.before_us) * 100
    return f"A search while idle: a token takes {result.after_us:,.0f} µs, {percent:.1f} % less than before"
