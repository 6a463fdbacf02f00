"""Keys that come while a page opens or closes."""

from __future__ import annotations

import asyncio

import pytest
from textual.events import Key, Paste
from textual.widgets import Input

from app.screens.chat_app import ChatApp
from app.screens.engine_setup import EngineSetup
from engine.protocol.events import EngineOptions
from tests.app.driver import chat
from tests.app.fake_engine import FakeEngine
from tests.thorough import THOROUGH, rarely, thorough
from widgets.terminal import key_order


@thorough
@pytest.mark.parametrize(
    ("page", "every"),
    [rarely("f1", 20), *(rarely(page, 13) for page in ("f12", "ctrl+o", "f8")), ("ctrl+p", 13)],
)
async def test_the_second_of_two_quick_escapes_is_not_lost(history, home, page, every):
    every = 1 if THOROUGH else every  # steps of the loop between one try and the next
    setup = EngineSetup(EngineOptions(model_path="m.gguf", backend="CUDA"), "cuda")
    async with chat(FakeEngine(), history, setup=setup) as user:
        stops = []
        user.app.action_stop = lambda: stops.append(True)
        for n, steps in enumerate(range(0, 40, every), 1):
            await user.press(page)
            await user.until(lambda: len(user.app.screen_stack) == 2, "the page")
            user.app.post_message(Key("escape", None))
            for _ in range(steps):
                await asyncio.sleep(0)
            user.app.post_message(Key("escape", None))
            await user.until(lambda n=n: len(stops) == n, f"the second Esc, {steps} steps later")
            await user.until(lambda: len(user.app.screen_stack) == 1)


async def test_of_two_escapes_at_once_the_first_closes_the_search_and_the_second_is_not_lost(history):
    async with chat(FakeEngine(), history) as user:
        await user.say("hello")
        await user.idle()
        await user.press("ctrl+f")
        stops = []
        user.app.action_stop = lambda: stops.append(user.app.column.find_bar.is_open)
        for _ in range(2):
            user.app.post_message(Key("escape", None))
        await user.until(lambda: stops == [False], "the second Esc")


async def test_letters_right_after_ctrl_f_are_searched_and_ctrl_f_again_goes_to_the_next_place(history):
    async with chat(FakeEngine(), history) as user:
        await user.say("hello hello")  # and the reply says it once more
        await user.idle()
        for key in ("ctrl+f", *"hello"):
            user.app.post_message(Key(key, key if len(key) == 1 else None))
        await user.sees("3/3")
        assert user.app.column.find_bar.field.value == "hello" and not user.app.prompt.text
        await user.press("ctrl+f")
        await user.sees("1/3")


@pytest.mark.parametrize(
    "page",
    [("ctrl+o",), *map(rarely, (("ctrl+l",), ("alt+r",), ("f8",), ("ctrl+p",), (*"/chats", "enter")))],
    ids="".join,
)
async def test_what_comes_at_once_after_a_key_that_opens_a_page_is_for_its_field(history, page):
    setup = EngineSetup(EngineOptions(model_path="m.gguf", backend="CPU"), "cpu")
    async with chat(FakeEngine(), history, setup=setup) as user:
        await user.idle()
        for key in (*page, *"whx", "backspace"):
            user.app.post_message(Key(key, key if len(key) == 1 else None))
        user.app.post_message(Paste("at"))
        fields = lambda: [field.value for field in user.app.screen.query(Input)]
        await user.until(lambda: len(user.app.screen_stack) == 2 and fields() == ["what"], "the letters")
        assert not user.app.prompt.text and not user.turns()


async def test_what_comes_at_once_after_a_page_has_closed_is_the_next_prompt(history):
    async with chat(FakeEngine(), history) as user:
        await user.say("hello")
        await user.idle()
        for key in ("alt+r", *"hello", "enter", *" you"):
            user.app.post_message(Key(key, key if len(key) == 1 else None))
        await user.until(
            lambda: user.app.prompt.text == "hello you", "the prompt, and what was typed after it"
        )


async def test_what_is_typed_before_the_screen_is_there_is_in_the_prompt(history, monkeypatch):
    load = ChatApp.on_load

    def type_early(app: ChatApp) -> None:
        load(app)
        for key in "early":
            app.post_message(Key(key, key))

    monkeypatch.setattr(ChatApp, "on_load", type_early)
    async with chat(FakeEngine(), history) as user:
        await user.until(lambda: user.app.prompt.text == "early", "the letters")


async def test_keys_do_not_wait_long_for_a_widget_that_is_busy(history, monkeypatch):
    monkeypatch.setattr(key_order, "MOST_WAIT_S", 0.05)
    done = asyncio.Event()
    async with chat(FakeEngine(), history) as user:
        monkeypatch.setattr(user.app.session, "send", lambda *_, **__: done.wait())
        for key in ("x", "enter", "y"):
            user.app.post_message(Key(key, key if len(key) == 1 else None))
        await user.until(lambda: user.app.prompt.text == "y", "the letter")
        done.set()


@pytest.mark.parametrize("key", [rarely("pagedown"), rarely("down"), rarely("enter"), "x"])
async def test_a_key_that_comes_before_the_palette_has_its_list_means_nothing(history, key):
    async with chat(FakeEngine(), history) as user:
        await user.idle()
        for name in ("ctrl+p", key, "escape"):
            user.app.post_message(Key(name, name if len(name) == 1 else None))
        await user.until(lambda: len(user.app.screen_stack) == 1)
        await user.pilot.pause()
        await user.press("ctrl+p")
        await user.until(lambda: len(user.app.screen_stack) == 2, "the palette")
