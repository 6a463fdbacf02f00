"""The full-screen chat, driven by keys: every action, and everything that can go wrong on the way."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from textual.pilot import Pilot
from textual.widgets import Input, OptionList

from app.chat_app import ChatApp
from app.history import History
from app.screens.chats import ChatsScreen
from app.screens.help import HelpScreen
from engine.events import Failed, Loading, Message, Prefilling, Token
from tests import synthetic
from tests.app.fake_engine import DIED, READY, STARTED, TOO_LONG, FakeEngine, reply, tokens
from widgets.activity_line import ActivityLine
from widgets.reply_markdown import Fence


@pytest.fixture
def history(tmp_path: Path):
    history = History(tmp_path / "history.sqlite3")
    yield history
    history.close()


class Driver:
    """A running chat and what a user can see of it."""

    def __init__(self, app: ChatApp, pilot: Pilot[None], engine: FakeEngine) -> None:
        self.app, self.pilot, self.engine = app, pilot, engine

    async def until(self, holds: Callable[[], object], what: str = "what was expected") -> None:
        for _ in range(200):
            if holds():
                return
            await asyncio.sleep(0.03)
        raise AssertionError(f"{what} did not come:\n{self.screen()}")

    def screen(self) -> str:
        """The visible text, line by line."""
        lines = self.app.screen._compositor.render_strips()
        return "\n".join(strip.text.rstrip() for strip in lines)

    async def sees(self, text: str) -> None:
        await self.until(lambda: text in self.screen(), f"{text!r} on the screen")

    async def press(self, *keys: str) -> None:
        await self.pilot.press(*keys)

    async def say(self, text: str) -> None:
        """Types a prompt (at once) and sends it."""
        self.app.prompt.insert(text)
        await self.press("enter")

    async def idle(self) -> None:
        await self.until(lambda: not self.app.session.is_busy, "the end of the reply")
        await self.pilot.pause()

    def turns(self) -> list[tuple[str, str]]:
        return [(turn.role, turn.content) for turn in self.app.session.conversation.turns]

    def notice(self) -> str:
        return self.app.query_one(ActivityLine).notice


@contextlib.asynccontextmanager
async def chat(
    engine: FakeEngine, history: History, size: tuple[int, int] = (100, 30), **options
) -> AsyncIterator[Driver]:
    app = ChatApp(engine, history, **options)
    async with app.run_test(size=size) as pilot:
        yield Driver(app, pilot, engine)


def stored(history: History, chat_id: int) -> list[tuple[str, str, bool]]:
    return [(s.message.role, s.message.content, s.finished) for s in history.messages(chat_id)]


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
        for fact in ("Qwen3 0.6B", "Q6_K", "CUDA", "tok/s", "first token 0.21 s", "/8,192"):
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
        await user.sees("Ctrl+Q quits")


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


async def test_edit_can_be_left(history):
    async with chat(FakeEngine(), history, initial_prompt="one") as user:
        await user.idle()
        await user.press("f2", "x", "escape")
        assert user.app.prompt.text == ""
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
    engine = FakeEngine(reply("Four.", thinking="Two and two. " * 40))
    async with chat(engine, history, initial_prompt="2+2?") as user:
        await user.sees("▸ Thought for")
        await user.sees("120 words")
        assert "Two and two" not in user.screen()
        await user.press("ctrl+t")
        await user.sees("Two and two.")
        await user.press("ctrl+t")
        await user.until(lambda: "Two and two" not in user.screen())
        await user.pilot.click("ThinkingHeader")
        await user.sees("Two and two.")


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
    async with chat(
        FakeEngine(reply("*Yes*", thinking="hm")), history, initial_prompt="Is it, or\nnot?"
    ) as user:
        await user.idle()
        await user.press("ctrl+s")
        await user.press("ctrl+s")
        assert "is-it-or-not-2.md" in user.notice()
    text = (tmp_path / "is-it-or-not.md").read_text()
    assert text.startswith("# Is it, or not?\n\n## You\n\nIs it, or\nnot?\n\n## Qwen3 0.6B\n\n<details>")
    assert text.endswith("*Yes*\n")
    assert (tmp_path / "is-it-or-not-2.md").read_text() == text


async def test_export_where_nobody_may_write(history, tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "cwd", lambda: tmp_path / "gone")
    async with chat(FakeEngine(), history, initial_prompt="Hi") as user:
        await user.idle()
        await user.press("ctrl+s")
        assert "cannot be written" in user.notice()


async def test_help_and_palette_have_every_action(history):
    from app.actions import ACTIONS

    async with chat(FakeEngine(), history, size=(100, 60)) as user:
        await user.press("f1")
        assert isinstance(user.app.screen, HelpScreen)
        for action in ACTIONS:
            await user.sees(action.help)
        await user.press("escape")
        commands = {command.title for command in user.app.get_system_commands(user.app.screen)}
        assert commands == {action.title for action in ACTIONS} | {"Theme"}
        await user.press("ctrl+p", *"past", "enter")
        await user.until(lambda: isinstance(user.app.screen, ChatsScreen))


async def test_selected_text_is_copied(history):
    async with chat(FakeEngine(reply("Some words to copy.")), history, initial_prompt="Hi") as user:
        await user.sees("Some words")
        await user.idle()
        await user.pilot.mouse_down("MarkdownParagraph", offset=(0, 0))
        await user.pilot.hover("MarkdownParagraph", offset=(9, 0))
        await user.pilot.mouse_up("MarkdownParagraph", offset=(9, 0))
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
        await user.pilot.click("MarkdownParagraph", offset=(1, 0))
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


# --- past chats ------------------------------------------------------------------------------------------


def fill(history: History) -> tuple[int, int]:
    sea, bread = history.new_chat("m"), history.new_chat("m")
    for chat_id, prompt, answer in (
        (sea, "Why tides?", "The Moon."),
        (bread, "Bake bread", "Use [b]yeast[/b]."),
    ):
        history.append(chat_id, Message(role="user", content=prompt))
        history.append(chat_id, Message(role="assistant", content=answer))
    return sea, bread


async def test_a_past_chat_is_found_and_gone_on_with(history):
    sea, _ = fill(history)
    async with chat(FakeEngine(reply("More.")), history) as user:
        await user.press("ctrl+o")
        await user.sees("Use [b]yeast[/b].")
        user.app.screen.query_one(Input).value = "moon"
        await user.until(lambda: user.app.screen.query_one(OptionList).option_count == 1)
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
        await user.sees("Delete “dough” for good?")
        await user.press("n")
        assert len(history.chats()) == 2
        await user.press("delete", "y")
        assert [c.id for c in history.chats()] == [sea]
        await user.press("escape")
        await user.until(
            lambda: user.app.session.conversation.chat_id is None, "a new chat in place of the deleted"
        )
        assert user.turns() == []


async def test_no_search_text_breaks_the_list(history):
    fill(history)
    async with chat(FakeEngine(), history) as user:
        await user.press("ctrl+o", "quotation_mark", "asterisk", "left_parenthesis")
        await user.sees("No message has these words.")
        await user.press("enter")
        assert isinstance(user.app.screen, ChatsScreen)
        await user.press("escape")
        assert not isinstance(user.app.screen, ChatsScreen)


# --- what goes wrong -------------------------------------------------------------------------------------


async def test_an_engine_that_dies_in_mid_reply(history):
    engine = FakeEngine([*reply("So far")[:-1], DIED], [*STARTED, *reply("Again")])
    async with chat(engine, history, initial_prompt="Tell me") as user:
        await user.sees("⚠ The engine process died (signal 9). The next prompt restarts it.")
        assert user.turns() == [("user", "Tell me"), ("assistant", "So far")]
        assert stored(history, user.app.session.conversation.chat_id)[-1] == ("assistant", "So far", False)
        await user.sees("the engine has stopped")
        await user.say("Still there?")
        await user.sees("Again")
        await user.idle()
        assert engine.prompts()[-1] == [
            ("user", "Tell me"),
            ("assistant", "So far"),
            ("user", "Still there?"),
        ]


async def test_an_engine_that_does_not_start_gives_the_prompt_back(history):
    no_file = Failed(kind="model", message="There is no file [red]x.gguf[/red].", hint="Check\x1b the path.")
    engine = FakeEngine([*STARTED, *reply("Here I am")], start=[STARTED[0], None, no_file])
    async with chat(engine, history) as user:
        await user.say("Hello?")
        engine.release()
        await user.sees("⚠ There is no file [red]x.gguf[/red]. Check the path.")
        assert user.app.prompt.text == "Hello?"
        await user.press("enter")
        await user.sees("Here I am")


async def test_a_context_that_is_too_small_for_the_prompt(history):
    engine = FakeEngine([TOO_LONG], reply("Fine"))
    async with chat(engine, history, initial_prompt="long text") as user:
        await user.sees("⚠ The prompt has 9,000 tokens and the context holds 8,192. Shorten it. · Ctrl+N")
        assert user.turns() == [("user", "long text")]
        await user.say("short")
        await user.sees("Fine")
        await user.idle()
        assert engine.prompts()[-1] == [("user", "short")], "a prompt that failed is not sent again"


async def test_a_context_that_fills_up_says_so_with_numbers(history):
    engine = FakeEngine(reply("So much", reason="length", context_used=8192))
    async with chat(engine, history, initial_prompt="Tell me all") as user:
        await user.sees("⚠ The context is full: 8,192 of 8,192 tokens · Ctrl+N starts a new chat")
        await user.sees("8,192/8,192 tokens 100% full")


async def test_an_empty_reply_is_said_to_be_one(history):
    async with chat(FakeEngine(reply("")), history, initial_prompt="Hi") as user:
        await user.sees("The model gave an empty reply")
        assert user.turns() == [("user", "Hi")]


async def test_an_engine_that_raises_is_a_line_too(history):
    class Broken(FakeEngine):
        async def generate(self, request):
            yield Token(request_id=1, id=1, text="So far")
            raise ValueError("[bold]oops")

    async with chat(Broken(), history, initial_prompt="Hi") as user:
        await user.sees("⚠ The engine broke off: ValueError: [bold]oops.")
        assert user.turns() == [("user", "Hi"), ("assistant", "So far")]


async def test_a_history_that_cannot_be_opened(tmp_path):
    path = tmp_path / "h.sqlite3"
    path.write_bytes(b"garbage, not a database" * 100)
    async with chat(FakeEngine(), History.open(path), size=(240, 30)) as user:
        await user.sees("is damaged. Move it away")
        await user.sees("not saved")
        await user.say("Hi")
        await user.sees("Hello.")


async def test_a_history_that_fails_later_catches_up_when_it_works_again(history):
    async with chat(FakeEngine(), history, size=(240, 30)) as user:
        await user.sees("ready")
        history._db.execute("PRAGMA query_only = ON")
        await user.say("one")
        await user.sees("cannot be written")
        await user.idle()
        await user.sees("⚠ not saved")
        history._db.execute("PRAGMA query_only = OFF")
        await user.say("two")
        await user.idle()
        assert "not saved" not in user.screen()
    assert [c for _, c, _ in stored(history, history.chats()[0].id)] == ["one", "Hello.", "two", "Hello."]


async def test_an_interrupted_reply_is_resumed(history):
    chat_id = history.new_chat("m")
    history.append(chat_id, Message(role="user", content="Count"))
    reply_id = history.append(chat_id, Message(role="assistant", content="One, two"), finished=False)
    history._db.execute("UPDATE messages SET writer = 999999999 WHERE id = ?", (reply_id,))
    async with chat(FakeEngine(reply(", three")), history) as user:
        await user.sees("The reply in “Count” was interrupted · Ctrl+G opens it")
        await user.press("ctrl+g")
        await user.sees("interrupted · Ctrl+G goes on with it")
        await user.press("ctrl+g")
        await user.sees("One, two, three")
        await user.idle()
    assert stored(history, chat_id)[-1] == ("assistant", "One, two, three", True)


async def test_a_reply_is_saved_while_it_streams(history, monkeypatch):
    monkeypatch.setattr("app.chat_app.SAVE_S", 0.05)
    engine = FakeEngine([*tokens("So far"), None])
    async with chat(engine, history, initial_prompt="Tell me") as user:
        await user.until(lambda: history.chats())
        chat_id = history.chats()[0].id
        await user.until(lambda: stored(history, chat_id)[-1] == ("assistant", "So far", False))
        user.app.prompt.insert("a draft")
        await user.until(lambda: history._run("SELECT text FROM drafts") == [("a draft",)])


async def test_leaving_in_mid_reply_saves_it_as_interrupted(history):
    engine = FakeEngine([*tokens("So far"), None])
    async with chat(engine, history, initial_prompt="Tell me") as user:
        await user.sees("So far")
        await user.press("ctrl+q")
    assert stored(history, history.chats()[0].id)[-1] == ("assistant", "So far", False)
    assert engine.closed


# --- untrusted text --------------------------------------------------------------------------------------

HOSTILE = "[bold red]markup[/] \x1b]0;title\x07\x1b[2Jcleared \u202egnp.exe &#x202e;x <b>html</b> ![i](http://x/y.png)"


async def test_text_of_a_model_is_shown_as_text(history):
    engine = FakeEngine(reply(f"{HOSTILE}\n\n```\n{HOSTILE}\n```\n", thinking=HOSTILE))
    async with chat(engine, history, initial_prompt=HOSTILE, size=(140, 30)) as user:
        await user.idle()
        await user.press("ctrl+t")
        everywhere = "in the prompt, the thinking, the prose and the code"
        await user.until(lambda: user.screen().count("[bold red]markup[/]") == 4, everywhere)
        screen = user.screen()
        assert "<b>html</b>" in screen
        for code in "\x1b\x07\u202e":
            assert code not in screen


# --- layout ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(120, 40), (60, 20), (40, 10)])
async def test_what_must_be_seen_is_seen_at_any_size(history, size):
    async with chat(FakeEngine(), history, size=size, initial_prompt="Hi") as user:
        await user.sees("Hello.")
        await user.idle()
        last = user.screen().splitlines()[-1]
        for fact in ("Qwen3", "Q6_K", "CUDA", "tok/s", "%"):
            assert fact in last


async def test_a_tiny_terminal_shows_the_chat_and_the_prompt(history):
    async with chat(FakeEngine([*tokens("Hello"), None]), history, size=(30, 8), initial_prompt="Hi") as user:
        await user.sees("Hello")
        assert "CUDA" not in user.screen()
        await user.sees("answering")


async def test_without_colour_everything_is_still_said(history, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    engine = FakeEngine([*reply("**So** far `code`")[:-1], DIED])
    async with chat(engine, history, initial_prompt="Hi") as user:
        await user.sees("⚠ The engine process died")
        await user.sees("⚠ the engine has stopped")
        colours = set(re.findall(r"#[0-9a-f]{6}", user.app.export_screenshot()))
    of_the_frame = {"#ff5f57", "#febc2e", "#28c840", "#c5c8c6"}  # its buttons and its default
    assert all(colour[1:3] == colour[3:5] == colour[5:7] for colour in colours - of_the_frame)


async def test_code_is_plain_until_its_end_has_arrived(history):
    engine = FakeEngine([*tokens("```python\ndef f(): pass\n"), None, *reply("```\n")[2:]])
    async with chat(engine, history, initial_prompt="Hi") as user:
        await user.sees("def f(): pass")
        [fence] = user.app.query(Fence)
        assert fence._highlighted_code.spans == []
        engine.release()
        await user.idle()
        await user.until(lambda: user.app.query(Fence).first()._highlighted_code.spans)


# --- the real engine process -----------------------------------------------------------------------------


async def test_a_killed_engine_process_costs_one_line(history):
    """SIGKILL in mid-reply: the partial reply and the conversation stay, and the next prompt works."""
    engine = synthetic.engine(rate=200, tokens=40, die_at=20, load_s=0.02, prefill_s=0.02)
    async with chat(engine, history, initial_prompt="Tell me") as user:
        await user.sees("Ctrl+R tries again")
        [(_, prompt), (role, partial)] = user.turns()
        assert prompt == "Tell me" and role == "assistant" and partial
        assert stored(history, user.app.session.conversation.chat_id)[-1] == ("assistant", partial, False)
        await user.say("Still there?")
        await user.until(lambda: len(user.turns()) == 4, "the beginning of another reply")
        await user.idle()
        assert user.app.session.conversation.messages()[1].content == partial
