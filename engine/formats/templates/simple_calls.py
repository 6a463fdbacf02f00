"""Conversations with calls of tools, for chat templates that refuse the usual form."""

from __future__ import annotations

import re
from collections.abc import Sequence
from hashlib import blake2b

from msgspec.structs import replace

from engine.protocol.events import Message, ToolCall

_SHORT = re.compile(r"[a-zA-Z0-9]{9}")


def with_short_ids(messages: Sequence[Message]) -> list[Message]:
    """Ids of calls are of 9 letters or digits, as Mistral's templates want them; other ones become their digests."""

    def short(id: str) -> str:
        return id if not id or _SHORT.fullmatch(id) else blake2b(id.encode()).hexdigest()[:9]

    return [
        replace(
            message,
            tool_calls=tuple(replace(call, id=short(call.id)) for call in message.tool_calls),
            tool_call_id=short(message.tool_call_id),
        )
        for message in messages
    ]


def one_by_one(messages: Sequence[Message]) -> list[Message]:
    """Each call is in a message of its own, before its result, as Llama 3's templates want it. What the model said
    stands before the first one."""
    single: list[Message] = []
    said, waiting = Message(role="assistant", content=""), list[ToolCall]()

    def add(call: ToolCall) -> None:
        nonlocal said
        waiting.remove(call)
        single.append(replace(said, tool_calls=(call,)))
        said = replace(said, content="", thinking="")

    for message in messages:
        if message.role == "tool":
            for call in [call for call in waiting if call.id == message.tool_call_id][:1]:
                add(call)
        else:
            for call in list(waiting):  # that have no result
                add(call)
        if message.tool_calls:
            said, waiting = message, list(message.tool_calls)
        else:
            single.append(message)
    for call in list(waiting):
        add(call)
    return single
