"""Goes over from preset to preset in mid-conversation, in the real full screen with the real engine, and takes a
picture at each stage:

    python -m tools.measure recorded_run MODEL FOLDER [--presets cpu,cuda,cuda-beam2]

What the dashboard says at each stage is printed too. Settings, history and what was measured are those of
FOLDER/home, so that a run starts as on a new machine; kernels in the caches are used.
"""

import argparse
import asyncio
import time
from collections.abc import Callable
from pathlib import Path

from textual.pilot import Pilot

from app.chat.history import History
from app.chat.speed_history import recording_engine
from app.screens.chat_app import ChatApp
from presets.loader import preset_files
from tools.measure.driven_chat import DrivenChat, chat_with, keep_apart
from widgets.text import as_bytes

REPLY_S = 4.0
"""Longer replies are stopped."""
PROMPTS = (
    "What is the KV cache?",
    "Why is decode bound by memory?",
    "What does BEAM do?",
    "Which key goes to the next backend?",
)
"""What the model that is built in can answer."""


class Recording(DrivenChat):
    """A chat with its pictures, which are numbered in `folder`."""

    def __init__(self, app: ChatApp, pilot: Pilot[None], folder: Path, wait_s: float) -> None:
        super().__init__(app, pilot, wait_s)
        self.folder, self.pictures = folder, 0

    async def until(self, holds: Callable[[], object], what: str) -> None:
        try:
            await super().until(holds, what)
        except TimeoutError:
            self.picture("stuck")
            raise

    def picture(self, name: str) -> None:
        self.pictures += 1
        path = self.folder / f"{self.pictures:02}-{name}.svg"
        path.write_text(self.app.export_screenshot(title="orin-chat"))
        view = self.app.dashboard.performance.throughput()
        said = {
            "tok/s": view.current, "prefill": view.prefill, "GB/s": view.gbps, "copy": view.copy_gbps,
            "roofline": view.share and 100 * view.share,
        }  # fmt: skip
        figures = "  ".join(f"{key} {value:,.0f}" for key, value in said.items() if value)
        print(f"{time.monotonic() - self.began_s:6.1f} s  {path.stem:<28} {figures}", flush=True)

    async def answer(self, preset: str, prompt: str) -> None:
        """Asks; pictures from the middle of the reply and of the figures after it."""
        app, performance = self.app, self.app.dashboard.performance
        await self.is_idle("the end of the reply before")
        await self.ask(prompt)
        await self.until(lambda: performance.current, "a figure of the speed")
        await self.until(
            lambda: len(performance.throughput().samples) > 3 or not app.session.is_answering, "half a reply"
        )
        self.picture(f"{preset}-answering")
        enough = time.monotonic() + REPLY_S
        await self.until(lambda: not app.session.is_busy or time.monotonic() > enough, "the end of the reply")
        if app.session.is_answering:
            await self.pilot.press("escape")
        await self.is_idle()
        seen = performance.kernels.decode
        for _ in range(300):  # where the machine has other work, the profile may be long in coming
            if performance.kernels.decode not in (None, seen):
                break
            await self.pilot.pause(0.1)
        await self.pilot.pause(1.5)  # the machine's counters
        self.picture(f"{preset}-measured")

    async def go_over(self, preset: str) -> None:
        """By the list of presets; the old engine answers a prompt that is sent meanwhile."""
        app = self.app
        assert app.setup is not None
        listings = list(preset_files())
        await self.press("f8", "home", *["down"] * listings.index(preset), pause_s=0.2)
        self.picture(f"{preset}-chosen")
        before = app.session.engine
        await self.press("enter", pause_s=0.6)
        self.picture(f"{preset}-starting")

        def is_there() -> bool:
            return app.session.engine is not before or app.session.candidate is None

        await self.until(lambda: is_there() or self._products_searched() > 1, f"the preset {preset}")
        if not is_there():
            await self.pilot.pause(0.5)
            self.picture(f"{preset}-searching")
        await self.until(is_there, f"the preset {preset}")
        await self.pilot.pause(0.2)
        self.picture(f"{preset}-in-use")

    def _products_searched(self) -> int:
        """By the preset that is on its way, 0 where it does not search."""
        candidate = self.app.session.candidate
        status = candidate.status.snapshot() if candidate else None
        return status.done if status and status.searching else 0

    async def panes(self, preset: str) -> None:
        """Each pane of the dashboard alone, and the kernel that takes longest."""
        for name in ("throughput", "kernels", "machine"):
            await self.press("f9", pause_s=0.5)
            self.picture(f"{preset}-{name}")
            if name == "kernels":
                await self.press("enter", pause_s=0.5)
                self.picture(f"{preset}-kernel")
                await self.pilot.press("escape")
        await self.pilot.press("escape")


async def record(given: argparse.Namespace) -> None:
    names, size = given.presets.split(","), given.size.split("x")
    app = chat_with(given.model, names[0], recording_engine, History.open(), given.context, given.tokens)
    setup = app.setup
    assert setup is not None
    async with app.run_test(size=(int(size[0]), int(size[1]))) as pilot:
        recording = Recording(app, pilot, given.folder, given.wait)
        await pilot.pause(0.5)
        recording.picture(f"{names[0]}-starting")
        await recording.is_idle("the engine")
        if not app.session.status.is_ready:
            recording.picture("failed")
            raise SystemExit(app.column.activity.notice)
        for i, (name, prompt) in enumerate(zip(names, PROMPTS, strict=False)):
            try:
                if i:
                    await recording.go_over(name)
            except TimeoutError as error:
                print(f"         {error}", flush=True)
                await pilot.press("escape")
            if setup.name == name:
                await recording.answer(name, prompt)
            else:
                print(f"         {app.column.activity.notice}", flush=True)
        await recording.panes(setup.name)
        turns = app.session.conversation.turns
        size_bytes = Path(given.model).stat().st_size
        print(f"{len(turns)} turns of one conversation; the model has {as_bytes(size_bytes)}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--presets", default="cpu,cuda,cuda-beam2")
    parser.add_argument("--size", default="160x48")
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--context", type=int, default=16384)
    parser.add_argument("--wait", type=float, default=120.0, help="seconds for each thing to come")


def run(given: argparse.Namespace) -> None:
    given.folder.mkdir(parents=True, exist_ok=True)
    keep_apart(given.folder / "home")
    asyncio.run(record(given))
