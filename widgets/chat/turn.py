"""A turn of the conversation. The application owns the turns and changes them; the transcript reads them."""

import re
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from engine.protocol.events import Message, Picture, ToolCall, plain

WARNING = "⚠"
"""The first character of a note about something that went wrong."""


class PictureFile(msgspec.Struct, frozen=True, kw_only=True):
    """The file of a picture, of `width` x `height` pixels. `thumbnail` is it in small: RGB, rows of `thumbnail_width`
    pixels."""

    data: bytes
    width: int = 0
    height: int = 0
    is_animated: bool = False
    thumbnail: bytes = b""
    thumbnail_width: int = 0


class Attachment(msgspec.Struct, frozen=True, kw_only=True):
    """A file that the user gave with a prompt, as it was then: its lines from `first` to `last` (0: all). `name` is how
    it is shown; `stamp` changes when the file does. `tokens` is None if they were not counted. Of a `picture`, the
    engine says them, and `text` is ""."""

    name: str
    path: str
    text: str
    first: int = 0
    last: int = 0
    stamp: str = ""
    tokens: int | None = None
    picture: PictureFile | None = None

    @property
    def label(self) -> str:
        """The name and its size: notes.txt 1,234 tokens."""
        parts = [self.name]
        if picture := self.picture:
            parts += [f"{picture.width}×{picture.height}"] if picture.width else []
            parts += ["(the first frame)"] if picture.is_animated else []
        elif self.tokens is None:
            parts.append(f"{len(self.text):,} characters")
        parts += [] if self.tokens is None else [f"{self.tokens:,} tokens"]
        return " ".join(parts)

    @property
    def quoted(self) -> str:
        """What the model reads of it. The fence is longer than any in the text, so that the text cannot end it."""
        ticks = max(map(len, re.findall(r"`{3,}", self.text)), default=2) + 1
        return f"{self.name}:\n{'`' * ticks}\n{self.text.rstrip(chr(10))}\n{'`' * ticks}"


CallState = Literal["open", "asked", "running", "returned", "failed", "refused"]
"""Of a call of a tool: not run yet; the user is asked whether it may run; it runs; how it ended."""
NOT_RUN = "The call was not run."


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """A tool that the model called. `arguments` are JSON, as it wrote them; `result` is what the tool returned, or why
    it did not."""

    id: str
    name: str
    arguments: str
    state: CallState = "open"
    result: str = ""

    @property
    def is_over(self) -> bool:
        return self.state in ("returned", "failed", "refused")


@dataclass(eq=False)
class Turn:
    """`content` and `thinking` are raw text from the user or the model; the widgets clean it. `streaming`: more text is
    to come. `finished` is False for a reply that is not complete, or was not when the program ended. `thinking_s` is
    in seconds (None: not measured). `note` is one line about the turn (stopped, failed), which no model sees.
    `message_id` is its row in the history (None: not saved yet). `files` came with a prompt. `version`: which
    of how many versions is shown from this prompt on. `calls` are those of tools at the end of a reply; what the model
    says to their results is another turn. `guessed`: the parts of `content`, from and to a character, that were guessed
    before they were computed."""

    role: Literal["user", "assistant"]
    content: str = ""
    thinking: str = ""
    finished: bool = True
    streaming: bool = False
    thinking_s: float | None = None
    note: str = ""
    message_id: int | None = None
    files: tuple[Attachment, ...] = ()
    version: tuple[int, int] = (1, 1)
    calls: tuple[Call, ...] = ()
    guessed: list[tuple[int, int]] = field(default_factory=list)

    def add(self, text: str, *, guessed: bool = False) -> None:
        """Adds what follows in a reply."""
        start = len(self.content)
        self.content += text
        if guessed:
            self.guessed.append((start, len(self.content)))

    @property
    def messages(self) -> tuple[Message, ...]:
        """What a model is sent: the files before the prompt; the results after the calls."""
        parts = *(file.quoted for file in self.files if not file.picture), self.content
        pictures = (Picture(data=file.picture.data, name=file.path) for file in self.files if file.picture)
        calls = tuple(ToolCall(id=call.id, name=call.name, arguments=call.arguments) for call in self.calls)
        said = Message(
            role=self.role,
            content=plain("\n\n".join(parts)),
            thinking=self.thinking,
            pictures=tuple(pictures),
            tool_calls=calls,
        )
        results = (
            Message(role="tool", content=plain(call.result) or NOT_RUN, tool_call_id=call.id, name=call.name)
            for call in self.calls
        )
        return said, *results

    @property
    def written(self) -> Message:
        """What was written, without the files."""
        return Message(role=self.role, content=self.content, thinking=self.thinking)
