"""Conversations in OpenAI's form, as the engine takes them."""

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from app.serve.errors import wrong
from app.serve.protocols.pictures import NOTHING_ELSE, from_url
from app.serve.protocols.tools import INPUT
from engine.protocol.events import PICTURE_MARK, Message, Picture, ToolCall, plain

TEXTS = ("text", "input_text", "output_text", "refusal")
PICTURES = ("image_url", "input_image")
"""The types of parts, in chat completions and in responses."""


class Part(msgspec.Struct):
    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: Any = None


class PicturePart(Part, kw_only=True):
    """A picture that was read in another protocol."""

    type: str = "picture"
    picture: Picture


class CalledFunction(msgspec.Struct):
    name: str
    arguments: str = "{}"


class CustomInput(msgspec.Struct):
    name: str
    input: str = ""


class Call(msgspec.Struct):
    function: CalledFunction | None = None
    custom: CustomInput | None = None
    id: str = ""

    @property
    def called(self) -> CalledFunction:
        """A custom tool is a function of a text (see `tools`)."""
        if self.custom:
            return CalledFunction(
                self.custom.name, json.dumps({INPUT: self.custom.input}, ensure_ascii=False)
            )
        return self.function or CalledFunction("")


class ChatMessage(msgspec.Struct):
    role: str
    content: str | list[Part] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # vLLM's and OpenRouter's name
    tool_calls: list[Call] | None = None
    function_call: CalledFunction | None = None  # of OpenAI's first form of calls
    tool_call_id: str | None = None
    name: str | None = None


def conversation(messages: Sequence[ChatMessage]) -> tuple[Message, ...]:
    """Raises ApiError for a role or a part of a message that the engine does not know."""
    names: dict[str, str] = {}  # of the functions that were called, by the id of the call
    converted: list[Message] = []
    for i, message in enumerate(messages):
        content, pictures = _content(message, f"messages[{i}].content")
        match message.role:
            case "system" | "developer":
                converted.append(Message(role="system", content=content))
            case "user":
                converted.append(Message(role="user", content=content, pictures=pictures))
            case "assistant":
                called = [(call.id, call.called) for call in message.tool_calls or ()]
                if message.function_call:
                    called.append(("", message.function_call))
                calls = tuple(
                    ToolCall(id=id, name=call.name, arguments=call.arguments) for id, call in called
                )
                names |= {call.id: call.name for call in calls}
                thinking = plain(message.reasoning_content or message.reasoning or "")
                converted.append(
                    Message(role="assistant", content=content, thinking=thinking, tool_calls=calls)
                )
            case "tool" | "function":
                id = message.tool_call_id or ""
                name = message.name or names.get(id, "")
                converted.append(Message(role="tool", content=content, tool_call_id=id, name=name))
            case _:
                raise wrong(
                    "A role is system, developer, user, assistant, tool or function.", f"messages[{i}].role"
                )
    return tuple(converted)


def _content(message: ChatMessage, param: str) -> tuple[str, tuple[Picture, ...]]:
    """The text, with marks where pictures stand, and the pictures. Raises ApiError."""
    if not isinstance(message.content, list):
        return plain(message.content or ""), ()
    texts, pictures = list[str](), list[Picture]()
    for part in message.content:
        if part.type in TEXTS:
            texts.append(plain(part.text or part.refusal or ""))
        elif message.role != "user":
            raise wrong("Pictures stand in messages of the user.", param)
        else:
            texts.append(PICTURE_MARK)
            pictures.append(part.picture if isinstance(part, PicturePart) else _picture(part, param))
    return "".join(texts), tuple(pictures)


def _picture(part: Part, param: str) -> Picture:
    if part.type not in PICTURES:
        raise wrong(NOTHING_ELSE, param)
    return from_url(part.image_url, param)
