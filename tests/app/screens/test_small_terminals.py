"""The screen in terminals down to 20 x 6: what a user must see there."""

from __future__ import annotations

import pytest
from textual.events import Key

from app.chat.history import History
from app.screens.engine_setup import EngineSetup
from app.screens.pages.chats import ChatsScreen
from engine.protocol.events import EngineOptions
from tests.app.driver import chat, stored
from tests.app.fake_engine import FakeEngine, reply
from tests.thorough import rarely, thorough
from widgets.page import Frame

SIZES = [(160, 48), (60, 20), (34, 12), (20, 6)]


PAGES = {
    "ctrl+o": ("F2 renames", "Del"),
    "f8": ("F2 edits", "Del"),
    "ctrl+l": ("Del",),
    "f12": ("Ctrl+S saves",),
    "f1": ("Esc closes",),
}


@thorough
@pytest.mark.parametrize("size", [rarely(SIZES[0]), SIZES[1], rarely(SIZES[2]), rarely(SIZES[3])])
async def test_the_border_of_a_page_names_its_keys_at_every_width(history, home, size):
    setup = EngineSetup(EngineOptions(model_path="m.gguf", backend="CUDA"), "cuda")
    async with chat(FakeEngine(reply("Yes.")), history, size=size, setup=setup) as user:
        await user.say("Is it?")
        await user.idle()

        def border() -> str:
            region = user.app.screen.query_one(Frame).region
            return user.screen().split("\n")[region.bottom - 1][region.x : region.right]

        for page, keys in PAGES.items():
            await user.press(page)
            await user.until(lambda: user.app.screen.query(Frame), f"the page of {page}")
            await user.until(lambda keys=keys: all(key in border() for key in keys), f"{keys} in the border")
            assert "…" not in border()
            await user.press("escape")
            await user.until(lambda: len(user.app.screen_stack) == 1)


@pytest.mark.parametrize("size", [(34, 12), (20, 6)])
async def test_a_tiny_terminal_shows_the_speed_and_how_full_the_context_is(history, size):
    async with chat(FakeEngine(reply("Yes.")), history, size=size) as user:
        await user.say("Is it?")
        await user.idle()
        await user.sees("tok/s")
        foot = user.screen().split("\n")[-1]
        assert f"{user.app.session.status.snapshot().tokens_per_s:.0f} tok/s" in foot
        assert foot.rstrip("─╯ ").endswith("%") and "…" not in foot


async def test_a_tiny_terminal_warns_that_the_chat_is_not_saved(tmp_path):
    history = History.open(tmp_path)  # a folder
    async with chat(FakeEngine(), history, size=(34, 12)) as user:
        await user.until(lambda: "⚠ not saved" in user.screen().split("\n")[-1], "the warning in the border")


@pytest.mark.parametrize("size", [rarely((60, 20)), rarely((34, 12)), (20, 6)])
async def test_the_palette_of_commands_has_entries_at_every_size(history, size):
    async with chat(FakeEngine(), history, size=size) as user:
        await user.press("ctrl+p")
        await user.sees("Compare · F10")
        lines = user.screen().split("\n")
        assert [line.partition(" ·")[0].rstrip(" …▇▆▄").strip() for line in lines[1:5]] == [
            "Compare", "Copy code block", "Copy reply", "Dashboard",
        ]  # fmt: skip
        await user.press(*"past", "enter")
        await user.until(lambda: isinstance(user.app.screen, ChatsScreen), "the page of past chats")


@pytest.mark.parametrize("size", [rarely(SIZES[0]), SIZES[1], *map(rarely, SIZES[2:]), rarely((120, 40))])
async def test_the_chat_shows_that_a_system_prompt_is_set(history, size):
    async with chat(FakeEngine(reply("Yes.")), history, size=size) as user:
        await user.idle()
        assert "system" not in user.screen()
        user.app.session.set_system("Answer briefly.")
        await user.sees("system")
        user.app.session.set_system("")
        await user.until(lambda: "system" not in user.screen(), "the end of the mark")


@pytest.mark.parametrize("size", [(1, 200), rarely((2, 200)), rarely((3, 200)), (200, 1)])
async def test_terminals_of_few_columns_or_rows_end_nothing(history, size):
    async with chat(FakeEngine(reply("Yes.")), history, size=size) as user:
        user.app.prompt.insert("Why?")
        # Where the prompt is not visible, it has the focus only until the first frame.
        user.app.prompt.post_message(Key("enter", "\r"))
        await user.until(lambda: len(user.turns()) == 2, "the reply")
        await user.idle()
        assert [text for _, text, _ in stored(history, user.app.session.conversation.chat_id)] == [
            "Why?",
            "Yes.",
        ]
