"""Copies text by tmux. A program reaches the terminal's clipboard by OSC 52, also over SSH, but tmux does not pass that
on by default. It passes on what its own command gets."""

import asyncio
import contextlib
import os
from asyncio.subprocess import DEVNULL, PIPE


def is_in_tmux() -> bool:
    return "TMUX" in os.environ


async def copy_by_tmux(text: str) -> None:
    """Copies `text` with tmux 3.2 or later. An older tmux, or none, is no error."""
    with contextlib.suppress(OSError):
        process = await asyncio.create_subprocess_exec(
            "tmux", "load-buffer", "-w", "-", stdin=PIPE, stdout=DEVNULL, stderr=DEVNULL
        )
        await process.communicate(text.encode(errors="replace"))
