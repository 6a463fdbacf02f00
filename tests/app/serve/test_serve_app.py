"""The server's screen over a scripted engine."""

import asyncio
import io
import sys

import httpx
import pytest
from msgspec.structs import replace

from app.serve import serve_app, serve_command
from app.serve.activity import Activity
from app.serve.model_pool import ModelPool
from app.serve.routes import application
from app.serve.serve_app import ServeApp, run_beside
from app.serve.service import Service
from engine.protocol.events import BlockCounts, Ready, Slot, Slots
from tests.app.fake_engine import READY, MeasuredEngine, reply
from tests.app.scenes import COUNTERS, drawn, settled
from tests.app.serve.conftest import HELLO
from tests.waiting import LIMIT_S, until
from widgets.dashboard.request_list import Handled

SLOTS = Slots(
    slots=(
        Slot(request_id=1, client="10.0.0.7", phase="prefill", prompt_done=512, prompt_n=2048, predicted_n=0, rate=0),
        Slot(request_id=2, client="10.0.0.8", phase="decode", prompt_done=96, prompt_n=96, predicted_n=12, rate=43.2),
        None,
    ),
    waiting=0,
    blocks=(BlockCounts(free=700, held=68, cached=32),),
    rows=1,
    prompt_tokens=256,
    room=256,
)  # fmt: skip


def served(model_file, *replies, **fields):
    """(the screen, its engine, a client) with a clock that stands still."""
    engine = MeasuredEngine(*replies)
    activity = Activity("http://127.0.0.1:8080/v1", engine.clock)
    service = Service(engine, model="tiny", file=model_file, **fields)
    service.on_handled, service.watch = activity.handled, activity.follow
    app = ServeApp(service, engine, activity, stop=lambda: app.exit(), read_counters=lambda: COUNTERS)
    engine.on_event = app.observe
    transport = httpx.ASGITransport(application(service))
    return app, engine, httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8080")


def load(app, ready: Ready = READY):
    app.service.ready = ready
    app.observe(ready)


async def shows(pilot, *words):
    text = lambda: "\n".join(strip.text for strip in drawn(pilot.app))
    await until(lambda: all(word in text() for word in words), lambda: f"{words} did not all come:\n{text()}")


def busy(model_file):
    """The screen of a busy server with three slots."""
    app, *_ = served(model_file)
    load(app, replace(READY, parallel=3))
    app.observe(SLOTS)
    app.service.open = 5
    app.service.metrics.requests.update({200: 41, 429: 2})
    for i in range(1, 41):
        app.service.metrics.begun(0.035 * i)
    app.activity._bins.update(
        {number: {"10.0.0.8": 20 + number % 7, "10.0.0.7": number % 5 * 3} for number in range(1890, 2000)}
    )
    end = reply("", predicted_n=12, predicted_ms=11 / 43.2 * 1e3)[-1]
    app.activity.handled(Handled("12:00:00", "10.0.0.8", "/v1/chat/completions", 200, end))
    return app


def test_it_looks_as_it_did(model_file, snap_compare, monkeypatch):
    monkeypatch.setattr("app.chat.idle_profiler.IDLE_S", 9e9)
    assert snap_compare(busy(model_file), terminal_size=(140, 40), run_before=settled)


async def test_slots_of_the_engine(model_file):
    app = busy(model_file)
    async with app.run_test(size=(140, 40)) as pilot:
        await shows(
            pilot, "3 waiting · 2 refused", "prefill  25%", "12 tokens after 96", "68 held", "43 requests"
        )
        await shows(pilot, "step: 1 reply, 256 of 256 prompt tokens", "first token p50 735 ms, p99 1.4 s")
        await pilot.press("f9")
        await shows(pilot, "tok/s")
        assert app.graph.size.width > 130 and not app.table.size.width
        await pilot.press(*["f9"] * 4)
        assert app.table.size.width > 130
        await pilot.press("escape")
        assert app.table.size.width and app.graph.size.width


async def test_several_models(model_file):
    """The one that was asked last is shown, with the requests of all."""
    app, *_ = served(model_file)
    others = {"other": lambda: Service(MeasuredEngine(), "other", model_file, metrics=app.service.metrics)}
    app._pool = pool = ModelPool(app.service, others, most_loaded=2)
    app.service.watch, pool.on_made = app.follow, app.add
    transport = httpx.ASGITransport(application(pool))
    client = httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8080")
    async with app.run_test(size=(140, 40)) as pilot:
        load(app)
        await shows(pilot, "tiny · Q6_K", "other models: other")
        assert (
            await client.post("/v1/chat/completions", json={**HELLO, "model": "other"})
        ).status_code == 200
        app.observe(replace(READY, context_length=512), model=app._models[1])
        await shows(pilot, "other · Q6_K", "context 512", "other models: tiny (loaded)", "1 request")
        app.service.ready = None
        await shows(pilot, "other · not loaded")
        await client.post("/v1/chat/completions", json={**HELLO, "model": "tiny"})
        await shows(pilot, "tiny · Q6_K", "other models: other", "2 requests")


async def test_80_columns_hold_what_a_step_had_and_how_long_first_tokens_took(model_file):
    app = busy(model_file)
    async with app.run_test(size=(80, 24)) as pilot:
        await shows(pilot, "step: 1 reply, 256 of 256 prompt tokens", "first token p50 735 ms, p99 1.4 s")


async def test_one_after_another(model_file):
    app, engine, client = served(model_file, [*reply("Secret, well")[:-1], None, *reply("")[-1:]])
    async with app.run_test(size=(140, 40)) as pilot:
        load(app)
        asked = asyncio.create_task(client.post("/v1/chat/completions", json=HELLO))
        await shows(pilot, "127.0.0.1       decode", "3 tokens after 96", "tiny · Q6_K · CUDA (NVIDIA H200)")
        engine.release()
        assert (await asked).status_code == 200
        await shows(pilot, "1 request ·", "/v1/chat/completions 200", " 1 idle")
        assert "Secret" not in "\n".join(strip.text for strip in drawn(app))


async def test_kernels_are_measured_while_it_is_idle(model_file, monkeypatch):
    monkeypatch.setattr("app.chat.idle_profiler.IDLE_S", 0.0)
    monkeypatch.setattr(serve_app, "FRAME_S", 0.02)
    app, engine, _ = served(model_file)
    async with app.run_test(size=(140, 40)) as pilot:
        load(app)
        await shows(pilot, "FFN gate+up", "143 kernels")
        assert engine.profiles == ["decode"] and app.activity.kernels.copy_gbps == 120.0


async def test_a_small_terminal_shows_the_slots_and_none_before_there_are_any(model_file):
    app, *_ = served(model_file)
    async with app.run_test(size=(60, 20)) as pilot:
        await shows(pilot, "0 waiting", "throughput")
        assert "idle" not in "\n".join(strip.text for strip in drawn(app))
        load(app, replace(READY, parallel=3))
        await shows(pilot, "1 idle", "3 idle")
        app.observe(SLOTS)
        await shows(pilot, "prefill  25%", "12 tokens after 96", "3 idle", "127.0.0.1:8080")


@pytest.mark.parametrize("size", [(20, 6), (20, 30), (60, 12), (90, 50), (200, 10)])
async def test_small_terminals(model_file, size):
    app = busy(model_file)
    async with app.run_test(size=size) as pilot:
        await shows(pilot, "waiting")
        app.service.stopping = True
        await shows(pilot, "The server ends")


async def test_the_server_ends_the_screen_and_ctrl_c_the_server(model_file):
    app, *_ = served(model_file)
    ended = asyncio.Event()
    app._stop = ended.set

    async def serving():
        await ended.wait()
        return 130

    app_run = app.run_async
    app.run_async = lambda: app_run(headless=True)
    run = asyncio.create_task(run_beside(app, serving()))
    await until(lambda: app.is_running and app.head.data is not None)
    print("Traceback", file=sys.stderr)
    app.simulate_key("ctrl+c")
    assert await asyncio.wait_for(run, LIMIT_S) == 130
    assert "Traceback" in "".join(app.printed)


@pytest.mark.parametrize(
    ("terminals", "term", "screen"), [(3, "xterm", True), (2, "xterm", False), (3, "dumb", False)]
)
def test_when_there_is_a_screen(monkeypatch, terminals, term, screen):
    monkeypatch.setenv("TERM", term)
    for i, name in enumerate(("stdin", "stderr", "stdout")):
        stream = io.StringIO()
        stream.isatty = lambda i=i: i < terminals
        monkeypatch.setattr(sys, name, stream)
    assert serve_command._has_screen() is screen
