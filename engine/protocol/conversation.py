"""A conversation as it travels to an engine: its turns with their pictures, and the other kinds of prompts."""

from typing import Literal

import msgspec

Role = Literal["system", "user", "assistant", "tool"]
PICTURE_MARK = "\ufffc"  # U+FFFC, object replacement character


class Record(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of all messages: frozen, keyword-only, and tagged with the class name (subclasses inherit the tag)."""


class ToolCall(Record, frozen=True, kw_only=True):
    """A function that the model asked for. `arguments` is JSON, as the model wrote it."""

    id: str
    name: str
    arguments: str


class Picture(Record, frozen=True, kw_only=True):
    """A picture of a turn: the bytes of its file, as they were given, and the file's name."""

    data: bytes
    name: str = ""


class Message(Record, frozen=True, kw_only=True):
    """One turn of a conversation. `thinking` is the model's reasoning before `content`, if there was any. A message of
    the role "tool" is the result of the call `tool_call_id` of the function `name`.

    Each PICTURE_MARK in `content` stands for one of `pictures`, in their order. Pictures without a mark come before the
    text. So whoever makes a message replaces the mark in text from elsewhere (`plain`)."""

    role: Role
    content: str
    thinking: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""
    pictures: tuple[Picture, ...] = ()

    @property
    def parts(self) -> list[str | Picture]:
        """The texts and the pictures of a turn, in their order; no text is empty."""
        texts = self.content.split(PICTURE_MARK, len(self.pictures))
        first = len(self.pictures) - len(texts) + 1  # of those with a mark
        parts: list[str | Picture] = [*self.pictures[:first], texts[0]]
        for picture, text in zip(self.pictures[first:], texts[1:], strict=True):
            parts += picture, text
        return [part for part in parts if part]


class Chat(Record, frozen=True, kw_only=True):
    """A conversation, for the model's chat template. `think` False asks a thinking model not to think. `tools` is a
    JSON array of the functions that the model may ask for, in OpenAI's form, or ""."""

    messages: tuple[Message, ...]
    think: bool = True
    tools: str = ""

    @property
    def pictures(self) -> tuple[Picture, ...]:
        """The pictures of all messages."""
        return tuple(picture for message in self.messages for picture in message.pictures)


class RawText(Record, frozen=True, kw_only=True):
    """Text for the model without a template. With `special`, the names of special tokens in it are these tokens, as in
    a text to which a client has applied a template; else they are plain text."""

    text: str
    special: bool = False


class TokenIds(Record, frozen=True, kw_only=True):
    """Token ids for the model, without a template or a tokenizer."""

    ids: tuple[int, ...]


def plain(text: str) -> str:
    """`text` without PICTURE_MARK: U+FFFD is in its place."""
    return text.replace(PICTURE_MARK, "\ufffd")
