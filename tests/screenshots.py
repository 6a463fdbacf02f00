"""Writes pictures of the chat for the README: python -m tests.screenshots [FOLDER]

The screen is the real one; what the engine says comes from a script, so that the pictures show the same text
on every machine. With --model FILE the real engine answers instead.
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from textual.app import App

from app.chat_app import ChatApp
from app.history import History
from engine.client import LocalEngine
from engine.events import EngineOptions
from tests.app.scenes import QUESTION, SCENES

PICTURES = {
    "chat-120x40": "reply",
    "chat-60x20": "reply-narrow",
    "dashboard-160x48": "dashboard",
    "dashboard-light-130x40": "dashboard-light",
    "kernels-120x30": "whole-kernels",
    "presets-100x30": "presets",
    "comparison-120x36": "comparison",
}


async def picture_of_scene(name: str) -> str:
    scene = SCENES[name]
    app = scene.app()
    async with app.run_test(size=scene.size) as pilot:
        await scene.play(pilot)
        return _svg(app)


async def picture_of_model(model_path: str, size: tuple[int, int], max_tokens: int) -> str:
    engine = LocalEngine(EngineOptions(model_path=model_path))
    app = ChatApp(engine, History(":memory:"), initial_prompt=QUESTION, max_tokens=max_tokens)
    async with app.run_test(size=size) as pilot:
        app.prompt.cursor_blink = False
        while app.session.is_busy:
            await pilot.pause(0.1)
        await pilot.pause(0.5)
        return _svg(app)


def _svg(app: App[None]) -> str:
    return app.export_screenshot(title="orin-chat")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("docs"))
    parser.add_argument("--model", metavar="FILE")
    parser.add_argument("--max-tokens", type=int, default=400)
    options = parser.parse_args()
    options.folder.mkdir(exist_ok=True)
    for file, scene in PICTURES.items():
        if options.model:
            svg = asyncio.run(picture_of_model(options.model, SCENES[scene].size, options.max_tokens))
        else:
            svg = asyncio.run(picture_of_scene(scene))
        (options.folder / f"{file}.svg").write_text(svg)


if __name__ == "__main__":
    main()
