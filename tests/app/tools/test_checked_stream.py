import asyncio
import contextlib
import time

import anyio
import pytest
from mcp.shared.message import SessionMessage
from mcp_types import JSONRPCNotification, JSONRPCResponse

from app.tools import checked_stream, host
from app.tools.checked_stream import CheckedStream, NoMessageError

NOTICE = SessionMessage(JSONRPCNotification(jsonrpc="2.0", method="notifications/tools/list_changed"))
ANSWER = SessionMessage(JSONRPCResponse(jsonrpc="2.0", id=1, result={}))


async def received(*items):
    """What the library gets of what a server sends, and whether it was too much."""

    @contextlib.asynccontextmanager
    async def transport():
        sending, incoming = anyio.create_memory_object_stream(len(items))
        for item in items:
            sending.send_nowait(item)
        sending.close()
        yield incoming, None

    flooded = asyncio.Event()
    async with CheckedStream(transport(), flooded).streams() as (checked, _):
        return [item async for item in checked], flooded.is_set()


async def test_notices_are_for_nobody_and_too_many_messages_end_the_stream(monkeypatch):
    monkeypatch.setattr(checked_stream, "MOST_MESSAGES", 4)
    few = NOTICE, NoMessageError(), ANSWER, NOTICE
    assert await received(*few) == ([ANSWER], False)
    assert await received(*few, ANSWER) == ([ANSWER], True)
    assert await received(*[ANSWER] * 9) == ([ANSWER] * 4, True), "answers to what nobody asked"


async def test_streams_of_comments_are_too_much_as_well():
    flooded = asyncio.Event()
    transport = host._Bounded(flooded, 1.0, lambda *_: None)
    transport._check_lines(b": x\n\n" * (host.MOST_LINES // 2))
    assert not flooded.is_set()
    with pytest.raises(host._Flooding, match="was ended"):
        transport._check_lines(b"\r")
    assert flooded.is_set()


async def test_an_answer_that_nobody_waits_for_ends():
    async def drops():
        while True:
            yield b": x\n\n"

    with pytest.raises(TimeoutError):
        async for _ in host._CheckedBytes(drops(), lambda _: None, time.monotonic()):
            pass


def test_a_tool_with_numbers_that_json_lacks_is_not_valid():
    stream = CheckedStream(None, asyncio.Event())
    stream.version = "2025-06-18"
    for number in (1.0, float("nan"), float("inf")):
        tool = {"name": "add", "inputSchema": {"type": "object", "properties": {"a": {"maximum": number}}}}
        assert stream._is_valid({"tools": [tool]}) == (number == 1.0)
