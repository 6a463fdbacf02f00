"""The full-screen chat in trouble: engines that fail, histories that cannot be written, text that attacks, terminals
that are too small or without colours."""

from __future__ import annotations

import importlib
import re

import pytest
from msgspec.structs import replace

from app.chat.history import History
from engine.protocol.events import Failed, Message, Prefilling, Token
from tests import synthetic
from tests.app.driver import chat, stored
from tests.app.fake_engine import DIED, READY, STARTED, TOO_LONG, FakeEngine, reply, tokens
from tests.thorough import rarely

# --- what goes wrong -------------------------------------------------------------------------------------


async def test_an_engine_that_dies_in_mid_reply(history):
    engine = FakeEngine([*reply("So far")[:-1], DIED], [*STARTED, *reply("Again")])
    async with chat(engine, history, initial_prompt="Tell me") as user:
        await user.sees("⚠ The engine process died (signal 9). The next prompt restarts it.")
        assert user.turns() == [("user", "Tell me"), ("assistant", "So far")]
        assert stored(history, user.app.session.conversation.chat_id)[-1] == ("assistant", "So far", False)
        await user.sees("the engine does not answer")
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


async def test_a_model_that_stands_in_for_another_is_a_warning_that_stays(history):
    warning = "There is no file x.gguf. orin-guide answers · Ctrl+L chooses another"
    async with chat(FakeEngine(start=[STARTED[0], None, READY]), history, warning=warning) as user:
        await user.sees(f"⚠ {warning}")
        user.engine.release()
        await user.idle()
        assert f"⚠ {warning}" in user.screen()


async def test_flaws_of_the_settings_stay_beside_what_the_engine_remarks(history):
    ready = replace(READY, warnings=("The GPU is hot.",))
    flaw = "settings.toml: mcp.a is left out: it has no key cmd."
    async with chat(FakeEngine(start=[STARTED[0], None, ready]), history, warning=flaw) as user:
        user.engine.release()
        await user.sees(f"⚠ {flaw} The GPU is hot.")


async def test_a_context_that_is_too_small_for_the_prompt(history):
    engine = FakeEngine([TOO_LONG], reply("Fine"))
    async with chat(engine, history, initial_prompt="long text") as user:
        await user.sees(
            "⚠ The prompt has 9,000 tokens and the context holds 8,192. · The prompt alone is too long"
        )
        assert user.turns() == [("user", "long text")]
        await user.say("short")
        await user.sees("Fine")
        await user.idle()
        assert engine.prompts()[-1] == [("user", "short")], "a prompt that failed is not sent again"


async def test_a_context_that_fills_up_says_so_with_numbers(history):
    engine = FakeEngine(reply("So much", reason="length", prompt_n=8190))
    async with chat(engine, history, initial_prompt="Tell me all") as user:
        await user.sees("⚠ The context of 8,192 tokens is full · Ctrl+G offers how to go on")
        await user.sees("8,192/8,192 tokens 100% full")


async def test_a_full_context_offers_how_to_go_on(history):
    full = reply("So much", reason="length", prompt_n=8190)
    engine = FakeEngine(
        reply("Yes."), full, reply(" more", prompt_n=7000), reply("You asked me to tell all.")
    )
    async with chat(engine, history, initial_prompt="Hello") as user:
        await user.sees("Yes.")
        await user.idle()
        await user.say("Tell me all")
        await user.sees("Ctrl+G offers how to go on")
        await user.idle()
        await user.press("ctrl+g")
        await user.sees("The model reads at most a context of 8,192 tokens.")
        await user.press("escape", "ctrl+g", "down", "enter")
        await user.sees("So much more")
        await user.sees("the model reads from here on: 2 turns before it are left out")
        assert user.turns()[0] == ("user", "Hello") and engine.prompts()[-1][0] == ("user", "Tell me all")
        await user.idle()
        await user.sees("⚠ The context is nearly full: Ctrl+P begins")
        await user.press("ctrl+p", *"summary", "enter")
        await user.sees("You asked me to tell all.")
        assert user.turns()[0][1].startswith("Summarize our chat “Hello”")
        await user.idle()
    assert len(history.chats()) == 2


async def test_a_server_that_cuts_a_reply_has_not_filled_the_context(history):
    engine = FakeEngine(reply("So much", reason="length", prompt_n=38))
    async with chat(engine, history, initial_prompt="Tell me all") as user:
        await user.sees("tokens · Ctrl+G goes on")
        assert "full" not in user.screen()


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


async def test_a_program_whose_files_are_replaced_goes_on(history):
    async def imports_late():
        importlib.import_module("app.screens.gone")

    async with chat(FakeEngine(reply("Yes.")), history) as user:
        await user.idle()
        user.app.run_worker(imports_late())
        await user.sees("⚠ orin-chat's own files have changed since it was started. Start it again.")
        await user.say("Still there?")
        await user.sees("Yes.")


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
        await user.press("ctrl+q")
        await user.sees("This chat is not saved. Ctrl+Q again leaves it, Ctrl+S writes it to a file.")
        assert user.app.session.conversation.way_back().startswith("Not all of this chat is saved: ")
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
    engine = FakeEngine(reply(", three"), start=[STARTED[0], None, READY])
    async with chat(engine, history) as user:
        await user.sees("The reply in “Count” was interrupted · Ctrl+G opens it")
        await user.sees("loading · ")  # which that does not hide
        engine.release()
        await user.until(lambda: "loading · " not in user.screen())
        await user.sees("Ctrl+G opens it")
        await user.press("ctrl+g")
        await user.sees("interrupted · Ctrl+G goes on with it")
        await user.press("ctrl+g")
        await user.sees("One, two, three")
        await user.idle()
        await user.press("ctrl+n")
        await user.until(lambda: not user.turns())
        await user.press("ctrl+g")
        await user.sees("There is no reply to go on with yet")
    assert stored(history, chat_id)[-1] == ("assistant", "One, two, three", True)


async def test_a_prompt_that_was_being_read_at_a_crash_is_offered_again(history):
    async with chat(FakeEngine([PROGRESS, None]), history, initial_prompt="Long one") as user:
        await user.sees("reading the prompt")
        chat_id = history.chats()[0].id
        assert stored(history, chat_id) == [("user", "Long one", False)]
    history._db.execute("UPDATE messages SET writer = 999999999")  # as after a crash
    async with chat(FakeEngine(reply("Yes.")), history) as user:
        await user.sees("The reply in “Long one” was interrupted · Ctrl+G opens it")
        await user.idle()
        await user.press("ctrl+g")
        await user.sees("interrupted before there was a reply · Ctrl+G answers it")
        await user.press("ctrl+g")
        await user.sees("Yes.")
        await user.idle()
    assert stored(history, chat_id) == [("user", "Long one", True), ("assistant", "Yes.", True)]
    async with chat(FakeEngine(), history) as user:
        await user.idle()
        assert "interrupted" not in user.screen()


async def test_esc_gives_the_prompt_that_waits_back(history):
    engine = FakeEngine([*tokens("So far"), None], reply("Never."))
    async with chat(engine, history, initial_prompt="One") as user:
        await user.sees("So far")
        await user.say("Two")
        await user.sees("⏎ next: Two")
        await user.press("escape")
        await user.idle()
        assert user.app.prompt.text == "Two" and len(engine.requests) == 1
        assert user.turns() == [("user", "One"), ("assistant", "So far")]


async def test_a_reply_is_saved_while_it_streams(history, monkeypatch):
    monkeypatch.setattr("app.screens.resuming.DRAFT_S", 0.05)
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

PROGRESS = Prefilling(request_id=0, done=10, total=1000, cached=0)
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


@pytest.mark.parametrize("size", [rarely((120, 40)), (60, 20), (40, 10)])
async def test_what_must_be_seen_is_seen_at_any_size(history, size):
    async with chat(FakeEngine(), history, size=size, initial_prompt="Hi") as user:
        await user.sees("Hello.")
        await user.idle()
        last = user.screen().splitlines()[-1]
        for fact in ("Qwen3", "Q6_K", "CUDA", "tok/s", "%"):
            assert fact in last


async def test_the_prompts_box_is_as_high_as_its_text_after_each_resize(history):
    async with chat(FakeEngine(), history, size=(100, 30)) as user:
        user.app.prompt.insert("a prompt of some words")
        for width, rows in ((20, 2), (100, 1)):
            await user.pilot.resize_terminal(width, 30)
            await user.until(lambda rows=rows: user.app.prompt.size.height == rows)


async def test_a_tiny_terminal_shows_the_chat_and_the_prompt(history):
    async with chat(FakeEngine([*tokens("Hello"), None]), history, size=(30, 8), initial_prompt="Hi") as user:
        await user.sees("Hello")
        assert "CUDA" not in user.screen()
        await user.sees("answering")


async def test_an_empty_wish_for_no_colour_is_none(history, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "")
    async with chat(FakeEngine(STARTED), history) as user:
        await user.sees("Ask anything")
        assert not user.app.no_color
        colours = re.findall("#([0-9a-f]{6})", user.app.export_screenshot())
        assert any(len({colour[:2], colour[2:4], colour[4:]}) > 1 for colour in colours)  # no grey


async def test_without_colour_everything_is_still_said(history, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    engine = FakeEngine([*reply("**So** far `code`")[:-1], DIED])
    async with chat(engine, history, initial_prompt="Hi") as user:
        await user.sees("⚠ The engine process died")
        await user.sees("⚠ the engine does not answer")
        colours = set(re.findall(r"#[0-9a-f]{6}", user.app.export_screenshot()))
        await user.press("ctrl+o")
        await user.sees("open now")
        strips = user.app.screen._compositor.render_strips()
        [chosen] = [strip for strip in strips if "open now" in strip.text]
        assert all(segment.style.reverse for segment in chosen if "open now" in segment.text)
    # The frame's buttons, and the picture's own colours for text and background.
    assert colours <= {"#ff5f57", "#febc2e", "#28c840", "#c5c8c6", "#292929", "#0c0c0c"}, "no grey either"


async def test_code_is_plain_until_its_end_has_arrived(history):
    engine = FakeEngine([*tokens("```python\ndef f(): pass\n"), None, *reply("```\n")[2:]])
    async with chat(engine, history, initial_prompt="Hi") as user:
        await user.sees("def f(): pass")
        assert len(colours_of(user, "def f(): pass")) == 1
        engine.release()
        await user.idle()
        await user.until(lambda: len(colours_of(user, "def f(): pass")) > 1)


def colours_of(user, text: str) -> set[object]:
    """The colours in which a text stands on the screen."""
    strips = user.app.screen._compositor.render_strips()
    [strip] = [strip for strip in strips if text in strip.text]
    words = [segment for segment in strip if segment.text.strip() and segment.text.strip() in text]
    return {segment.style.color for segment in words}


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


async def test_the_chat_of_a_process_that_died_is_offered(history, monkeypatch):
    chat_id = history.new_chat("m")
    history.append(chat_id, Message(role="user", content="Why tides?"))
    history.append(chat_id, Message(role="assistant", content="The Moon."))
    with monkeypatch.context() as dead:
        dead.setattr("os.getpid", lambda: 2**22 + 1)  # above the largest process id
        history.set_open(chat_id)
    async with chat(FakeEngine(), history) as user:
        await user.sees("orin-chat ended in the middle of “Why tides?” · Ctrl+G opens it")
        await user.press("ctrl+g")
        await user.sees("The Moon.")
    async with chat(FakeEngine(), history) as user:
        await user.sees("ready")
        assert "ended in the middle" not in user.screen(), "this one was left in order"
