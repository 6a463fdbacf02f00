"""What a server lists may hold tools that are not valid. The library `mcp` refuses the whole list then; here they are
taken out before it reads the list."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import anyio
from mcp.shared.message import SessionMessage
from mcp_types import JSONRPCResponse, Tool
from mcp_types.methods import validate_server_result

from app.tools.stdio import Received


class ValidTools:
    """`streams` is the transport of a server without invalid tools, whose names are in `left_out`. `version` of the
    protocol is known once the server has begun, before its tools are listed."""

    def __init__(self, transport: contextlib.AbstractAsyncContextManager[Any]) -> None:
        self._transport = transport
        self.version = ""
        self.left_out: list[str] = []

    @contextlib.asynccontextmanager
    async def streams(self) -> AsyncIterator[tuple[Any, Any]]:
        async with self._transport as (received, outgoing):
            to_session, checked = anyio.create_memory_object_stream[Received](0)

            async def pass_on() -> None:
                async with to_session:
                    with contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
                        async for item in received:
                            self._take_out(item)
                            await to_session.send(item)

            passing = asyncio.ensure_future(pass_on())
            try:
                yield checked, outgoing
            finally:
                passing.cancel()
                await asyncio.gather(passing, return_exceptions=True)
                await checked.aclose()

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
        """As the library decides it."""
        try:
            validate_server_result("tools/list", self.version, result)
            for tool in result["tools"]:
                Tool.model_validate(tool, by_name=False)
        except (ValueError, KeyError):
            return False
        return True


def _name(tool: object) -> str:
    name = tool.get("name") if isinstance(tool, dict) else None
    return name if name and isinstance(name, str) else "one without a name"
