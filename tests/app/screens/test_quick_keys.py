"""Keys that come while a page closes."""

from __future__ import annotations

import asyncio

import pytest
from textual.events import Key

from app.screens.engine_setup import EngineSetup
from engine.protocol.events import EngineOptions
from tests.app.driver import chat
from tests.app.fake_engine import FakeEngine
from tests.thorough import THOROUGH

STEP = 1 if THOROUGH else 2


# At every other step of the loop on one page, at every sixth on the others.
@pytest.mark.parametrize(
    ("page", "every"), [("f1", STEP), ("f12", 6), ("ctrl+o", 6), ("f8", 6), ("ctrl+p", 6)]
)
async def test_the_second_of_two_quick_escapes_is_not_lost(history, home, page, every):
    setup = EngineSetup(EngineOptions(model_path="m.gguf", backend="CUDA"), "cuda")
    async with chat(FakeEngine(), history, setup=setup) as user:
        stops = []
        user.app.action_stop = lambda: stops.append(True)
        for n, steps in enumerate(range(0, 40, every), 1):
            await user.press(page)
            await user.until(lambda: len(user.app.screen_stack) == 2, "the page")
            user.app.post_message(Key("escape", None))
            for _ in range(steps):
                await asyncio.sleep(0)
            user.app.post_message(Key("escape", None))
            await user.until(lambda n=n: len(stops) == n, f"the second Esc, {steps} steps later")
            await user.until(lambda: len(user.app.screen_stack) == 1)
