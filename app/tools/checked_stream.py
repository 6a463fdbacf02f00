"""What a server sends, checked before the library `mcp` reads it.

A list may hold tools that are not valid: the library refuses the whole list then; here they are taken out. Notices
(progress, logs, changes of other lists than that of tools) are for nobody here, and the library takes half a
millisecond for each. A server that sends them without an end is left, and so is one that answers without an end what
nobody asked."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from typing import Any, TypeAlias

import anyio
from mcp.shared.message import SessionMessage
from mcp_types import JSONRPCNotification, JSONRPCResponse, Tool
from mcp_types.methods import validate_server_result

Received: TypeAlias = SessionMessage | Exception

MOST_MESSAGES, MESSAGES_S = 50_000, 10.0
"""How many messages may come, and in how many seconds. A loop that tells each of its steps sends some thousand a
second."""
FLOODED = f"sent more than {MOST_MESSAGES:,} messages within {MESSAGES_S:.0f} s, and was ended"


class Flood:
    """Counts what comes: more than `most` within MESSAGES_S is a flood."""

    def __init__(self, most: int) -> None:
        self._most, self._count, self._since_s = most, 0, time.monotonic()

    def has_begun(self, more: int = 1) -> bool:
        """Counts so many more, and says whether these are a flood."""
        if (now := time.monotonic()) > self._since_s + MESSAGES_S:
            self._count, self._since_s = 0, now
        self._count += more
        return self._count > self._most


class NoMessageError(ValueError):
    """What the server has printed is no message."""


class CheckedStream:
    """`streams` is the transport of a server without invalid tools, whose names are in `left_out`. `version` of the
    protocol is known once the server has begun, before its tools are listed. `flooded` is set, and the stream ends, if
    the server sends more than is read; `tools_changed`, when it says that its tools have."""

    def __init__(
        self, transport: contextlib.AbstractAsyncContextManager[Any], flooded: asyncio.Event
    ) -> None:
        self._transport, self._flooded = transport, flooded
        self.version = ""
        self.left_out: list[str] = []
        self.tools_changed = asyncio.Event()
        self._messages = Flood(MOST_MESSAGES)

    @contextlib.asynccontextmanager
    async def streams(self) -> AsyncIterator[tuple[Any, Any]]:
        """What comes from the server, checked, and what goes to it, while the connection is open."""
        async with self._transport as (received, outgoing):
            to_session, checked = anyio.create_memory_object_stream[Received](0)

            async def pass_on() -> None:
                async with to_session:
                    with contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
                        async for item in received:
                            if self._messages.has_begun():
                                self._flooded.set()
                                break
                            self._take_out(item)
                            if _is_notice(item):
                                self._hear(item)
                            else:
                                await to_session.send(item)

            passing = asyncio.ensure_future(pass_on())
            try:
                yield checked, outgoing
            finally:
                passing.cancel()
                await asyncio.gather(passing, return_exceptions=True)
                await checked.aclose()

    def _hear(self, notice: Received) -> None:
        if getattr(getattr(notice, "message", None), "method", "") == "notifications/tools/list_changed":
            self.tools_changed.set()

    def _take_out(self, item: Received) -> None:
        if not isinstance(item, SessionMessage) or not isinstance(item.message, JSONRPCResponse):
            return
        result = item.message.result
        tools = result.get("tools")
        if isinstance(tools, list) and not self._is_valid(result):
            valid = [self._is_valid({**result, "tools": [tool]}) for tool in tools]
            result["tools"] = [tool for tool, is_valid in zip(tools, valid, strict=True) if is_valid]
            self.left_out += [
                _name(tool) for tool, is_valid in zip(tools, valid, strict=True) if not is_valid
            ]

    def _is_valid(self, result: dict[str, Any]) -> bool:
        """As the library decides it. Python's JSON has numbers that no other has, such as NaN."""
        try:
            json.dumps(result, allow_nan=False)
            validate_server_result("tools/list", self.version, result)
            for tool in result["tools"]:
                Tool.model_validate(tool, by_name=False)
        except (ValueError, KeyError, RecursionError):
            return False
        return True


def _is_notice(item: Received) -> bool:
    """Whether it is for nobody."""
    is_notification = isinstance(item, SessionMessage) and isinstance(item.message, JSONRPCNotification)
    return is_notification or isinstance(item, NoMessageError)


def _name(tool: object) -> str:
    name = tool.get("name") if isinstance(tool, dict) else None
    return name if name and isinstance(name, str) else "one without a name"
