"""The dashboard beside a chat: what it asks of an idle engine, and going over to another preset."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest

from app import evidence
from app.chat_app import ChatApp
from app.history import History
from app.setup import Setup
from engine.events import EngineOptions, Failed
from presets import loader
from tests.app.fake_engine import STARTED, FakeEngine, MeasuredEngine, profile, reply
from tests.app.scenes import COUNTERS, sees

NO_DRIVER = Failed(kind="backend", message="There is no driver.", hint="Choose CPU.")


@pytest.fixture(autouse=True)
def own_presets(tmp_path, monkeypatch):
    monkeypatch.setattr(loader, "own_folder", lambda: tmp_path / "presets")
    monkeypatch.setattr(evidence, "_path", lambda: tmp_path / "evidence.json")


@asynccontextmanager
async def dashboard(engine, *others, flaws=None, size=(140, 44), backend="CUDA", name="cuda", **options):
    made = []

    def make(options: EngineOptions):
        made.append(options)
        return others[len(made) - 1]

    setup = Setup(
        EngineOptions(model_path="m.gguf", backend=backend), name, make=make,
        flaw=lambda backend: (flaws or {}).get(backend, ""),
    )  # fmt: skip
    app = ChatApp(
        engine,
        History(":memory:"),
        setup=setup,
        read_counters=lambda: COUNTERS,
        clock=engine.clock,
        **options,
    )
    async with app.run_test(size=size) as pilot:
        app.prompt.cursor_blink = False
        await sees(pilot, "ready")
        await until(lambda: setup._flaws)
        yield app, pilot, made


async def until(holds):
    for _ in range(300):
        if holds():
            return
        await asyncio.sleep(0.02)
    raise AssertionError


async def test_an_idle_engine_is_measured_once_and_after_each_reply():
    engine = MeasuredEngine(reply("Hello. " * 40))
    async with dashboard(engine) as (app, pilot, _):
        await until(lambda: engine.profiles == ["decode"])
        await sees(pilot, "143 kernels · sum 8,190 · wall 10,000 µs")
        assert app.dashboard.performance.copy_gbps == 120
        await asyncio.sleep(1.2)
        assert engine.profiles == ["decode"], "not again and again"
        app.prompt.insert("Hi")
        await pilot.press("enter")
        await until(lambda: engine.profiles == ["decode"] * 2)
        await sees(pilot, "42% of roofline")


async def test_an_engine_that_does_not_measure_itself_says_so():
    async with dashboard(FakeEngine()) as (_, pilot, _):
        await sees(pilot, "fake does not tell of its kernels")


async def test_a_profile_that_gave_way_is_asked_for_again():
    engine = MeasuredEngine()
    answers = [Failed(kind="usage", message="The profile was given up for a prompt."), profile()]

    async def asked(step="decode"):
        engine.profiles.append(step)
        if len(answers) == 2:
            app.session._is_starting = True  # as if a prompt had come
            asyncio.get_running_loop().call_later(0.3, setattr, app.session, "_is_starting", False)
        return answers.pop(0)

    engine.profile = asked
    async with dashboard(engine) as (app, pilot, _):
        await until(lambda: engine.profiles == ["decode"] * 2)
        await sees(pilot, "143 kernels")


async def test_keys_of_the_kernel_table():
    engine = MeasuredEngine()
    async with dashboard(engine) as (app, pilot, _):
        await sees(pilot, "143 kernels")
        table = app.dashboard.table
        await pilot.press("f9", "f9")
        assert app.focused is table and app.transcript.size.width == app.prompt.size.width == 0
        assert [kernel.role for kernel in table.rows[:2]] == ["FFN gate+up", "attention"]
        await pilot.press("s")
        assert table.rows[0].role == "output head" and "by GB/s" in table.border_subtitle
        await pilot.press("f", "f")
        assert [kernel.role for kernel in table.rows] == ["attention"]
        await pilot.press("f", "f", "f", "d")
        await until(lambda: engine.profiles[-1] == "prefill")
        await sees(pilot, "512 tokens")
        await pilot.press("p")
        await sees(pilot, "paused")
        await pilot.press("down", "enter")
        await sees(pilot, "options: UPCAST")
        await pilot.press("escape", "escape")
        assert app.focused is app.prompt and app.prompt.size.width > 0


async def test_the_next_backend_keeps_the_conversation():
    engine, other = MeasuredEngine(reply("One.")), MeasuredEngine(reply("Two."))
    async with dashboard(engine, other, initial_prompt="first") as (app, pilot, made):
        await sees(pilot, "One.")
        await pilot.press("f6")
        await until(lambda: app.session.engine is other)
        assert (made[0].backend, made[0].beam, app.setup.name) == ("CPU", 0, "cpu")
        app.prompt.insert("second")
        await pilot.press("enter")
        await sees(pilot, "Two.")
        assert [text for _, text in other.prompts()[0]] == ["first", "One.", "second"]
        assert engine.closed


async def test_a_backend_that_does_not_work_here_is_passed_over():
    flaws = {"NV": "no driver", "CPU": "no compiler"}
    async with dashboard(MeasuredEngine(), flaws=flaws) as (app, pilot, made):
        await pilot.press("f6")
        await sees(pilot, "No other backend works here")
        assert made == [] and app.session.candidate is None


async def test_a_wider_search_and_back():
    wide, wider, narrow = MeasuredEngine(), MeasuredEngine(), MeasuredEngine()
    async with dashboard(MeasuredEngine(), wide, wider, narrow) as (app, pilot, made):
        for engine, name in ((wide, "cuda-beam2"), (wider, "cuda-beam4"), (narrow, "cuda")):
            await pilot.press("f7")
            await until(lambda engine=engine: app.session.engine is engine)
            assert app.setup.name == name
        assert [options.beam for options in made] == [2, 4, 0]


async def test_a_preset_that_fails_leaves_the_old_one():
    broken = FakeEngine(start=[*STARTED[:2], NO_DRIVER])
    async with dashboard(MeasuredEngine(), broken) as (app, pilot, _):
        before = app.session.engine
        await pilot.press("f6")
        await sees(pilot, "cpu did not start: There is no driver. Choose CPU.")
        assert app.session.engine is before and app.setup.name == "cuda" and not before.closed


async def test_escape_gives_up_a_switch():
    slow = FakeEngine(start=[*STARTED[:2], None])
    async with dashboard(MeasuredEngine(), slow) as (app, pilot, _):
        await pilot.press("f6")
        await sees(pilot, "cpu: preparing kernels · 12 of 48")
        await pilot.press("escape")
        await until(lambda: slow.closed)
        assert app.setup.name == "cuda" and app.session.candidate is None


async def test_presets_are_chosen_and_edited_in_a_list(tmp_path):
    other = MeasuredEngine()
    async with dashboard(MeasuredEngine(), other) as (app, pilot, made):
        await pilot.press("f8")
        await sees(pilot, "not measured yet")
        await pilot.press("home", "f2")
        await sees(pilot, "Ctrl+S saves")
        app.screen.query_one("TextArea").text = 'title = "Mine"\nbackend = "TPU"\n'
        await pilot.press("ctrl+s")
        await sees(pilot, "$.backend")
        app.screen.query_one("TextArea").text = 'title = "Mine"\nbackend = "CPU"\nkernels = "graph"\n'
        await pilot.press("ctrl+s")
        await sees(pilot, "your own")
        await pilot.press("home", "enter")
        await until(lambda: app.session.engine is other)
        assert made[0].kernels == "graph" and (tmp_path / "presets" / "cpu.toml").is_file()


async def test_speeds_are_noted_for_the_preset():
    engine = MeasuredEngine(reply("word " * 60, prompt_n=96, prompt_ms=210.0))
    async with dashboard(engine, initial_prompt="Hi") as (app, pilot, _):
        await until(lambda: evidence.recall(app.setup.model_path))
        known = evidence.recall(app.setup.model_path)["cuda"]
        assert (round(known.runs[0].decode), round(known.runs[0].prefill)) == (100, 457)
        await sees(pilot, "decode 100")


async def test_where_there_is_no_room_a_key_shows_it_and_what_happens_under_it():
    slow = FakeEngine(start=[*STARTED[:2], None])
    async with dashboard(MeasuredEngine(), slow, size=(80, 30)) as (app, pilot, _):
        assert app.dashboard.size.width == 0
        await pilot.press("f5")
        await sees(pilot, "throughput")
        await sees(pilot, "F5 back")
        assert app.prompt.size.width == 0
        await pilot.press("f7")
        await sees(pilot, "cuda-beam2: preparing kernels")
        await pilot.press("escape", "f5")
        await pilot.pause()
        assert app.column.size.width == 80 and app.focused is app.prompt


async def test_on_a_tiny_terminal_there_is_only_the_chat():
    async with dashboard(MeasuredEngine(), size=(36, 12)) as (app, pilot, _):
        await pilot.press("f5", "f9")
        await pilot.pause()
        assert app.dashboard.size.width == 0
        assert app.column.size.width == 36


@pytest.mark.parametrize(
    ("options", "backend", "name"),
    [
        ({}, "CPU", "cpu"),
        ({"backend": "CUDA", "context_length": 512}, "CUDA", "cuda"),
        ({"beam": 2}, "CUDA", ""),
        ({"kernels": "graph"}, "CPU", ""),
    ],
)
def test_without_a_preset_it_is_that_of_the_backend_if_it_is_set_up_alike(options, backend, name):
    setup = Setup(EngineOptions(model_path="m", **options))
    setup.started(backend)
    assert setup.name == name


async def test_what_is_not_seen_costs_nothing():
    engine = MeasuredEngine()
    async with dashboard(engine) as (app, pilot, _):
        await pilot.press("f5")
        await until(lambda: not app.dashboard.is_seen)
        app.dashboard._read = lambda: pytest.fail("the counters are read")
        engine.profiles.clear()
        app.dashboard._wanted = ["decode"]
        await asyncio.sleep(1.5)
        assert engine.profiles == []


async def test_tab_goes_to_the_kernels_and_back():
    async with dashboard(MeasuredEngine()) as (app, pilot, _):
        await pilot.press("tab")
        assert app.focused is app.dashboard.table
        await pilot.press("escape", "tab")
        await pilot.click("ThroughputGraph")
        assert app.focused is app.prompt
