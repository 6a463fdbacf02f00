"""What helps while a prompt is typed, as a user sees it: files and commands."""

from __future__ import annotations

import inspect
import threading
from unittest import mock

import pytest
from textual.events import Key

from app.chat import files
from app.screens import chat_app
from app.screens.pages.chats import ChatsScreen
from app.screens.pages.help import HelpScreen
from app.screens.typing_help import TypingHelp
from engine.protocol.events import Message
from tests.app.driver import chat
from tests.app.fake_engine import FakeEngine, reply
from tests.thorough import thorough
from widgets.chat.vi_keys import ViKeys


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("The tide is high.\n")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\0")
    return tmp_path


async def test_a_file_goes_along_and_is_read_again_when_it_has_changed(history, folder, monkeypatch):
    monkeypatch.setattr(chat_app, "FILES_S", 0.05)
    engine = FakeEngine(reply("High."), reply("Low."))
    async with chat(engine, history) as user:
        await user.press(*"What about ", "@", "n", "o")
        await user.sees("▸ @notes.txt")
        await user.press("tab", "?")
        assert user.app.prompt.text == "What about @notes.txt ?"
        await user.sees("▪ notes.txt 18 characters")
        await user.press("enter")
        await user.sees("High.")
        await user.idle()
        assert user.engine.prompts()[0][0][1] == (
            "notes.txt:\n```\nThe tide is high.\n```\n\nWhat about @notes.txt ?"
        )
        assert "▪ notes.txt 18 characters" in user.screen()
        (folder / "notes.txt").write_text("The tide is low.\n")
        await user.sees("notes.txt has changed since then · Alt+U reads again")
        await user.press("alt+u")
        await user.until(lambda: user.app.prompt.text == "@notes.txt ")
        await user.press("n", "o", "w", "?", "enter")
        await user.sees("Low.")
        assert "The tide is low." in user.engine.prompts()[1][2][1]


async def test_a_disk_that_does_not_answer_holds_one_thread_and_esc_gives_up(history, monkeypatch):
    answers, waiting = threading.Event(), []
    monkeypatch.setattr(files, "read", lambda mention: waiting.append(mention) or answers.wait())
    async with chat(FakeEngine(reply("Yes.")), history) as user:
        await user.press(*"@notes.txt and")
        await user.until(lambda: waiting)
        await user.press("enter")
        await user.until(lambda: len(waiting) == 2 and user.app.column.reading)
        assert user.app.prompt.text == ""
        await user.press("escape")
        await user.until(lambda: user.app.prompt.text == "@notes.txt and")
        assert user.notice() == "Its files were not read"
        await user.press(*" on")
        assert len(waiting) == 2
        user.app.prompt.put("")
        await user.say("Are you there?")
        await user.sees("Yes.")
        answers.set()


async def test_a_list_that_is_behind_what_was_typed_takes_nothing_of_it(history):
    """On a busy machine, Enter came before the list knew the last letters, and took them away."""
    async with chat(FakeEngine(reply("High.")), history) as user:
        await user.idle()
        await user.press(*"@notes")
        await user.sees("▸ @notes.txt")
        for key in (*".txt now", "enter"):
            user.app.prompt.post_message(Key({".": "full_stop", " ": "space"}.get(key, key), key[:1]))
        await user.sees("High.")
        assert user.engine.prompts()[0][0][1].endswith("@notes.txt now")


async def test_what_names_no_file_goes_as_text_and_is_said(history):
    async with chat(FakeEngine(reply("Hm.")), history) as user:
        await user.idle()
        await user.say("Read @nosuchfile")
        await user.sees("Hm.")
        await user.idle()
        assert user.notice() == "@nosuchfile names no file, and went as text"
        assert user.engine.prompts()[0][0][1] == "Read @nosuchfile"


async def test_keys_of_vi(history):
    async with chat(FakeEngine(reply("Yes.")), history) as user:
        user.app.prompt.vi = ViKeys(user.app.prompt)
        await user.idle()
        await user.press(*"no", "escape", "c", "c", *"Is it?", "escape")
        await user.sees("vi: letters are commands, i inserts")
        await user.press("j", "enter")
        await user.sees("Yes.")
        assert user.engine.prompts()[0][0][1] == "Is it?"


async def test_what_is_no_text_is_not_sent_and_not_lost(history):
    async with chat(FakeEngine(), history) as user:
        await user.idle()
        await user.say("Look at @picture.png")  # before it was looked at, as a script does
        await user.sees("▪ picture.png is no text and no picture (5 B)")
        await user.sees("⚠ Not sent.")  # what the line of files says is not said again
        assert user.app.prompt.text == "Look at @picture.png" and not user.engine.requests


async def test_commands_are_listed_completed_and_obeyed(history):
    history.append(history.new_chat("m"), Message(role="user", content="Why tides?"))
    engine = FakeEngine(reply("Yes."), reply("No."))
    async with chat(engine, history) as user:
        await user.idle()
        await user.press("/")
        await user.sees("/chats")
        await user.press("h", "enter")
        await user.until(lambda: isinstance(user.app.screen, HelpScreen))
        await user.press("ctrl+c")
        await user.until(lambda: user.app.screen is user.app.page)
        await user.say("Is it?")
        await user.sees("Yes.")
        await user.idle()
        await user.press(*"/reg", "tab", "enter")
        await user.sees("No.")
        await user.idle()
        await user.say("/set temperature 0.1")
        await user.sees("temperature is 0.1 from the next prompt on")
        assert user.app.session.sampling.temperature == 0.1
        await user.say("/set effort much")
        await user.sees("It takes low, medium, high or none.")
        assert user.app.prompt.text == "/set effort much"
        await user.press("ctrl+c")
        await user.say("/chats tides")
        await user.until(lambda: isinstance(user.app.screen, ChatsScreen) and user.app.screen.entries)
        assert len(user.app.screen.entries) == 1 and user.app.screen.field.value == "tides"
        await user.press("escape")
        await user.say("/delete 1")
        await user.sees("Delete it for good?")
        await user.press("n", "escape")
        await user.say("/frob it")
        await user.sees("There is no command /frob; /help lists them.")
        assert user.app.prompt.text == "/frob it"
        await user.press("ctrl+c")
        await user.say("/etc/hosts is what?")
        await user.idle()
        assert user.turns()[-2] == ("user", "/etc/hosts is what?")


async def test_what_each_command_does_and_says(history, folder):
    """Those of the test above and of keys aside."""
    history.append(past := history.new_chat("m"), Message(role="user", content="Why tides?"))
    async with chat(FakeEngine(reply("Yes."), reply("No.", thinking="Hm.")), history, size=(150, 40)) as user:
        await user.idle()
        session, said = user.app.session, lambda text: " ".join(user.notice().split()).startswith(text)
        open_chat = lambda: session.conversation.chat_id

        async def tell(command: str, says: str) -> None:
            await user.say(command)
            await user.until(lambda: said(says), f"{says!r} after {command}, not {user.notice()!r},")
            await user.press("ctrl+c") if user.app.prompt.text else None

        for command in "/stats", "/thoughts":
            await tell(command, "There is no reply yet")
        await tell("/regenerate", "There is no message yet.")
        await tell("/think off", "The model does not think from the next prompt on")
        assert session.think is False
        await tell("/think on", "The model thinks, if it can, from the next prompt on")
        await tell("/set top_k 7", "top_k is 7 from the next prompt on.")
        await tell("/set max_tokens 9", "max_tokens is 9 from the next prompt on.")
        await tell("/set", "temperature")
        assert "top_k 7 " in user.notice() and user.notice().endswith("max_tokens 9")
        await tell("/set kv", "'' is no value for kv. It takes f16, q8_0 or none.")
        await user.say("Is it?")
        await user.sees("Yes.")
        await user.idle()
        await tell("/thoughts", "The model gave the last reply without thoughts")
        await tell("/stats", "prompt 96 tokens (0 cached)")
        await tell("/save chat.md", "Saved as chat.md")
        assert "Is it?" in (folder / "chat.md").read_text()
        await tell("/save chat.md", "chat.md exists already.")
        await tell("/open 77", "There is no chat 77")
        await tell("/open one", "/open needs the number of a chat.")
        await user.say(f"/open {past}")
        await user.until(lambda: open_chat() == past)
        await tell("/system Be brief.", "A new chat under this system prompt")
        assert session.system == "Be brief." and open_chat() is None
        await tell("/system none", "A new chat")
        assert session.system == ""
        await user.say("/continue")
        await user.until(lambda: open_chat() not in (None, past))
        await user.say("/new")
        await user.until(lambda: open_chat() is None)


@thorough
async def test_tab_and_an_earlier_prompt_leave_the_keys_to_the_prompt(history):
    history.append(history.new_chat("m"), Message(role="user", content="See @no"))
    history.append(history.new_chat("m"), Message(role="user", content="/h"))
    async with chat(FakeEngine(), history, size=(140, 40)) as user:
        await user.press("h", "i", "tab", "d", "s")
        assert user.app.prompt.text == "hids"
        await user.press("ctrl+c", "up", "up", "up")
        assert user.app.prompt.text == "See @no"


def test_work_that_is_given_up_before_it_begins_leaves_nothing_behind():
    """A coroutine that nobody awaits is a warning, as the next key came or the application ended."""
    text = "read @some"
    owner, prompt = mock.Mock(), mock.Mock(text=text, before_cursor=text, is_typed=True)
    TypingHelp(owner, prompt, lambda: None, lambda: False).text_changed()
    begun = [call.args[0] for call in owner.run_worker.call_args_list]
    assert len(begun) == 2 and not any(map(inspect.isawaitable, begun))
