"""The line mode, with a synthetic engine behind it and a script instead of a terminal."""

import asyncio
import io
import os
import signal

import pytest
from msgspec.structs import replace

from app.chat.commands import commands
from app.chat.history import History
from app.chat.settings import Settings, last_model
from app.lines.line_chat import LineChat
from app.lines.other_models import OtherModels
from engine.errors import UsageError
from engine.protocol.events import EngineOptions, Failed
from engine.system.invocation import call
from presets import GUIDE
from tests import synthetic
from tests.app.fake_engine import DIED, READY, TOO_LONG, FakeEngine, reply
from tests.generated_model import write


class Script:
    """Gives lines one after the other; what is callable is called, for what happens in between."""

    def __init__(self, *lines, is_terminal=False):
        self.lines = list(lines)
        self.is_terminal = is_terminal
        self.drafts = []

    async def read(self, draft):
        self.drafts.append(draft)
        while self.lines:
            line = self.lines.pop(0)
            if not callable(line):
                return line
            line()
        raise EOFError


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch):
    """Lines are not broken, so that they can be compared."""
    monkeypatch.setenv("COLUMNS", "500")


@pytest.fixture
def history():
    history = History()
    yield history
    history.close()


@pytest.fixture
def chat(history):
    """Runs lines through a chat: the chat, its exit code, what it printed, what it complained of."""

    async def chat(*lines, chat_id=None, system="", is_terminal=False, **behaviour):
        behaviour = {"rate": 0, "load_s": 0, "prefill_s": 0, "text": "Yes.\n", "tokens": 2} | behaviour
        out, messages = io.StringIO(), io.StringIO()
        script = Script(*lines, is_terminal=is_terminal)
        chat = LineChat(
            synthetic.engine(**behaviour), history, script, out, messages, system=system, chat_id=chat_id
        )
        chat.code = await asyncio.wait_for(chat.run(), 60)
        chat.out, chat.err, chat.drafts = out.getvalue(), messages.getvalue(), script.drafts
        return chat

    return chat


def contents(history, chat_id=1):
    return [(stored.message.role, stored.message.content) for stored in history.messages(chat_id)]


async def test_a_chat_is_answered_and_kept(chat, history):
    c = await chat("Is it?", "", "Really?")
    assert (c.code, c.err) == (0, "")
    assert c.out.count("Yes.\n[prompt ") == 2
    assert contents(history) == [
        ("user", "Is it?"),
        ("assistant", "Yes.\n"),
        ("user", "Really?"),
        ("assistant", "Yes.\n"),
    ]
    assert all(stored.finished for stored in history.messages(1))


async def test_nothing_from_the_model_steers_the_terminal(chat):
    c = await chat("x", "/model", "/chats", text="\x1b[2J\x9b\x07.", name="\x1b]0;x\x07")
    assert "[2J." in c.out
    assert not set(c.out) & {"\x1b", "\x07", "\x9b"}


async def test_regenerate_replaces_the_reply(chat, history):
    await chat("Is it?", "/regenerate")
    assert contents(history) == [("user", "Is it?"), ("assistant", "Yes.\n")]


async def test_the_reply_stays_where_another_one_fails(history):
    out, messages = io.StringIO(), io.StringIO()
    engine = FakeEngine(reply("First."), [DIED])
    code = await LineChat(engine, history, Script("Is it?", "/regenerate"), out, messages).run()
    assert code == 0 and "the earlier reply stays" in messages.getvalue()
    assert contents(history) == [("user", "Is it?"), ("assistant", "First.")]


async def test_edit_brings_the_message_back_and_replaces_it(chat, history):
    c = await chat("Is it?", "/edit", "Was it?")
    assert c.drafts[2] == "Is it?"
    assert contents(history) == [("user", "Was it?"), ("assistant", "Yes.\n")]


async def test_a_past_chat_goes_on(chat, history):
    await chat("Is it?", "/new", "Other.")
    c = await chat("And now?", "/chats", "/open 2", chat_id=1)
    assert "> Is it?\nYes.\n" in c.out and "2  20" in c.out and "Other." in c.out
    assert [role for role, _ in contents(history)] == ["user", "assistant"] * 2
    with pytest.raises(UsageError, match="no chat 7"):
        await chat(chat_id=7)


async def test_a_past_chat_is_deleted_after_a_question(chat, history):
    await chat("Is it?", "/new", "Other.")
    c = await chat("/delete 1", "no", "/delete 2", "y", "/delete 7", "/delete", chat_id=1)
    assert [summary.id for summary in history.chats()] == [1]
    assert "Delete “Is it?” for good?" in c.out and "It stays." in c.out
    assert "no chat 7" in c.err and "/delete needs the number" in c.err
    await chat("/delete 1", "y", "A new one.", chat_id=1)
    assert [summary.title for summary in history.chats()] == ["A new one."]


async def test_continue_goes_on_with_the_reply_or_in_a_new_chat_with_the_latest(history):
    async def lines(engine, *lines):
        out, messages = io.StringIO(), io.StringIO()
        assert await LineChat(engine, history, Script(*lines), out, messages).run() == 0
        return out.getvalue(), messages.getvalue()

    assert "no chat to go on with" in (await lines(FakeEngine(), "/continue"))[1]
    engine = FakeEngine(reply("One,"), reply(" two."))
    await lines(engine, "Count.", "/continue")
    assert contents(history) == [("user", "Count."), ("assistant", "One, two.")]
    assert engine.prompts()[1] == [("user", "Count."), ("assistant", "One,")]
    engine = FakeEngine(reply("Three."))
    out, _ = await lines(engine, "/continue", "And now?")
    assert "> Count.\nOne, two." in out and contents(history)[-1] == ("assistant", "Three.")
    await lines(FakeEngine([TOO_LONG], reply("Yes.")), "Is it?", "/continue")
    assert contents(history, 2) == [("user", "Is it?"), ("assistant", "Yes.")], "a prompt without a reply"


async def test_a_full_context_has_ways_on(history):
    full = reply("So much", reason="length", prompt_n=8190)
    engine = FakeEngine(
        reply("Yes."), full, reply(" more."), reply("A greeting."), [TOO_LONG], reply("Well.")
    )
    out, messages = io.StringIO(), io.StringIO()
    lines = ("Hello", "Tell me all", "/shorten", "/summary", "Long", "/shorten", "/shorten")
    assert await LineChat(engine, history, Script(*lines), out, messages).run() == 0
    said = messages.getvalue()
    assert said.count("/summary begins a new chat with a summary, /shorten leaves out") == 2
    assert "2 turns left out" in said and "no older turns" in said
    assert contents(history)[-1] == ("assistant", "So much more.")
    assert contents(history, 2)[1:] == [
        ("assistant", "A greeting."),
        ("user", "Long"),
        ("assistant", "Well."),
    ]
    assert "A new chat.\n> Summarize our chat “Hello”" in out.getvalue()


async def test_a_system_prompt_begins_a_new_chat(chat, history):
    await chat("Is it?", "/system Be brief.", "Is it?", "/system none", "Is it?")
    assert contents(history, 2)[0] == ("system", "Be brief.")
    assert [role for role, _ in contents(history, 3)] == ["user", "assistant"]


async def test_set_changes_the_sampling_within_its_range(chat):
    c = await chat("/set temperature 0.25", "/set top-k 0", "/set seed 7", "/set max_tokens 9")
    assert (
        c.session.sampling.temperature,
        c.session.sampling.top_k,
        c.session.sampling.seed,
        c.session.max_tokens,
    ) == (0.25, 0, 7, 9)
    assert c.err == "" and "temperature 0.25" in c.out
    c = await chat("/set seed 7", "/set seed none", "/set max_tokens 9", "/set max_tokens none")
    assert (c.session.sampling.seed, c.session.max_tokens, c.err) == (None, None, "")
    c = await chat("/set temperature -1", "/set top-k x", "/set seed", "/set max_tokens 0", "/set heat 3")
    assert c.session.sampling.temperature == 0.7 and c.session.max_tokens is None
    assert c.err.count("\n") == 5


async def test_an_effort_without_effect_is_said(chat):
    c = await chat("/set effort high", "/set effort much", "/set effort none")
    assert c.out.count("The chat template of Synthetic 0.5B reads no effort") == 1
    assert "effort high" in c.out and "'much' is no value for effort" in c.err
    assert c.session.sampling.effort is None


async def test_what_the_model_thought_can_be_read(chat):
    c = await chat(
        "/thoughts", "Is it?", "/thoughts", "/think off", "Is it?", "/thoughts", thinking=3, tokens=7
    )
    assert "There is no reply yet." in c.err
    assert c.out.count("The question") == 1 and c.out.count("without thoughts") == 1


async def test_thinking_is_asked_for_or_not(chat, history):
    await chat("Is it?", "/think off", "Is it?", "/think maybe", thinking=3, tokens=7)
    thoughts = [stored.message.thinking for stored in history.messages(1)]
    assert thoughts[1] and not thoughts[3]
    assert contents(history)[1] == ("assistant", "Yes.\n")


async def test_a_list_of_no_chats_says_so(chat):
    c = await chat("/chats", "hello", "/chats nowhere")
    assert "No chats yet." in c.out and "No message has these words." in c.out


async def test_save_writes_a_new_file(chat, home):
    c = await chat(
        "Is it?", f"/save {home}/chat.md", f"/save {home}/chat.md", f"/save {home}/no/chat.md", "/save"
    )
    text = (home / "chat.md").read_text()
    assert text.startswith("# Is it?\n") and "Yes." in text
    assert c.err.count("\n") == 3


async def test_a_mistaken_command_is_not_sent_and_not_lost(chat, history):
    c = await chat("/frob is a word", "/regenerate", "/edit", "/stats", "/open x")
    assert c.drafts[1] == " /frob is a word"
    assert c.err.count("\n") == 4
    assert history.chats() == []


async def test_leaving_names_the_way_back_on_a_terminal(chat, history):
    c = await chat("Is it?", is_terminal=True)
    assert c.out.endswith(f"\n{call('--plain --continue')} goes on with this chat.\n")
    await chat("Another one.")
    c = await chat(chat_id=1, is_terminal=True)  # read again, but not changed
    assert c.out.endswith(f"\n{call('--plain --chat 1')} goes on with this chat.\n")
    assert "goes on" not in (await chat(is_terminal=True)).out, "an empty chat"
    assert "goes on" not in (await chat("Is it?")).out, "a program reads it"


async def test_words_are_not_broken_on_a_terminal(chat, monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    text = "Press Ctrl+J or Alt+Enter: it begins a new line."
    wrapped = "Press Ctrl+J or Alt+Enter: it\nbegins a new line."
    c = await chat("How?", "/new", "/open 1", text=text, tokens=20, is_terminal=True)
    assert c.out.count(wrapped) == 2, "the reply, and again when the chat is opened"
    assert all(len(line) <= 30 for line in c.out.splitlines())
    assert text in (await chat("How?", text=text, tokens=20)).out, "a file gets whole lines"


async def test_help_lists_every_command(chat):
    c = await chat("/help", "/quit", "never read")
    assert all(f"/{name} " in c.out for name in commands())
    assert "never" not in c.out
    assert all(meaning and "\n" not in meaning for meaning in commands().values())


async def test_ctrl_c_stops_the_reply_and_not_the_chat(chat, history):
    def interrupt_soon():
        asyncio.get_running_loop().call_later(0.4, os.kill, os.getpid(), signal.SIGINT)

    c = await chat(interrupt_soon, "Is it?", "/stats", rate=50, tokens=5000)
    assert c.code == 0 and c.out.count("stopped") == 2
    (_, (role, content)) = contents(history)
    assert role == "assistant" and content.startswith("Yes.\nYes.\n")


async def test_the_engine_dies_and_the_chat_does_not(chat, history):
    c = await chat("Is it?", "Is it?", "/stats", text="One two three four.", rate=50, die_at=2, tokens=4)
    assert c.code == 0 and c.err.count("SIGKILL") == c.err.count("next message starts the engine again") == 2
    assert c.out.count("ready in") == 2
    assert [content for _, content in contents(history)] == ["Is it?", "One two", "Is it?", "One two"]
    assert not history.messages(1)[1].finished


async def test_a_failure_leaves_the_message_where_it_can_be_repeated(chat, history):
    c = await chat("Is it?", failure="ContextFullError", tokens=3)
    assert c.code == 0 and "ContextFullError" in c.err
    assert contents(history) == [("user", "Is it?")]


async def test_a_model_that_does_not_load_ends_the_chat(chat):
    c = await chat("never read", load_failure="ModelFileError")
    assert c.code == 3 and c.err.count("\n") == 1


BROKEN = Failed(kind="model", message="first.gguf is damaged.", hint="Download it again.")


@pytest.fixture
def models(history, home, monkeypatch):
    """Chats with an engine whose file a user may replace by others in their home folder: these answer "Other."."""
    write(home / "other.gguf", context=512)
    made = []

    def make(options, **_):
        made.append((options, FakeEngine(reply("Other."))))
        return made[-1][1]

    monkeypatch.setattr("engine.protocol.client.LocalEngine", make)

    async def chat(*lines, engine, is_terminal=True, options=None):
        options = options or EngineOptions(model_path="first.gguf", context_length=2048)
        out, messages = io.StringIO(), io.StringIO()
        script = Script(*lines, is_terminal=is_terminal)
        chat = LineChat(engine, history, script, out, messages, models=OtherModels(options, Settings()))
        chat.code = await asyncio.wait_for(chat.run(), 60)
        chat.out, chat.err, chat.made = out.getvalue(), messages.getvalue(), made
        return chat

    return chat


async def test_a_model_that_does_not_load_can_be_replaced_on_a_terminal(models, home, history):
    c = await models(
        "Hello", f"/model {home}/other.gguf", "Hello", engine=FakeEngine([BROKEN], start=[BROKEN])
    )
    assert c.code == 0 and contents(history)[-1] == ("assistant", "Other.")
    assert c.err.splitlines()[0] == (
        "orin-chat: first.gguf is damaged. Download it again. /model NAME goes on with another model, "
        "/model orin-guide with the one that is built in."
    )
    c = await models("never read", engine=FakeEngine(start=[BROKEN]), is_terminal=False)
    assert c.code == 3 and "/model" not in c.err, "a program cannot choose"
    gone = Failed(kind="backend", message="There is no GPU.")
    c = await models("never read", engine=FakeEngine(start=[gone]))
    assert c.code == 4 and "/model" not in c.err, "another model would not help"


async def test_the_conversation_goes_on_with_another_model(models, home, history):
    first = FakeEngine(reply("First."))
    c = await models("Hello", f"/model {home}/other.gguf", "And now?", "/model", engine=first)
    assert (c.code, first.closed) == (0, 1)
    [(options, engine)] = c.made
    # At most as long as it was trained for.
    assert (options.model_path, options.context_at_most) == (f"{home}/other.gguf", True)
    assert engine.prompts() == [[("user", "Hello"), ("assistant", "First."), ("user", "And now?")]]
    assert last_model() == f"{home}/other.gguf"
    assert "On this machine: " in c.out and GUIDE in c.out


async def test_a_chat_says_which_adapters_it_began_with(models, history):
    adapted = replace(READY, model=replace(READY.model, adapters=("style", "short × 0.5")))
    options = EngineOptions(model_path="first.gguf", lora="/my style.gguf:1,/short.gguf:0.5")
    c = await models("Hello", engine=FakeEngine(reply("Yes."), start=[adapted]), options=options)
    assert f"{call('--plain ')}--lora '/my style.gguf,/short.gguf:0.5' --continue goes on" in c.out
    said = "This chat began with Qwen3 0.6B + style + short × 0.5: --lora FILE names its adapters."
    assert said in " ".join((await models("/open 1", engine=FakeEngine())).err.split())
    assert "began with" not in (await models("/open 1", engine=FakeEngine(start=[adapted]))).err


async def test_the_context_is_changed_in_a_chat(models, home, history):
    first = FakeEngine(reply("First."))
    lines = (
        "Hello",
        f"/model {home}/other.gguf",
        "/set context max",
        "/set kv q8_0",
        "And now?",
        "/set context long",
        "/set kv q9",
        "/set",
    )
    c = await models(*lines, engine=first)
    *_, (options, engine) = c.made
    assert (options.model_path, options.context_length, options.kv) == (f"{home}/other.gguf", "max", "q8_0")
    assert engine.prompts() == [[("user", "Hello"), ("assistant", "First."), ("user", "And now?")]]
    assert "Qwen3 0.6B with context max answers now" in c.err and "  context max\n  kv q8_0\n" in c.out
    assert "'long' is no value for context" in c.err and "'q9' is no value for kv" in c.err


async def test_a_model_that_cannot_be_had_changes_nothing(models, home, history):
    (home / "none.gguf").write_bytes(b"no model")
    first = FakeEngine(reply("First."))
    c = await models("/model nosuchname", f"/model {home}/none.gguf", "Hello", engine=first)
    assert c.code == 0 and not c.made and last_model() == ""
    assert "'nosuchname'" in c.err and "none.gguf" in c.err and c.err.count("\n") == 2
    assert contents(history)[-1] == ("assistant", "First.")


async def test_a_model_of_a_server_stays(chat):
    assert "no other models" in (await chat("/model qwen3:0.6b")).err
    assert "set where it runs" in (await chat("/set context 64")).err


async def test_sigterm_ends_the_chat(chat, history):
    def terminate_soon():
        asyncio.get_running_loop().call_later(0.4, os.kill, os.getpid(), signal.SIGTERM)

    c = await chat(terminate_soon, "Is it?", "never read", rate=50, tokens=5000)
    assert c.code == 143
    assert contents(history)[1][1].startswith("Yes.\n")


async def test_without_a_history_the_chat_goes_on(home):
    data = home / ".local" / "share"
    data.parent.mkdir()
    data.write_text("a file where a folder should be")
    out, messages = io.StringIO(), io.StringIO()
    engine = synthetic.engine(rate=0, load_s=0, prefill_s=0, text="Yes.\n", tokens=2)
    code = await LineChat(engine, History.open(), Script("Is it?"), out, messages).run()
    assert code == 0 and "Yes." in out.getvalue() and messages.getvalue().count("\n") == 1


async def test_a_chat_is_forked(chat, history):
    c = await chat("One?", "Two?", "/fork", "Other?")
    assert c.drafts[3] == "Two?" and "A new chat with 2 messages of the other." in c.out
    assert [text for _, text in contents(history, 2)] == ["One?", "Yes.\n", "Other?", "Yes.\n"]
    assert len(contents(history, 1)) == 4
