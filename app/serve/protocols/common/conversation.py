"""Conversations in OpenAI's form, as the engine takes them."""

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from app.serve.errors import ApiError, wrong
from app.serve.protocols.common.pictures import NOT_READ, NOT_SEEN, NOTHING_ELSE, PICTURES, from_part
from app.serve.protocols.common.text_files import from_file
from app.serve.protocols.common.tools import INPUT
from engine.protocol.events import PICTURE_MARK, Message, Picture, ToolCall, plain

TEXTS = ("text", "input_text", "output_text", "refusal")
FILES = ("file", "input_file")
THOUGHTS = ("thinking", "reasoning", "redacted_thinking")
"""The types of parts, in chat completions and in responses."""
_OF_TOOLS = ("tool", "function")


class Part(msgspec.Struct):
    """`thinking` is what the model thought, as Mistral's protocol has it, and others. A picture is in one of
    `image_url`, `source`, `image` and `url`. A `file` has its data within, or in `filename` and `file_data`. Some
    clients leave out the type of a text."""

    type: str = "text"
    text: str | None = None
    refusal: str | None = None
    thinking: Any = None
    image_url: Any = None
    source: Any = None
    image: Any = None
    url: Any = None
    file: Any = None
    filename: Any = None
    file_data: Any = None


class PicturePart(Part, kw_only=True):
    """A picture that was read in another protocol."""

    type: str = "picture"
    picture: Picture


class CalledFunction(msgspec.Struct):
    """Arguments are JSON as a text; some clients send the object itself, or nothing."""

    name: str
    arguments: str | dict[str, Any] | None = "{}"

    @property
    def given(self) -> str:
        given = self.arguments
        return given if isinstance(given, str) else json.dumps(given or {}, ensure_ascii=False)


class CustomInput(msgspec.Struct):
    name: str
    input: str = ""


class Call(msgspec.Struct):
    function: CalledFunction | None = None
    custom: CustomInput | None = None
    id: str | None = None

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
    content: str | Sequence[Part | str] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # vLLM's and OpenRouter's name
    tool_calls: list[Call] | None = None
    function_call: CalledFunction | None = None  # of OpenAI's first form of calls
    tool_call_id: str | None = None
    name: str | None = None


def conversation(messages: Sequence[ChatMessage], *, sees: bool = True) -> tuple[Message, ...]:
    """Pictures in the results of tools become the user's after these: chat templates expect them nowhere else. If the
    model `sees` none, a text says so in their place. Raises ApiError for a role or a part of a message that the engine
    does not know."""
    shown = list[Picture]()  # in results of tools, up to the next message of another role
    names: dict[str, str] = {}  # of the functions that were called, by the id of the call
    converted: list[Message] = []
    for i, message in enumerate(messages):
        content, thoughts, pictures = _content(message, f"messages[{i}].content")
        if shown and message.role == "user":
            content, pictures, shown = PICTURE_MARK * len(shown) + content, (*shown, *pictures), []
        elif shown and message.role not in _OF_TOOLS:
            converted.append(_shown(shown))
            shown = []
        match message.role:
            case "system" | "developer":
                converted.append(Message(role="system", content=content))
            case "user":
                converted.append(Message(role="user", content=content, pictures=pictures))
            case "assistant":
                called = [(call.id or "", call.called) for call in message.tool_calls or ()]
                if message.function_call:
                    called.append(("", message.function_call))
                calls = tuple(ToolCall(id=id, name=call.name, arguments=call.given) for id, call in called)
                names |= {call.id: call.name for call in calls}
                thinking = plain(message.reasoning_content or message.reasoning or thoughts)
                converted.append(
                    Message(role="assistant", content=content, thinking=thinking, tool_calls=calls)
                )
            case role if role in _OF_TOOLS:
                id = message.tool_call_id or ""
                name = message.name or names.get(id, "")
                if not sees:
                    content, pictures = content.replace(PICTURE_MARK, NOT_SEEN), ()
                text = content.replace(PICTURE_MARK, "") or ("(a picture)" if pictures else "")
                converted.append(Message(role="tool", content=text, tool_call_id=id, name=name))
                shown += pictures
            case _:
                raise wrong(
                    "A role is system, developer, user, assistant, tool or function.", f"messages[{i}].role"
                )
    return (*converted, _shown(shown)) if shown else tuple(converted)


def _shown(pictures: Sequence[Picture]) -> Message:
    return Message(role="user", content=PICTURE_MARK * len(pictures), pictures=tuple(pictures))


def _content(message: ChatMessage, param: str) -> tuple[str, str, tuple[Picture, ...]]:
    """The text, with marks where pictures stand, what was thought before it, and the pictures. Raises ApiError."""
    if message.content is None or isinstance(message.content, str):
        return plain(message.content or ""), "", ()
    texts, thoughts, pictures = list[str](), list[str](), list[Picture]()
    for part in message.content:
        if isinstance(part, str):
            texts.append(plain(part))
        elif part.type in THOUGHTS:
            thoughts.append(_thought(part.thinking) or part.text or "")
        else:
            try:
                read = _read(part, message.role, param)
            except ApiError:
                if message.role not in _OF_TOOLS:
                    raise
                read = NOT_READ
            texts.append(PICTURE_MARK if isinstance(read, Picture) else read)
            pictures += [read] if isinstance(read, Picture) else []
    return "".join(texts), "".join(thoughts), tuple(pictures)


def _read(part: Part, role: str, param: str) -> str | Picture:
    """A text or a picture. Raises ApiError."""
    if part.type in TEXTS:
        return plain(part.text or part.refusal or "")
    if part.type in FILES:
        return plain(from_file(part.file or {"filename": part.filename, "file_data": part.file_data}, param))
    if role not in ("user", *_OF_TOOLS):
        of_user = "Pictures stand in messages of the user, and in results of tools."
        raise wrong(of_user if part.type in PICTURES else NOTHING_ELSE, param)
    if isinstance(part, PicturePart):
        return part.picture
    if part.type not in PICTURES:
        raise wrong(NOTHING_ELSE, param)
    return from_part(part, param)


def _thought(given: Any) -> str:
    """A text, or a list of parts that have one."""
    if isinstance(given, list):
        return "".join(
            text for part in given if isinstance(part, dict) and isinstance(text := part.get("text"), str)
        )
    return given if isinstance(given, str) else ""
