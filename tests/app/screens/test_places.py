"""Versions of a chat, forks, and what is searched for, as a user sees them."""

from __future__ import annotations

import pytest

from app.chat.history import History
from app.screens.pages.chats import ChatsScreen
from app.screens.pages.earlier_prompts import EarlierPromptsScreen
from engine.protocol.events import Message
from tests.app.driver import chat
from tests.app.fake_engine import FakeEngine, reply
from tests.thorough import rarely


async def test_what_is_replaced_stays_as_a_version_also_after_a_restart(tmp_path):
    path = tmp_path / "history.sqlite3"
    engine = FakeEngine(*(reply(f"Reply {n}.") for n in range(1, 5)))
    async with chat(engine, History(path), initial_prompt="One?") as user:
        await user.sees("Reply 1.")
        await user.idle()
        await user.press("ctrl+r")
        await user.sees("Reply 2.")
        await user.idle()
        await user.sees("2/2 · Alt+Left, Alt+Right")
        await user.say("And then?")
        await user.sees("Reply 3.")
        await user.idle()
        await user.press("f2", "f2")
        user.app.prompt.load_text("Other?")
        await user.press("enter")
        await user.sees("Reply 4.")
        await user.idle()
        assert "3/3" in user.screen() and user.turns() == [("user", "Other?"), ("assistant", "Reply 4.")]
        await user.press("alt+left")
        await user.sees("And then?")
        assert [text for _, text in user.turns()] == ["One?", "Reply 2.", "And then?", "Reply 3."]
    async with chat(FakeEngine(reply("Reply 5.")), History(path), chat_id=1) as user:
        await user.sees("Reply 3.")
        assert "2/3" in user.screen()
        await user.press("alt+left")
        await user.sees("Reply 1.")
        assert "1/3" in user.screen() and len(user.turns()) == 2
        await user.press("alt+left")
        await user.sees("This is the oldest version")
        await user.say("On.")
        await user.sees("Reply 5.")
        await user.idle()
        assert user.engine.prompts()[0] == [("user", "One?"), ("assistant", "Reply 1."), ("user", "On.")]
        await user.press("alt+right", "alt+right")
        await user.sees("Reply 4.")
    [summary] = History(path).chats()
    assert summary.message_count == 2


@pytest.mark.parametrize("key", [rarely("alt+f"), "alt+m"])
async def test_a_chat_is_forked_at_a_prompt(history, key):
    engine = FakeEngine(reply("A"), reply("B"), reply("C"))
    async with chat(engine, history, initial_prompt="one", system="Be brief.") as user:
        await user.idle()
        await user.say("two")
        await user.idle()
        await user.press(key)
        await user.sees("A new chat that begins as the other")
        assert user.app.prompt.text == "two" and user.turns() == [("user", "one"), ("assistant", "A")]
        await user.press("enter")
        await user.sees("C")
        await user.idle()
        assert user.engine.prompts()[2] == [
            ("system", "Be brief."), ("user", "one"), ("assistant", "A"), ("user", "two"),
        ]  # fmt: skip
    assert [chat.message_count for chat in history.chats()] == [5, 5]


def long_chat(history):
    chat_id = history.new_chat("m")
    for n in range(30):
        history.append(chat_id, Message(role="user", content=f"question {n}"))
        word = "Kiwi" if n == 3 else "apple"
        history.append(chat_id, Message(role="assistant", content="line\n\n" * 5 + f"An {word} number {n}."))
    return chat_id


async def test_a_chat_is_searched(history):
    async with chat(FakeEngine(), history, chat_id=long_chat(history)) as user:
        await user.sees("An apple number 29.")
        await user.press("ctrl+f", *"kiwi")
        await user.sees("An Kiwi number 3.")
        await user.sees("1/1")
        await user.press("ctrl+a", "ctrl+k", *"APPLE number 1")
        await user.sees("An apple number 19.")
        await user.sees("11/11")
        await user.press("up")
        await user.sees("10/11")
        await user.sees("An apple number 18.")
        await user.press("escape", "x")
        assert user.app.prompt.text == "x" and "Enter next" not in user.screen()


async def test_a_hit_of_past_chats_opens_at_its_place_also_in_another_version(history):
    chat_id = long_chat(history)
    history.truncate(chat_id, history.messages(chat_id)[1].id)
    history.append(chat_id, Message(role="user", content="something else"))
    async with chat(FakeEngine(), history) as user:
        await user.press("ctrl+o", *"kiwi")
        await user.until(
            lambda: isinstance(user.app.screen, ChatsScreen) and len(user.app.screen.entries) == 1
        )
        await user.press("enter")
        await user.sees("An Kiwi number 3.")
        assert len(user.turns()) == 60


async def test_earlier_prompts_are_searched(history):
    long_chat(history)
    async with chat(FakeEngine(), history) as user:
        await user.press(*"draft", "alt+r")
        await user.until(lambda: isinstance(user.app.screen, EarlierPromptsScreen))
        await user.press(*"question 17", "enter")
        await user.until(lambda: user.app.prompt.text == "question 17")
        await user.press("up")
        assert user.app.prompt.text == "draft", "nothing typed is lost"
