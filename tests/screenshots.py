"""Writes pictures of the chat for the README: python -m tests.screenshots [FOLDER] [--model FILE] [--only NAME]

The screen is the real one; what the engine says comes from a script, so that the pictures show the same text
and figures on every machine. With --model the real engine answers on this machine, and every figure is its own.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from textual.app import App
from textual.pilot import Pilot

from app.chat.history import History
from app.chat.speed_history import recording_engine
from app.screens.chat_app import ChatApp
from app.screens.engine_setup import EngineSetup
from engine.events import EngineOptions, Sampling
from presets import guide_path
from tests.app.scenes import SCENES

PICTURES: dict[str, tuple[str, tuple[str, ...]]] = {
    "chat-120x40": ("reply", ()),
    "chat-60x20": ("reply-narrow", ()),
    "dashboard-160x48": ("dashboard", ()),
    "dashboard-light-130x40": ("dashboard-light", ()),
    "kernels-120x30": ("whole-kernels", ("f9", "f9", "down")),
    "presets-100x30": ("presets", ("f8",)),
    "comparison-120x36": ("comparison", ("f10",)),
}
"""By file: the scene of `tests.app.scenes`, and the keys that lead to it where a model answers."""
PROMPTS = (
    "Hello!",
    "What is the KV cache?",
    "Why is decode slower than prefill?",
    "What does Q6_K mean?",
    "Which keys switch presets?",
    "What is the roofline?",
)
"""The built-in model knows about this."""
WAIT_S = 120.0
READING_S = 6.0
"""Between two prompts, as of someone who reads the answers: the graphs show a minute."""


async def picture_of_scene(name: str) -> str:
    scene = SCENES[name]
    app = scene.app()
    async with app.run_test(size=scene.size) as pilot:
        await scene.play(pilot)
        return _svg(app)


async def picture_of_model(model: str, name: str, keys: tuple[str, ...]) -> str:
    scene, options = SCENES[name], EngineOptions(model_path=model)
    setup = EngineSetup(options)
    app = ChatApp(
        recording_engine(options), History(":memory:"), setup=setup, sampling=Sampling(temperature=0)
    )
    if scene.theme:
        app.theme = scene.theme
    async with app.run_test(size=scene.size) as pilot:
        app.prompt.cursor_blink = False
        await _until(pilot, lambda: not app.session.is_busy)
        if keys == ("f10",):
            await pilot.press(*keys)
        for prompt in PROMPTS:
            app.prompt.insert(prompt)
            await pilot.press("enter")
            await pilot.pause(0.3)
            await _until(pilot, lambda: not app.session.is_busy)
            await pilot.pause(READING_S)
        if keys == ("f10",):
            await pilot.pause(0.5)
            return _svg(app)
        await pilot.press(*keys)
        if app.dashboard.is_visible:
            await _until(pilot, lambda: app.dashboard.performance.kernels.decode is not None)
        await pilot.pause(1.5)  # the machine's counters
        return _svg(app)


async def _until(pilot: Pilot[None], holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError("the engine did not come to an end")
        await pilot.pause(0.1)


def _svg(app: App[None]) -> str:
    return app.export_screenshot(title="orin-chat")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("docs"))
    parser.add_argument("--model", metavar="FILE", nargs="?", const=str(guide_path()))
    parser.add_argument("--only", choices=PICTURES)
    given = parser.parse_args()
    given.folder.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as home:
        for kind in ("STATE", "DATA", "CONFIG"):
            os.environ[f"XDG_{kind}_HOME"] = home  # nobody's settings and history show in the pictures
        for file, (scene, keys) in PICTURES.items():
            if given.only in (None, file):
                what = picture_of_model(given.model, scene, keys) if given.model else picture_of_scene(scene)
                (given.folder / f"{file}.svg").write_text(asyncio.run(what))


if __name__ == "__main__":
    main()
