"""From the events of two engines to what is said of their answers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from msgspec import to_builtins

from app.cli.progress import describe
from engine.events import (
    Event,
    Failed,
    Finished,
    Loading,
    Prefilling,
    Ready,
    Token,
    Warming,
    decode_rate,
    prefill_rate,
)
from engine.measure.memory import resident
from widgets.comparison_data import ComparisonData, EngineAnswer, mode, rows, times, verdict
from widgets.text import clean, one_line

if TYPE_CHECKING:
    from engine.client import Engine


@runtime_checkable
class Compared(Protocol):
    """An engine that is two (`app.comparison.engine.Comparison`), as a screen sees it. `ours` is the one of the
    chat; `together`: they answer at the same time, from the next prompt on."""

    together: bool

    @property
    def ours(self) -> Engine: ...

    @property
    def doing(self) -> str:
        """Which of the two works, and at what; "" where neither does."""
        ...

    def view(self) -> ComparisonData: ...

    def forget(self) -> None:
        """The conversation is another: the last answers are of no interest any more."""

    async def release(self) -> Engine: ...


def is_shared(engine: Engine) -> bool:
    """Whether the last answer of `engine` was given while another engine worked: no measure of a preset."""
    return isinstance(engine, Compared) and engine.view().together


class Side:
    """One engine and its answer, as its events tell."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.ready: Ready | None = None
        self.problem = ""
        self.pid: int | None = None
        self.device_bytes = 0
        self.copy_gbps = 0.0
        self.tokens: list[Token] = []
        self._state = ""
        self._is_busy = False
        self._text = ""
        self._prompt_tokens = 0
        self._end: Finished | None = None
        self._peak_bytes: int | None = None

    def starting(self) -> None:
        """The engine is on its way."""
        self.problem, self._state, self._is_busy = "", "starting", True

    def begin(self, prompt_tokens: int = 0) -> None:
        """A new prompt; without one, none that was asked."""
        self.tokens, self._text, self._end, self._prompt_tokens = [], "", None, prompt_tokens
        if self.ready:
            self._is_busy = False
            self.problem, self._state = "", "its turn comes" if prompt_tokens else "ready"

    def waits_for(self, other: str) -> None:
        """It is not asked before `other` is ready."""
        self._state = f"waits for {other}"

    def asked(self) -> None:
        """It has its turn."""
        self._state, self._is_busy = "reading the prompt", True

    @property
    def doing(self) -> str:
        """What it works at, under its name; "" where it does nothing."""
        if not self._is_busy:
            return ""
        counted = f" · {len(self.tokens):,} tokens" if self.tokens else ""
        return f"{self.name}: {self._state}{counted}"

    def passed_over(self) -> None:
        """Its turn does not come: the user has stopped the answers."""
        if self.ready and not self._end and not self.problem:
            self._state = "not asked"

    def observe(self, event: Event) -> None:
        self._is_busy = not isinstance(event, Ready | Finished | Failed)
        match event:
            case Ready():
                self.ready, self._state, self.problem = event, "ready", ""
            case Loading() | Warming() | Prefilling():
                self._state = describe(event)
            case Token():
                self.tokens.append(event)
                self._text += event.text
                self._state = "answering"
            case Finished():
                self._end = event
                self._state = {"stop": "done", "length": "done, cut at the limit", "cancelled": "stopped"}[
                    event.reason
                ]
            case Failed():
                self.problem = f"{event.message} {event.hint}".strip()
                self._state = ""
                if event.request_id is None:
                    self.ready = None

    def column(self, same: int | None, bytes_per_token: tuple[int, int], copy_gbps: float) -> EngineAnswer:
        """`same`: the tokens that are the other's too (None: all so far). `bytes_per_token` are those of the
        weights, and of the keys and values of each token before, that a step reads."""
        decode, first_token_s, prefill = self._rates()
        weights, per_position = bytes_per_token
        gbps = (weights + per_position * (self._prompt_tokens + len(self.tokens) / 2)) * (decode or 0) / 1e9
        memory = resident(self.pid)
        if memory:
            self._peak_bytes = memory.peak + self.device_bytes
        about = (self.ready.backend, self.ready.device_name) if self.ready else ()
        return EngineAnswer(
            name=self.name,
            about=" ".join(part for part in about if part and part != self.name),
            state=self._state,
            text=self._text,
            same=len(self._text) if same is None else sum(len(token.text) for token in self.tokens[:same]),
            problem=self.problem,
            prompt_tokens=self._prompt_tokens,
            tokens=self._end.predicted_n if self._end else len(self.tokens),
            first_token_s=first_token_s,
            prefill=prefill,
            decode=decode,
            gbps=gbps or None,
            share=gbps / copy_gbps if gbps and copy_gbps else None,
            memory_bytes=self._peak_bytes,
        )

    def _rates(self) -> tuple[float | None, float | None, float | None]:
        """Decode in tokens a second, time to the first token in seconds, prefill in tokens a second."""
        if self._end and self._end.predicted_n:
            end = self._end
            return (
                decode_rate(end.predicted_n, end.predicted_ms) or None,
                end.prompt_ms / 1e3,
                prefill_rate(end.prompt_n, end.cached_n, end.prompt_ms) or None,
            )
        if not self.tokens:
            return None, None, None
        first_ms, last_ms = self.tokens[0].at_ms, self.tokens[-1].at_ms
        if first_ms is None or last_ms is None:
            return None, None, None
        return (
            decode_rate(len(self.tokens), last_ms - first_ms) or None,
            first_ms / 1e3,
            prefill_rate(self._prompt_tokens, 0, first_ms) or None,
        )


class Agreement:
    """How far two growing answers are the same. `same` counts the tokens that are; where `differs`, the next
    ones of both are not. Some tokens' ids are not told (-1): they are judged by the text that they complete
    together with those after them."""

    def __init__(self) -> None:
        self.same = 0
        self.differs = False

    def update(self, a: Sequence[Token], b: Sequence[Token]) -> None:
        common = min(len(a), len(b))
        while not self.differs and self.same < common:
            known = (i for i in range(self.same, common) if -1 not in (a[i].id, b[i].id))
            if (end := next(known, None)) is None:
                return
            run = slice(self.same, end + 1)
            alike = a[end].id == b[end].id and (end == self.same or _text(a[run]) == _text(b[run]))
            if alike:
                self.same = end + 1
            else:
                self.differs = True


def _text(tokens: Sequence[Token]) -> str:
    """Without U+FFFD: how many of them stand for damaged characters is a matter of taste."""
    return "".join(token.text for token in tokens).replace("\N{REPLACEMENT CHARACTER}", "")


def report(view: ComparisonData, *, as_json: bool = False) -> str:
    """A comparison that is complete, for a terminal or a file: the other engine's text where it is another, the
    figures of both, and the verdict. As JSON it is one object on a line."""
    if as_json:
        return json.dumps({"event": "comparison"} | to_builtins(view)).replace("\x7f", "\\u007f") + "\n"
    left, right = view.left, view.right
    lines = [""]
    for column in (left, right):
        if column.problem:
            lines += [one_line(f"{column.name}: {column.problem}"), ""]
    if view.difference:
        lines += [f"{one_line(right.name)} says:", clean(right.text).strip("\n"), ""]
    lines.append(f"{'':<20}  {one_line(left.name):>24}  {'':<9}  {one_line(right.name):<24}".rstrip())
    for one, label, ratio, other in rows(view):
        lines.append(f"{label:<20}  {one:>24}  {times(ratio):^9}  {other:<24}".rstrip())
    return "\n".join([*lines, f"{verdict(view)} ({mode(view)})", ""])
