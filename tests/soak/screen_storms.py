"""The full screen while its terminal changes its size all the time, and when a megabyte is pasted."""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from pathlib import Path

from textual.events import Paste

from app.chat.history import History
from app.screens.chat_app import ChatApp
from tests.app.driver import Driver
from tests.app.fake_engine import FakeEngine, reply
from tests.soak.counts import Counts
from tests.synthetic import MARKDOWN

LIMIT_S = 60.0
PASTE = ("The water rises twice a day.\n" * 40_000)[: 1 << 20]


def run(tries: int, number: int = 0) -> Counts:
    """Sizes from 20 x 5 to 400 x 100 while a reply streams; every hundredth time a megabyte is pasted and sent."""
    counts = Counts("the terminal is resized, or 1 MB is pasted")
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(_all(tries, random.Random(number), counts, Path(folder)))
    return counts


async def _all(tries: int, choose: random.Random, counts: Counts, folder: Path) -> None:
    engine = FakeEngine(reply(MARKDOWN), token_s=0.01)
    history = History(folder / "history.sqlite3")
    app = ChatApp(engine, history)  # type: ignore[arg-type]
    async with app.run_test(size=(100, 30)) as pilot:
        user = Driver(app, pilot, engine)
        for count in range(tries):
            pastes = count % 100 == 5
            what = "paste" if pastes else "resize"
            started = time.perf_counter()
            try:
                async with asyncio.timeout(LIMIT_S):
                    await (_paste(user) if pastes else _resize(user, choose))
                counts.survived[what] += 1
            except Exception as error:
                counts.lost[f"{what}: {type(error).__name__} {str(error)[:60]}"] += 1
            counts.took((time.perf_counter() - started) * 1e3)
    history.close()


async def _resize(user: Driver, choose: random.Random) -> None:
    size = choose.randint(20, 400), choose.randint(5, 100)
    await user.pilot.resize_terminal(*size)
    await user.pilot.pause()
    if tuple(user.app.size) != size:
        raise RuntimeError(f"the screen has {user.app.size}, the terminal {size}")
    if not user.app.session.is_busy:
        await user.say("Go on")


async def _paste(user: Driver) -> None:
    user.app.prompt.post_message(Paste(PASTE))
    await user.until(lambda: len(user.app.prompt.text) >= len(PASTE))
    user.app.prompt.put("")
    await user.pilot.pause()
