"""Several models behind one server, over engines that follow scripts."""

import asyncio
from dataclasses import replace

import httpx
import pytest

from app.serve.model_pool import ModelPool
from app.serve.routes import application
from app.serve.service import Service
from engine.errors import ModelFileError
from tests.app.fake_engine import READY, FakeEngine, reply
from tests.app.serve.conftest import HELLO, error
from tests.waiting import until

CHAT = "/v1/chat/completions"


@pytest.fixture
def pooled(model_file):
    """`pooled(engine of a, engine of b, …)`: a client, the pool, and the requests that have ended."""

    def make(*engines, **options):
        handled = []
        names = [chr(ord("a") + i) for i in range(len(engines))]
        services = {
            name: Service(
                engine, name, model_file, ready=READY if name == "a" else None, on_handled=handled.append
            )
            for name, engine in zip(names, engines, strict=True)
        }
        for service in services.values():
            service.engine.on_event = service.observe
        others = {name: lambda name=name: services[name] for name in names[1:]}
        pool = ModelPool(services["a"], others, **options)
        transport = httpx.ASGITransport(application(pool))
        return httpx.AsyncClient(transport=transport, base_url="http://localhost"), pool, handled

    return make


def loads(text):
    """An engine that loads with its first request, as `LocalEngine` does."""
    return FakeEngine([READY, *reply(text)])


async def test_the_request_chooses_the_model(pooled):
    client, pool, handled = pooled(loads("A"), loads("B"))
    listed = (await client.get("/v1/models")).json()["data"]
    assert [model["id"] for model in listed] == ["a", "b"] and "meta" not in listed[1]
    said = [
        (await client.post(path, json={**HELLO, "model": name, "stream": False, "max_tokens": 9})).json()
        for name, path in (("b", CHAT), ("a", CHAT), ("b:latest", "/api/chat"))
    ]
    assert [each["choices"][0]["message"]["content"] for each in said[:2]] == ["B", "A"]
    assert said[2]["message"]["content"] == "B" and [h.model for h in handled] == ["b", "a", "b"]
    unknown = await client.post(CHAT, json={**HELLO, "model": "gpt-9"})
    assert unknown.status_code == 404 and error(unknown)["message"].endswith("There are: a, b.")
    assert (await client.post("/tokenize", json={"content": "x", "model": "c"})).status_code == 404
    assert (await client.get("/v1/models/b")).json()["meta"]["n_ctx"] == 8192
    assert (await client.get("/health")).status_code == 200 and pool.known[1].metrics is not None


async def test_a_file_that_cannot_be_read_is_a_sentence(pooled):
    client, pool, _ = pooled(loads("A"), loads("B"))

    def broken():
        raise ModelFileError("b.gguf is a folder.", "Name a file.")

    pool._makers["b"] = broken
    for path in (CHAT, "/v1/models/b", "/tokenize"):
        asked = {**HELLO, "model": "b", "content": "x"}
        failed = await (client.get(path) if path.endswith("b") else client.post(path, json=asked))
        assert failed.status_code == 500 and error(failed)["message"] == "b.gguf is a folder. Name a file."
    assert (await client.post(CHAT, json={**HELLO, "model": "a"})).status_code == 200


@pytest.mark.parametrize(("path", "name"), [("/api/tags", "models"), ("/api/v0/models", "data")])
async def test_models_that_were_not_read_have_the_fields_of_those_that_were(pooled, path, name):
    """Clients with strict types, as Zed, could read none of the list otherwise."""
    client, _, _ = pooled(loads("A"), loads("B"))
    known, unread = (await client.get(path)).json()[name]
    of_files = {"arch", "capabilities", "quantization", "max_context_length", "loaded_context_length"}
    assert known.keys() - of_files <= unread.keys()
    for field in known.keys() & unread.keys():
        assert type(known[field]) is type(unread[field])


async def test_the_one_that_was_used_least_recently_goes(pooled):
    engines = [loads(text) for text in "ABC"]
    client, pool, _ = pooled(*engines, most_loaded=2)
    for name in ("b", "a", "c"):
        await client.post(CHAT, json={**HELLO, "model": name})
    assert [engine.closed for engine in engines] == [0, 1, 0]
    assert [pool.is_loaded(name) for name in "abc"] == [True, False, True]
    assert [model["name"] for model in (await client.get("/api/ps")).json()["models"]] == ["a", "c"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_waits_until_the_other_model_has_answered(pooled, stream):
    busy = FakeEngine([*reply("")[:2], None, *reply("A")[2:]])
    client, pool, _ = pooled(busy, loads("B"))
    first = asyncio.ensure_future(client.post(CHAT, json=HELLO))
    await until(lambda: pool.default.processing)
    second = asyncio.ensure_future(client.post(CHAT, json={**HELLO, "model": "b", "stream": stream}))
    await until(lambda: len(pool.known) == 2 and pool.known[1].open)
    third = asyncio.ensure_future(client.post(CHAT, json=HELLO))  # it waits behind the second
    await until(lambda: pool.default.open == 2)
    gone = asyncio.ensure_future(client.post(CHAT, json={**HELLO, "model": "b"}))
    await until(lambda: pool.known[1].open == 2)
    gone.cancel()
    assert not pool.is_loaded("b") and not second.done()
    busy.replies = [reply("A")]
    busy.release()
    assert "A" in (await first).text and "B" in (await second).text and "A" in (await third).text
    assert busy.closed == 1 and pool.is_loaded("a") and not pool.is_loaded("b")


async def test_idle_models_are_unloaded(pooled):
    now = [0.0]
    client, pool, _ = pooled(loads("A"), loads("B"), most_loaded=2, idle_s=0.01, clock=lambda: now[0])
    await client.post(CHAT, json={**HELLO, "model": "b"})
    watching = asyncio.ensure_future(pool.unload_idle())
    now[0] = 1.0
    await until(lambda: not pool.is_loaded("a") and not pool.is_loaded("b"))
    assert pool.default.ready is None
    assert "A" in (await client.post(CHAT, json=HELLO)).text
    watching.cancel()


def test_one_model_answers_to_every_name(model_file):
    service = Service(FakeEngine(), "a", replace(model_file), ready=READY)
    pool = ModelPool(service)
    assert asyncio.run(pool.named("gpt-9")) is service and pool.names == ["a"]
