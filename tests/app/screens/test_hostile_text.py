"""Every way in which text from elsewhere reaches the full screen: none of it acts on the terminal."""

from __future__ import annotations

import pytest
from textual import events
from textual.app import App
from textual.widgets import Input, TextArea

from app.chat.history import History
from app.screens.pages.models import ModelsScreen
from app.serve.activity import Activity
from app.serve.serve_app import ServeApp
from app.serve.service import Service
from engine.protocol.events import Counter, Failed, Message, Slot, Slots
from tests.app.driver import Driver, chat
from tests.app.fake_engine import STARTED, FakeEngine, reply
from tests.app.hostile_text import ATTACK, HOSTILE_READY, NAME, acting
from tests.app.terminal import Terminal, shown
from tests.generated_model import write
from tests.waiting import until
from widgets.dashboard.request_list import Handled
from widgets.entry_list import EntryList


def past_chat(history: History) -> int:
    """A chat that another program has written."""
    chat_id = history.new_chat(ATTACK)
    history.set_system(chat_id, ATTACK)
    for role in ("user", "assistant"):
        history.append(chat_id, Message(role=role, content=ATTACK, thinking=ATTACK))
    history.rename(chat_id, ATTACK)
    return chat_id


async def paste(user: Driver, field: str) -> None:
    user.app.screen.query_one(field).post_message(events.Paste(ATTACK))
    await user.pilot.pause()


def check_terminal(app: App[None]) -> None:
    """A terminal shows the text that the program means to show, and does nothing else."""
    terminal = Terminal(*app.size)
    terminal.feed(app.screen._compositor.render_full_update().render_segments(app.console))
    meant = "\n".join(strip.text.rstrip() for strip in app.screen._compositor.render_strips())
    assert terminal.text() == shown(meant).rstrip().split("\n")
    assert terminal.effects() == {}


async def seen(user: Driver) -> None:
    """Waits until the text is shown, and checks the whole screen and what can be edited on it."""
    await user.sees("attack")
    check_terminal(user.app)
    for area in user.app.screen.query(TextArea):
        assert acting(area.text) == []
    for field in user.app.screen.query(Input):
        assert acting(field.value) == []


async def test_a_past_chat_shown_edited_and_renamed(history):
    async with chat(FakeEngine(), history, chat_id=past_chat(history), size=(140, 40)) as user:
        await seen(user)
        await user.press("ctrl+t")  # its thinking
        await seen(user)
        for keys in (("f2",), ("escape", "up"), ("f12",), ("escape", "ctrl+o"), ("f2",)):
            await user.press(*keys)
            await seen(user)


@pytest.mark.parametrize(("keys", "field"), [((), "Prompt"), (("f12",), "TextArea"), (("ctrl+o",), "Input")])
async def test_what_is_pasted(history, keys, field):
    async with chat(FakeEngine(), history) as user:
        await user.idle()
        await user.press(*keys)
        await paste(user, field)
        await seen(user)


async def test_the_draft_of_the_last_time(history, monkeypatch):
    monkeypatch.setattr(history, "take_draft", lambda: ATTACK)
    async with chat(FakeEngine(), history) as user:
        await seen(user)


async def test_a_prompt_that_waits_and_is_given_back(history):
    failed = Failed(kind="model", message=ATTACK, hint=ATTACK)
    engine = FakeEngine(start=[STARTED[0], None, failed])
    async with chat(engine, history, size=(140, 40)) as user:
        user.app.prompt.insert(ATTACK)
        await user.press("enter")
        await seen(user)
        engine.release()
        await user.until(lambda: user.app.prompt.text, "the prompt that was given back")
        await seen(user)


async def test_what_an_engine_says_of_itself(history):
    engine = FakeEngine(reply(ATTACK, ATTACK), start=[*STARTED[:2], HOSTILE_READY])
    async with chat(engine, history, initial_prompt="Hi", warning=ATTACK, size=(140, 40)) as user:
        await user.idle()
        await seen(user)


async def test_the_list_of_models(home):
    path = write(home / f"{NAME}.gguf", context=256)
    app = App()
    async with app.run_test(size=(120, 40)) as pilot:
        await app.push_screen(page := ModelsScreen({NAME: str(path)}, None))
        await until(lambda: any("attack" in row for row in page.query_one(EntryList).texts))
        await pilot.pause()
        check_terminal(app)


async def test_the_screen_of_the_server():
    engine, activity = FakeEngine(), Activity("http://127.0.0.1:8080/v1")
    service = Service(engine, ATTACK, None)
    app = ServeApp(
        service, engine, activity, read_counters=lambda: (Counter(name=ATTACK, value=1.0, unit="%"),)
    )
    phases = {"prompt_done": 1, "prompt_n": 2, "predicted_n": 3, "rate": 4.0}
    slots = Slots(slots=(Slot(request_id=1, client=ATTACK, phase="decode", **phases),), waiting=0, blocks=())
    async with app.run_test(size=(160, 50)) as pilot:
        for event in (HOSTILE_READY, slots, Failed(kind="model", message=ATTACK, hint=ATTACK)):
            app.observe(event)
        for handled in (
            Handled("", ATTACK, ATTACK, 200, reply("")[-1]),
            Handled("", ATTACK, ATTACK, 500, problem=ATTACK),
        ):
            activity.handled(handled)
        app.draw()
        await pilot.pause()
        await until(lambda: any("attack" in strip.text for strip in app.screen._compositor.render_strips()))
        check_terminal(app)
