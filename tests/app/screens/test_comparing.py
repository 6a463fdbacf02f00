"""The comparison in the full screen: opened and left by a key, the conversation kept, one failing alone."""

from __future__ import annotations

from contextlib import asynccontextmanager

import pytest

from app.chat.history import History
from app.comparison.comparison_engine import ComparisonEngine
from app.screens.chat_app import ChatApp
from app.screens.engine_setup import EngineSetup
from engine.protocol.client import LocalEngine
from engine.protocol.events import EngineOptions, Failed, Loading
from tests import generated_model, synthetic
from tests.app.fake_engine import READY, FakeEngine, MeasuredEngine, reply
from tests.app.scenes import beside, sees
from tests.thorough import rarely, thorough
from tests.waiting import until
from widgets.dashboard.comparison_pane import ComparisonPane

NOT_FOUND = Failed(kind="backend", message="There is no llama-server.", hint="Install it.")


@asynccontextmanager
async def chat(engine, *peers, size=(120, 40), setup=None, **options):
    if setup is None:
        setup = EngineSetup(
            EngineOptions(model_path="m.gguf", backend="CPU"), "cpu", make=lambda _: MeasuredEngine()
        )
        rest = list(peers)
        setup.compare = lambda ours, **how: beside(rest.pop(0))(ours, **how)
    app = ChatApp(engine, History(":memory:"), setup=setup, read_counters=lambda: (), **options)
    async with app.run_test(size=size) as pilot:
        app.prompt.cursor_blink = False
        await sees(pilot, "ready")
        yield app, pilot


async def say(app, pilot, text):
    app.prompt.insert(text)
    await pilot.press("enter")
    await until(lambda: not app.session.is_busy)
    await pilot.pause(0.15)


def contents(app):
    return [turn.content for turn in app.session.conversation.turns]


async def test_a_key_opens_it_and_closes_it_and_the_conversation_goes_on():
    ours, peer = MeasuredEngine(reply("One."), reply("Two."), reply("Three.")), FakeEngine(reply("Zwei."))
    async with chat(ours, peer) as (app, pilot):
        await say(app, pilot, "first")
        await pilot.press("f10")
        await sees(pilot, "The next prompt is answered by both.")
        assert not app.dashboard.is_visible and app.focused is app.prompt
        await say(app, pilot, "second")
        await sees(pilot, "Zwei.")
        await sees(pilot, "decode")
        await pilot.press("f10")
        await until(lambda: peer.closed and app.session.engine is ours)
        await sees(pilot, "Two.")
        assert app.dashboard.is_visible and not ours.closed
        await say(app, pilot, "third")
        assert contents(app) == ["first", "One.", "second", "Two.", "third", "Three."]
        assert [role for role, _ in ours.prompts()[-1]] == ["user", "assistant"] * 2 + ["user"]


async def test_keys_of_the_pane():
    ours, peer = MeasuredEngine(reply("One."), reply("Two.")), FakeEngine(reply("Eins."), reply("Zwei."))
    async with chat(ours, peer) as (app, pilot):
        await pilot.press("f10")
        await say(app, pilot, "first")
        await pilot.press("tab")
        assert isinstance(app.focused, ComparisonPane)
        await sees(pilot, "r asks both again")
        await pilot.press("t", "t", "t")
        await sees(pilot, "From the next prompt on they answer together")
        await pilot.press("r")
        await sees(pilot, "Zwei.")
        await sees(pilot, "together: they share the memory")
        assert contents(app) == ["first", "Two."]
        await pilot.press("escape")
        await until(lambda: app.session.engine is ours)


async def test_escape_stops_both_before_it_closes_anything():
    ours = MeasuredEngine([*reply("On and on. ")[:3], None])
    async with chat(ours, FakeEngine()) as (app, pilot):
        await pilot.press("f10")
        app.prompt.insert("go")
        await pilot.press("enter")
        await sees(pilot, "answering")
        await pilot.press("f10")
        await sees(pilot, "Esc stops the reply first")
        await pilot.press("tab", "escape")
        await until(lambda: not app.session.is_answering)
        assert isinstance(app.session.engine, ComparisonEngine)


@thorough
async def test_the_activity_says_which_of_the_two_is_waited_for():
    ours = MeasuredEngine([None, *reply("One. Two.")[:4], None, *reply(" Three.")[2:]])
    peer = FakeEngine([None, *reply("Eins.")], start=[Loading(done_bytes=1, total_bytes=4), None, READY])
    async with chat(ours, peer) as (app, pilot):
        await pilot.press("f10")
        app.prompt.insert("go")
        await pilot.press("enter")
        await sees(pilot, "llama.cpp: loading 25%")
        await sees(pilot, "waits for llama.cpp")
        assert "reading the prompt" not in app.column.activity.text
        peer.release()
        await sees(pilot, "orin-chat: reading the prompt")
        ours.release()
        await sees(pilot, "orin-chat: answering · 2 tokens")
        ours.release()
        await sees(pilot, "llama.cpp: reading the prompt")
        await pilot.press("escape")
        await until(lambda: not app.session.is_answering)
        await until(lambda: app.column.activity.text == "ready")


@thorough
async def test_speeds_of_two_at_once_are_no_evidence_of_a_preset():
    async with chat(MeasuredEngine(reply("One. " * 60)), FakeEngine()) as (app, pilot):
        noted = []
        app.setup.record_speed = lambda decode, prefill: noted.append((decode, prefill))
        await pilot.press("f10")
        await say(app, pilot, "in turn")
        [(decode, prefill)] = noted
        assert decode and prefill
        await pilot.press("tab", "t", "r")
        await sees(pilot, "together: they share the memory")
        await until(lambda: not app.session.is_busy)
        await pilot.press("f10")
        assert noted == [(decode, prefill)]


@thorough
async def test_page_up_scrolls_both_texts():
    text = "".join(f"line {i}\n\n" for i in range(100))
    async with chat(MeasuredEngine(reply(text)), FakeEngine(reply(text))) as (app, pilot):
        await pilot.press("f10")
        await say(app, pilot, "count")
        await sees(pilot, "line 99")
        await pilot.press(*["pageup"] * 20)
        await sees(pilot, "line 0")
        assert "line 99" not in app.export_screenshot()


@thorough
async def test_another_chat_is_not_shown_with_the_answers_of_the_last():
    async with chat(MeasuredEngine(reply("One.")), FakeEngine(reply("Eins."))) as (app, pilot):
        await pilot.press("f10")
        await say(app, pilot, "first")
        await sees(pilot, "Eins.")
        await until(lambda: not app.session.is_busy)
        await pilot.press("ctrl+n")
        await sees(pilot, "The next prompt is answered by both.")
        assert "Eins." not in app.export_screenshot()


async def test_without_llama_server_the_chat_says_so_and_keeps_its_place():
    ours = MeasuredEngine(reply("One."))
    async with chat(ours, FakeEngine(start=[NOT_FOUND])) as (app, pilot):
        await pilot.press("f10")
        await sees(pilot, "There is no llama-server. Install it.")
        assert app.session.engine is ours and not app.column.comparison.size and not ours.closed
        await say(app, pilot, "first")
        await sees(pilot, "One.")
        assert contents(app) == ["first", "One."]


async def test_one_that_dies_leaves_the_other_unharmed():
    died = Failed(kind="backend", message="llama-server died.", hint="Its log: x")
    async with chat(MeasuredEngine(reply("One.")), FakeEngine([*reply("Eins.")[:3], died])) as (app, pilot):
        await pilot.press("f10")
        await say(app, pilot, "first")
        await sees(pilot, "⚠ llama-server died. Its log: x")
        await sees(pilot, "One.")
        assert contents(app) == ["first", "One."]


@thorough
async def test_another_preset_is_compared_too():
    ours, peers = MeasuredEngine(), (FakeEngine(), FakeEngine())
    async with chat(ours, *peers) as (app, pilot):
        await pilot.press("f10")
        await sees(pilot, "The next prompt")
        before = app.session.engine
        before.together = True
        app.switch_preset(lambda _: "safe")
        await until(lambda: app.session.engine is not before)
        assert isinstance(app.session.engine, ComparisonEngine) and app.session.engine.together
        await until(lambda: ours.closed and peers[0].closed and not peers[1].closed)


@thorough
async def test_from_the_start():
    """As `--compare` has it."""
    ours, peer = MeasuredEngine(reply("One.")), FakeEngine(reply("Eins."))
    async with chat(beside(peer)(ours), initial_prompt="Hi") as (app, pilot):
        await sees(pilot, "Eins.")
        assert contents(app) == ["Hi", "One."]


async def test_a_server_elsewhere_cannot_be_compared():
    app = ChatApp(FakeEngine(), History(":memory:"))
    async with app.run_test(size=(120, 40)) as pilot:
        await sees(pilot, "ready")
        await pilot.press("f10")
        await sees(pilot, "Only an engine of orin-chat's own")


async def test_a_peer_that_does_not_start_while_a_prompt_waits_is_told_in_its_column():
    ours, peer = MeasuredEngine(reply("One.")), FakeEngine(start=[None, NOT_FOUND])
    async with chat(ours, peer) as (app, pilot):
        await pilot.press("f10")
        app.prompt.insert("first")
        await pilot.press("enter")
        await until(lambda: app.session.is_answering)
        peer.release()
        await sees(pilot, "⚠ There is no llama-server. Install it.")
        await sees(pilot, "One.")
        assert isinstance(app.session.engine, ComparisonEngine) and not app.column.activity.notice


@thorough
async def test_ours_dying_is_told_in_its_column():
    ours = synthetic.engine(load_s=0.0, prefill_s=0.0, tokens=40, rate=200, die_at=8)
    async with chat(ours, FakeEngine(reply("Eins."))) as (app, pilot):
        await pilot.press("f10")
        await say(app, pilot, "first")
        await sees(pilot, "⚠ The engine process died")
        await sees(pilot, "Eins.")


@thorough
@pytest.mark.parametrize(
    "size", [rarely((120, 40)), rarely((80, 24)), rarely((60, 20)), rarely((40, 12)), (20, 8)]
)
async def test_it_fits(size):
    ours, peer = MeasuredEngine(reply("One. " * 40)), FakeEngine(reply("Eins. " * 40))
    setup = EngineSetup(
        EngineOptions(model_path="m.gguf", backend="CPU"), "cpu", make=lambda _: MeasuredEngine()
    )
    setup.compare = beside(peer)
    app = ChatApp(ours, History(":memory:"), setup=setup, read_counters=lambda: ())
    async with app.run_test(size=size) as pilot:
        await until(lambda: not app.session.is_busy)
        await pilot.press("f10")
        await pilot.pause()
        await say(app, pilot, "Hi")
        await sees(pilot, "One.")
        await sees(pilot, "Eins.")


async def test_with_a_real_llama_server(llama_server, tmp_path, monkeypatch):
    path = str(generated_model.write(tmp_path / "noise.gguf", architecture="qwen3"))
    options = EngineOptions(model_path=path, backend="CPU", context_length=256)
    setup = EngineSetup(options, "cpu", llama_server=llama_server)
    app = ChatApp(
        LocalEngine(options), History(":memory:"), setup=setup, read_counters=lambda: (), max_tokens=12
    )
    async with app.run_test(size=(120, 40)) as pilot:
        await until(lambda: app.session.status.is_ready)
        await pilot.press("f10")
        app.prompt.insert("hello")
        await pilot.press("enter")
        await until(lambda: app.column.comparison.data.complete)
        view = app.column.comparison.data
        assert (view.left.problem, view.right.problem, view.asked) == ("", "", "hello")
        assert view.left.prompt_tokens == view.right.prompt_tokens and view.right.memory_bytes
        await until(lambda: not app.session.is_busy)
        ours = app.session.engine.ours
        await pilot.press("f10")
        await until(lambda: app.session.engine is ours)
        await sees(pilot, "llama.cpp is closed")
