"""The page of past chats, as a user sees it."""

from __future__ import annotations

import os
from datetime import datetime
from unittest import mock

import pytest
from textual.widgets import Input

from app.chat.history import History
from app.screens.pages.chats import PAGE, ChatsScreen, time_label
from engine.protocol.events import Message
from tests.app.driver import chat, stored
from tests.app.fake_engine import FakeEngine, reply
from tests.thorough import rarely, thorough


def fill(history: History) -> tuple[int, int]:
    sea, bread = history.new_chat("m"), history.new_chat("m")
    for chat_id, prompt, answer in (
        (sea, "Why tides?", "The Moon."),
        (bread, "Bake bread", "Use [b]yeast[/b]."),
    ):
        history.append(chat_id, Message(role="user", content=prompt))
        history.append(chat_id, Message(role="assistant", content=answer))
    return sea, bread


async def test_a_past_chat_is_found_and_gone_on_with(history, monkeypatch):
    sea, _ = fill(history)
    monkeypatch.setattr("app.screens.pages.list_page.SLOW_S", -1)  # searches wait for a pause in typing
    async with chat(FakeEngine(reply("More.")), history) as user:
        await user.press("ctrl+o")
        await user.sees("Use [b]yeast[/b].")
        user.app.screen.query_one(Input).value = "moon"
        await user.press("enter")
        await user.sees("The Moon.")
        assert user.app.session.conversation.chat_id == sea
        assert "–/8,192" in user.screen(), "how full the context is, no engine knows yet"
        await user.say("More?")
        await user.sees("More.")
        await user.idle()
        assert [c for _, c, _ in stored(history, sea)] == ["Why tides?", "The Moon.", "More?", "More."]


async def test_a_chat_given_at_the_start_is_opened(history):
    sea, _ = fill(history)
    async with chat(FakeEngine(), history, chat_id=sea) as user:
        await user.sees("The Moon.")


async def test_rename_and_delete_a_past_chat(history):
    sea, bread = fill(history)
    async with chat(FakeEngine(), history, chat_id=bread) as user:
        await user.press("ctrl+o", "f2")
        user.app.screen.query_one(Input).value = "dough"
        await user.press("enter")
        assert history.chats()[0].title == "dough"
        await user.sees("dough")
        await user.press("delete")
        await user.sees("Delete it for good? y deletes, any other key keeps it: “dough”")
        await user.press("n")
        assert len(history.chats()) == 2
        await user.press("delete", "y")
        assert [c.id for c in history.chats()] == [sea]
        await user.press("escape")
        await user.until(
            lambda: user.app.session.conversation.chat_id is None, "a new chat in place of the deleted"
        )
        assert user.turns() == []


@thorough
async def test_a_long_chat_is_deleted_in_parts_while_the_page_is_closed(history, monkeypatch):
    monkeypatch.setattr("app.chat.history.DELETED_CHARS", 10)
    sea, bread = fill(history)
    async with chat(FakeEngine(), history) as user:
        await user.press("ctrl+o")
        await user.sees("2 messages")
        n_rows = user.app.screen.list.count
        await user.press("delete", "y", "escape")
        assert n_rows == 2
        await user.until(lambda: len(history.chat_ids()) == 1, "the chat is deleted")
        assert not history.messages(bread) or not history.messages(sea)


def fill_many(history: History, count: int) -> None:
    """`count` chats, chat 0 the oldest."""
    for i in range(count):
        chat_id = history.new_chat("m")
        history.append(chat_id, Message(role="user", content=f"prompt {i} about tides"))


@thorough
async def test_the_list_of_past_chats_has_no_end(history):
    fill_many(history, 320)
    read = []
    summaries = history.summaries
    history.summaries = lambda ids, query: read.append(len(ids)) or summaries(ids, query)
    async with chat(FakeEngine(), history) as user:
        await user.press("ctrl+o")
        await user.sees("prompt 319")
        assert sum(read) <= 2 * PAGE, "only what is seen is read from the history"
        await user.press("end")
        await user.sees("prompt 0 about")
        assert sum(read) <= 4 * PAGE
        await user.press("up", "delete", "y")
        await user.until(lambda: "prompt 1 about" not in user.screen())
        assert user.app.screen.highlighted.title == "prompt 0 about tides"
        await user.press("t", "i", "d")
        await user.until(lambda: user.app.screen.list.count == 319)
        await user.press("end", "enter")
        await user.until(lambda: user.turns() == [("user", "prompt 0 about tides")])


@thorough
async def test_a_chat_that_another_process_deletes_is_still_a_line_of_the_list(history):
    fill_many(history, 2 * PAGE)
    async with chat(FakeEngine(), history) as user:
        await user.press("ctrl+o")
        await user.sees("prompt 99")
        history.delete(1)
        await user.press("end")
        await user.sees("this chat cannot be read")
        await user.press("enter")
        await user.sees("This chat is not there any more")


@pytest.mark.parametrize("at_start", [True, rarely(False)])
async def test_a_chat_that_another_program_has_open_is_said_to_be(history, at_start):
    sea, _ = fill(history)
    with mock.patch("app.chat.history.os.getpid", os.getppid):
        history.set_open(sea)
    async with chat(FakeEngine(), history, chat_id=sea if at_start else None) as user:
        if not at_start:
            await user.press("ctrl+o")
            user.app.screen.query_one(Input).value = "moon"
            await user.sees("open elsewhere  The Moon.")
            await user.press("enter")
        await user.sees("This chat is open in another orin-chat, too")


@thorough
async def test_what_matters_in_the_list_is_not_cut_off_on_narrow_screens(history):
    sea, _ = fill(history)
    history.rename(sea, "A title that is longer than the screen is wide, " * 3)
    async with chat(FakeEngine(), history, size=(50, 20), chat_id=sea) as user:
        await user.press("ctrl+o", "up", "down")
        await user.sees("open now  The Moon.")
        await user.press("delete")
        await user.sees("y deletes, any")
        await user.press("n", "f2")
        await user.sees("the first prompt")


@pytest.mark.parametrize(
    ("then", "label"),
    [
        ((2026, 5, 9, 0, 1), "00:01"),
        ((2026, 5, 8, 23, 59), "Fri 23:59"),
        ((2026, 5, 3, 8, 0), "Sun 08:00"),
        ((2026, 5, 2, 8, 0), "2 May"),
        ((2025, 12, 31, 8, 0), "31 Dec 2025"),
    ],
)
def test_a_time_is_said_by_how_long_ago_it_was(then, label):
    assert time_label(datetime(*then).timestamp(), datetime(2026, 5, 9, 14, 5).timestamp()) == label


@thorough
async def test_no_search_text_breaks_the_list(history):
    fill(history)
    async with chat(FakeEngine(), history) as user:
        await user.press("ctrl+o", "quotation_mark", "asterisk", "left_parenthesis")
        await user.sees("No message has these words.")
        await user.press("enter")
        assert isinstance(user.app.screen, ChatsScreen)
        await user.press("escape")
        assert not isinstance(user.app.screen, ChatsScreen)
