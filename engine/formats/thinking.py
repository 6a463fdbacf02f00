"""Separates the thinking in a streamed reply from the answer."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from enum import Enum, auto

from msgspec.structs import asdict, replace

from engine.events import Event, Finished, Thinking, Token

OPEN, CLOSE = "<think>", "</think>"


class _Phase(Enum):
    START = auto()
    THINKING = auto()
    ANSWER = auto()


class ThinkSplitter:
    """Takes the text of a reply token by token.

    Thinking can only be at the start of a reply: from `<think>`, or from the first token if `inside` (the prompt ended
    in `<think>`), to the first `</think>`. Later marks are ordinary text. The marks are removed, and so are line breaks
    after them and white space before the first. A mark may be one token or several, so text that could be the beginning
    of one is held back until the next tokens decide.
    """

    def __init__(self, *, inside: bool = False) -> None:
        self._phase = _Phase.THINKING if inside else _Phase.START
        self._held = ""
        self._after_mark = inside

    def feed(self, text: str) -> tuple[bool, str]:
        """(whether the token is thinking, the text that can be shown now). Text after `</think>` in the same token is
        returned with the next token."""
        self._held += text
        if self._phase is _Phase.START:
            stripped = self._held.lstrip()
            if len(stripped) < len(OPEN) and OPEN.startswith(stripped):
                return False, ""
            if stripped.startswith(OPEN):
                self._phase, self._after_mark, self._held = _Phase.THINKING, True, stripped[len(OPEN) :]
            else:
                self._phase = _Phase.ANSWER
        if self._phase is _Phase.ANSWER:
            return False, self._take(len(self._held))
        thought, mark, rest = self._held.partition(CLOSE)
        if not mark:
            return True, self._take(len(self._held) - _overlap(self._held, CLOSE))
        self._held = thought
        shown = self._take(len(thought))
        self._phase, self._after_mark, self._held = _Phase.ANSWER, True, rest
        return True, shown

    def flush(self) -> tuple[bool, str]:
        """The text that is still held back at the end of the reply, as `feed` returns it."""
        return self._phase is _Phase.THINKING, self._take(len(self._held))

    def _take(self, n: int) -> str:
        """Removes the first `n` characters from the held text; returns them without line breaks that follow a mark."""
        text, self._held = self._held[:n], self._held[n:]
        if self._after_mark:
            text = text.lstrip("\n")
            self._after_mark = not text
        return text


async def split_thinking(
    events: AsyncIterator[Event], splitter: ThinkSplitter | None
) -> AsyncGenerator[Event, None]:
    """The events of an answer, in which `splitter` has marked `Thinking` (None: they stay as they are). Text that the
    splitter holds back at the end comes as one more token, with the id -1."""
    request_id = 0
    async for event in events:
        if splitter and isinstance(event, Token) and not isinstance(event, Thinking):
            request_id = event.request_id
            thinking, text = splitter.feed(event.text)
            event = (Thinking if thinking else Token)(**asdict(replace(event, text=text)))
        elif splitter and isinstance(event, Finished):
            if text := splitter.flush()[1]:
                yield Token(request_id=event.request_id, id=-1, text=text)
            splitter = None
        yield event
    if splitter and (text := splitter.flush()[1]):
        yield Token(request_id=request_id, id=-1, text=text)


def _overlap(text: str, mark: str) -> int:
    """How many characters at the end of `text` could be the beginning of `mark`."""
    return next((n for n in range(len(mark) - 1, 0, -1) if text.endswith(mark[:n])), 0)
