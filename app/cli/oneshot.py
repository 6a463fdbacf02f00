"""One prompt, one answer. As text, standard output gets the reply alone; as JSON, it gets every event."""

import json
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, Protocol, TextIO

import msgspec

from app.chat.configuration import without_effect
from app.chat.failures import is_about_model
from app.chat.files import fewer_lines
from app.cli.progress import ProgressLine, describe, figures, say
from app.cli.signals import run_until_signal
from app.cli.start_lines import start_lines
from engine.protocol.client import Engine, leave
from engine.protocol.events import Event, Failed, Finished, Generate, Ready, Sampling, Thinking, Token
from widgets.chat.turn import Attachment
from widgets.text import clean


class Writer(Protocol):
    """The part of a text stream that an answer needs."""

    def write(self, text: str, /) -> object: ...

    def flush(self) -> object: ...


class Tools(Protocol):
    """Lets the model of an answer call tools."""

    def answer(
        self, engine: Engine, request: Generate, show: Callable[[Event], None]
    ) -> Coroutine[Any, Any, int]: ...

    async def close(self) -> None: ...


async def run(
    engine: Engine, request: Generate, show: Callable[[Event], None], tools: Tools | None = None
) -> int:
    """Starts `engine`, shows the events of its start and of its answer, closes it, and returns the exit code.

    SIGINT and SIGTERM stop the answer. Raises what `show` raises."""
    signals = signal.SIGINT, signal.SIGTERM
    try:
        if code := await run_until_signal(follow(engine.start(), show), *signals):
            return code
        answer = tools.answer(engine, request, show) if tools else follow(engine.generate(request), show)
        return await run_until_signal(answer, *signals, stop=engine.stop)
    finally:
        if tools:
            await tools.close()
        await leave(engine)


async def follow(events: AsyncIterator[Event], show: Callable[[Event], None]) -> int:
    """Shows each event of an engine. Returns the exit code: 0, or that of the failure that ends the events."""
    async for event in events:
        show(event)
        if isinstance(event, Failed):
            return event.exit_code
    return 0


class TextOutput:
    """Writes the reply to `out`. Writes failures, progress (on a terminal) and, if `verbose`, figures to `messages`.
    `sampling` is what was asked for, `files` those of the prompt; `why_this_model` is told if the model fails."""

    def __init__(
        self,
        out: Writer,
        messages: TextIO,
        *,
        verbose: bool = False,
        sampling: Sampling | None = None,
        files: Sequence[Attachment] = (),
        why_this_model: str = "",
    ) -> None:
        self._out = out
        self._messages = messages
        self._status = ProgressLine(messages)
        self._verbose = verbose
        self._sampling = sampling or Sampling()
        self._files = files
        self._why_this_model = why_this_model
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
                self._say_event(event)
            case _:
                self._status.show(describe(event))

    def _say_event(self, event: Finished | Failed | Ready) -> None:
        if isinstance(event, Failed):
            hint = fewer_lines(self._files, event.tokens, event.most) or event.hint
            self.say(event.message, hint, self._why_this_model if is_about_model(event) else "")
        elif self._verbose:
            self.say(figures(event) if isinstance(event, Finished) else describe(event))
            if isinstance(event, Ready):
                self._messages.writelines(f"{line}\n" for line in start_lines(event.start))
        if isinstance(event, Finished) and event.context_used >= self._context_length > 0:
            self.say(f"The reply was cut: the context of {self._context_length:,} tokens is full.")
        if isinstance(event, Ready):
            self._context_length = event.context_length
            for warning in (*event.warnings, *without_effect(self._sampling, event)):
                self.say(warning)

    def clear(self) -> None:
        """Removes the progress, so that something else can be printed."""
        self._status.clear()

    def say(self, *sentences: str) -> None:
        """Writes one line to `messages`."""
        self._status.clear()
        say(self._messages, *sentences)

    def _write(self, text: str) -> None:
        self._status.clear()
        self._out.write(text)
        self._out.flush()
        self._line_open = not text.endswith("\n")


def show_as_json(out: TextIO, event: Event) -> None:
    """Writes an event as a JSON object on a line; log-probabilities only if they were asked for, and of tokens that
    they were guessed only if they were."""
    fields = {"event": type(event).__name__.lower()} | _without_tags(msgspec.to_builtins(event))
    fields.pop("request_id", None)
    fields.pop("at_ms", None)
    if fields.get("logprob", ...) is None:
        del fields["logprob"], fields["top"]
    if not fields.get("guessed", True):
        del fields["guessed"]
    # All ASCII and no control characters: a terminal must not obey text of a model. json does not escape DEL.
    out.write(json.dumps(fields).replace("\x7f", "\\u007f") + "\n")
    out.flush()


def _without_tags(value: Any) -> Any:
    """Builtins that msgspec made of tagged structs, without the tags."""
    if isinstance(value, dict):
        return {name: _without_tags(item) for name, item in value.items() if name != "type"}
    return [_without_tags(item) for item in value] if isinstance(value, list | tuple) else value
