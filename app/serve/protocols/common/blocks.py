"""An answer as a row of blocks, thinking, texts and calls, as Anthropic's messages and OpenAI's responses have it."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from app.serve.answer import AnswerDelta
from engine.protocol.events import Token

Kind = Literal["thinking", "text", "call"]


@dataclass
class Block:
    """`id` and `name` are those of a call, whose text is its arguments. `tokens`: those of a text, if their
    log-probabilities are known."""

    kind: Kind
    index: int
    id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)


@dataclass(frozen=True)
class Opened:
    block: Block


@dataclass(frozen=True)
class Grown:
    block: Block
    text: str
    tokens: tuple[Token, ...] = ()


@dataclass(frozen=True)
class Closed:
    block: Block


Change = Opened | Grown | Closed


class Blocks:
    """Makes `all` blocks of the deltas of an answer, one open at a time. White space alone is no text."""

    def __init__(self) -> None:
        self.all: list[Block] = []
        self._open: Block | None = None
        self._blank = ""

    def feed(self, delta: AnswerDelta) -> Iterator[Change]:
        if delta.reasoning:
            yield from self._add("thinking", delta.reasoning)
        if delta.content or delta.tokens:
            yield from self._text(delta)
        if piece := delta.call:
            if piece.name:
                yield from self.close()
                yield from self._begin("call", piece.id, piece.name)
            yield from self._add("call", piece.arguments)

    def close(self) -> Iterator[Closed]:
        """Closes the block that is open."""
        if block := self._open:
            self._open = None
            yield Closed(block)
        self._blank = ""

    def _text(self, delta: AnswerDelta) -> Iterator[Change]:
        text = self._blank + delta.content
        if self._open and self._open.kind == "text":
            yield from self._add("text", text, delta.tokens)
        elif text.strip():
            yield from self._add("text", text.lstrip() if self.all else text, delta.tokens)
        else:
            self._blank = text

    def _add(self, kind: Kind, text: str, tokens: tuple[Token, ...] = ()) -> Iterator[Change]:
        if self._open is None or self._open.kind != kind:
            yield from self.close()
            yield from self._begin(kind)
        self._blank = ""
        if (block := self._open) and (text or tokens):
            block.pieces.append(text)
            block.tokens += tokens
            yield Grown(block, text, tokens)

    def _begin(self, kind: Kind, id: str = "", name: str = "") -> Iterator[Opened]:
        self._open = Block(kind, len(self.all), id, name)
        self.all.append(self._open)
        yield Opened(self._open)
