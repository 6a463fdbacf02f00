"""Twenty seconds of the real chat as an animated picture: python -m tools.recording FILE.svg [--model FILE]

A question is typed and answered, F6 goes to the next backend, the answer comes again, F9 shows the kernels whole, and
F10 has llama.cpp answer beside. The engine, its speed and every figure are this machine's. Waits in which nothing
changes are cut to a second.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from textual._compositor import Compositor
from textual.pilot import Pilot

from app.chat.configuration import configure
from app.chat.history import History
from app.chat.settings import Settings
from app.screens.chat_app import ChatApp
from app.screens.engine_setup import EngineSetup
from engine.client import LocalEngine
from engine.events import Sampling
from presets import guide_path
from presets.loader import find_preset
from tools.recording.animation import Frame, animated_svg, without_waits

FRAME_S = 0.1
TYPING_S = 0.05
LONGEST_WAIT_S = 1.0
WAIT_S = 240.0


class Recorder:
    """Drives the chat by keys, and keeps a frame whenever the screen has changed."""

    def __init__(self, app: ChatApp, pilot: Pilot[None]) -> None:
        self.app, self.pilot = app, pilot
        self.frames: list[Frame] = []
        self._began = time.monotonic()

    async def watch(self) -> None:
        """Keeps frames until it is cancelled."""
        while True:
            compositor: Compositor = self.app.screen._compositor
            rows = tuple(compositor.render_strips())
            if not self.frames or [list(row) for row in rows] != [list(row) for row in self.frames[-1].rows]:
                self.frames.append(Frame(time.monotonic() - self._began, rows))
            await asyncio.sleep(FRAME_S)

    async def until(self, holds: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + WAIT_S
        while not holds():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what} did not come: {self.app.column.activity.notice}")
            await asyncio.sleep(0.05)

    async def ask(self, prompt: str) -> None:
        """Types a prompt, sends it, and waits for the end of the reply."""
        for letter in prompt:
            self.app.prompt.insert(letter)
            await asyncio.sleep(TYPING_S)
        await self.pilot.press("enter")
        await asyncio.sleep(0.3)
        await self.until(lambda: not self.app.session.is_busy, "the end of the reply")
        await asyncio.sleep(1.5)

    async def press(self, key: str, pause_s: float) -> None:
        await self.pilot.press(key)
        await asyncio.sleep(pause_s)


async def record(
    model: str, presets: list[str], size: tuple[int, int], questions: list[str]
) -> tuple[list[Frame], ChatApp]:
    settings = Settings()
    options = configure(model, settings, find_preset(presets[0])).engine
    setup = EngineSetup(options, presets[0], settings=settings, make=LocalEngine)
    app = ChatApp(LocalEngine(options), History(":memory:"), setup=setup, sampling=Sampling(temperature=0))
    async with app.run_test(size=size) as pilot:
        app.prompt.cursor_blink = False
        recorder = Recorder(app, pilot)
        await recorder.until(lambda: app.session.status.is_ready, "the engine")
        watching = asyncio.ensure_future(recorder.watch())
        await asyncio.sleep(0.5)
        await recorder.ask(questions[0])
        for question in questions[1 : len(presets)]:
            before = app.session.engine
            await recorder.press("f6", 0.3)
            await recorder.until(lambda before=before: app.session.engine is not before, "the next backend")  # type: ignore[misc]
            await recorder.ask(question)
        for _ in range(2):
            await recorder.press("f9", 1.5)
        await recorder.press("escape", 0.5)
        await recorder.press("f10", 0.5)
        await recorder.ask(questions[-1])
        await asyncio.sleep(2.0)
        watching.cancel()
        return recorder.frames, app


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--model", default=str(guide_path()))
    parser.add_argument("--presets", default="cpu,cuda", help="the first, and where F6 leads to")
    parser.add_argument("--size", default="120x36")
    questions = ["What is the KV cache?", "Why is decode bound by memory?", "What is the roofline?"]
    parser.add_argument("--questions", nargs="*", default=questions)
    given = parser.parse_args()
    columns, rows = map(int, given.size.split("x"))
    with tempfile.TemporaryDirectory() as home:
        for kind in ("STATE", "DATA", "CONFIG"):
            os.environ[f"XDG_{kind}_HOME"] = f"{home}/{kind}"
        recording = record(given.model, given.presets.split(","), (columns, rows), given.questions)
        frames, app = asyncio.run(recording)
    frames = without_waits(frames, LONGEST_WAIT_S)
    theme = app.current_theme
    svg = animated_svg(
        frames,
        frames[-1].at_s + 2.0,
        foreground=theme.foreground or "#e0e0e0",
        background=theme.background or "#121212",
    )
    given.file.write_text(svg, "utf-8")
    print(f"{given.file}: {len(frames)} frames, {frames[-1].at_s:.1f} s, {len(svg) / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
