"""What one key may ask."""

import asyncio
from argparse import ArgumentTypeError

import httpx
import pytest

from app.chat.settings import Settings
from app.serve import serve_command
from app.serve.errors import ApiError
from app.serve.limits import Budgets, Limits
from app.serve.routes import application
from engine.errors import UsageError
from tests.app.fake_engine import FakeEngine, reply
from tests.app.serve.conftest import HELLO, error


def refused(budgets, who):
    with pytest.raises(ApiError) as told:
        budgets.enter(who)
    assert told.value.status == 429
    return int(told.value.headers["Retry-After"])


def test_a_minute():
    now = [0.0]
    budgets = Budgets(Limits(requests=2, tokens=100), lambda: now[0])
    budgets.enter("ann")
    now[0] = 10
    budgets.enter("ann")
    assert refused(budgets, "ann") == 50
    budgets.enter("ben")
    now[0] = 61
    budgets.enter("ann")
    budgets.leave("ann", 120)  # which is known only now
    now[0] = 72
    assert refused(budgets, "ann") == 49
    for _ in range(2):
        budgets.leave("ann", 0)
    budgets.leave("ben", 0)
    now[0] = 200
    budgets.enter("ben")
    assert budgets._used.keys() == {"ben"}  # others are forgotten


def test_what_is_no_limit():
    assert Limits.parse("requests=60, open=4") == Limits(requests=60, open=4)
    for wrong in ("", "requests", "requests=0", "requests=-1", "a=1", "open=1,open=2", "open=x"):
        with pytest.raises(ArgumentTypeError, match="requests=60"):
            Limits.parse(wrong)


def test_limits_of_the_settings():
    assert serve_command._limits_of(Settings(limits="open=2")) == Limits(open=2)
    assert serve_command._limits_of(Settings()) == Limits()
    with pytest.raises(UsageError, match="In the settings, limits must be such as requests=60"):
        serve_command._limits_of(Settings(limits="few"))


async def test_each_key_has_its_own(served):
    engine = FakeEngine([*reply("")[:1], None, *reply("")[1:]])
    _, service = served(engine, parallel=4)
    transport = httpx.ASGITransport(application(service, "one,two", Limits(open=1)))
    client = httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8080")

    def ask(key):
        return client.post("/v1/chat/completions", json=HELLO, headers={"X-Api-Key": key})

    first = asyncio.ensure_future(ask("one"))
    await asyncio.sleep(0.02)
    beyond = await ask("one")
    assert beyond.status_code == 429 and error(beyond)["code"] == "rate_limit_exceeded"
    other = asyncio.ensure_future(ask("two"))
    await asyncio.sleep(0.02)
    engine.release()
    assert [(await each).status_code for each in (first, other)] == [200, 200]
    again, _ = await asyncio.gather(ask("one"), _release(engine))
    assert again.is_success


async def test_keys_that_nobody_asked_for_are_no_way_around(served):
    _, service = served()
    transport = httpx.ASGITransport(application(service, "", Limits(requests=1)))
    client = httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8080")
    asked = [client.post("/v1/chat/completions", json=HELLO, headers={"X-Api-Key": key}) for key in "ab"]
    assert [(await each).status_code for each in asked] == [200, 429]


async def _release(engine):
    await asyncio.sleep(0.02)
    engine.release()
