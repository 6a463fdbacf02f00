"""Tools in the line mode: a call is shown with its arguments and asks, on a terminal only."""

import asyncio
import io

import pytest

from app.lines.line_chat import LineChat
from app.tools.toolbox import Returned
from engine.formats.tools.forms import HERMES
from tests.app.chat.test_tool_use import READ, called
from tests.app.fake_engine import FakeEngine, reply
from tests.app.lines.test_line_chat import Script
from tests.app.tools.fake_toolbox import FakeToolbox


@pytest.fixture
def chat(history, monkeypatch):
    monkeypatch.setenv("COLUMNS", "500")

    async def chat(*lines, is_terminal=True):
        box = FakeToolbox(lambda *_: Returned("a text"))
        out = io.StringIO()
        line_chat = LineChat(
            FakeEngine(called(READ, text="Let me see."), reply("It has a text.")),
            history,
            Script(*lines, is_terminal=is_terminal),
            out,
            io.StringIO(),
            tools=box,
        )
        line_chat.session.tools.form = lambda: HERMES
        await asyncio.wait_for(line_chat.run(), 60)
        return out.getvalue(), box

    return chat


async def test_a_call_asks_and_runs(chat):
    out, box = await chat("What is in it?", "y", "/mcp")
    assert 'The model calls files.read with\n{\n "path": "a.txt"\n}' in out
    assert "Let me see." in out and "<tool_call>" not in out
    assert '[files.read {"path": "a.txt"} · 6 characters]' in out and "It has a text." in out
    assert "files: 2 tools\n  files.read  Reads a file" in out and len(box.called) == 1


@pytest.mark.parametrize(("lines", "is_terminal"), [(("Read", "what?"), True), (("Read", "y"), False)])
async def test_whatever_else_is_answered_does_not_run(chat, lines, is_terminal):
    out, box = await chat(*lines, is_terminal=is_terminal)
    assert not box.called and "· not allowed]" in out
