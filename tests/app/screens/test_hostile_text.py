"""Every way in which text from elsewhere reaches the full screen: none of it acts on the terminal."""

from __future__ import annotations

import msgspec
import pytest
from textual import events
from textual.widgets import Input, TextArea

from app.chat.history import History
from engine.events import Failed, Message
from tests.app.driver import Driver, chat
from tests.app.fake_engine import READY, STARTED, FakeEngine, reply
from tests.app.hostile_text import ATTACK, acting


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


async def seen(user: Driver) -> None:
    """Waits until the text is shown, and checks the whole screen and what can be edited on it."""
    await user.sees("attack")
    assert acting(user.screen()) == []
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
    model = msgspec.structs.replace(READY.model, name=ATTACK, quantization=ATTACK, architecture=ATTACK)
    ready = msgspec.structs.replace(
        READY, model=model, backend=ATTACK, device_name=ATTACK, warnings=(ATTACK,)
    )
    engine = FakeEngine(reply(ATTACK, ATTACK), start=[*STARTED[:2], ready])
    async with chat(engine, history, initial_prompt="Hi", warning=ATTACK, size=(140, 40)) as user:
        await user.idle()
        await seen(user)
