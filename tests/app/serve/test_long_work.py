"""Work on long texts: one client's does not keep others from theirs."""

import asyncio
import threading

import pytest

from app.serve.errors import ApiError
from app.serve.long_work import MAX_TEXT_BYTES, MAX_WAITING, SHORT_BYTES, LongWork


async def test_clients_take_turns():
    work, order, go = LongWork(), [], threading.Event()

    def do(name):
        go.wait()
        order.append(name)

    long = SHORT_BYTES + 1
    flood = [asyncio.ensure_future(work.run("a", long, do, f"a{i}")) for i in range(5)]
    await asyncio.sleep(0)
    other = asyncio.ensure_future(work.run("b", long, do, "b"))
    await asyncio.sleep(0.01)
    short = asyncio.ensure_future(work.run("a", SHORT_BYTES, order.append, "short"))
    await short
    go.set()
    await asyncio.gather(*flood, other)
    assert order == ["short", "a0", "b", "a1", "a2", "a3", "a4"]


async def test_a_longer_text_waits_elsewhere():
    work, go = LongWork(), threading.Event()
    longest = asyncio.ensure_future(work.run("a", 16 << 20, go.wait))
    assert await work.run("b", 1 << 20, lambda: 7) == 7
    go.set()
    assert await longest


async def test_what_waits_is_bounded_and_may_go():
    work, go = LongWork(), threading.Event()
    many = [asyncio.ensure_future(work.run("a", 1 << 20, go.wait)) for _ in range(MAX_WAITING)]
    await asyncio.sleep(0)
    with pytest.raises(ApiError) as refused:
        await work.run("b", 1 << 20, go.wait)
    assert refused.value.status == 429 and refused.value.headers["Retry-After"]
    for one in many[1:]:
        one.cancel()
    await asyncio.gather(*many[1:], return_exceptions=True)
    go.set()
    assert await work.run("b", 1 << 20, lambda: 7) == 7


async def test_a_text_to_be_counted_has_a_limit(served):
    client, _ = served()
    response = await client.post("/tokenize", json={"content": "a " * (MAX_TEXT_BYTES // 2)})
    assert response.status_code == 413 and "4 MiB" in response.json()["error"]["message"]
