"""The dashboard: the panes beside the chat, and the figures that they show."""

import asyncio
import os
import time
from collections import deque
from collections.abc import Callable

from textual import on
from textual.app import ComposeResult
from textual.events import Resize

from app.chat.idle_profiler import IdleProfiler
from app.chat.idle_tuner import IdleTuner
from app.chat.session import Session
from app.chat.slowdown import is_quiet
from app.comparison.comparison_engine import answered_together
from app.screens.engine_setup import EngineSetup
from app.screens.performance import PerformanceObserver
from engine.measure.counters import Counters
from engine.measure.power import Samples, with_efficiency
from engine.protocol.events import (
    MIN_TOKENS,
    Counter,
    Event,
    Finished,
    Ready,
    decode_rate,
    shown_prefill_rate,
)
from widgets.dashboard.expert_strip import ExpertStrip
from widgets.dashboard.kernel_table import KernelTable
from widgets.dashboard.machine_panel import MachinePanel, MachineState
from widgets.dashboard.pane_stack import PaneStack
from widgets.dashboard.preset_bar import PresetBar
from widgets.dashboard.throughput_graph import ThroughputGraph

FRAME_S = 0.5 if "SSH_CONNECTION" in os.environ else 0.25
COUNTERS_S = 1.0
HISTORY = 300  # values of each counter: five minutes
LOW_HEIGHT = 32
"""With fewer rows, the experts are left out (F9 shows them): the kernels would not fit."""


class Dashboard(PaneStack):
    """While it is not visible, it draws nothing, reads no counters and has nothing measured."""

    DEFAULT_CSS = """
    Dashboard { width: 1fr; }
    Dashboard ThroughputGraph { height: 1fr; min-height: 6; }
    Dashboard KernelTable { height: 2fr; min-height: 11; }
    Dashboard ExpertStrip { height: auto; max-height: 7; }
    Dashboard ExpertStrip.-absent, Dashboard.-low ExpertStrip { display: none; }
    Dashboard MachinePanel { height: auto; max-height: 13; }
    Dashboard.-zoomed > .-whole { max-height: 100%; }
    """

    def __init__(
        self,
        session: Session,
        setup: EngineSetup | None,
        read_counters: Callable[[], tuple[Counter, ...]] | None,
    ) -> None:
        super().__init__(id="dashboard")
        self.session, self.setup = session, setup
        self.performance = PerformanceObserver(session.clock)
        self.profiler = IdleProfiler(lambda: session.engine, self._is_idle, self.performance)
        when = lambda: setup.search_when_idle if setup else "never"
        is_left_alone = lambda: self._is_idle() and not self.profiler.is_measuring
        self.tuner = IdleTuner(lambda: session.engine, is_left_alone, when, self._tell_gain)
        self.tell: Callable[[str], None] = lambda _: None  # a notice
        self.preset_bar, self.graph = PresetBar(), ThroughputGraph()
        self.table, self.experts, self.machine = KernelTable(), ExpertStrip(classes="-absent"), MachinePanel()
        self.panes = (self.graph, self.table, self.experts, self.machine)
        self._read_counters = read_counters or Counters().read
        self._counters: tuple[Counter, ...] = ()
        self._history: dict[str, deque[float]] = {}  # of each counter
        self._drawn_at = 0.0
        self._drawn_changes = -1
        session.watch = self.observe

    def compose(self) -> ComposeResult:
        yield from (self.preset_bar, *self.panes)

    def on_mount(self) -> None:
        self.preset_bar.set_class(self.setup is None, "-absent")
        self.table.data = self.performance.kernels
        self.set_interval(COUNTERS_S, self._sample_counters)
        self.call_after_refresh(self._sample_counters)
        self.run_worker(self._check_backends())

    def on_resize(self, event: Resize) -> None:
        self.set_class(event.size.height < LOW_HEIGHT, "-low")

    # --- events -----------------------------------------------------------------------------------------

    def observe(self, event: Event) -> None:
        is_first = self.performance.ready is None
        self.performance.observe(event)
        self.profiler.observe(event)
        self.tuner.observe(event)
        if isinstance(event, Ready):
            self.experts.set_class(not event.experts, "-absent")
            if self.setup is not None:
                self.setup.engine_ready(event.backend)
                self.show_preset()
            if (search := self.session.status.search).has_searched:
                self.performance.mark("S", "search", f"ended: {search.text}")
            if not is_first:
                preset = self.setup.name if self.setup is not None else ""
                text = ", ".join(filter(None, [preset or event.backend, event.model.title]))
                self.performance.mark("E", "engine", text)
        elif isinstance(event, Finished):
            self._record_speed(event)

    def _record_speed(self, end: Finished) -> None:
        if self.setup is None or answered_together(self.session.engine):
            return
        decode = prefill = None
        if end.predicted_n >= MIN_TOKENS:
            decode = decode_rate(end.predicted_n, end.predicted_ms)
        if end.predicted_n:
            prefill = shown_prefill_rate(end.prompt_n, end.cached_n, end.prompt_ms - end.pictures_ms)
        self.setup.record_speed(decode, prefill)
        self.show_preset()

    def show_preset(self) -> None:
        if self.setup is not None and self.is_mounted:
            self.preset_bar.data = self.setup.bar()

    async def _check_backends(self) -> None:
        if self.setup is not None:
            await asyncio.to_thread(self.setup.check_backends)
            self.show_preset()

    @on(KernelTable.ProfileRequested)
    def _profile_requested(self, message: KernelTable.ProfileRequested) -> None:
        self.tuner.key_pressed()  # or a mouse button
        self.profiler.request(message.step)

    def _tell_gain(self, text: str) -> None:
        """Marks what a search has gained on the time axis, and has the step that is faster now profiled again."""
        self.performance.mark("S", "search", text)
        self.profiler.request("decode")
        self.tell(text)

    def _is_idle(self) -> bool:
        session = self.session
        return session.status.is_ready and not session.is_busy and session.candidate is None

    # --- drawing ----------------------------------------------------------------------------------------

    @property
    def is_visible(self) -> bool:
        return self.display and self.size.width > 0 and self.app.screen is self.screen

    def draw(self) -> bool:
        """Shows what has changed, at most once in FRAME_S. Returns whether anything was drawn."""
        now = time.monotonic()
        if now - self._drawn_at < FRAME_S:
            return False
        self._drawn_at = now
        if self.is_visible and not self.tuner.is_searching:  # a measurement would end the search
            with_kernels = not self.table.is_paused
            self.profiler.measure_if_idle(with_kernels=with_kernels, is_quiet=is_quiet(self._counters))
        self.tuner.search_if_idle()
        if not self.is_visible or self._drawn_changes == self.performance.changes:
            return False
        self._drawn_changes = self.performance.changes
        with self.app.batch_update():
            self.graph.data = self.performance.throughput(self._counters)
            self.table.data = self.performance.kernels
            self.experts.data = self.performance.experts()
        return True

    async def _sample_counters(self) -> None:
        if self.is_visible:
            self._counters = await asyncio.to_thread(self._read_counters)
            for counter in self._counters:
                if counter.value is not None:
                    self._history.setdefault(counter.name, deque(maxlen=HISTORY)).append(counter.value)
            history = {name: tuple(values) for name, values in self._history.items()}
            counters, warning = self._counters, ""
            if self.session.is_answering:
                relevant = self.performance.relevant(counters)
                warning = self.performance.slowdown(counters) or Samples([relevant]).below_full()
                counters = with_efficiency(counters, self.performance.current, self.performance.is_on_cpu)
            self.machine.data = MachineState(counters, warning, history)
            self._drawn_changes = -1  # the graph shows a counter too
