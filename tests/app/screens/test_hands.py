"""Keys and the mouse, as hands expect them."""

from __future__ import annotations

import signal
from unittest import mock

from textual.widgets import Input, TextArea

from app.screens.pages.chats import ChatsScreen
from app.screens.pages.preset_editor import PresetEditor
from engine.protocol.events import Message
from tests.app.driver import chat
from tests.app.fake_engine import FakeEngine, reply


async def test_ctrl_c_clears_a_draft_and_twice_quits(history):
    async with chat(FakeEngine(), history) as user:
        await user.idle()
        await user.press(*"draft", "ctrl+c")
        await user.sees("Cleared; Up brings it back")
        assert user.app.prompt.text == ""
        await user.press("up")
        assert user.app.prompt.text == "draft"
        await user.press("down", "ctrl+c")
        await user.sees("Ctrl+C again quits")
        assert user.app.is_running and user.app._exit is False
        await user.press("ctrl+c")
        await user.until(lambda: user.app._exit)


async def test_ctrl_d_quits_from_an_empty_prompt_alone(history):
    async with chat(FakeEngine(), history) as user:
        await user.idle()
        await user.press("a", "left", "ctrl+d")
        assert user.app.prompt.text == "" and not user.app._exit
        await user.press("ctrl+d")
        await user.until(lambda: user.app._exit)


async def test_a_key_suspends_and_ctrl_z_names_it(history):
    async with chat(FakeEngine(), history) as user:
        await user.idle()
        await user.press("a", "ctrl+z")
        assert user.app.prompt.text == ""
        await user.press("ctrl+z")
        await user.sees("There is nothing to undo · Alt+Z suspends orin-chat")
        with mock.patch("os.kill") as kill:
            await user.press("alt+z")
        assert kill.call_args.args[1] == signal.SIGTSTP


async def test_a_double_click_takes_a_word_and_a_triple_click_a_line(history):
    words = " ".join(f"word{n}" for n in range(30))
    async with chat(FakeEngine(reply(f"First line.\n\n{words}")), history, initial_prompt="Hi") as user:
        await user.idle()
        await user.sees("word29")
        x, y = user.place("word2 ")
        await user.pilot.click(offset=(x + 1, y), times=2)
        await user.until(lambda: user.app.clipboard == "word2")
        await user.pilot.click(offset=(x + 1, y), times=3)
        await user.until(lambda: user.app.clipboard == words)


async def test_more_below_is_marked_while_scrolled_up(history):
    async with chat(FakeEngine(reply("line\n\n" * 60)), history, initial_prompt="Hi") as user:
        await user.idle()
        await user.press("pageup")
        await user.sees("↓ more below Ctrl+End")
        await user.press("ctrl+end")
        await user.sees("Ctrl+P commands")
        assert "more below" not in user.screen()


async def test_home_and_end_of_a_text_that_is_edited(history):
    async with chat(FakeEngine(), history) as user:
        user.app.push_screen(PresetEditor("mine", 'backend = "CPU"\nkv = "f16"\n# end'))
        await user.until(
            lambda: isinstance(user.app.screen, PresetEditor) and user.app.screen.query(TextArea)
        )
        area = user.app.screen.query_one(TextArea)
        await user.press("ctrl+end")
        assert area.cursor_location == (2, 5)
        await user.press("ctrl+home")
        assert area.cursor_location == (0, 0)


async def test_renaming_labels_the_field_and_keeps_the_search(history):
    for text in ("Why tides?", "Why bread?"):
        history.append(history.new_chat("m"), Message(role="user", content=text))
    async with chat(FakeEngine(), history) as user:
        await user.press("ctrl+o", *"tides")
        await user.until(
            lambda: isinstance(user.app.screen, ChatsScreen) and len(user.app.screen.entries) == 1
        )
        await user.press("f2")
        await user.sees("Past chats · new title")
        await user.press("end", *" Or not", "enter")
        await user.sees("Why tides? Or not")
        assert user.app.screen.query_one(Input).value == "tides" and len(user.app.screen.entries) == 1
        assert "new title" not in user.screen()
