"""Turns what the engine and the server do into the figures of the server's screen. Nothing that is asked or said stays
here: only counts, times and names of clients."""

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from app.cli.progress import describe
from app.serve.answer import Events
from app.serve.service import Service
from engine.protocol.events import (
    Event,
    Failed,
    Generate,
    KernelProfile,
    Loading,
    Measured,
    Prefilling,
    Ready,
    Slot,
    Slots,
    Token,
    decode_rate,
)
from widgets.dashboard.client_graph import BIN_S, RATE_S, WINDOW_S, ClientThroughput
from widgets.dashboard.kernel_lines import KernelProfiles
from widgets.dashboard.request_list import Handled
from widgets.dashboard.server_head import ServerState
from widgets.dashboard.slot_table import SlotState

MAX_REQUESTS = 50
TOO_MANY = 429  # the status of a request that is refused because too many wait


@dataclass
class _Reply:
    """A request that the engine has begun with."""

    client: str
    done: int
    total: int
    tokens: int = 0
    first_s: float = 0.0
    last_s: float = 0.0

    def slot(self) -> Slot:
        return Slot(
            request_id=0,
            client=self.client,
            phase="decode" if self.tokens else "prefill",
            prompt_done=self.done,
            prompt_n=self.total,
            predicted_n=self.tokens,
            rate=decode_rate(self.tokens, (self.last_s - self.first_s) * 1e3),
        )


class Activity:
    """`observe` takes the engine's own events, `handled` the requests that have ended, and `follow` the events of each
    answer. `changes` grows with each change of a figure, so that nothing is drawn twice."""

    def __init__(
        self, address: str, clock: Callable[[], float] = time.monotonic, beside: "Activity | None" = None
    ) -> None:
        """`beside`: of another model of the same server, with which it shares the requests and the throughput."""
        self.address, self._clock = address, clock
        self.changes = 0
        self.kernels = KernelProfiles()
        self.failed: Failed | None = None
        self._ready: Ready | None = None
        self._start = "starting"
        self._slots: Slots | None = None
        self._replies: dict[int, _Reply] = {}
        self.requests: deque[Handled] = beside.requests if beside else deque(maxlen=MAX_REQUESTS)
        self._bins: dict[int, Counter[str]] = beside._bins if beside else {}  # reply tokens by client
        self._prompt_bins: Counter[int] = beside._prompt_bins if beside else Counter()

    # --- what happens -----------------------------------------------------------------------------------

    def observe(self, event: Event) -> None:
        """Takes an event of the engine."""
        match event:
            case Ready():
                self._ready, self.failed = event, None
            case Failed(request_id=None):
                self.failed = event
                self._slots = None
            case Loading() if self._ready is not None:  # it is loaded once more
                self._ready, self._slots, self._start = None, None, describe(event)
            case Slots():
                self._slots = event
            case Measured(copy_gbps=copy_gbps):  # the best counts: other programs only make it less
                best = max(copy_gbps, self.kernels.copy_gbps or 0.0)
                self.kernels = replace(self.kernels, copy_gbps=best)
            case KernelProfile():
                self.kernels = self.kernels.with_profile(event)
            case _ if text := describe(event) if self._ready is None else "":
                self._start = text
            case _:
                return
        self.changes += 1

    def unloaded(self) -> None:
        """Says that the engine has been ended, to make room or since nobody asked."""
        if self._ready is not None:
            self._ready, self._slots, self._start = None, None, "not loaded"
            self.changes += 1

    def note(self, text: str) -> None:
        """Shows `text` in the kernel table."""
        self.kernels = replace(self.kernels, note=text)
        self.changes += 1

    def handled(self, request: Handled) -> None:
        self.requests.appendleft(request)
        self.changes += 1

    async def follow(self, request: Generate, events: Events) -> Events:
        """`events`, the answer to `request`, counted."""
        key = id(events)
        try:
            async with aclosing(events):
                async for event in events:
                    self._count(key, request.client, event)
                    yield event
        finally:
            self._replies.pop(key, None)
            self.changes += 1

    def _count(self, key: int, client: str, event: Event) -> None:
        now = self._clock()
        number = int(now / BIN_S)
        match event:
            case Prefilling():
                reply = self._replies.setdefault(key, _Reply(client, event.cached, event.total))
                self._prompt_bins[number] += max(0, event.done - reply.done)
                reply.done, reply.total = event.done, event.total
            case Token():
                reply = self._replies.setdefault(key, _Reply(client, 0, 0))
                reply.tokens, reply.last_s = reply.tokens + 1, now
                reply.first_s = reply.first_s or now
                self._bins.setdefault(number, Counter())[client] += 1
            case _:
                return
        self.changes += 1

    # --- figures ----------------------------------------------------------------------------------------

    @property
    def moves(self) -> bool:
        """Whether the graph changes though nothing happens: it shows the last minute."""
        self._forget()
        return bool(self._bins or self._prompt_bins)

    def throughput(self, service: Service) -> ClientThroughput:
        self._forget()
        first_tokens = sorted(service.metrics.recent_first_tokens())
        p50, p99 = (
            first_tokens[int(share * len(first_tokens))] if first_tokens else 0.0 for share in (0.5, 0.99)
        )
        last = int(self._clock() / BIN_S) - 1
        recent = range(last - round(RATE_S / BIN_S) + 1, last + 1)
        bins = {number: dict(counts) for number, counts in sorted(self._bins.items())}
        prefill = sum(self._prompt_bins[number] for number in recent) / RATE_S
        return ClientThroughput(bins, last, prefill, p50, p99)

    def slots(self, service: Service) -> SlotState:
        """The slots as the engine reports them or, if it answers one request after another, made of the replies that
        it has begun. None while it loads."""
        refused = service.metrics.requests[TOO_MANY]
        if report := self._slots:
            used = sum(slot is not None for slot in report.slots)
            step = report.rows, report.prompt_tokens, report.room
            return SlotState(report.slots, max(0, service.open - used), refused, *step)
        slots = [reply.slot() for reply in self._replies.values()]
        idle = [None] * ((self._ready.parallel if self._ready else 0) - len(slots))
        return SlotState((*slots, *idle), max(0, service.open - len(slots)), refused)

    def blocks(self) -> Slots | None:
        """What says how the blocks of the KV cache are used; None if it has none."""
        return self._slots if self._slots and self._slots.blocks else None

    def head(self, service: Service, ending: str = "", others: Sequence[str] = ()) -> ServerState:
        """`others`: the other models, in words."""
        ready, metrics = self._ready, service.metrics
        engine: tuple[str, ...] = (service.model, self._start)
        if ready is not None:
            engine = (
                " + ".join((service.model, *ready.model.adapters)),
                ready.model.quantization,
                f"{ready.backend} ({ready.device_name})",
                f"context {ready.context_length:,}",
                f"{ready.parallel} at a time",
            )
        return ServerState(
            self.address,
            engine,
            sum(metrics.requests.values()),
            metrics.requests[TOO_MANY],
            metrics.prompt_tokens,
            metrics.predicted_tokens,
            (*(ready.warnings if ready else ()), *([self.failed.message] if self.failed else [])),
            ending,
            tuple(others),
        )

    def _forget(self) -> None:
        """Drops what is too old for the graph."""
        since = int((self._clock() - WINDOW_S) / BIN_S) - 1
        for bins in (self._bins, self._prompt_bins):
            for number in [number for number in bins if number < since]:
                del bins[number]
