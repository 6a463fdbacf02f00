"""Presets and backends, as a user goes over to them and edits them."""

from __future__ import annotations

import pytest
from textual.events import Key

from app.chat import speed_history
from app.screens.engine_setup import EngineSetup
from engine.errors import UsageError
from engine.protocol.events import EngineOptions, Failed
from tests.app.fake_engine import STARTED, FakeEngine, MeasuredEngine, reply, tokens
from tests.app.scenes import sees
from tests.app.screens.test_dashboard import dashboard
from tests.thorough import thorough
from tests.waiting import until

NO_DRIVER = Failed(kind="backend", message="There is no driver.", hint="Choose CPU.")


@pytest.fixture
def own_presets(home):
    """The folder of the user's own presets."""
    folder = home / ".config" / "orin-chat" / "presets"
    folder.mkdir(parents=True)
    return folder


async def test_the_next_backend_keeps_the_conversation():
    engine, other = MeasuredEngine(reply("One.")), MeasuredEngine(reply("Two."))
    async with dashboard(engine, other, initial_prompt="first") as (app, pilot, made):
        await sees(pilot, "One.")
        await pilot.press("f6")
        await until(lambda: app.session.engine is other)
        assert (made[0].backend, made[0].search_width, app.setup.name) == ("CPU", 0, "cpu")
        app.prompt.insert("second")
        await pilot.press("enter")
        await sees(pilot, "Two.")
        assert [text for _, text in other.prompts()[0]] == ["first", "One.", "second"]
        assert engine.closed


async def test_a_backend_that_does_not_work_here_is_passed_over():
    flaws = {"NV": "no NVIDIA driver", "CPU": "no compiler"}
    async with dashboard(MeasuredEngine(), flaws=flaws) as (app, pilot, made):
        await pilot.press("f6")
        await sees(pilot, "No other backend works here")
        assert app.column.activity.notice.endswith("CPU: no compiler; NV: no NVIDIA driver.")
        assert made == [] and app.session.candidate is None


def test_an_engine_that_starts_is_not_started_again_as_the_only_backend():
    flaw = lambda backend: "" if backend == "CPU" else "no GPU"
    setup = EngineSetup(EngineOptions(model_path="m.gguf"), unusable_because=flaw)
    setup.check_backends()
    for name in ("", "CPU"):  # while it starts, it has not said its device
        setup.backend = name
        with pytest.raises(UsageError, match="No other backend works here"):
            setup.next_backend()


async def test_a_wider_search_and_back():
    wide, wider, narrow = MeasuredEngine(), MeasuredEngine(), MeasuredEngine()
    async with dashboard(MeasuredEngine(), wide, wider, narrow) as (app, pilot, made):
        for engine, name in ((wide, "cuda-beam2"), (wider, "cuda-beam4"), (narrow, "cuda")):
            await pilot.press("f7")
            await until(lambda engine=engine: app.session.engine is engine)
            assert app.setup.name == name
        assert [options.search_width for options in made] == [2, 4, 0]


async def test_a_preset_that_fails_leaves_the_old_one():
    broken = FakeEngine(start=[*STARTED[:2], NO_DRIVER])
    async with dashboard(MeasuredEngine(), broken) as (app, pilot, _):
        before = app.session.engine
        await pilot.press("f6")
        await sees(pilot, "cpu did not start: There is no driver. Choose CPU.")
        assert app.session.engine is before and app.setup.name == "cuda" and not before.closed


async def test_in_mid_reply_a_switch_is_said_and_so_is_its_failure():
    answering = MeasuredEngine([*tokens("still at it"), None])
    broken = FakeEngine(start=[STARTED[0], None, NO_DRIVER])
    async with dashboard(answering, broken) as (app, pilot, _):
        await pilot.press("h", "i", "enter")
        await sees(pilot, "still at it")
        await pilot.press("f6")
        await sees(pilot, "cpu is being prepared and answers after this reply")
        await until(lambda: app.column.activity.hint == "then cpu answers  Esc stops")
        broken.release()
        await sees(pilot, "cpu did not start: There is no driver. Choose CPU.")
        assert app.session.is_answering and app.session.candidate is None


async def test_escape_gives_up_a_switch():
    slow = FakeEngine(start=[*STARTED[:2], None])
    async with dashboard(MeasuredEngine(), slow) as (app, pilot, _):
        await pilot.press("f6")
        await sees(pilot, "cpu: preparing kernels · 12 of 48")
        await pilot.press("escape")
        await until(lambda: slow.closed)
        assert app.setup.name == "cuda" and app.session.candidate is None


async def test_presets_are_chosen_and_edited_in_a_list(own_presets):
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
        assert made[0].kernels == "graph" and (own_presets / "cpu.toml").is_file()


@thorough
async def test_no_edit_of_a_preset_is_lost_by_one_key(own_presets):
    mine = own_presets / "mine.toml"
    mine.write_text('title = "Of last week"\nbackend = "CPU"\n')
    async with dashboard(MeasuredEngine()) as (app, pilot, _):
        await pilot.press("f8", "home", "f2")
        await sees(pilot, "Ctrl+S saves · Esc closes")
        await pilot.press("escape")  # nothing was edited
        await sees(pilot, "Enter chooses")
        await pilot.press("f2")
        await sees(pilot, "Ctrl+S saves · Esc closes")
        app.screen.query_one("TextArea").text = text = 'title = "Mine"\nbackend = "CPU"\n'
        app.screen.query_one("Input").value = "mine"
        await pilot.press("escape")
        await sees(pilot, "This is not saved. Esc again leaves it")
        await pilot.press("ctrl+s")
        await sees(pilot, "There is a preset mine of your own.")
        assert "Of last week" in mine.read_text()
        await pilot.press("ctrl+s")
        await sees(pilot, "mine  Mine  your own")
        assert mine.read_text() == text and app.screen.highlighted.name == "mine"
        await pilot.press("f2")
        await sees(pilot, "Ctrl+S saves · Esc closes")
        app.screen.query_one("TextArea").text = "nonsense"
        await pilot.press("escape", "escape")
        await sees(pilot, "Enter chooses")
        assert mine.read_text() == text


@thorough
async def test_what_was_typed_before_a_key_that_saves_is_saved(own_presets):
    async with dashboard(MeasuredEngine()) as (app, pilot, _):
        await pilot.press("f8", "home", "f2")
        await sees(pilot, "Ctrl+S saves · Esc closes")
        for key in ("#", "x", "enter", "ctrl+s"):  # at once, as on a slow line
            app.post_message(Key(key, key if len(key) == 1 else None))
        await sees(pilot, "your own")
        assert (own_presets / "cpu.toml").read_text().startswith("#x\n")


async def test_a_preset_of_ones_own_is_deleted_after_a_question(own_presets):
    own = own_presets / "safe.toml"
    own.write_text('title = "Mine"\nbackend = "CPU"\n')
    async with dashboard(MeasuredEngine()) as (app, pilot, _):
        await pilot.press("f8", "end", "f2")
        await sees(pilot, "Ctrl+S saves · Esc closes")
        await pilot.press("escape")
        await sees(pilot, "safe  Mine  your own")
        assert app.screen.highlighted.name == "safe", "where it was"
        await pilot.press("delete")
        await sees(pilot, "Delete your own safe for good? y deletes, any other key keeps it")
        await pilot.press("delete")  # is an answer
        assert own.exists()
        await pilot.press("delete", "y")
        await sees(pilot, "safe  Safe: the CPU alone")
        assert not own.exists()
        await pilot.press("delete")
        await sees(pilot, "safe comes with orin-chat")


async def test_quitting_asks_for_edits_that_are_not_saved():
    async with dashboard(MeasuredEngine()) as (app, pilot, _):
        await pilot.press("f8", "home", "f2")
        await sees(pilot, "Ctrl+S saves · Esc closes")
        app.screen.query_one("TextArea").insert("# a thought\n")
        app.action_help()  # by the palette
        await sees(pilot, "All keys")
        await pilot.press("ctrl+q")
        await sees(pilot, "This is not saved. Ctrl+Q again leaves it, Ctrl+S saves.")
        await pilot.press("x", "ctrl+q")  # something else was typed since
        await pilot.press("escape")  # another key was asked for
        assert app.is_running and app.return_code is None
        assert "x" in app.screen.query_one("TextArea").text
        await pilot.press("ctrl+q", "ctrl+q")
        assert app.return_code == 0


@thorough
async def test_quitting_asks_nothing_where_nothing_is_edited():
    async with dashboard(MeasuredEngine()) as (app, pilot, _):
        await pilot.press("f8", "home", "f2")
        await sees(pilot, "Ctrl+S saves · Esc closes")
        await pilot.press("ctrl+q")
        assert app.return_code == 0


@thorough
async def test_speeds_are_noted_for_the_preset():
    engine = MeasuredEngine(reply("word " * 60, prompt_n=96, prompt_ms=210.0))
    async with dashboard(engine, initial_prompt="Hi") as (app, pilot, _):
        await until(lambda: speed_history.preset_speeds(app.setup.model_path))
        known = speed_history.preset_speeds(app.setup.model_path)["cuda"]
        assert (round(known.runs[0].decode), round(known.runs[0].prefill)) == (100, 457)
        full, short, _ = known.summaries
        assert full.startswith("decode 100, prefill 457 tok/s (20") and "prefill" not in short
        await sees(pilot, "decode 100")
