"""One prompt, one answer: the reply on stdout and nothing else there; or, as JSON, every event."""

from __future__ import annotations

import json
import signal
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol, TextIO

import msgspec

from app.cli.progress import StatusLine, describe, figures
from app.cli.signals import run_until_signal
from engine.client import Engine
from engine.events import Event, Failed, Finished, Generate, Ready, Thinking, Token
from widgets.text import clean, one_line


class Output(Protocol):
    def show(self, event: Event) -> None: ...


async def run(engine: Engine, request: Generate, output: Output) -> int:
    """Starts `engine`, has it answer `request`, shows every event, closes it, and returns the exit code.

    SIGINT and SIGTERM stop the answer. What writing to `output` raises (BrokenPipeError) is passed on."""
    signals = signal.SIGINT, signal.SIGTERM
    try:
        if code := await run_until_signal(follow(engine.start(), output.show), *signals):
            return code
        answer = follow(engine.generate(request), output.show)
        return await run_until_signal(answer, *signals, stop=engine.stop)
    finally:
        await engine.close()


async def follow(events: AsyncIterator[Event], show: Callable[[Event], None]) -> int:
    """Shows each event of an engine. Returns the exit code: 0, or that of the failure that ends the events."""
    async for event in events:
        show(event)
        if isinstance(event, Failed):
            return event.exit_code
    return 0


class TextOutput:
    """The reply on `out`; on `messages` failures, progress (on a terminal) and, when `verbose`, figures."""

    def __init__(self, out: TextIO, messages: TextIO, *, verbose: bool = False) -> None:
        self._out = out
        self._messages = messages
        self._status = StatusLine(messages)
        self._verbose = verbose
        self._line_open = False
        self._context_length = 0  # 0: not known

    def show(self, event: Event) -> None:
        match event:
            case Thinking():
                self._status.show(describe(event))
            case Token():
                if text := clean(event.text):
                    self._write(text)
            case Finished() | Failed() | Ready():
                if self._line_open:
                    self._write("\n")
                self._status.clear()
                self._tell(event)
            case _:
                self._status.show(describe(event))

    def _tell(self, event: Finished | Failed | Ready) -> None:
        if isinstance(event, Failed):
            self.say(event.message, event.hint)
        elif self._verbose:
            self.say(figures(event) if isinstance(event, Finished) else describe(event))
        if isinstance(event, Finished) and event.context_used >= self._context_length > 0:
            self.say(f"The reply was cut: the context of {self._context_length} tokens is full.")
        if isinstance(event, Ready):
            self._context_length = event.context_length
            for warning in event.warnings:
                self.say(warning)

    def say(self, *sentences: str) -> None:
        """One line on `messages`, whatever the sentences hold."""
        self._status.clear()
        print("orin-chat:", *(one_line(sentence) for sentence in sentences if sentence), file=self._messages)

    def _write(self, text: str) -> None:
        self._status.clear()
        self._out.write(text)
        self._out.flush()
        self._line_open = not text.endswith("\n")


class JsonOutput:
    """Every event as a JSON object on a line of its own; log-probabilities where they were asked for."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def show(self, event: Event) -> None:
        fields = {"event": type(event).__name__.lower()} | _without_tags(msgspec.to_builtins(event))
        fields.pop("request_id", None)
        fields.pop("at_ms", None)
        if fields.get("logprob", ...) is None:
            del fields["logprob"], fields["top"]
        # ASCII alone, so that text from a model stays data on a terminal too (json leaves DEL as it is).
        self._out.write(json.dumps(fields).replace("\x7f", "\\u007f") + "\n")
        self._out.flush()


def _without_tags(value: Any) -> Any:
    """Builtins as msgspec makes them of tagged records, without the tags."""
    if isinstance(value, dict):
        return {name: _without_tags(item) for name, item in value.items() if name != "type"}
    return [_without_tags(item) for item in value] if isinstance(value, list | tuple) else value
