"""The server's screen: what its engine does, for whom, and how fast. It runs in the event loop of the server."""

import asyncio
import os
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.types import ASGIApp
from textual import on
from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal
from textual.events import Print
from textual.widget import Widget

from app.chat.idle_profiler import IdleProfiler
from app.chat.slowdown import is_quiet
from app.cli.progress import say
from app.serve.activity import Activity
from app.serve.answer import Events
from app.serve.model_pool import ModelPool
from app.serve.server import DRAIN_S, Server
from app.serve.service import Service
from engine.measure.counters import Counters
from engine.protocol.client import Engine
from engine.protocol.events import Counter, Event, Generate, Loading, Ready
from engine.system.logs import screen_log
from widgets.dashboard.block_bar import BlockBar
from widgets.dashboard.client_graph import ClientGraph
from widgets.dashboard.kernel_table import KernelTable
from widgets.dashboard.machine_panel import MachinePanel, MachineState
from widgets.dashboard.pane_stack import PaneStack, next_pane
from widgets.dashboard.request_list import RequestList
from widgets.dashboard.server_head import ServerHead
from widgets.dashboard.slot_table import SlotTable
from widgets.terminal.stray_output import stray_output_to
from widgets.terminal.terminal_signals import ENDING, end_in_order, suspend_between_events
from widgets.text import counted

FRAME_S = 0.5 if "SSH_CONNECTION" in os.environ else 0.25
COUNTERS_S = 1.0
WIDE_WIDTH, SHORT_HEIGHT, MEDIUM_HEIGHT, TALL_HEIGHT = 110, 16, 24, 40
"""A narrower terminal shows the kernels and the machine only with F9, or if it has TALL_HEIGHT rows. One with less than
MEDIUM_HEIGHT rows leaves out the last requests, and with less than SHORT_HEIGHT rows the head."""


def interrupt() -> None:
    """What Ctrl+C does in a terminal that shows lines: the screen gets it as a key."""
    signal.raise_signal(signal.SIGINT)


@dataclass(frozen=True)
class FollowedModel:
    """One of the server's models."""

    service: Service
    activity: Activity
    profiler: IdleProfiler


class ServeApp(App[None]):
    """Shows `activity` and `service`; of several models (`pool`), the one that was loaded or asked last. `stop` is
    called by Ctrl+C and Ctrl+Q. Exits when whoever runs it says so."""

    TITLE = "orin-chat serve"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #panes { height: 1fr; }
    ServerHead { height: auto; max-height: 9; }
    ClientGraph { height: 2fr; min-height: 5; }
    SlotTable { height: auto; max-height: 50%; }
    RequestList { height: 1fr; min-height: 4; }
    BlockBar { height: auto; max-height: 8; }
    BlockBar.-absent { display: none; }
    KernelTable { height: 1fr; min-height: 8; }
    MachinePanel { height: auto; max-height: 13; }
    #engine { display: none; width: 2fr; }
    #clients { width: 3fr; }
    .-wide #engine, .-whole-engine #engine { display: block; }
    .-narrow.-tall #panes { layout: vertical; }
    .-narrow.-tall #engine { display: block; width: 1fr; height: 1fr; }
    .-narrow.-tall #clients { width: 1fr; height: 1fr; }
    .-short RequestList, .-low RequestList, .-low ServerHead { display: none; }
    .-short ServerHead { max-height: 5; }
    .-short ClientGraph { height: 1fr; }
    .-low.-ending ServerHead { display: block; max-height: 4; }
    .-low ClientGraph { min-height: 3; }
    .-whole-engine #clients, .-whole-clients #engine { display: none; }
    .-whole-engine #engine, .-whole-clients #clients { width: 1fr; height: 1fr; }
    .-whole-engine #engine > .-whole, .-whole-clients #clients > .-whole { display: block; max-height: 100%; }
    """
    BINDINGS = [
        Binding("ctrl+c", "stop", "End the server", show=False, priority=True),
        Binding("ctrl+q", "stop", "End the server", show=False, priority=True),
        Binding("f9", "zoom", "The next pane on the whole screen", show=False),
        Binding("escape", "unzoom", "All panes", show=False),
    ]
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (WIDE_WIDTH, "-wide")]
    VERTICAL_BREAKPOINTS = [
        (0, "-low"),
        (SHORT_HEIGHT, "-short"),
        (MEDIUM_HEIGHT, "-medium"),
        (TALL_HEIGHT, "-tall"),
    ]

    def __init__(
        self,
        service: Service,
        engine: Engine,
        activity: Activity,
        *,
        stop: Callable[[], object] = interrupt,
        read_counters: Callable[[], tuple[Counter, ...]] | None = None,
        pool: ModelPool | None = None,
    ) -> None:
        super().__init__()
        self._pool = pool or ModelPool(service)
        self._models = [self._followed(service, engine, activity)]
        self._shown, self._stop = self._models[0], stop
        self._read_counters = read_counters or Counters().read
        self._counters: tuple[Counter, ...] = ()
        self.head, self.graph, self.slots = ServerHead(), ClientGraph(), SlotTable()
        self.requests, self.blocks = RequestList(), BlockBar(classes="-absent")
        self.table, self.machine = KernelTable(), MachinePanel()
        self.clients, self.engine_panes = PaneStack(id="clients"), PaneStack(id="engine")
        self.clients.panes = (self.graph, self.slots, self.requests)
        self.engine_panes.panes = (self.blocks, self.table, self.machine)
        self.printed: deque[str] = deque(maxlen=200)
        """What was written to standard error, such as a traceback: for the terminal after the screen."""
        self._drawn: tuple[FollowedModel, int] | None = None
        self._stop_at = 0.0
        self.animation_level = "none"

    def compose(self) -> ComposeResult:
        yield self.head
        with Horizontal(id="panes"):
            with self.clients:
                yield from self.clients.panes
            with self.engine_panes:
                yield from self.engine_panes.panes

    def on_mount(self) -> None:
        self.begin_capture_print(self, stdout=False)
        self.draw()
        self.set_interval(FRAME_S, self.draw)
        self.set_interval(COUNTERS_S, self._sample_counters)
        self.call_after_refresh(self._sample_counters)
        suspend_between_events(self)
        end_in_order(interrupt, *ENDING)

    def on_print(self, event: Print) -> None:
        self.printed.append(event.text)

    # --- the models ---------------------------------------------------------------------------------------

    @property
    def service(self) -> Service:
        return self._shown.service

    @property
    def activity(self) -> Activity:
        return self._shown.activity

    def add(self, service: Service) -> None:
        """Follows another model, too."""
        activity = Activity(self.activity.address, beside=self._models[0].activity)
        self._models.append(model := self._followed(service, service.engine, activity))
        service.engine.on_event = partial(self.observe, model=model)
        service.watch = partial(self.follow, model=model)

    def _followed(self, service: Service, engine: Engine, activity: Activity) -> FollowedModel:
        is_idle = lambda: service.ready is not None and self._is_idle()
        return FollowedModel(service, activity, IdleProfiler(lambda: engine, is_idle, activity))

    def _is_idle(self) -> bool:
        services = [model.service for model in self._models]
        return not any(service.open or service.stopping for service in services)

    # --- events -----------------------------------------------------------------------------------------

    def observe(self, event: Event, model: FollowedModel | None = None) -> None:
        """Takes the own events of an engine, that of the first model if not of another."""
        model = model or self._models[0]
        if isinstance(event, Loading | Ready):
            self._shown = model
        for each in (model.activity, model.service, model.profiler):
            each.observe(event)

    def follow(self, request: Generate, events: Events, model: FollowedModel | None = None) -> Events:
        """The events of an answer by a model, the first one if not another."""
        self._shown = model or self._models[0]
        return self._shown.activity.follow(request, events)

    @on(KernelTable.ProfileRequested)
    def _profile_requested(self, message: KernelTable.ProfileRequested) -> None:
        self._shown.profiler.request(message.step)

    # --- drawing ----------------------------------------------------------------------------------------

    def draw(self) -> None:
        """Shows what has changed."""
        shown = self._shown
        activity, service = shown.activity, shown.service
        if service.ready is None:
            activity.unloaded()
        with_kernels = self.table.size.width > 0 and not self.table.is_paused
        shown.profiler.measure_if_idle(with_kernels=with_kernels, is_quiet=is_quiet(self._counters))
        state = shown, sum(model.activity.changes for model in self._models)
        if self._drawn == state and not activity.moves and not service.stopping:
            return
        self._drawn = state
        with self.batch_update():
            self.head.data = activity.head(service, self._ending(), self._others())
            self.graph.data = activity.throughput(service)
            self.slots.data = activity.slots(service)
            self.requests.data = tuple(activity.requests)
            blocks = activity.blocks()
            self.blocks.set_class(not blocks, "-absent")
            self.blocks.data = blocks
            self.table.data = activity.kernels

    def _others(self) -> list[str]:
        loaded = {model.service.model for model in self._models if model.service.ready}
        names = [name for name in self._pool.names if name != self.service.model]
        return [f"{name} (loaded)" if name in loaded else name for name in names]

    def _ending(self) -> str:
        if not self.service.stopping:
            return ""
        self._stop_at = self._stop_at or time.monotonic() + DRAIN_S
        self.screen.set_class(True, "-ending")
        left = max(0.0, self._stop_at - time.monotonic())
        answers = counted(sum(model.service.open for model in self._models), "answer")
        return f"The server ends: {answers} in progress, {left:.0f} s left. Ctrl+C ends them now."

    async def _sample_counters(self) -> None:
        if self.machine.size.width > 0:
            self._counters = await asyncio.to_thread(self._read_counters)
            self.machine.data = MachineState(self._counters)

    # --- keys -------------------------------------------------------------------------------------------

    def action_stop(self) -> None:
        self._stop()

    def action_zoom(self) -> None:
        panes = (*self.clients.panes, *self.engine_panes.panes)
        self._zoom(next_pane(panes, self.clients.whole or self.engine_panes.whole))

    def action_unzoom(self) -> None:
        self._zoom(None)

    def _zoom(self, pane: Widget | None) -> None:
        for stack in (self.clients, self.engine_panes):
            mine = pane if pane in stack.panes else None
            self.screen.set_class(mine is not None, f"-whole-{stack.id}")
            stack.zoom(mine)
        if pane is None:
            self.screen.set_focus(None)


async def serve_on_screen(pool: ModelPool, http: ASGIApp, sock: socket.socket, address: str) -> int:
    """Serves as `Server.run` does, with a screen, and returns the exit code."""
    service, activity = pool.default, Activity(address)
    app = ServeApp(service, service.engine, activity, pool=pool)
    service.engine.on_event, service.on_handled, service.watch = app.observe, activity.handled, app.follow
    pool.on_made = app.add
    with stray_output_to(screen_log()):
        code = await run_beside(
            app, Server(service, service.engine, http, sock, activity.observe, pool).run()
        )
    sys.stderr.write("".join(app.printed))
    if activity.failed and service.ready is None:
        say(sys.stderr, activity.failed.message, activity.failed.hint)
    return code


async def run_beside(app: ServeApp, serving: Coroutine[Any, Any, int]) -> int:
    """Shows `app` as long as the server `serving` runs, and returns the server's exit code. If the screen fails, the
    server ends, too."""
    server = asyncio.ensure_future(serving)
    server.add_done_callback(lambda _: app.exit())
    await app.run_async()
    if not server.done():
        interrupt()
    return await server
