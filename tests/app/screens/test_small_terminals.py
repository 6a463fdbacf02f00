"""The screen in terminals down to 20 x 6: what a user must see there."""

from __future__ import annotations

import pytest

from app.screens.engine_setup import EngineSetup
from app.screens.page import Frame
from engine.events import EngineOptions
from tests.app.driver import chat
from tests.app.fake_engine import FakeEngine, reply

SIZES = [(160, 48), (60, 20), (34, 12), (20, 6)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("page", "keys"),
    [
        ("ctrl+o", ("F2 renames", "Del")),
        ("f8", ("F2 edits", "Del")),
        ("ctrl+l", ("Del",)),
        ("f12", ("Ctrl+S saves",)),
        ("f1", ("Esc closes",)),
    ],
)
async def test_the_border_of_a_page_names_its_keys_at_every_width(history, home, size, page, keys):
    setup = EngineSetup(EngineOptions(model_path="m.gguf", backend="CUDA"), "cuda")
    async with chat(FakeEngine(reply("Yes.")), history, size=size, setup=setup) as user:
        await user.say("Is it?")
        await user.idle()
        await user.press(page)
        await user.until(lambda: user.app.screen.query(Frame), "the page")
        frame = user.app.screen.query_one(Frame)

        def border() -> str:
            return user.screen().split("\n")[frame.region.bottom - 1][frame.region.x : frame.region.right]

        await user.until(lambda: all(key in border() for key in keys), f"{keys} in the border")
        assert "…" not in border()
