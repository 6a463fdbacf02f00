"""Requests that take long: signs of life, clients that go, a model that loads or has stopped."""

import asyncio
import json

import pytest

from app.serve.http import PIECE_BYTES
from app.serve.routes import application
from engine.protocol.events import Failed, Token
from tests.app.fake_engine import READY, TOO_LONG, FakeEngine, reply, tokens
from tests.app.serve.conftest import HELLO, WEATHER, error
from tests.app.serve.test_routes import CHAT
from tests.waiting import LIMIT_S, until


@pytest.mark.parametrize("stream", [False, True])
async def test_a_failure_of_one_of_several_answers_ends_all(served, stream):
    died = Failed(kind="backend", message="The engine died.")
    client, service = served(FakeEngine([*reply("one")[:-1], None], [died]))
    response = await client.post(CHAT, json={**HELLO, "n": 2, "stream": stream})
    assert "The engine died." in response.text
    assert service.open == service.processing == 0 and service.handled[0].problem == died.message


async def test_a_proxy_sees_that_a_silent_stream_lives(served, sent, monkeypatch):
    monkeypatch.setattr("app.serve.http.KEEP_ALIVE_S", 0.01)
    engine = FakeEngine([None, TOO_LONG])
    client, service = served(engine)
    asked = asyncio.ensure_future(client.post(CHAT, json={**HELLO, "stream": True}))
    await until(lambda: engine.requests and sent)
    engine.release()
    response = await asked
    first, *_, failed, done, _ = response.text.split("\n\n")
    assert response.status_code == 200 and first == ": still here" and done == "data: [DONE]"
    assert json.loads(failed.removeprefix("data: "))["error"]["code"] == "context_length_exceeded"
    assert service.open == 0 and service.handled[0].problem


async def test_an_answer_that_is_not_streamed_shows_that_it_lives(served, sent, monkeypatch):
    for name in ("KEEP_ALIVE_S", "QUIET_S"):
        monkeypatch.setattr(f"app.serve.http.{name}", 0.01)
    monkeypatch.setattr("app.serve.bodies.MAX_HELD_BYTES", PIECE_BYTES)
    too_long = [Token(request_id=0, id=0, text="x" * (2 * PIECE_BYTES))]
    engine = FakeEngine(
        [None, *reply("Well.")], [None, TOO_LONG], [None, *reply("")[:-1], *too_long, reply("")[-1]]
    )
    client, service = served(engine)
    for n, told in enumerate(("choices", "error", "error"), 1):
        asked = asyncio.ensure_future(client.post(CHAT, json=HELLO))
        await until(lambda n=n: len(engine.requests) == n and len(sent) > 1)
        engine.release()
        response = await asked
        sent.clear()
        assert response.text.startswith("  ") and told in response.json() and response.status_code == 200
        assert "content-length" not in response.headers and service.open == 0
    assert service.handled[1].problem
    task = asyncio.ensure_future(client.post(CHAT, json=HELLO))
    await until(lambda: len(engine.requests) == 4 and sent)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert service.open == 0 and service.handled[3].status == 499


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("before", [[], [*reply("")[:2], *tokens("Well, ")]], ids=["waiting", "answering"])
async def test_a_client_that_goes_cancels_its_request(served, stream, before):
    closed = asyncio.Event()

    class Watched(FakeEngine):
        async def generate(self, request):
            try:
                async for event in super().generate(request):
                    yield event
            finally:
                closed.set()

    engine = Watched([*before, None])
    _, service = served(engine)
    gone, sent = asyncio.Event(), []
    body = json.dumps({**HELLO, "stream": stream}).encode()
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive():
        if messages:
            return messages.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    scope = {
        "type": "http", "method": "POST", "path": CHAT, "headers": [(b"host", b"localhost")], "query_string": b"",
        "client": ("127.0.0.1", 1), "scheme": "http", "server": ("127.0.0.1", 80), "root_path": "",
    }  # fmt: skip
    call = asyncio.ensure_future(application(service)(scope, receive, send))
    while not engine.requests or (stream and before and len(sent) < 3):
        await asyncio.sleep(0)
    gone.set()
    await asyncio.wait_for(call, LIMIT_S)
    assert closed.is_set() and service.open == service.processing == 0
    assert [(h.status, h.problem) for h in service.handled] == [(499, "the client has gone")]


async def test_while_it_loads_and_when_it_stops(served):
    engine = FakeEngine([None, *reply("Hello.")])
    client, service = served(engine, ready=None, max_waiting=1)
    loading = await client.get("/health")
    assert loading.status_code == 503 and error(loading)["message"] == "Loading model"
    early = [asyncio.ensure_future(client.post(CHAT, json=HELLO)) for _ in range(2)]
    while service.open < 2:
        await asyncio.sleep(0)
    assert (await client.post(CHAT, json=HELLO)).status_code == 429
    engine.release()
    assert [(await answer).status_code for answer in early] == [200, 200]
    assert "meta" not in (await client.get("/v1/models")).json()["data"][0]
    service.ready = READY
    assert (await client.get("/health")).json() == {"status": "ok", "slots": 1}
    service.stopping = True
    assert (await client.post(CHAT, json=HELLO)).status_code == 503


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_that_cannot_be_read_is_text(served, stream):
    client, service = served(FakeEngine(reply("<tool_call>\n{name: get_weather}\n</tool_call>")))
    response = await client.post(CHAT, json={**HELLO, "tools": [WEATHER], "stream": stream})
    assert "tool_calls" not in response.text and '"stop"' in response.text
    assert service.handled[0].note == "1 call of tools could not be read"
