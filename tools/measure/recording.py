"""Twenty seconds of the real chat as an animated picture:

    python -m tools.measure recording FILE.svg [--model FILE]

A question is typed and answered, F6 goes to the next backend, the answer comes again, F9 shows the kernels whole, and
F10 has llama.cpp answer beside. The engine, its speed and every figure are this machine's. Waits in which nothing
changes are cut to a second.
"""

import argparse
import asyncio
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from textual._compositor import Compositor
from textual.theme import Theme

from app.chat.configuration import configure
from app.chat.history import History
from app.chat.settings import Settings
from app.screens.chat_app import ChatApp
from app.screens.engine_setup import EngineSetup
from engine.protocol.client import LocalEngine
from engine.protocol.events import Sampling
from presets import guide_path
from presets.loader import find_preset
from tools.measure.animation import Frame, animated_svg, without_waits
from tools.measure.driven_chat import DrivenChat, keep_apart

FRAME_S = 0.1
TYPING_S = 0.05
LONGEST_WAIT_S = 1.0
WAIT_S = 240.0


def chat_with(model: str, preset: str) -> ChatApp:
    """The chat as the command line would open it, without chance."""
    settings = Settings()
    options = configure(model, settings, find_preset(preset)).engine
    setup = EngineSetup(options, preset, settings=settings, make=LocalEngine)
    return ChatApp(LocalEngine(options), History(":memory:"), setup=setup, sampling=Sampling(temperature=0))


async def watch(chat: DrivenChat, frames: list[Frame]) -> None:
    """Keeps a frame whenever the screen has changed, until it is cancelled."""
    while True:
        compositor: Compositor = chat.app.screen._compositor
        rows = tuple(compositor.render_strips())
        if not frames or [list(row) for row in rows] != [list(row) for row in frames[-1].rows]:
            frames.append(Frame(time.monotonic() - chat.began_s, rows))
        await asyncio.sleep(FRAME_S)


async def record(
    model: str, presets: list[str], size: tuple[int, int], questions: list[str]
) -> tuple[list[Frame], Theme]:
    app, frames = chat_with(model, presets[0]), list[Frame]()
    async with app.run_test(size=size) as pilot:
        chat = DrivenChat(app, pilot, WAIT_S)

        async def ask(question: str) -> None:
            await chat.ask(question, TYPING_S)
            await chat.is_idle()
            await asyncio.sleep(1.5)

        await chat.until(lambda: app.session.status.is_ready, "the engine")
        watching = asyncio.ensure_future(watch(chat, frames))
        await asyncio.sleep(0.5)
        await ask(questions[0])
        for question in questions[1 : len(presets)]:
            before = app.session.engine
            await chat.press("f6", pause_s=0.3)
            await chat.until(lambda before=before: app.session.engine is not before, "the next backend")  # type: ignore[misc]
            await ask(question)
        for key, pause_s in (("f9", 1.5), ("f9", 1.5), ("escape", 0.5), ("f10", 0.5)):
            await chat.press(key, pause_s=pause_s)
        await ask(questions[-1])
        await asyncio.sleep(2.0)
        watching.cancel()
        return frames, app.current_theme


def write_recording(path: Path, frames: Sequence[Frame], theme: Theme) -> None:
    """Writes the animated picture, without long waits."""
    frames = without_waits(frames, LONGEST_WAIT_S)
    svg = animated_svg(
        frames,
        frames[-1].at_s + 2.0,
        foreground=theme.foreground or "#e0e0e0",
        background=theme.background or "#121212",
    )
    path.write_text(svg, "utf-8")
    print(f"{path}: {len(frames)} frames, {frames[-1].at_s:.1f} s, {len(svg) / 1e3:.0f} kB")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path)
    parser.add_argument("--model", default=str(guide_path()))
    parser.add_argument("--presets", default="cpu,cuda", help="the first, and where F6 leads to")
    parser.add_argument("--size", default="120x36")
    questions = ["What is the KV cache?", "Why is decode bound by memory?", "What is the roofline?"]
    parser.add_argument("--questions", nargs="*", default=questions)


def run(given: argparse.Namespace) -> None:
    columns, rows = map(int, given.size.split("x"))
    with tempfile.TemporaryDirectory() as home:
        keep_apart(Path(home))
        recording = record(given.model, given.presets.split(","), (columns, rows), given.questions)
        frames, theme = asyncio.run(recording)
    write_recording(given.file, frames, theme)
