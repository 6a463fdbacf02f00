"""Conversations with calls of tools, for chat templates that refuse the usual form."""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Sequence
from hashlib import blake2b
from itertools import chain

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
    single = list[Message]()
    said, waiting = Message(role="assistant", content=""), defaultdict[str, deque[ToolCall]](deque)

    def add(call: ToolCall) -> None:
        nonlocal said
        single.append(replace(said, tool_calls=(call,)))
        said = replace(said, content="", thinking="")

    def add_waiting() -> None:
        """Those that have no result."""
        for call in chain.from_iterable(waiting.values()):
            add(call)
        waiting.clear()

    for message in messages:
        if message.role != "tool":
            add_waiting()
        elif same := waiting.get(message.tool_call_id):
            add(same.popleft())
        if message.tool_calls:
            said = message
            for call in message.tool_calls:
                waiting[call.id].append(call)
        else:
            single.append(message)
    add_waiting()
    return single
