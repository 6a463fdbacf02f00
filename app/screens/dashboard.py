"""The dashboard: panes beside the chat, fed by what the engine tells and, while it is idle, by what is asked
of it."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable

from textual import on
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.widget import Widget

from app.chat.session import Session
from app.chat.slowdown import explain_slowdown
from app.chat.speed_history import MIN_TOKENS
from app.comparison.engine_pair import answered_together
from app.screens.engine_setup import EngineSetup
from app.screens.kernel_source import KernelScreen
from app.screens.performance import PerformanceObserver
from engine.client import Measurable
from engine.events import Counter, Event, Failed, Finished, Ready, Step, decode_rate, prefill_rate
from engine.measure.counters import Counters
from widgets.kernel_table import KernelTable
from widgets.machine_panel import MachinePanel, MachineState
from widgets.preset_bar import PresetBar
from widgets.throughput_graph import ThroughputGraph

FRAME_S = 0.5 if "SSH_CONNECTION" in os.environ else 0.25
COUNTERS_S = 1.0
IDLE_S = 0.7
"""The engine has nothing to do for this long before it is asked to measure itself."""


class Dashboard(Vertical):
    """Panes from the top: preset, throughput, kernels, machine. Nothing is drawn while it is not seen."""

    DEFAULT_CSS = """
    Dashboard { width: 1fr; }
    Dashboard ThroughputGraph { height: 3fr; min-height: 6; }
    Dashboard KernelTable { height: 4fr; min-height: 9; }
    Dashboard MachinePanel { height: auto; max-height: 13; }
    Dashboard.-zoomed > * { display: none; }
    Dashboard.-zoomed > .-whole { display: block; height: 1fr; max-height: 100%; }
    """

    def __init__(
        self,
        session: Session,
        setup: EngineSetup | None,
        read_counters: Callable[[], tuple[Counter, ...]] | None = None,
    ) -> None:
        super().__init__(id="dashboard")
        self.session, self.setup = session, setup
        self.performance = PerformanceObserver(session.clock)
        self._read = read_counters or Counters().read
        self._counters: tuple[Counter, ...] = ()
        self._best: tuple[float, int] | None = None  # tok/s, bytes a token had to read
        self._drawn = -1
        self._wanted: list[Step] = []
        self._asked: asyncio.Task[None] | None = None
        self._idle_since: float | None = None
        self._drawn_at = 0.0
        session.watch = self.observe

    def compose(self) -> ComposeResult:
        yield PresetBar("F6", "F7", "F8")
        yield ThroughputGraph()
        yield KernelTable()
        yield MachinePanel()

    def on_mount(self) -> None:
        self.preset_bar = self.query_one(PresetBar)
        self.graph = self.query_one(ThroughputGraph)
        self.table = self.query_one(KernelTable)
        self.machine = self.query_one(MachinePanel)
        self.panes: list[Widget] = [self.graph, self.table, self.machine]
        self.preset_bar.set_class(self.setup is None, "-absent")
        self.table.data = self.performance.kernels
        self.set_interval(COUNTERS_S, self._sample)
        self.call_after_refresh(self._sample)
        self.run_worker(self._examine())

    # --- what happens -----------------------------------------------------------------------------------

    def observe(self, event: Event) -> None:
        self.performance.observe(event)
        if isinstance(event, Ready):
            self._best, self._wanted = None, ["decode"]
            if self.setup is not None:
                self.setup.engine_ready(event.backend)
                self.show_preset()
        elif isinstance(event, Finished):
            self._wanted = ["decode", *(step for step in self._wanted if step != "decode")]
            self._note_speed(event)

    def _note_speed(self, end: Finished) -> None:
        if self.setup is None or answered_together(self.session.engine):
            return
        decode, prefill = decode_rate(end.predicted_n, end.predicted_ms), None
        if end.prompt_n - end.cached_n >= MIN_TOKENS and end.predicted_n:
            prefill = prefill_rate(end.prompt_n, end.cached_n, end.prompt_ms)
        self.setup.record_speed(decode if end.predicted_n >= MIN_TOKENS else None, prefill)
        self.show_preset()

    def show_preset(self) -> None:
        if self.setup is not None and self.is_mounted:
            self.preset_bar.data = self.setup.bar()

    async def _examine(self) -> None:
        if self.setup is not None:
            await asyncio.to_thread(self.setup.check_backends)
            self.show_preset()

    # --- drawing ----------------------------------------------------------------------------------------

    @property
    def is_seen(self) -> bool:
        return self.display and self.size.width > 0 and self.app.screen is self.screen

    def draw(self) -> bool:
        """Shows what has changed, FRAME_S after the last time at the earliest; asks an idle engine. Whether anything
        was drawn."""
        now = time.monotonic()
        if now - self._drawn_at < FRAME_S:
            return False
        self._drawn_at = now
        self._ask_when_idle()
        if not self.is_seen or self._drawn == self.performance.changes:
            return False
        self._drawn = self.performance.changes
        with self.app.batch_update():
            self.graph.data = self.performance.throughput(self._counters)
            self.table.data = self.performance.kernels
        return True

    async def _sample(self) -> None:
        if not self.is_seen:
            return
        self._counters = await asyncio.to_thread(self._read)
        self.machine.data = MachineState(self._counters, self._verdict())
        self._drawn = -1

    def _verdict(self) -> str:
        performance = self.performance
        rate, must_read = performance.current, performance.bytes_per_token(performance.position)
        if rate and (self._best is None or rate > self._best[0]):
            self._best = rate, must_read
        if self._best is None or not self.session.is_answering:
            return ""
        best, then = self._best
        slowdown = then / must_read if must_read and then else 1.0
        return explain_slowdown(
            rate, best, slowdown, performance.position, performance.bearing(self._counters)
        )

    # --- what the idle engine is asked ------------------------------------------------------------------

    @on(KernelTable.ProfileRequested)
    def measure_again(self, message: KernelTable.ProfileRequested) -> None:
        self._wanted.append(message.step)
        self.performance.note("is measured as soon as the engine is idle")

    @on(KernelTable.SourceRequested)
    def show_detail(self, message: KernelTable.SourceRequested) -> None:
        self.app.push_screen(KernelScreen(message.kernel))

    def _ask_when_idle(self) -> None:
        now, session = time.monotonic(), self.session
        if session.is_busy or not session.status.is_ready or session.candidate is not None:
            self._idle_since = None
            return
        self._idle_since = now if self._idle_since is None else self._idle_since
        if now - self._idle_since < IDLE_S or not self.is_seen or (self._asked and not self._asked.done()):
            return
        engine = session.engine
        if not isinstance(engine, Measurable):
            if self._wanted:
                self._wanted.clear()
                self.performance.note(f"{engine.name} does not tell of its kernels")
            return
        if self.performance.copy_gbps is None:
            self._asked = asyncio.ensure_future(self._measure(engine))
        elif self._wanted and not self.table.is_paused:
            self._asked = asyncio.ensure_future(self._profile(engine, self._wanted[0]))

    async def _measure(self, engine: Measurable) -> None:
        answer = await engine.measure()
        if self._is_in_use(engine):
            if isinstance(answer, Failed):
                self.performance.copy_gbps = 0.0  # not again
            self.performance.observe(answer)

    async def _profile(self, engine: Measurable, step: Step) -> None:
        answer = await engine.profile(step)
        if not self._is_in_use(engine) or self.session.is_busy:
            return  # asked again when it is idle
        self._wanted = [wanted for wanted in self._wanted if wanted != step]
        if isinstance(answer, Failed):
            self.performance.note(f"{step}: {answer.message}")
        else:
            self.performance.observe(answer)

    def _is_in_use(self, engine: object) -> bool:
        return engine is self.session.engine

    # --- full screen ------------------------------------------------------------------------------------

    @property
    def whole(self) -> Widget | None:
        """The pane that has the screen for itself."""
        return next((pane for pane in self.panes if pane.has_class("-whole")), None)

    @property
    def next_pane(self) -> Widget | None:
        """The one to have it next; None after the last."""
        following = 0 if self.whole is None else self.panes.index(self.whole) + 1
        return self.panes[following] if following < len(self.panes) else None

    def zoom(self, pane: Widget | None) -> None:
        for other in self.panes:
            other.set_class(other is pane, "-whole")
        self.set_class(pane is not None, "-zoomed")
        if pane is not None:
            pane.focus()
