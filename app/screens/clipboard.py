"""The clipboard, where the terminal does not help.

A program copies to the terminal's clipboard by OSC 52, also over SSH, but tmux does not pass that on by default. It
passes on what its own command gets. No terminal gives a program the picture that was copied. On the machine with the
desktop, the desktop's own commands do.
"""

import asyncio
import contextlib
import os
import shutil
from asyncio.subprocess import DEVNULL, PIPE

from engine.formats.picture_kind import is_binary_picture

PICTURE_S = 2.0  # for a command to give a picture; one that asks a program that hangs would take longer
_COMMANDS = {
    "WAYLAND_DISPLAY": ("wl-paste", "--no-newline", "--type", "image/png"),
    "DISPLAY": ("xclip", "-selection", "clipboard", "-target", "image/png", "-out"),
}
"""What prints the picture in the clipboard, by the variable that says which desktop there is."""
_OR_A_FILE = "Save it as a file, and paste its path or drop it."


async def copied_picture() -> bytes:
    """The picture that was copied on this machine's desktop; b"" if there is none, or no command that gives it."""
    for variable, command in _COMMANDS.items():
        if variable in os.environ:
            with contextlib.suppress(OSError):
                process = await asyncio.create_subprocess_exec(
                    *command, stdin=DEVNULL, stdout=PIPE, stderr=DEVNULL
                )
                try:
                    data, _ = await asyncio.wait_for(process.communicate(), PICTURE_S)
                except TimeoutError:
                    process.kill()
                    await process.wait()
                    continue
                if is_binary_picture(data):
                    return data
    return b""


def no_picture_because() -> str:
    """A sentence on why `copied_picture` gave none."""
    commands = [command[0] for variable, command in _COMMANDS.items() if variable in os.environ]
    if not commands:
        return f"No desktop runs on this machine, and terminals pass on no pictures. {_OR_A_FILE}"
    if not any(map(shutil.which, commands)):
        return f"A copied picture comes by {' or '.join(commands)}, which is not installed. {_OR_A_FILE}"
    return "No picture was copied on this machine"


def is_in_tmux() -> bool:
    return "TMUX" in os.environ


async def copy_by_tmux(text: str) -> None:
    """Copies `text` with tmux 3.2 or later. An older tmux, or none, is no error."""
    with contextlib.suppress(OSError):
        process = await asyncio.create_subprocess_exec(
            "tmux", "load-buffer", "-w", "-", stdin=PIPE, stdout=DEVNULL, stderr=DEVNULL
        )
        await process.communicate(text.encode(errors="replace"))
