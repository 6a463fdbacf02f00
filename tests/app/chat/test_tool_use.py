"""Calls of tools in a chat: who may run them, what the model gets, and what is kept."""

from __future__ import annotations

import asyncio
import json
import threading
from unittest.mock import AsyncMock

import pytest

from app.chat import tool_use
from app.chat.export import to_markdown
from app.chat.history import History
from app.chat.session import Session
from app.chat.tool_use import Permissions
from app.chat.view import View
from app.cli.oneshot_tools import OneShotTools
from app.tools.toolbox import Returned
from engine.formats.tools.forms import GRANITE, HARMONY, HERMES, LLAMA, MISTRAL, MISTRAL_ARGS, QWEN_XML
from engine.protocol.events import Chat, Failed, Generate, Message, Token
from tests.app.fake_engine import FakeEngine, reply
from tests.app.tools.fake_toolbox import FakeToolbox
from tests.waiting import LIMIT_S, until


def called(*calls: tuple[str, dict], text: str = "") -> list:
    """The events of a reply that calls tools, as Hermes writes that."""
    lines = (json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls)
    return reply(text + "".join(f"<tool_call>\n{line}\n</tool_call>\n" for line in lines))


READ = "files.read", {"path": "a.txt"}


class Answering(View):
    """Gives one answer after the other (None: it waits for ever)."""

    def __init__(self, *answers: str | None) -> None:
        self.answers, self.asked, self.noticed = list(answers), list[str](), list[str]()

    def notice(self, text, *, warning=False):
        self.noticed += [text] if warning else []

    async def may_run(self, call):
        self.asked.append(call.name)
        if (answer := self.answers.pop(0)) is None:
            await asyncio.Event().wait()
        return answer


@pytest.fixture
def begin(monkeypatch):
    kept: dict[str, str] = {}
    monkeypatch.setattr(tool_use, "remember", kept.__setitem__)
    monkeypatch.setattr(tool_use, "remembered", lambda key: kept.get(key, ""))
    tasks: list[asyncio.Task] = []

    def begin(engine, view, box=None, history=None, **options) -> Session:
        box = box or FakeToolbox(lambda name, arguments: Returned(f"{name} says hi"))
        session = Session(
            engine,
            history or History(":memory:"),
            view,
            spawn=lambda work: tasks.append(asyncio.ensure_future(work)),
            tools=box,
            **options,
        )
        session.tools.form = lambda: HERMES
        session.start()
        return session

    yield begin
    for task in tasks:
        task.cancel()


async def say(session: Session, text: str) -> None:
    await until(lambda: not session.is_busy)
    await session.send(text)
    await until(lambda: not session.is_busy)


def messages(engine: FakeEngine) -> list[tuple[str, str]]:
    return engine.prompts()[-1]


async def test_a_call_asks_runs_and_the_model_goes_on_with_its_result(begin):
    engine, view = FakeEngine(called(READ, text="Let me see. "), reply("It says hi.")), Answering("once")
    session = begin(engine, view)
    await say(session, "What is in a.txt?")
    offered = json.loads(engine.requests[0].prompt.tools)
    assert [tool["function"]["name"] for tool in offered] == ["files.read", "files.write"]
    assert view.asked == ["files.read"]
    _, call, answer = session.conversation.turns
    assert (call.content, answer.content) == ("Let me see. ", "It says hi.")
    assert session.tools.toolbox.called == [("files.read", '{"path": "a.txt"}')]
    last = engine.requests[-1].prompt.messages
    assert [(message.role, message.content) for message in last[1:]] == [
        ("assistant", "Let me see. "),
        ("tool", "files.read says hi"),
    ]
    assert last[1].tool_calls[0].id == last[2].tool_call_id and last[2].name == "files.read"


async def test_what_is_not_allowed_does_not_run_and_the_model_hears_of_it(begin):
    engine = FakeEngine(called(READ, ("files.rm", {})), reply("A pity."))
    session = begin(engine, Answering("no"))
    await say(session, "Read it")
    assert session.tools.toolbox.called == []
    assert [content for role, content in messages(engine) if role == "tool"] == [
        tool_use.REFUSED,
        "There is no tool files.rm.",
    ]


@pytest.mark.parametrize(
    ("answers", "options", "asked"),
    [
        (["once", "once", "once"], {}, 3),
        (["chat", "once"], {}, 2),  # a new chat asks again
        (["always"], {}, 1),
        ([], {"allowed": ["files"]}, 0),
        ([], {"allowed": ["files.re*"]}, 0),
        (["once", "once", "once"], {"allowed": ["files.w*", "web"]}, 3),
    ],
)
async def test_who_is_asked_how_often(begin, answers, options, asked):
    rounds = [each for _ in range(3) for each in (called(READ), reply("So."))]
    view = Answering(*answers)
    session = begin(FakeEngine(*rounds), view, **options)
    await say(session, "a")
    await say(session, "b")
    await session.open(None)
    await say(session, "c")
    assert len(view.asked) == asked and len(session.tools.toolbox.called) == 3


async def test_always_holds_for_the_next_run_but_not_for_a_changed_tool(begin, monkeypatch):
    first = begin(FakeEngine(called(READ), reply("So.")), Answering("always"))
    await say(first, "a")
    second = begin(FakeEngine(called(READ), reply("So.")), view := Answering("no"))
    await say(second, "a")
    assert view.asked == []
    await second.tools.toolbox.start()
    tool = second.tools.toolbox.tools["files.read"]
    assert Permissions().allow(tool)
    object.__setattr__(tool, "definition", "another")
    assert not Permissions().allow(tool)


async def test_calls_in_a_row_end_until_the_user_goes_on(begin, monkeypatch):
    monkeypatch.setattr(tool_use, "MOST_CALLS", 3)
    engine = FakeEngine(called(READ))  # again and again
    session = begin(engine, Answering(), allowed=["all"])
    await say(session, "Read it")
    assert session.conversation.turns[-1].note == "3 calls of tools in a row · Ctrl+G goes on"
    assert len(session.tools.toolbox.called) == 3
    engine.replies = [reply("Enough.")]
    await session.go_on()
    await until(lambda: not session.is_busy)
    assert len(session.tools.toolbox.called) == 4 and session.conversation.turns[-1].content == "Enough."


@pytest.mark.parametrize("waits_for", ["the user", "the tool"])
async def test_stop_ends_a_call_and_go_on_takes_it_up_again(begin, waits_for):
    box = FakeToolbox(None)
    view = Answering(None, "once") if waits_for == "the user" else Answering("once", "once")
    session = begin(FakeEngine(called(READ), reply("So.")), view, box)
    await until(lambda: not session.is_busy)
    await session.send("Read it")
    await until(lambda: box.called or (waits_for == "the user" and view.asked))
    await session.stop()
    await until(lambda: not session.is_busy)
    turn = session.conversation.turns[-1]
    assert turn.note == "stopped · Ctrl+G goes on" and turn.calls[0].state == "open"
    box.answers = lambda *_: Returned("hi")
    await session.go_on()
    await until(lambda: not session.is_busy)
    assert turn.calls[0].result == "hi" and session.conversation.turns[-1].content == "So."


async def test_stop_ends_the_wait_for_how_the_model_writes_calls(begin):
    engine, is_read = FakeEngine(reply("So.")), threading.Event()
    session = begin(engine, Answering())
    session.tools.form = lambda: is_read.wait(LIMIT_S) and HERMES
    await until(lambda: not session.is_busy)
    await session.send("Read it")
    await until(lambda: session.tools.stop() or not session.is_answering)
    await until(lambda: not session.is_busy)
    is_read.set()
    assert not engine.requests and "stopped" in session.conversation.turns[-1].note


async def test_a_chat_that_is_left_ends_its_call(begin):
    box = FakeToolbox(None)
    session = begin(FakeEngine(called(READ)), Answering("once"), box)
    await until(lambda: not session.is_busy)
    await session.send("Read it")
    await until(lambda: box.called)
    await session.open(None)
    assert box.cancelled == 1 and not session.is_answering and not session.conversation.turns


async def test_calls_and_results_survive_a_restart_and_are_exported(begin, tmp_path):
    path = tmp_path / "history.sqlite3"
    engine = FakeEngine(called(READ), reply("It says hi."))
    await say(begin(engine, Answering("once"), history=History(path)), "Read it")
    engine, history = FakeEngine(reply("Again.")), History(path)
    session = begin(engine, Answering(), history=history)
    await session.open(history.chats()[0].id)
    assert session.conversation.turns[1].calls[0].result == "files.read says hi"
    await say(session, "And now?")
    roles = [message.role for message in engine.requests[0].prompt.messages]
    assert roles == ["user", "assistant", "tool", "assistant", "user"]
    document = to_markdown("Title", "Qwen", session.conversation.all_messages())
    assert '<summary>files.read {"path": "a.txt"}</summary>' in document
    assert "files.read says hi" in document and document.count("## Qwen") == 2


async def test_regenerate_replaces_the_reply_with_its_calls(begin):
    engine = FakeEngine(called(READ), reply("One."), reply("Two."))
    session = begin(engine, Answering("once"))
    await say(session, "Read it")
    await session.regenerate()
    await until(lambda: not session.is_busy)
    assert [turn.content for turn in session.conversation.turns] == ["Read it", "Two."]
    await session.show_version(0, -1)
    assert [bool(turn.calls) for turn in session.conversation.turns] == [False, True, False]


async def test_a_long_result_leaves_room_in_the_context(begin):
    engine = FakeEngine(called(READ), reply("Long."))
    session = begin(
        engine, Answering("once"), FakeToolbox(lambda *_: Returned("x" * 150_000, left_out=50_000))
    )
    await say(session, "Read it")
    result = messages(engine)[-1][1]
    assert len(result) < 8192 * 1.6 and result.endswith("[187,712 more characters are left out]")


FAMILIES = {  # what a model of the family writes
    HERMES: '<tool_call>\n{"name": "files.read", "arguments": {"path": "a.txt"}}\n</tool_call>',
    QWEN_XML: "<tool_call>\n<function=files.read>\n<parameter=path>\na.txt\n</parameter>\n</function>\n</tool_call>",
    MISTRAL: '[TOOL_CALLS][{"name": "files.read", "arguments": {"path": "a.txt"}}]',
    MISTRAL_ARGS: '[TOOL_CALLS]files.read[ARGS]{"path": "a.txt"}',
    GRANITE: '<|tool_call|>[{"name": "files.read", "arguments": {"path": "a.txt"}}]',
    LLAMA: '{"name": "files.read", "parameters": {"path": "a.txt"}}',
    HARMONY: ' to=functions.files.read<|message|>{"path": "a.txt"}',
}


@pytest.mark.parametrize("form", FAMILIES)
async def test_every_family_is_understood(begin, form):
    session = begin(FakeEngine(reply(FAMILIES[form]), reply("So.")), Answering("once"))
    session.tools.form = lambda: form
    await say(session, "Read it")
    assert session.tools.toolbox.called == [("files.read", '{"path": "a.txt"}')]
    assert [turn.content for turn in session.conversation.turns[1:]] == ["", "So."]


async def test_text_that_only_begins_like_a_call_is_text(begin):
    engine = FakeEngine(reply("Write <tool_call> and"))
    session = begin(engine, Answering())
    await say(session, "How?")
    assert session.conversation.turns[-1].content == "Write <tool_call> and"


async def test_a_model_with_too_short_a_context_is_offered_none_and_waits_for_none(begin, monkeypatch):
    engine, view, box = FakeEngine(called(READ), called(READ)), Answering(), FakeToolbox()
    monkeypatch.setattr(box, "start", started := AsyncMock())
    session = begin(engine, view, box)
    session.tools.form = lambda: None
    await say(session, "Read it")
    await say(session, "Again")
    assert view.noticed == ["The model in use is offered no tools: its context is too short for them"]
    assert engine.requests[0].prompt.tools == "" and "<tool_call>" in session.conversation.turns[-1].content
    assert not started.called


async def test_a_server_that_does_not_start_is_told_once(begin, monkeypatch):
    box, view = FakeToolbox(), Answering()
    monkeypatch.setattr(box, "start", AsyncMock())
    box.states["files"].problem = "does not start: No such file"
    session = begin(FakeEngine(reply("One."), reply("Two.")), view, box)
    await say(session, "Read it")
    await say(session, "Again")
    assert view.noticed == ["Tools: files does not start: No such file · /mcp again starts what is down"]


@pytest.mark.parametrize(("allowed", "is_run"), [(["all"], True), (["files.write"], False)])
async def test_a_single_answer_runs_what_the_command_line_allows(allowed, is_run, capsys):
    box = FakeToolbox(lambda *_: Returned("hi"))
    tools = tool_use.ToolUse(box, Permissions(allowed), View())
    tools.form = lambda: HERMES
    shown: list = []
    engine = FakeEngine(called(READ), reply("Done."))
    request = Generate(request_id=1, prompt=Chat(messages=(Message(role="user", content="Read it"),)))
    calls: list = []
    assert await OneShotTools(tools, calls.append).answer(engine, request, shown.append) == 0
    assert "".join(event.text for event in shown if isinstance(event, Token)) == "Done."
    assert bool(box.called) is is_run and calls[0].state == ("returned" if is_run else "refused")
    engine = FakeEngine([Failed(kind="context", message="full", request_id=1)])
    assert await OneShotTools(tools, calls.append).answer(engine, request, shown.append) == 5
