"""A running chat, driven by keys, and what a user can see of it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable

from textual.pilot import Pilot

from app.chat.history import History
from app.screens.chat_app import ChatApp
from tests.app.fake_engine import FakeEngine
from tests.waiting import until
from widgets.chat.activity_line import ActivityLine


class Driver:
    """A running chat and what a user can see of it."""

    def __init__(self, app: ChatApp, pilot: Pilot[None], engine: FakeEngine) -> None:
        self.app, self.pilot, self.engine = app, pilot, engine

    async def until(self, holds: Callable[[], object], what: str = "what was expected") -> None:
        await until(holds, lambda: f"{what} did not come:\n{self.screen()}")

    def screen(self) -> str:
        """The visible text, line by line."""
        lines = self.app.screen._compositor.render_strips()
        return "\n".join(strip.text.rstrip() for strip in lines)

    def place(self, text: str) -> tuple[int, int]:
        """The column and the row of the screen where a text begins."""
        lines = self.screen().split("\n")
        row = next(row for row, line in enumerate(lines) if text in line)
        return lines[row].index(text), row

    async def click(self, text: str) -> None:
        """Clicks on the second character of a text on the screen."""
        column, row = self.place(text)
        await self.pilot.click(offset=(column + 1, row))

    async def sees(self, text: str) -> None:
        """Waits for `text`, wherever its lines are broken, and in a frame."""
        words = lambda text: " ".join(text.replace("│", " ").split())
        await self.until(lambda: words(text) in words(self.screen()), f"{text!r} on the screen")

    async def press(self, *keys: str) -> None:
        await self.pilot.press(*keys)

    async def say(self, text: str) -> None:
        """Types a prompt (at once) and sends it."""
        self.app.prompt.insert(text)
        await self.press("enter")

    async def idle(self) -> None:
        await self.until(lambda: not self.app.session.is_busy, "the end of the reply")
        await self.pilot.pause()

    def turns(self) -> list[tuple[str, str]]:
        return [(turn.role, turn.content) for turn in self.app.session.conversation.turns]

    def notice(self) -> str:
        return self.app.query_one(ActivityLine).notice


@contextlib.asynccontextmanager
async def chat(
    engine: FakeEngine, history: History, size: tuple[int, int] = (100, 30), **options
) -> AsyncIterator[Driver]:
    app = ChatApp(engine, history, **options)
    async with app.run_test(size=size) as pilot:
        yield Driver(app, pilot, engine)


def stored(history: History, chat_id: int) -> list[tuple[str, str, bool]]:
    return [(s.message.role, s.message.content, s.finished) for s in history.messages(chat_id)]
