"""Text that would act on a terminal, for every way in which text from elsewhere reaches one."""

import re

SEQUENCES = (
    "\x1b]52;c;aGk=\x07",  # OSC 52: sets the clipboard
    "\x1b]0;owned\x1b\\",  # OSC 0: sets the title
    "\x1b[31;5m\x1b[2J",  # CSI: colours, clears
    "\x1bP+q\x1b\\\x1bc",  # DCS, and RIS: resets
    "\x9b2J\x9d0;c1\x9c\x90",  # the same as C1 controls
    "\u202egnp.exe\u2066\u202d",  # another order
    "\x07\x08\x0c\x7f\x00",
)
ATTACK = f"attack{''.join(SEQUENCES)}end"
_ACTS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def acting(text: str) -> list[str]:
    """The characters of a text that a terminal would act on; newlines and tabs do not count."""
    return sorted(set(_ACTS.findall(text)))
