"""A chat with the real engine that is driven by keys, for pictures of it."""

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path

from textual.pilot import Pilot

from app.screens.chat_app import ChatApp


def keep_apart(home: Path) -> None:
    """Settings, history and what was measured are those of `home` from now on, as on a new machine."""
    for kind in ("STATE", "DATA", "CONFIG"):
        os.environ[f"XDG_{kind}_HOME"] = str(home.resolve() / kind)


class DrivenChat:
    """Waits for no longer than `wait_s` for each thing to come."""

    def __init__(self, app: ChatApp, pilot: Pilot[None], wait_s: float) -> None:
        self.app, self.pilot, self.wait_s = app, pilot, wait_s
        self.began_s = time.monotonic()
        app.prompt.cursor_blink = False

    async def until(self, holds: Callable[[], object], what: str) -> None:
        """Raises TimeoutError."""
        deadline = time.monotonic() + self.wait_s
        while not holds():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what} did not come: {self.app.column.activity.notice}")
            await self.pilot.pause(0.05)

    async def is_idle(self, what: str = "the end of the reply") -> None:
        await self.until(lambda: not self.app.session.is_busy, what)

    async def ask(self, prompt: str, typing_s: float = 0.0) -> None:
        """Types a prompt and sends it."""
        for token_slot in prompt:
            self.app.prompt.insert(token_slot)
            await asyncio.sleep(typing_s)
        await self.press("enter", pause_s=0.3)

    async def press(self, *keys: str, pause_s: float = 0.0) -> None:
        await self.pilot.press(*keys)
        await self.pilot.pause(pause_s)
