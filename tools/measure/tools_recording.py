"""A file, a call of a tool and a version in the chat, as an animated picture:

    python -m tools.measure tools_recording FILE.svg

A script answers in place of a model, and says so in the status line. The file, the MCP server, its process, the
question whether it may run, and the history are real.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
from pathlib import Path

from msgspec.structs import replace

from app.chat.history import History
from app.screens.chat_app import ChatApp
from app.tools.messages import Server
from app.tools.toolbox import Toolbox
from engine.formats.tools.forms import HERMES
from engine.protocol.events import ModelInfo
from tests.app.fake_engine import READY, FakeEngine, reply
from tests.paths import ROOT
from tools.measure.animation import Frame
from tools.measure.driven_chat import DrivenChat, keep_apart
from tools.measure.recording import TYPING_S, WAIT_S, watch, write_recording

NOTES = "Crates in the shed: 18 of apples, 24 of pears.\n"
QUESTION = "How many crates are in @notes.txt?"
CALL = json.dumps({"name": "calc.add", "arguments": {"a": 18, "b": 24}})
ANSWERS = "There are **42 crates**: 18 of apples and 24 of pears.", "42 crates in all."
SIZE = 100, 28


def _engine() -> FakeEngine:
    model = ModelInfo(
        name="a script, no model", architecture="", quantization="", parameters=0, file_bytes=0,
        trained_context=8192, thinks=False,
    )  # fmt: skip
    ready = replace(READY, model=model, backend="", device_name="")
    texts = f"The notes have two figures. I add them.\n<tool_call>{CALL}</tool_call>", *ANSWERS
    return FakeEngine(*(reply(text, predicted_ms=0.0) for text in texts), start=(ready,), token_s=0.05)


async def _record(frames: list[Frame]) -> ChatApp:
    calc = Server(command=sys.executable, args=(str(ROOT / "tests/app/tools/server.py"),), folder=str(ROOT))
    app = ChatApp(_engine(), History(":memory:"), tools=Toolbox({"calc": calc}))
    async with app.run_test(size=SIZE) as pilot:
        app.session.tools.form = lambda: HERMES
        chat = DrivenChat(app, pilot, WAIT_S)
        await chat.until(lambda: app.session.status.is_ready, "the engine")
        watching = asyncio.ensure_future(watch(chat, frames))
        await asyncio.sleep(0.5)
        await chat.ask(QUESTION, TYPING_S)
        await chat.until(lambda: app.column.question.has_class("-asking"), "the question")
        await asyncio.sleep(2.5)
        await chat.press("alt+y")
        await chat.is_idle()
        await asyncio.sleep(1.5)
        for key, pause_s in (("ctrl+t", 2.0), ("ctrl+t", 1.0), ("ctrl+r", 0.5)):
            await chat.press(key, pause_s=pause_s)
            await asyncio.sleep(pause_s)
        await chat.is_idle()
        await asyncio.sleep(1.5)
        for key in ("alt+left", "alt+right"):
            await chat.press(key)
            await asyncio.sleep(2.0)
        watching.cancel()
    return app


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path)


def run(given: argparse.Namespace) -> None:
    target, frames = given.file.absolute(), list[Frame]()
    with tempfile.TemporaryDirectory() as home:
        keep_apart(Path(home))
        os.chdir(home)
        Path("notes.txt").write_text(NOTES, "utf-8")
        theme = asyncio.run(_record(frames)).current_theme
    write_recording(target, frames, theme)
