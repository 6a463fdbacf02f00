"""The full-screen chat, driven by keys: every action."""

from __future__ import annotations

from textwrap import wrap
from unittest import mock

import pytest
from msgspec.structs import replace

from app.screens.chat_app import ChatApp
from app.screens.pages.chats import ChatsScreen
from app.screens.pages.help import HelpScreen
from engine.protocol.events import Loading, Message, Prefilling, Token
from tests.app.driver import chat, stored
from tests.app.fake_engine import DIED, READY, STARTED, FakeEngine, reply, tokens
from tests.thorough import rarely, thorough

# --- a conversation --------------------------------------------------------------------------------------


async def test_a_prompt_is_answered_and_saved(history):
    engine = FakeEngine(reply("Because of the **Moon**.", thinking="Hm, tides."), reply("Twice a day."))
    async with chat(engine, history, system="Be brief.") as user:
        await user.sees("ready")
        await user.say("Why?")
        await user.sees("Because of the Moon.")
        await user.idle()
        await user.say("How often?")
        await user.sees("Twice a day.")
        await user.idle()
        assert user.engine.prompts()[1] == [
            ("system", "Be brief."),
            ("user", "Why?"),
            ("assistant", "Because of the **Moon**."),
            ("user", "How often?"),
        ]
        assert user.engine.requests[1].prompt.messages[2].thinking == "Hm, tides."
        assert user.app.focused is user.app.prompt
        for fact in ("Qwen3 0.6B", "Q6_K", "CUDA", "tok/s", "first token 210 ms", "/8,192"):
            assert fact in user.screen()
    assert engine.closed
    [summary] = history.chats()
    assert summary.title == "Why?"
    assert summary.model == "Qwen3 0.6B"
    assert [content for _, content, _ in stored(history, summary.id)][1:] == [
        "Why?",
        "Because of the **Moon**.",
        "How often?",
        "Twice a day.",
    ]


async def test_starting_and_prefill_are_shown(history):
    start = [
        Loading(done_bytes=0, total_bytes=10**9),
        Loading(done_bytes=5 * 10**8, total_bytes=10**9),
        None,
        READY,
    ]
    answer = [
        Prefilling(request_id=1, done=0, total=4000, cached=0),
        Prefilling(request_id=1, done=1000, total=4000, cached=0),
        None,
        *reply("Done.")[2:],
    ]
    engine = FakeEngine(answer, start=start)
    async with chat(engine, history) as user:
        await user.sees("loading · 500 MB of 1.00 GB · 50%")
        engine.release()
        await user.sees("ready")
        await user.say("Read this")
        await user.sees("reading the prompt · 1,000 of 4,000 tokens · 25%")
        assert "Esc stops" in user.screen()
        engine.release()
        await user.sees("Done.")


async def test_a_prompt_typed_while_loading_waits_and_is_shown(history):
    engine = FakeEngine(reply("Yes."), start=[STARTED[0], None, READY])
    async with chat(engine, history) as user:
        await user.say("Are you there?")
        await user.sees("next: Are you there?")
        assert engine.requests == []
        await user.say("And there?")
        await user.sees("One prompt is waiting already")
        assert user.app.prompt.text == "And there?", "nothing typed is lost"
        await user.press("f2")
        assert user.app.prompt.text == "Are you there?"
        await user.press("up")
        assert user.app.prompt.text == "And there?"
        await user.press("down", "enter")
        engine.release()
        await user.sees("Yes.")
        assert engine.prompts() == [[("user", "Are you there?")]]


async def test_a_prompt_typed_during_a_reply_is_sent_after_it(history):
    engine = FakeEngine([*tokens("One"), None, *reply(" two")[2:]], reply("Three"))
    async with chat(engine, history, initial_prompt="Count") as user:
        await user.sees("One")
        await user.say("Go on")
        await user.sees("next: Go on")
        engine.release()
        await user.sees("Three")
        await user.idle()
        assert user.turns() == [
            ("user", "Count"),
            ("assistant", "One two"),
            ("user", "Go on"),
            ("assistant", "Three"),
        ]
        assert "next:" not in user.screen()


async def test_many_lines_and_earlier_prompts(history):
    history.append(history.new_chat("m"), Message(role="user", content="from last week"))
    async with chat(FakeEngine(), history) as user:
        await user.press("a", "ctrl+j", "b", "shift+enter", "c", "alt+enter", "d")
        assert user.app.prompt.text == "a\nb\nc\nd"
        await user.press("up", "up", "up", "up")
        assert user.app.prompt.text == "from last week"
        await user.press("down")
        assert user.app.prompt.text == "a\nb\nc\nd"
        await user.press("enter")
        await user.idle()
        assert user.turns()[0] == ("user", "a\nb\nc\nd")
        assert user.app.prompt.text == ""
        await user.press("up")
        assert user.app.prompt.text == "a\nb\nc\nd"


# --- actions ---------------------------------------------------------------------------------------------


async def test_stop_keeps_what_has_arrived(history):
    engine = FakeEngine([*tokens("So far"), None])
    async with chat(engine, history) as user:
        await user.say("Tell me")
        await user.sees("So far")
        await user.press("escape")
        await user.sees("stopped · Ctrl+G goes on")
        assert user.turns()[-1] == ("assistant", "So far")
        assert stored(history, user.app.session.conversation.chat_id)[-1] == ("assistant", "So far", True)


async def test_ctrl_c_stops_and_otherwise_tells_how_to_quit(history):
    engine = FakeEngine([*tokens("So far"), None])
    async with chat(engine, history, initial_prompt="Tell me") as user:
        await user.sees("So far")
        await user.press("ctrl+c")
        await user.sees("stopped")
        await user.press("ctrl+c")
        await user.sees("Ctrl+C again quits")


async def test_stop_before_the_first_word(history):
    async with chat(FakeEngine([None], reply("Hello")), history, initial_prompt="Hi") as user:
        await user.until(lambda: user.engine.requests)
        await user.press("escape")
        await user.sees("stopped")
        assert user.turns() == [("user", "Hi")]
        await user.press("ctrl+r")
        await user.sees("Hello")


async def test_regenerate_puts_a_new_reply_in_place_of_the_old(history):
    engine = FakeEngine(reply("First"), reply("Second"))
    async with chat(engine, history, initial_prompt="Hi") as user:
        await user.sees("First")
        await user.idle()
        await user.press("ctrl+r")
        await user.sees("Second")
        await user.idle()
        assert user.turns() == [("user", "Hi"), ("assistant", "Second")]
        assert "First" not in user.screen()
        assert [c for _, c, _ in stored(history, user.app.session.conversation.chat_id)] == ["Hi", "Second"]
        assert engine.prompts()[1] == [("user", "Hi")]


async def test_a_reply_survives_a_regeneration_that_fails(history):
    engine = FakeEngine(reply("First"), [DIED])
    async with chat(engine, history, initial_prompt="Hi") as user:
        await user.sees("First")
        await user.idle()
        await user.press("ctrl+r")
        await user.until(lambda: "the earlier reply stays" in user.notice())
        assert user.turns() == [("user", "Hi"), ("assistant", "First")]
        await user.sees("First")
    assert [c for _, c, _ in stored(history, history.chats()[0].id)] == ["Hi", "First"]


async def test_edit_replaces_the_last_prompt_and_what_follows(history):
    engine = FakeEngine(reply("A"), reply("B"), reply("C"))
    async with chat(engine, history, initial_prompt="one") as user:
        await user.idle()
        await user.say("two")
        await user.idle()
        user.app.prompt.insert("a draft")
        await user.press("f2")
        assert user.app.prompt.text == "two"
        await user.sees("editing")
        await user.press("!")
        await user.press("enter")
        await user.sees("C")
        await user.idle()
        assert user.turns() == [("user", "one"), ("assistant", "A"), ("user", "two!"), ("assistant", "C")]
        assert [c for _, c, _ in stored(history, user.app.session.conversation.chat_id)] == [
            "one",
            "A",
            "two!",
            "C",
        ]
        assert "editing" not in user.screen()
        await user.press("up", "up")
        assert user.app.prompt.text == "a draft", "the draft is an earlier prompt now"


async def test_edit_again_goes_to_the_prompt_before(history):
    engine = FakeEngine(reply("A"), reply("B"), reply("C"))
    async with chat(engine, history, initial_prompt="one") as user:
        await user.idle()
        await user.say("two")
        await user.idle()
        await user.press("f2", "f2")
        assert user.app.prompt.text == "one"
        await user.press("f2")
        await user.sees("This is the first prompt")
        await user.press("!", "enter")
        await user.sees("C")
        await user.idle()
        assert user.turns() == [("user", "one!"), ("assistant", "C")]


@pytest.mark.parametrize("width", [40, rarely(60), rarely(80), 100])
async def test_while_editing_the_keys_are_said_in_the_room_there_is(history, width):
    async with chat(FakeEngine(), history, size=(width, 20), initial_prompt="one") as user:
        await user.idle()
        await user.press("f2")
        await user.sees("editing · ")
        [title] = [line for line in user.screen().splitlines() if "editing · " in line]
        assert "Esc" in title and "…" not in title


async def test_edit_can_be_left(history):
    async with chat(FakeEngine(), history, initial_prompt="one") as user:
        await user.idle()
        user.app.prompt.insert("a draft")
        await user.press("f2", "x", "escape")
        assert user.app.prompt.text == "a draft", "as before"
        assert len(user.turns()) == 2
        assert "editing" not in user.screen()


async def test_go_on_continues_the_reply(history):
    engine = FakeEngine(reply("One, two", reason="length"), reply(", three"))
    async with chat(engine, history, initial_prompt="Count", max_tokens=2) as user:
        await user.sees("stopped at 3 tokens, as asked · Ctrl+G goes on")
        await user.press("ctrl+g")
        await user.sees("One, two, three")
        await user.idle()
        assert engine.prompts()[1] == [("user", "Count"), ("assistant", "One, two")]
        assert user.turns()[-1] == ("assistant", "One, two, three")
        assert stored(history, user.app.session.conversation.chat_id)[-1] == (
            "assistant",
            "One, two, three",
            True,
        )
        assert "stopped at" not in user.screen()


async def test_copy_reply_and_code(history):
    text = "Look:\n\n```python\nprint(1)\n```\n\nand\n\n```\nlast\n  one\n```\nfine.\x1b[31m"
    async with chat(FakeEngine(reply(text), reply("no code")), history, initial_prompt="Hi") as user:
        await user.idle()
        await user.press("f4")
        assert user.app.clipboard == "last\n  one\n"
        await user.sees("Copied the code block (11 characters)")
        await user.say("more")
        await user.idle()
        await user.press("f3")
        assert user.app.clipboard == "no code"
        await user.press("f4")
        assert user.app.clipboard == "last\n  one\n", "the last one is in an earlier reply"


async def test_actions_that_have_nothing_to_act_on_say_so(history):
    async with chat(FakeEngine(), history) as user:
        await user.sees("ready")
        for key, notice in {
            "f2": "no prompt to edit",
            "f3": "no reply to copy",
            "f4": "no code block",
            "ctrl+g": "no reply to go on",
            "ctrl+s": "nothing to export",
        }.items():
            await user.press(key)
            assert notice in user.notice(), key
        await user.press("ctrl+r")
        assert user.engine.requests == []


async def test_actions_during_a_reply_say_what_to_do_first(history):
    async with chat(FakeEngine([*tokens("So"), None]), history, initial_prompt="Hi") as user:
        await user.sees("So")
        for key in ("ctrl+r", "ctrl+g", "f2"):
            await user.press(key)
            assert "Esc stops the reply" in user.notice(), key
        assert len(user.engine.requests) == 1


async def test_thinking_is_folded_until_asked_for(history):
    engine = FakeEngine(reply("Four.", thinking="Two and two. " * 40), reply("Yes."))
    async with chat(engine, history, initial_prompt="2+2?") as user:
        await user.sees("▸ Thought for")
        await user.sees("120 words")
        assert "Two and two" not in user.screen()
        await user.press("ctrl+t")
        await user.sees("Two and two.")
        await user.press("ctrl+t")
        await user.until(lambda: "Two and two" not in user.screen())
        await user.click("▸ Thought")
        await user.sees("Two and two.")
        await user.say("/thoughts")
        await user.sees("Thinking is shown in full")
        await user.say("Sure?")
        await user.until(lambda: len(user.turns()) == 4, "the reply")
        await user.idle()
        await user.say("/thoughts")
        await user.sees("The model gave the last reply without thoughts")


async def test_guesses_are_tinted_when_that_is_asked_for(history):
    events = reply("one two three")
    second = next(event for event in events if isinstance(event, Token) and event.text == "two ")
    events[events.index(second)] = replace(second, guessed=True)
    async with chat(FakeEngine(events), history, initial_prompt="?") as user:
        await user.idle()
        turn = user.app.session.conversation.turns[-1]
        assert [turn.content[first:end].strip() for first, end in turn.guessed] == ["two"]
        tint = lambda: [
            part for lines in user.app.transcript._turns for part in lines.lines if "25%" in repr(part)
        ]
        assert not tint()
        await user.press("alt+g")
        await user.until(lambda: len(tint()) == 1)
        await user.press("alt+g")
        await user.until(lambda: not tint())


async def test_new_chat_keeps_the_old_one(history):
    engine = FakeEngine(reply("A"), [*tokens("B so far"), None])
    async with chat(engine, history, initial_prompt="one") as user:
        await user.idle()
        first = user.app.session.conversation.chat_id
        await user.press("ctrl+n")
        await user.until(lambda: not user.app.session.conversation.turns)
        await user.sees("8,192 tokens of context")
        await user.say("two")
        await user.sees("B so far")
        second = user.app.session.conversation.chat_id
        await user.press("ctrl+n")
        await user.until(lambda: not user.app.session.conversation.turns)
        assert not user.app.session.is_busy
        assert engine.prompts()[1] == [("user", "two")]
    assert [c for _, c, _ in stored(history, first)] == ["one", "A"]
    assert stored(history, second) == [("user", "two", True), ("assistant", "B so far", True)]


async def test_export(history, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    engine = FakeEngine(reply("*Yes*", thinking="hm"))
    async with chat(engine, history, system="Be brief.", initial_prompt="Is it, or\nnot?") as user:
        await user.idle()
        await user.press("ctrl+s")
        await user.press("ctrl+s")
        assert "is-it-or-2.md" in user.notice()
        history.rename(user.app.session.conversation.chat_id, "To be")
        await user.press("ctrl+s")
        assert "to-be.md" in user.notice()
    text = (tmp_path / "is-it-or.md").read_text()
    assert text.startswith(
        "# Is it, or\n\n## System\n\nBe brief.\n\n## You\n\nIs it, or\nnot?\n\n## Qwen3 0.6B\n\n<det"
    )
    assert text.endswith("*Yes*\n")
    assert (tmp_path / "is-it-or-2.md").read_text() == text
    assert (tmp_path / "to-be.md").read_text().startswith("# To be\n")


async def test_export_where_nobody_may_write(history, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "app.chat.export.write_new", mock.Mock(side_effect=OSError(28, "No space left on device"))
    )
    async with chat(FakeEngine(), history, initial_prompt="Hi") as user:
        await user.idle()
        await user.press("ctrl+s")
        assert "hi.md cannot be written: No space left on device" in user.notice()


async def test_help_and_palette_have_every_action(history):
    from app.screens.actions import ACTIONS
    from app.screens.context_actions import WAYS

    async with chat(FakeEngine(), history, size=(100, 60)) as user:
        await user.press("f1")
        assert isinstance(user.app.screen, HelpScreen)
        lines = [line for action in ACTIONS for line in wrap(action.help, 66)]
        await user.sees(lines[-1])
        words = " ".join(user.screen().replace("│", " ").split())
        assert [line for line in lines if line not in words] == []
        await user.press("escape")
        commands = {command.title for command in user.app.get_system_commands(user.app.screen)}
        assert commands == {entry.title for entry in (*ACTIONS, *WAYS)} | {"Theme"}
        await user.press("ctrl+p", *"past", "enter")
        await user.until(lambda: isinstance(user.app.screen, ChatsScreen))
        await user.press("ctrl+c")
        await user.until(lambda: user.app.screen is user.app.page)


@pytest.mark.parametrize("size", [rarely((100, 40)), (60, 20)])
async def test_the_palette_finds_what_commands_do(history, size):
    async with chat(FakeEngine(), history, size=size) as user:
        await user.press("ctrl+p", *"dark light")
        await user.sees("Theme")
        assert ("Choose light" in user.screen()) == (size[1] > 24)
        await user.press("enter")
        await user.sees("Search for themes")


async def test_selected_text_is_copied(history):
    async with chat(FakeEngine(reply("Some words to copy.")), history, initial_prompt="Hi") as user:
        await user.sees("Some words")
        await user.idle()
        x, y = user.place("Some words")
        await user.pilot.mouse_down(offset=(x, y))
        await user.pilot.hover(offset=(x + 9, y))
        await user.pilot.mouse_up(offset=(x + 9, y))
        await user.until(lambda: "Copied the selection" in user.notice())
        assert user.app.clipboard.startswith("Some word")
        assert user.app.focused is user.app.prompt


async def test_a_link_is_copied_and_never_opened(history, monkeypatch):
    opened = []
    monkeypatch.setattr(ChatApp, "open_url", lambda self, url, **_: opened.append(url))
    async with chat(
        FakeEngine(reply("[here](https://example.org/a')")), history, initial_prompt="Hi"
    ) as user:
        await user.sees("here")
        await user.idle()
        await user.click("here")
        await user.until(lambda: "Copied the link" in user.notice())
        assert user.app.clipboard == "https://example.org/a'"
    assert opened == []


async def test_tmux_is_given_what_is_copied(history, monkeypatch, tmp_path):
    tmux = tmp_path / "tmux"
    tmux.write_text(f'#!/bin/sh\necho "$@" >{tmp_path}/arguments\ncat >{tmp_path}/copied\n')
    tmux.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("TMUX", "yes")
    async with chat(FakeEngine(reply("copy me")), history, initial_prompt="Hi") as user:
        await user.idle()
        await user.press("f3")
        await user.until(
            lambda: (tmp_path / "copied").exists() and (tmp_path / "copied").read_text() == "copy me"
        )
    assert (tmp_path / "arguments").read_text().split() == ["load-buffer", "-w", "-"]


async def test_what_is_typed_where_it_means_nothing_is_for_the_prompt(history):
    async with chat(FakeEngine(), history, size=(120, 40)) as user:
        await user.sees("ready")
        await user.press("tab", "h", "i")
        assert user.app.prompt.text == "hi"
        assert user.app.prompt.has_focus


@thorough
async def test_the_theme_of_the_last_time_is_taken_if_there_still_is_one(history):
    async with chat(FakeEngine(), history, theme="textual-light") as user:
        await user.sees("ready")
        assert user.app.theme == "textual-light"
    async with chat(FakeEngine(), history, theme="of another time") as user:
        await user.sees("ready")
        assert user.app.theme in user.app.available_themes
