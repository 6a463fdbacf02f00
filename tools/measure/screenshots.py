"""Writes pictures of the chat for the README:

    python -m tools.measure screenshots [FOLDER] [--model FILE] [--only NAME]

The screen is the real one; what the engine says comes from a script, so that the pictures show the same text
and figures on every machine. With --model the real engine answers on this machine, and every figure is its own.
"""

import argparse
import asyncio
import tempfile
from pathlib import Path

from textual.app import App

from app.chat.history import History
from app.chat.speed_history import recording_engine
from app.screens.chat_app import ChatApp
from app.screens.engine_setup import EngineSetup
from engine.protocol.events import EngineOptions, Sampling
from presets import guide_path
from tests.app.scenes import SCENES
from tools.measure.driven_chat import DrivenChat, keep_apart

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
        chat = DrivenChat(app, pilot, WAIT_S)
        await chat.is_idle("the engine")
        if keys == ("f10",):
            await chat.press(*keys)
        for prompt in PROMPTS:
            await chat.ask(prompt)
            await chat.is_idle()
            await pilot.pause(READING_S)
        if keys == ("f10",):
            await pilot.pause(0.5)
            return _svg(app)
        await chat.press(*keys)
        if app.dashboard.is_visible:
            await chat.until(lambda: app.dashboard.performance.kernels.decode is not None, "the kernels")
        await pilot.pause(1.5)  # the machine's counters
        return _svg(app)


def _svg(app: App[None]) -> str:
    return app.export_screenshot(title="orin-chat")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", nargs="?", type=Path, default=Path("docs"))
    parser.add_argument("--model", metavar="FILE", nargs="?", const=str(guide_path()))
    parser.add_argument("--only", choices=PICTURES)


def run(given: argparse.Namespace) -> None:
    given.folder.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as home:
        keep_apart(Path(home))  # nobody's settings and history show in the pictures
        for file, (scene, keys) in PICTURES.items():
            if given.only in (None, file):
                what = picture_of_model(given.model, scene, keys) if given.model else picture_of_scene(scene)
                (given.folder / f"{file}.svg").write_text(asyncio.run(what))
