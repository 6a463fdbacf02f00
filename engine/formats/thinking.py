"""Separates the thinking in a streamed reply from the answer."""

import re
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

from msgspec.structs import asdict, replace

from engine.protocol.events import Event, Finished, Thinking, Token


@dataclass(frozen=True)
class ThinkMarks:
    """The texts that a family of models writes around its thinking, and around the answer: `begin` has the one that
    comes after thinking and the one in a reply without thinking; `end` closes an answer that a `begin` opened, which
    may do without both then, or, without a `begin`, the answer after thinking. `stops` end thinking too, and belong to
    the answer. `breaks`: the line breaks after `open`, before `close` and after it, for a reply that is written into a
    prompt."""

    open: str
    close: str
    begin: tuple[str, ...] = ()
    end: str = ""
    stops: tuple[str, ...] = ()
    breaks: tuple[str, str, str] = ("", "", "")


THINK = ThinkMarks("<think>", "</think>", breaks=("\n", "\n", "\n\n"))  # DeepSeek-R1, Qwen3, SmolLM3
MISTRAL = ThinkMarks("[THINK]", "[/THINK]")
SEED = ThinkMarks("<seed:think>", "</seed:think>", breaks=("", "", "\n"))
GEMMA = ThinkMarks("<|channel>thought", "<channel|>", breaks=("\n", "\n", ""))
HARMONY = ThinkMarks(  # gpt-oss: https://github.com/openai/harmony, docs/format.md
    "<|channel|>analysis<|message|>",
    "<|end|>",
    ("<|start|>assistant<|channel|>final<|message|>", "<|channel|>final<|message|>"),
)
MUSE = ThinkMarks("<|start|>assistant to=self<|message|>", "<|eom|>")
# Command R7B
COHERE = ThinkMarks("<|START_THINKING|>", "<|END_THINKING|>", ("<|START_RESPONSE|>",), "<|END_RESPONSE|>")
COHERE_TEXT = ThinkMarks(COHERE.open, COHERE.close, ("<|START_TEXT|>",), "<|END_TEXT|>")  # North Mini Code
APERTUS = ThinkMarks("<|inner_prefix|>", "<|inner_suffix|>", stops=("<|tools_prefix|>",))
GRANITE = ThinkMarks("<think>", "</think>", ("<response>",), "</response>")
APRIEL = ThinkMarks(
    "Here are my reasoning steps:",
    "[BEGIN FINAL RESPONSE]",
    end="[END FINAL RESPONSE]",
    breaks=("\n", "\n", "\n"),
)
# Of a reply whose model is not known.
_FAMILIES = (THINK, MISTRAL, SEED, GEMMA, HARMONY, MUSE, COHERE, APERTUS)

# The special tokens in these marks. `ThinkSplitter` has to see them.
MARK_TOKENS = frozenset(
    token
    for marks in (*_FAMILIES, COHERE_TEXT, APRIEL)
    for mark in (marks.open, marks.close, *marks.begin, marks.end)
    for token in re.findall(r"<[^>]+>|\[[^]]+\]", mark)
)


def marks_of(template: str) -> ThinkMarks:
    """The marks that a chat template names; those of most models if it names none."""
    if f"{GRANITE.begin[0]}{GRANITE.end}" in template:  # MiniMax M2 has both around results of tools
        return GRANITE
    if APRIEL.close in template:  # Apriel 1.5 opens thinking by itself
        return APRIEL
    for marks in (*_FAMILIES, COHERE_TEXT):
        if all(mark in template for mark in (marks.open, marks.close, *marks.begin[:1])):
            return marks
    return THINK


class ReplySplitter(Protocol):
    """Tells thinking from the answer, token by token."""

    @property
    def may_open(self) -> bool:
        """Whether the next token may open thinking at the start of the reply."""

    @property
    def answers_next(self) -> bool:
        """Whether the next token belongs to the answer, if it does not open thinking."""

    def feed(self, text: str, id: int = -1) -> tuple[bool, str]:
        """(whether the token is thinking, the text that can be shown now). `id` -1: not known."""

    def flush(self) -> tuple[bool, str]:
        """The text that is still held back at the end of the reply, as `feed` returns it."""


class _Phase(Enum):
    START = auto()
    THINKING = auto()
    BEFORE_ANSWER = auto()
    ANSWER = auto()


class ThinkSplitter:
    """Takes a reply token by token (see `ReplySplitter`) and looks for marks in its text.

    Thinking can only be at the start of a reply: from the opening mark, or from the first token if `inside` (the prompt
    ended in that mark), to the first closing mark. Later marks are ordinary text. The marks are removed, and so are
    line breaks after them and white space before the first. A mark may be one token or several, so text that could be
    the beginning of one is held back until the next tokens decide. Without `marks`, those of any family count.
    """

    def __init__(self, marks: ThinkMarks | None = None, *, inside: bool = False) -> None:
        families = (marks,) if marks else _FAMILIES
        self._marks = families[0]
        self._first = {mark: family for family in families for mark in (family.open, *family.begin)}
        self._phase = _Phase.THINKING if inside else _Phase.START
        self._held = ""
        self._after_mark = inside
        self._end = ""  # the mark that closes the answer

    @property
    def may_open(self) -> bool:
        return self._phase is _Phase.START

    @property
    def answers_next(self) -> bool:
        if self._phase is _Phase.ANSWER:
            return True
        begins = (
            self._marks.begin[1:] if self._phase is _Phase.START or self._marks.end else self._marks.begin
        )
        return self._phase is not _Phase.THINKING and not begins and not self._held.strip()

    def feed(self, text: str, id: int = -1) -> tuple[bool, str]:
        """(whether the token is thinking, the text that can be shown now). Text after the closing mark in the same
        token is returned with the next token."""
        self._held += text
        if self._phase is _Phase.START:
            if (mark := self._drop(self._first)) is None:
                return False, ""
            self._marks = self._first.get(mark, self._marks)
            self._phase = _Phase.THINKING if mark == self._marks.open else _Phase.ANSWER
            self._end = self._marks.end if mark in self._marks.begin else ""
        if self._phase is _Phase.THINKING:
            ends = (self._marks.close, *self._marks.stops)
            found = [(at, mark) for mark in ends if (at := self._held.find(mark)) >= 0]
            if not found:
                return True, self._take(len(self._held) - max(overlap(self._held, mark) for mark in ends))
            at, mark = min(found)
            rest = self._held[at:].removeprefix(self._marks.close)
            shown = self._take(at)
            self._phase, self._after_mark, self._held = _Phase.BEFORE_ANSWER, True, rest
            return True, shown
        if self._phase is _Phase.BEFORE_ANSWER:
            if (mark := self._drop(self._marks.begin)) is None:
                return False, ""
            is_closed = mark or not self._marks.begin
            self._phase, self._end = _Phase.ANSWER, self._marks.end if is_closed else ""
        if not self._end:
            return False, self._take(len(self._held))
        answer, mark, rest = self._held.partition(self._end)
        if mark:
            self._held, self._end = answer + rest, ""
        return False, self._take(len(self._held) - overlap(self._held, self._end))

    def flush(self) -> tuple[bool, str]:
        """The text that is still held back at the end of the reply, as `feed` returns it."""
        shown = self.feed("")[1] if self._phase is _Phase.BEFORE_ANSWER else ""
        return self._phase is _Phase.THINKING, shown + self._take(len(self._held))

    def _drop(self, marks: Iterable[str]) -> str | None:
        """Removes the one of `marks` that the held text begins with, and white space before it. Returns it; "" if the
        text begins with none; None if more text has to tell."""
        text = self._held.lstrip()
        for mark in marks:
            if text.startswith(mark):
                self._held, self._after_mark = text[len(mark) :], True
                return mark
        return None if any(mark.startswith(text) for mark in marks) else ""

    def _take(self, n: int) -> str:
        """Removes the first `n` characters from the held text; returns them without line breaks that follow a mark."""
        text, self._held = self._held[:n], self._held[n:]
        if self._after_mark:
            text = text.lstrip("\n")
            self._after_mark = not text
        return text


async def split_thinking(
    events: AsyncIterator[Event], splitter: ReplySplitter | None
) -> AsyncGenerator[Event, None]:
    """The events of an answer, in which `splitter` has marked `Thinking` (None: they stay as they are). Text that the
    splitter holds back at the end comes as one more token, with the id -1."""
    request_id = 0
    async for event in events:
        if splitter and isinstance(event, Token) and not isinstance(event, Thinking):
            request_id = event.request_id
            thinking, text = splitter.feed(event.text, event.id)
            event = (Thinking if thinking else Token)(**asdict(replace(event, text=text)))
        elif splitter and isinstance(event, Finished):
            if text := splitter.flush()[1]:
                yield Token(request_id=event.request_id, id=-1, text=text)
            splitter = None
        yield event
    if splitter and (text := splitter.flush()[1]):
        yield Token(request_id=request_id, id=-1, text=text)


def overlap(text: str, mark: str) -> int:
    """How many characters at the end of `text` could be the beginning of `mark`."""
    return next((n for n in range(len(mark) - 1, 0, -1) if text.endswith(mark[:n])), 0)
