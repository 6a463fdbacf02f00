"""Conversations in OpenAI's form, as the engine takes them."""

from collections.abc import Sequence

import msgspec

from app.serve.errors import wrong
from engine.protocol.events import Message, ToolCall


class Part(msgspec.Struct):
    type: str
    text: str | None = None


class CalledFunction(msgspec.Struct):
    name: str
    arguments: str = "{}"


class Call(msgspec.Struct):
    function: CalledFunction
    id: str = ""


class ChatMessage(msgspec.Struct):
    role: str
    content: str | list[Part] | None = None
    reasoning_content: str | None = None
    tool_calls: list[Call] | None = None
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
                calls = tuple(
                    ToolCall(id=call.id, name=call.function.name, arguments=call.function.arguments)
                    for call in message.tool_calls or ()
                )
                names |= {call.id: call.name for call in calls}
                thinking = message.reasoning_content or ""
                converted.append(
                    Message(role="assistant", content=content, thinking=thinking, tool_calls=calls)
                )
            case "tool":
                id = message.tool_call_id or ""
                name = message.name or names.get(id, "")
                converted.append(Message(role="tool", content=content, tool_call_id=id, name=name))
            case _:
                raise wrong("A role is system, user, assistant or tool.", f"messages[{i}].role")
    return tuple(converted)


def _text(message: ChatMessage, param: str) -> str:
    if not isinstance(message.content, list):
        return message.content or ""
    for part in message.content:
        if part.type != "text":
            raise wrong("This server reads text only: no images, sounds or files.", param)
    return "".join(part.text or "" for part in message.content)
