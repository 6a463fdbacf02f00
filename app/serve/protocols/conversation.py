"""Conversations in OpenAI's form, as the engine takes them."""

import json
from collections.abc import Sequence

import msgspec

from app.serve.errors import wrong
from app.serve.protocols.tools import INPUT
from engine.protocol.events import Message, ToolCall


class Part(msgspec.Struct):
    type: str
    text: str | None = None
    refusal: str | None = None


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
        content = _text(message, f"messages[{i}].content")
        match message.role:
            case "system" | "developer":
                converted.append(Message(role="system", content=content))
            case "user":
                converted.append(Message(role="user", content=content))
            case "assistant":
                called = [(call.id, call.called) for call in message.tool_calls or ()]
                if message.function_call:
                    called.append(("", message.function_call))
                calls = tuple(
                    ToolCall(id=id, name=call.name, arguments=call.arguments) for id, call in called
                )
                names |= {call.id: call.name for call in calls}
                thinking = message.reasoning_content or message.reasoning or ""
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


def _text(message: ChatMessage, param: str) -> str:
    if not isinstance(message.content, list):
        return message.content or ""
    for part in message.content:
        if part.type not in ("text", "input_text", "output_text", "refusal"):
            raise wrong("This server reads text only: no images, sounds or files.", param)
    return "".join(part.text or part.refusal or "" for part in message.content)
