"""The clipboard of tmux. Programs reach the terminal's by OSC 52, which works over SSH, but which tmux by
default keeps to itself; given the text by its own command, it passes it on."""

from __future__ import annotations

import asyncio
import contextlib
import os
from asyncio.subprocess import DEVNULL, PIPE


def is_in_tmux() -> bool:
    return "TMUX" in os.environ


async def copy_by_tmux(text: str) -> None:
    """Has tmux (3.2 or later) copy `text`; an older one, or none, is no error."""
    with contextlib.suppress(OSError):
        process = await asyncio.create_subprocess_exec(
            "tmux", "load-buffer", "-w", "-", stdin=PIPE, stdout=DEVNULL, stderr=DEVNULL
        )
        await process.communicate(text.encode(errors="replace"))
