"""The dashboard beside a chat: what it asks of an idle engine, and going over to another preset."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from itertools import pairwise

import pytest

from app.chat import idle_profiler, idle_tuner
from app.chat.configuration import configure
from app.chat.history import History
from app.chat.settings import Settings
from app.screens.chat_app import ChatApp
from app.screens.engine_setup import EngineSetup
from engine.protocol.events import Counter, EngineOptions, Failed, Measured, Search, Tuned, Warming
from tests.app.fake_engine import STARTED, WITH_EXPERTS, FakeEngine, MeasuredEngine, profile, reply
from tests.app.scenes import COUNTERS, sees, settled
from tests.thorough import thorough
from tests.waiting import until
from widgets.dashboard.kernel_table import KernelTable


@asynccontextmanager
async def dashboard(engine, *others, flaws=None, size=(140, 44), backend="CUDA", name="cuda", **options):
    made = []

    def make(options: EngineOptions):
        made.append(options)
        return others[len(made) - 1]

    setup = EngineSetup(
        EngineOptions(model_path="m.gguf", backend=backend), name, make=make,
        unusable_because=lambda backend: (flaws or {}).get(backend, ""),
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
        await until(lambda: setup._problems)
        yield app, pilot, made


async def test_an_idle_engine_is_measured_once_and_after_each_reply():
    engine = MeasuredEngine(reply("Hello. " * 40))
    async with dashboard(engine) as (app, pilot, _):
        await until(lambda: engine.profiles == ["decode"])
        await sees(pilot, "143 kernels · sum 8,190 · wall 10,000 µs")
        assert app.dashboard.performance.kernels.copy_gbps == 120
        await asyncio.sleep(0.3)
        assert engine.profiles == ["decode"], "not again and again"
        app.prompt.insert("Hi")
        await pilot.press("enter")
        await until(lambda: engine.profiles == ["decode"] * 2)
        await sees(pilot, "42% of roofline")


@thorough
async def test_the_pane_of_experts_is_there_for_models_that_have_some():
    for start, panes, rows in ((STARTED, 3, 44), ([WITH_EXPERTS], 4, 44), ([WITH_EXPERTS], 4, 24)):
        async with dashboard(FakeEngine(start=start), size=(140, rows)) as (app, pilot, _):
            strip = app.dashboard.experts
            await until(lambda: app.dashboard.table.size.height >= 9)  # whatever else there is
            assert strip.display == (panes == 4 and rows == 44)
            seen = []
            for _ in range(panes + 1):
                await pilot.press("f9")
                assert app.dashboard.whole is None or app.dashboard.whole.display
                seen.append(app.dashboard.whole)
            assert seen == [pane for pane in app.dashboard.panes if pane is not strip or panes == 4] + [None]


async def test_a_bandwidth_measured_beside_other_programs_is_measured_again_when_they_are_quiet():
    """Otherwise the roofline of a busy start would stay for the session."""
    engine, figures, load = MeasuredEngine(), iter([30.0, 52.0]), 80.0
    measured = []

    async def measure():
        measured.append(next(figures))
        return Measured(request_id=0, copy_gbps=measured[-1], kernels_per_token=1, device_bytes=1)

    engine.measure = measure
    async with dashboard(engine) as (app, _, _):
        panes = app.dashboard
        panes._read_counters = lambda: (Counter(name="other load", value=load, unit="%"),)
        await until(lambda: panes.performance.kernels.copy_gbps == 30)
        await until(lambda: panes.machine.data.counters[0].value == 80)
        await asyncio.sleep(0.2)
        assert measured == [30], "not while they work"
        load = 3.0
        await until(lambda: panes.performance.kernels.copy_gbps == 52)
        await asyncio.sleep(0.2)
        assert measured == [30, 52], "once"


async def test_an_engine_that_does_not_measure_itself_says_so():
    async with dashboard(FakeEngine()) as (_, pilot, _):
        await sees(pilot, "fake cannot measure its kernels")


async def test_a_search_and_a_measurement_wait_for_each_other(monkeypatch):
    """An engine gives up either for whatever else is asked of it."""
    monkeypatch.setattr(idle_tuner, "IDLE_S", 0.0)
    engine, searches = MeasuredEngine(), list[asyncio.Event]()

    async def tune(seconds):
        assert len(engine.profiles) == len(searches), "the profile came first"
        searches.append(asyncio.Event())
        await searches[-1].wait()
        return Tuned(request_id=0, before_us=1000.0, after_us=900.0, left=1)

    engine.tune, engine.stop_tuning = tune, lambda: searches[-1].set()
    async with dashboard(engine) as (app, pilot, _):
        app.dashboard.tuner._on_mains = lambda: True
        await until(lambda: searches)
        await asyncio.sleep(idle_profiler.IDLE_S + 0.1)
        assert not engine.profiles
        searches[-1].set()  # the search ends by itself, and has gained something
        await sees(pilot, "a token takes 900 µs, 10.0 % less than before")
        await until(lambda: len(searches) == 2 and engine.profiles == ["decode"])
        app.dashboard.table.post_message(KernelTable.ProfileRequested("decode"))  # as a mouse button does
        await until(lambda: len(searches) == 3 and engine.profiles == ["decode"] * 2)
        await pilot.press("x")
        assert app.prompt.text == "x" and searches[2].is_set(), "a key is shown, and ends a search"


@thorough
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
        assert [kernel.role for kernel in table.kernels[:2]] == ["FFN gate+up", "attention"]
        await pilot.press("s")
        assert table.kernels[0].role == "output head" and "by GB/s" in table.border_subtitle
        await pilot.press("f", "f")
        assert [kernel.role for kernel in table.kernels] == ["attention"]
        await pilot.press("f", "f", "f", "d")
        await until(lambda: engine.profiles[-1] == "prefill")
        await sees(pilot, "512 tokens")
        await pilot.press("p")
        await sees(pilot, "paused")
        await pilot.press("down", "enter")
        await sees(pilot, "options: UPCAST")
        await pilot.press("escape", "escape")
        await until(lambda: app.focused is app.prompt and app.prompt.size.width > 0)


@thorough
async def test_what_is_measured_again_is_shown_although_the_table_was_held():
    engine = MeasuredEngine()
    async with dashboard(engine) as (app, pilot, _):
        await sees(pilot, "143 kernels")
        await pilot.press("f9", "f9", "p", "d")  # prefill is not measured yet
        await sees(pilot, "512 tokens")
        assert engine.profiles == ["decode", "prefill"] and not app.dashboard.table.is_paused


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
        await until(lambda: app.column.size.width == 80 and app.focused is app.prompt)


@thorough
async def test_a_notice_does_not_hide_the_way_back():
    async with dashboard(MeasuredEngine(), size=(80, 30)) as (app, pilot, _):
        for key, way in (("f5", "F5 back"), ("f9", "Esc back")):
            app.notice("A model is here", seconds=60)
            await pilot.press(key)
            await sees(pilot, way)
        app.notice("The disk is full", warning=True)
        await pilot.press("f9")
        await sees(pilot, "The disk is full")


async def test_on_a_tiny_terminal_there_is_only_the_chat():
    async with dashboard(MeasuredEngine(), size=(36, 12)) as (app, pilot, _):
        await pilot.press("f5", "f9")
        await pilot.pause()
        assert app.dashboard.size.width == 0
        assert app.column.size.width == 36


@thorough
async def test_a_terminal_that_gets_too_small_for_a_whole_pane_shows_the_chat():
    async with dashboard(MeasuredEngine()) as (app, pilot, _):
        await pilot.press("f9")
        assert app.dashboard.whole is not None
        await pilot.resize_terminal(20, 8)
        await until(lambda: app.dashboard.whole is None and app.prompt.has_focus)
        assert app.transcript.size.height + app.column.welcome.size.height > 0


@pytest.mark.parametrize(
    ("options", "backend", "name"),
    [
        ({}, "CPU", "cpu"),
        ({"backend": "CUDA", "context_length": 512}, "CUDA", "cuda"),
        ({"search_width": 2}, "CUDA", ""),
        ({"kernels": "graph"}, "CPU", ""),
    ],
)
def test_without_a_preset_it_is_that_of_the_backend_if_it_is_set_up_alike(options, backend, name):
    setup = EngineSetup(EngineOptions(model_path="m", **options))
    setup.engine_ready(backend)
    assert setup.name == name


def test_packed_weights_in_the_settings_are_no_other_preset_and_stay_with_the_next():
    settings, made = Settings(keep_packed=True), []
    options = configure("m", settings).engine
    setup = EngineSetup(options, settings=settings, make=lambda options: made.append(options))
    setup.engine_ready("CPU")
    assert setup.name == "cpu"
    setup.with_preset("safe")
    assert made[0].keep_packed and made[0].context_length == 2048


async def test_what_is_not_seen_costs_nothing():
    engine = MeasuredEngine()
    async with dashboard(engine) as (app, pilot, _):
        await pilot.press("f5")
        await until(lambda: not app.dashboard.is_visible)
        app.dashboard._read_counters = lambda: pytest.fail("the counters are read")
        engine.profiles.clear()
        app.dashboard.profiler._steps = ["decode"]
        await asyncio.sleep(0.3)
        assert engine.profiles == []


async def test_a_frame_before_the_layout_leaves_the_focus_where_it_is():
    async with dashboard(MeasuredEngine(), size=(80, 30)) as (app, pilot, _):
        app._pacer.is_due = lambda: True
        app._show_whole(table := app.dashboard.table)
        app.page.set_focus(table)
        assert app.focused is table and not table.size
        app._tick()
        assert app.focused is table
        await pilot.pause()
        assert app.focused is table and table.size


async def test_tab_goes_to_the_graphs_the_kernels_and_back():
    async with dashboard(MeasuredEngine()) as (app, pilot, _):
        await pilot.press("tab")
        assert app.focused is app.dashboard.graph
        await pilot.press("tab")
        assert app.focused is app.dashboard.table
        await pilot.press("escape", "tab")
        await pilot.click("ThroughputGraph")
        assert app.focused is app.prompt


@asynccontextmanager
async def answered():
    """A dashboard after an answer of 3.5 s, which the graphs show."""
    engine = MeasuredEngine(reply("Hello. " * 200))
    async with dashboard(engine, initial_prompt="Hi") as (app, pilot, _):
        graph, performance = app.dashboard.graph, app.dashboard.performance
        await until(lambda: performance.last_end and graph.data == performance.throughput(COUNTERS))
        await settled(pilot)
        yield engine, app, pilot, graph


@thorough
async def test_the_border_of_the_graphs_says_the_figures_of_a_moment():
    async with answered() as (_, app, pilot, graph):
        assert graph.border_subtitle == "P prompt"
        await pilot.press("tab")
        await sees(pilot, "t 1 or 5 min")
        await pilot.press("left")
        await sees(pilot, "▲")
        assert graph.border_subtitle.startswith("1 s ago · decode 100 tok/s")
        says = []
        for _ in range(6):
            await pilot.press("left")
            says.append(graph.border_subtitle.partition(" ago · ")[2])
        assert any(line.startswith("prefill 4,800 tok/s") for line in says)
        assert any(line.endswith("· prompt") for line in says), "and which events were then"
        await pilot.press(*["right"] * 7)
        assert "←" in graph.border_subtitle
        await pilot.press("t")
        await sees(pilot, "-5 min")
        await pilot.press("escape", "shift+tab", "t")
        assert app.focused is app.prompt and app.prompt.text == "t", "which is a letter elsewhere"


@thorough
async def test_the_mouse_over_the_graphs_shows_the_figures_there():
    async with answered() as (_, app, pilot, graph):
        last = graph.size.width - 6 + graph.gutter.left
        await pilot.hover(graph, offset=(last, 8))
        await sees(pilot, "1 s ago · decode 100 tok/s")
        await pilot.hover(graph, offset=(last - 10, 8))
        await until(lambda: graph.border_subtitle.endswith("s ago · idle"))
        await pilot.hover(graph, offset=(3, 8))  # the labels
        await until(lambda: graph.border_subtitle == "P prompt")
        await pilot.hover(graph, offset=(last, 8))
        await until(lambda: "decode" in graph.border_subtitle)
        await pilot.hover(app.prompt)
        await until(lambda: graph.border_subtitle == "P prompt")


SEARCHED = Search(
    what="ffn", choice="x", tried=8, total=8, refused=0, before_us=120.0, after_us=100.0, left_s=0.0
)  # fmt: skip


async def test_a_switch_and_a_search_are_marked_on_the_time_axis():
    wide = MeasuredEngine(start=[*STARTED[:2], Warming(done=1, total=1, search=SEARCHED), STARTED[-1]])
    async with dashboard(MeasuredEngine(), wide) as (app, pilot, _):
        assert app.dashboard.performance.throughput().marks == (), "the first engine is no switch"
        await pilot.press("f7")
        await until(lambda: app.session.engine is wide)
        await sees(pilot, "E engine  S search")
        says = [f"{mark.symbol} {mark.kind} {mark.text}" for mark in app.dashboard.graph.data.marks]
        assert says == [
            "S search ended: its search made a step 20% faster",
            "E engine cuda-beam2, Qwen3 0.6B",
        ]


@thorough
async def test_an_idle_graph_is_drawn_only_when_it_has_moved_by_a_cell():
    async with answered() as (engine, _, pilot, graph):
        drawn, draw = [], graph.draw
        graph.draw = lambda *of: (drawn.append(of[0].now_s), draw(*of))[1]

        async def after(seconds):
            drawn.clear()
            engine.seconds = seconds
            await until(lambda: graph.data.now_s == seconds)
            await settled(pilot)
            return len(drawn)

        now = graph.data.now_s
        cell_s = 60 / (graph.size.width - 10)
        middle = (now // cell_s + 1.5) * cell_s
        await after(middle)
        assert await after(middle + 0.2 * cell_s) == 0
        assert await after(middle + cell_s) == 1
        await after(middle + 70)
        assert await after(middle + 90) == 0, "all of it is older than a minute"


@thorough
async def test_what_is_typed_goes_to_the_prompt_whenever_it_is_seen():
    async with dashboard(MeasuredEngine(), size=(140, 44)) as (app, pilot, _):
        await pilot.press("f5", "f5")  # hides it and shows it again
        await pilot.resize_terminal(80, 24)  # where it stands in the chat's place
        await sees(pilot, "F9 whole pane  F5 back")
        await until(lambda: app.focused is app.dashboard.table)
        await pilot.press("s", "f1", "escape", "s")  # its keys, also after another page
        assert app.dashboard.table.sort == "calls" and app.session.engine.requests == []
        await pilot.resize_terminal(140, 44)
        await until(lambda: app.focused is app.prompt)
        await pilot.press("h", "i")
        assert app.prompt.text == "hi"


@thorough
async def test_a_dashboard_that_was_left_in_a_narrow_terminal_is_there_in_a_wide_one():
    async with dashboard(MeasuredEngine(), size=(80, 24)) as (app, pilot, _):
        await pilot.press("f5")
        await sees(pilot, "throughput")
        await pilot.press("f5")
        await until(lambda: app.focused is app.prompt and app.prompt.size)
        await pilot.resize_terminal(140, 44)
        await sees(pilot, "throughput")


@thorough
async def test_keys_that_scroll_the_chat_move_the_cursor_of_an_editor():
    async with dashboard(MeasuredEngine()) as (app, pilot, _):
        await pilot.press("f8", "home", "f2")
        await sees(pilot, "Ctrl+S saves · Esc closes")
        editor = app.screen.query_one("TextArea")
        await pilot.press("pagedown")
        assert editor.cursor_location[0] == editor.document.end[0] > 0
        await pilot.press("pageup")
        assert editor.cursor_location[0] == 0


async def test_a_frame_draws_the_chat_or_the_dashboard_and_neither_twice_running(monkeypatch):
    """Where frames are seldom, both are due in each."""
    monkeypatch.setattr("app.screens.dashboard.FRAME_S", 0.0)
    engine = MeasuredEngine(reply("Hello. " * 400))
    async with dashboard(engine) as (app, pilot, _):
        drawn = []
        chat, panes = app.column.draw, app.dashboard.draw

        def draw_chat():
            drawn.append("chat")
            chat()

        def draw_panes():
            drew = panes()
            drawn.extend(["panes"] * drew)
            return drew

        monkeypatch.setattr(app, "report_download", lambda: drawn.append("frame"))
        monkeypatch.setattr(app.column, "draw", draw_chat)
        monkeypatch.setattr(app.dashboard, "draw", draw_panes)
        app.prompt.insert("Hi")
        await pilot.press("enter")
        await until(lambda: drawn.count("panes") > 3)
        assert all("frame" in pair for pair in pairwise(drawn))
        assert all("chat" in pair for pair in pairwise(what for what in drawn if what != "frame"))
