"""Text that would act on a terminal, for every way in which text from elsewhere reaches one."""

import re

import msgspec

from tests.app.fake_engine import READY

SEQUENCES = (
    "\x1b]52;c;aGk=\x07",  # OSC 52: sets the clipboard
    "\x1b]0;owned\x1b\\",  # OSC 0: sets the title
    "\x1b]8;;http://a.example\x07link\x1b]8;;\x07",  # OSC 8: a link to elsewhere
    "\x1b[31;5m",  # SGR: colours, blinks
    "\x1b[2J\x1b[9A",  # CSI: clears, moves the cursor
    "\x1b[?1049h\x1b[?25l\x1b[?1000h\x1b[2;3r",  # modes: another screen, no cursor, the mouse, margins
    "\x1b[c\x1b[6n",  # what the terminal would type in answer
    "\x1bP+q\x1b\\",  # DCS
    "\x1b_Gx\x1b\\",  # APC: pictures
    "\x1bc",  # RIS: resets
    "\x9b2J\x9b7m",  # CSI, OSC and DCS as C1 controls
    "\x9d0;c1\x9c",
    "\x90q\x9c",
    "\u202egnp.exe\u2066\u202d",  # another order
    "safe\rhidden\x08\x08\x0c\x0b",  # writes over what is there
    "\x07\x7f\x00\x0e\x0f",  # the bell, another alphabet
)
DISGUISES = (
    "[bold red on white]rich[/] [/nope] [link=file:///x]markup[/link] `[",
    "zero\u200b\u200d\u2060\ufeffwidth\U000e0041\U000e007f\u00ad",
    "flood" + "\u0301" * 300 + "\u0e47" * 300,
)
ATTACK = f"attack{''.join((*SEQUENCES, *DISGUISES))}end"
TYPED = ATTACK.replace("\0", "")  # no argument of a program can hold one
NAME = TYPED.replace("/", "")[:60]  # of a file
HOSTILE_READY = msgspec.structs.replace(
    READY,
    model=msgspec.structs.replace(READY.model, name=ATTACK, quantization=ATTACK, architecture=ATTACK),
    backend=ATTACK,
    device_name=ATTACK,
    warnings=(ATTACK,),
)
"""As an engine says whose model has such names."""
_ACTS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def acting(text: str) -> list[str]:
    """The characters of a text that a terminal would act on; newlines and tabs do not count."""
    return sorted(set(_ACTS.findall(text)))
