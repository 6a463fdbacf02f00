"""Turns an engine's events into its status for the screen. It needs no screen and no engine, only a clock."""

from collections.abc import Callable
from dataclasses import replace
from math import prod

from engine.protocol.events import (
    Event,
    Failed,
    Finished,
    Loading,
    Prefilling,
    Ready,
    Search,
    Seeing,
    Token,
    Warming,
    decode_rate,
)
from widgets.engine_status import EngineStatus, Phase

_MIN_S, _MIN_DONE = 0.5, 4
"""The time and the progress (in kernels, tokens, bytes) that an estimate of the time left needs."""


class SearchSummary:
    """Collects the last `Search` of each product from an engine's events."""

    def __init__(self) -> None:
        self._searches: dict[str, Search] = {}

    def observe(self, event: Event) -> None:
        if isinstance(event, Warming) and event.search is not None:
            self._searches[event.search.what] = event.search

    @property
    def has_searched(self) -> bool:
        """Whether anything was searched that was not known from an earlier start."""
        return any(not search.found for search in self._searches.values())

    @property
    def text(self) -> str:
        """The result in a few words; "" if nothing was searched. The products of a decode step are searched one
        after the other, each in a step that has the ones before, so their gains multiply."""
        if not self._searches:
            return ""
        searches = [search for search in self._searches.values() if not search.found]
        if not searches:
            return "its search was known from an earlier start"
        gain = prod(search.before_us / search.after_us for search in searches if search.after_us) - 1
        return (
            f"its search made a step {gain:.0%} faster"
            if gain >= 0.005
            else "its search found nothing faster"
        )


class StatusObserver:
    """Folds events into an `EngineStatus`, and into a summary of the search. `clock` gives seconds, from any origin."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.search = SearchSummary()
        self.last: Finished | None = None  # the figures of the last reply
        self._status = EngineStatus(context_used=0)
        self._since = clock()  # the beginning of the phase, or of the request
        self._done_at_start = 0
        self._progress_at, self._last_step = self._since, 0  # when `done` last grew, and by how much
        self._first_token_s: float | None = None  # by the engine's clock if the tokens have times
        self._last_token_s = 0.0
        self._n_new = 0  # tokens that `_status` does not count yet: thousands may come in a second
        self._search_left_s = self._search_at = 0.0  # the time left for a search, and when the engine said so

    @property
    def is_ready(self) -> bool:
        """Whether the engine can answer."""
        return self._status.phase in (Phase.READY, Phase.PREFILLING, Phase.GENERATING, Phase.STOPPING)

    @property
    def sees(self) -> bool:
        """False if the model is known to see no pictures."""
        return self._status.ready.model.sees or not self.is_ready

    def snapshot(self) -> EngineStatus:
        """The status at this moment, with the current speed and time left."""
        self._count_tokens()
        status, elapsed_s = self._status, self._clock() - self._since
        if status.phase in (Phase.READY, Phase.GONE):
            return status
        if status.phase is Phase.GENERATING and self._first_token_s is not None:
            speed = decode_rate(status.tokens, (self._last_token_s - self._first_token_s) * 1e3)
            return replace(status, elapsed_s=elapsed_s, tokens_per_s=speed or None)
        if status.searching:  # a search has a time limit
            left_s: float | None = max(0.0, self._search_left_s - (self._clock() - self._search_at)) or None
        else:
            left_s = self._seconds_left(elapsed_s)
        return replace(status, elapsed_s=elapsed_s, seconds_left=left_s)

    def _seconds_left(self, elapsed_s: float) -> float | None:
        """Assumes that the rest takes as long per unit as what is done. Between two steps the time falls by at most
        that of one step, so that a single slow kernel (BEAM) does not make it grow."""
        status, progress = self._status, self._status.done - self._done_at_start
        if status.done >= status.total or progress < _MIN_DONE or elapsed_s <= _MIN_S:
            return None
        unit_s = (self._progress_at - self._since) / progress
        waited_s = self._since + elapsed_s - self._progress_at
        left_s = unit_s * (status.total - status.done) - min(waited_s, unit_s * self._last_step)
        return left_s if left_s > 0 else None

    def expect(self, name: str) -> None:
        """The engine starts with the model of this name."""
        self._status = replace(self._status, expected=name)

    def request(self) -> None:
        """A request is sent to the engine."""
        self._count_tokens()
        self._enter(Phase.PREFILLING if self.is_ready else Phase.STARTING)
        self._first_token_s = None
        self._status = replace(self._status, tokens=0, tokens_per_s=None, first_token_s=None)

    def stopping(self) -> None:
        self._count_tokens()
        self._status = replace(self._status, phase=Phase.STOPPING)

    def new_conversation(self, context_used: int | None) -> None:
        self._count_tokens()
        self._status = replace(self._status, context_used=context_used, tokens_per_s=None, first_token_s=None)

    def context_changed(self) -> None:
        """The model will read less of the conversation than it did. How much, the next prompt shows."""
        self._count_tokens()
        self._status = replace(self._status, context_used=None)

    def observe(self, event: Event) -> None:
        if isinstance(event, Token):
            self._token(event)
            return
        self._count_tokens()
        self.search.observe(event)
        match event:
            case Loading(done_bytes=done, total_bytes=total):
                self._progress(Phase.LOADING, done, total)
                self._set_context(event)
            case Warming(search=search):
                self._progress(Phase.WARMING, event.done, event.total)
                self._search(search, event.cached)
            case Ready():
                self._enter(Phase.READY)
                self._status = replace(self._status, ready=event)
                self._set_context(event)
            case Seeing(done=done, total=total):
                task = "preparing kernels for" if event.compiles else "looking at"
                self._look_at(f"{task} picture {event.index + 1} of {event.pictures}")
                self._progress(Phase.PREFILLING, done, total)
            case Prefilling(done=done, total=total, cached=cached):
                self._look_at("")
                self._progress(Phase.PREFILLING, done, total, start=cached)
                self._status = replace(self._status, context_used=done)
            case Finished():
                self.last = event
                self._status = replace(
                    self._status,
                    phase=Phase.READY,
                    tokens=event.predicted_n,
                    tokens_per_s=decode_rate(event.predicted_n, event.predicted_ms) or None,
                    first_token_s=event.prompt_ms / 1e3,
                    context_used=event.context_used,
                )
            case Failed(request_id=request_id):  # keeps the speed until then
                phase = Phase.GONE if request_id is None else Phase.READY
                self._status = replace(self.snapshot(), phase=phase)

    def _set_context(self, event: Loading | Ready) -> None:
        length, cache_bytes = event.context_length, event.cache_bytes
        self._status = replace(self._status, context_length=length, cache_bytes=cache_bytes, kv=event.kv)

    def _token(self, token: Token) -> None:
        self._last_token_s = self._clock() if token.at_ms is None else token.at_ms / 1e3
        if self._first_token_s is None:
            self._first_token_s = self._last_token_s
            start_s = self._since if token.at_ms is None else 0.0
            self._status = replace(self._status, first_token_s=self._last_token_s - start_s)
        self._n_new += 1

    def _count_tokens(self) -> None:
        """Counts the tokens that have come since the last time."""
        n, self._n_new, status = self._n_new, 0, self._status
        if not n:
            return
        used = status.context_used
        if used is not None:  # the last token is not in the KV cache yet
            used += n if status.tokens else n - 1
        phase = Phase.STOPPING if status.phase is Phase.STOPPING else Phase.GENERATING
        self._status = replace(status, phase=phase, tokens=status.tokens + n, context_used=used)

    def _look_at(self, what: str) -> None:
        """Progress counts anew with each picture, and with the prompt after them."""
        if what != self._status.looking_at:
            self._begin(0)
            self._status = replace(self._status, looking_at=what, done=0, total=0)

    def _search(self, search: Search | None, cached: int) -> None:
        if (search is None) == bool(self._status.searching):  # kernels are counted now, or products
            self._begin(self._status.done)
        self._search_left_s, self._search_at = search.left_s if search else 0.0, self._clock()
        self._status = replace(self._status, cached=cached, searching=search.what if search else "")

    def _progress(self, phase: Phase, done: int, total: int, start: int = 0) -> None:
        if self._status.phase not in (phase, Phase.STOPPING):
            self._enter(phase)
        if self._status.total == 0:
            self._done_at_start = start
        if done > self._status.done:
            self._progress_at, self._last_step = self._clock(), done - self._status.done
        self._status = replace(self._status, done=done, total=total)

    def _enter(self, phase: Phase) -> None:
        self._begin(0)
        self._status = replace(
            self._status, phase=phase, done=0, total=0, cached=0, searching="", looking_at=""
        )

    def _begin(self, done: int) -> None:
        self._since = self._progress_at = self._clock()
        self._done_at_start, self._last_step = done, 0
