"""From an engine's events to what the screen says of it. No screen and no engine here: events and a clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from engine.events import (
    Event,
    Failed,
    Finished,
    Loading,
    Prefilling,
    Ready,
    Search,
    Token,
    Warming,
    decode_rate,
)
from widgets.engine_status import EngineStatus, Phase

_LEAST_S, _LEAST = 0.5, 4
"""So long and so many (of kernels, tokens, bytes) before it is said how long the rest takes."""


class StatusObserver:
    """Folds events into an `EngineStatus`. `clock` gives seconds, from any origin."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._status = EngineStatus(context_used=0)
        self._since = clock()  # when the current phase began, or the request while it is answered
        self._from = 0  # `done` at that time
        self._told, self._step = self._since, 0  # when `done` last grew, and by how much
        self._first_token: float | None = None  # seconds, by the engine's clock if it tells
        self._last_token = 0.0
        self._search_left_s = self._search_told = 0.0  # time left, and when that was said

    @property
    def is_ready(self) -> bool:
        """Whether the engine has said that it can answer and has not failed since."""
        return self._status.phase in (Phase.READY, Phase.PREFILLING, Phase.GENERATING, Phase.STOPPING)

    def snapshot(self) -> EngineStatus:
        """The status now: rates and times left are of this moment."""
        status, elapsed = self._status, self._clock() - self._since
        if status.phase in (Phase.READY, Phase.GONE):
            return status
        if status.phase is Phase.GENERATING and self._first_token is not None:
            rate = decode_rate(status.tokens, (self._last_token - self._first_token) * 1e3)
            return replace(status, elapsed_s=elapsed, tokens_per_s=rate or None)
        if status.searching:  # has a time of its own to end at
            remains = max(0.0, self._search_left_s - (self._clock() - self._search_told))
            return replace(status, elapsed_s=elapsed, seconds_left=remains or None)
        return replace(status, elapsed_s=elapsed, seconds_left=self._seconds_left(elapsed))

    def _seconds_left(self, elapsed: float) -> float | None:
        """What is left takes as long as what was done did on average. Until more is done, that becomes less by what
        the next step should take, and no more: a kernel whose search takes long (BEAM) does not make it grow."""
        status, gained = self._status, self._status.done - self._from
        if status.done >= status.total or gained < _LEAST or elapsed <= _LEAST_S:
            return None
        each = (self._told - self._since) / gained
        waited = self._since + elapsed - self._told
        return max(0.0, each * (status.total - status.done) - min(waited, each * self._step))

    def request(self) -> None:
        """A request is on its way to the engine."""
        self._enter(Phase.PREFILLING if self.is_ready else Phase.STARTING)
        self._first_token = None
        self._status = replace(self._status, tokens=0, tokens_per_s=None, first_token_s=None)

    def stopping(self) -> None:
        self._status = replace(self._status, phase=Phase.STOPPING)

    def new_conversation(self, context_used: int | None = 0) -> None:
        self._status = replace(self._status, context_used=context_used, tokens_per_s=None, first_token_s=None)

    def observe(self, event: Event) -> None:
        match event:
            case Loading(done_bytes=done, total_bytes=total):
                self._progress(Phase.LOADING, done, total)
            case Warming(search=search):
                self._progress(Phase.WARMING, event.done, event.total)
                self._searched(search, event.cached)
            case Ready(model=model):
                self._enter(Phase.READY)
                self._status = replace(
                    self._status,
                    model=model.name,
                    quantization=model.quantization,
                    parameters=model.parameters,
                    backend=event.backend,
                    device=event.device_name,
                    context_length=event.context_length,
                )
            case Prefilling(done=done, total=total, cached=cached):
                self._progress(Phase.PREFILLING, done, total, start=cached)
                self._status = replace(self._status, context_used=done)
            case Token():  # and Thinking, which is one
                self._token(event)
            case Finished():
                self._phase(Phase.READY)
                self._status = replace(
                    self._status,
                    tokens=event.predicted_n,
                    tokens_per_s=decode_rate(event.predicted_n, event.predicted_ms) or None,
                    first_token_s=event.prompt_ms / 1e3,
                    context_used=event.context_used,
                )
            case Failed(request_id=request_id):
                self._status = self.snapshot()  # the speed it had until then
                self._phase(Phase.GONE if request_id is None else Phase.READY)

    def _token(self, token: Token) -> None:
        now, status = self._clock(), self._status
        self._last_token = now if token.at_ms is None else token.at_ms / 1e3
        if self._first_token is None:
            self._first_token = self._last_token
            status = replace(
                status, first_token_s=self._last_token - (self._since if token.at_ms is None else 0.0)
            )
        used = status.context_used
        if used is not None and status.tokens:  # the token before this one has been read
            used += 1
        self._status = replace(status, tokens=status.tokens + 1, context_used=used)
        self._phase(Phase.GENERATING)

    def _searched(self, search: Search | None, cached: int) -> None:
        if (search is None) != (not self._status.searching):  # what is counted is another thing now
            self._begin(self._status.done)
        self._search_left_s, self._search_told = search.left_s if search else 0.0, self._clock()
        self._status = replace(self._status, cached=cached, searching=search.what if search else "")

    def _progress(self, phase: Phase, done: int, total: int, start: int = 0) -> None:
        if self._status.phase not in (phase, Phase.STOPPING):
            self._enter(phase)
        if self._status.total == 0:
            self._from = start
        if done > self._status.done:
            self._told, self._step = self._clock(), done - self._status.done
        self._status = replace(self._status, done=done, total=total)

    def _enter(self, phase: Phase) -> None:
        self._begin()
        self._status = replace(self._status, phase=phase, done=0, total=0, cached=0, searching="")

    def _begin(self, done: int = 0) -> None:
        self._since = self._told = self._clock()
        self._from, self._step = done, 0

    def _phase(self, phase: Phase) -> None:
        if not (self._status.phase is Phase.STOPPING and phase is Phase.GENERATING):
            self._status = replace(self._status, phase=phase)
