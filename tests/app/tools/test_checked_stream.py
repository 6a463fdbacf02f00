import contextlib

import anyio
from mcp.shared.message import SessionMessage
from mcp_types import JSONRPCNotification, JSONRPCResponse

from app.tools import checked_stream
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

    stream = CheckedStream(transport())
    async with stream.streams() as (checked, _):
        return [item async for item in checked], stream.flooded.is_set()


async def test_notices_are_for_nobody_and_too_many_end_the_stream(monkeypatch):
    monkeypatch.setattr(checked_stream, "MOST_NOTICES", 4)
    few = NOTICE, NoMessageError(), ANSWER, NOTICE
    assert await received(*few) == ([ANSWER], False)
    assert await received(*few, ANSWER, NOTICE, ANSWER, NOTICE, ANSWER) == ([ANSWER] * 3, True)
