"""Pictures in a terminal that draws them itself (`kitty_graphics`), in place of their half blocks.

The cells of a small picture are half blocks whose style says which `PART` of it they show. On the way to the terminal
placeholders take their place, once the terminal has the picture. What it can do, it is asked; a terminal that does not
say that it is one of these is sent nothing else.
"""

import fcntl
import os
import random
import struct
import termios
from collections import OrderedDict, deque
from typing import NamedTuple

from rich.color import Color
from rich.segment import Segment
from rich.style import Style
from textual.strip import Strip

from widgets.terminal.kitty_graphics import (
    ASK_VERSION,
    END,
    MOST_CELLS,
    answered,
    ask_support,
    deletion,
    is_open_after,
    knows_placeholders,
    picture_commands,
    picture_id,
    placeholder,
)

PART = "part"
"""In the meta of a cell's style: the numbers of `Shown`, and the column and the row of the part."""
HALF_BLOCK = "▀"
_FIRST, _ASKED = 16, 255
"""The numbers of pictures are colours that every terminal has. The last one is only asked about."""
KEPT = 40
"""How many pictures the terminal has at most."""
_AT_ONCE = 4  # commands, of 4 KB: a key waits for no more


_MOST_PIXELS = (5, 10) if "SSH_CONNECTION" in os.environ else (10, 20)
"""Of a cell: so a picture has at most half a megabyte, or an eighth over a network."""


def cell_pixels() -> tuple[int, int]:
    """The width and the height of a cell, in as many pixels as pictures are to have."""
    try:
        rows, columns, width, height = struct.unpack("4H", fcntl.ioctl(1, termios.TIOCGWINSZ, bytes(8)))
    except OSError:  # standard output is no terminal
        return _MOST_PIXELS
    if not (rows and columns and width and height):
        return _MOST_PIXELS
    return min(_MOST_PIXELS[0], width // columns), min(_MOST_PIXELS[1], height // rows)


class Shown(NamedTuple):
    """A picture, by a number that the application knows, in so many cells."""

    picture: int
    columns: int
    rows: int


class TerminalPictures:
    """`is_wanted`: the terminal may be asked. `is_on`: it draws pictures."""

    def __init__(self) -> None:
        self.is_wanted = True
        self._family = random.randrange(1, MOST_CELLS)
        self._is_open = False  # the commands of a picture have begun and not ended
        self.forget()

    def forget(self) -> None:
        """Nothing is known of the terminal any more."""
        self.is_on = self._has_asked = False
        self._kept: OrderedDict[Shown, int] = OrderedDict()  # their ids, the one least recently shown first
        self._due: deque[str] = deque()
        self._unanswered: set[int] = set()  # ids
        self._missed: dict[Shown, None] = {}
        self._asked_for: set[Shown] = set()

    # --- what the application shows -------------------------------------------------------------------------

    def placed(self, strip: Strip) -> Strip:
        """A row as the terminal is to show it."""
        if not self.is_on:
            return strip
        segments: list[Segment] = []
        background, has_changed = None, False
        for segment in strip:
            text, style, _ = segment
            part = style.meta.get(PART) if text == HALF_BLOCK and style is not None and style._meta else None
            if part is None:
                background = style.bgcolor if style is not None else None
            elif (id := self._id_of(Shown(*part[:3]))) is not None:
                own = Style(color=Color.from_ansi(id & 255), bgcolor=background)
                segment, has_changed = Segment(placeholder(id, *part[3:]), own), True
            segments.append(segment)
        return Strip(segments, strip.cell_length) if has_changed else strip

    def _id_of(self, shown: Shown) -> int | None:
        id = self._kept.get(shown)
        if id is None and shown not in self._asked_for and max(shown.columns, shown.rows) <= MOST_CELLS:
            self._missed[shown] = None
        if id is None or id in self._unanswered:
            return None
        self._kept.move_to_end(shown)
        return id

    def missed(self) -> list[Shown]:
        """What should be shown and is not in the terminal, each once. `give` is to be called with it."""
        missed = list(self._missed)
        self._asked_for.update(missed)
        self._missed.clear()
        return missed

    def give(self, shown: Shown, rgb: bytes, size: tuple[int, int]) -> None:
        """Has a picture of `size` (width, height) pixels sent."""
        if not self.is_on or shown in self._kept:
            return
        if len(self._kept) >= KEPT:
            oldest, id = self._kept.popitem(last=False)
            self._due.append(deletion(id))
            self._asked_for.discard(oldest)
        used = {id & 255 for id in self._kept.values()}
        number = next(n for n in range(_FIRST, _ASKED) if n not in used)
        id = self._kept[shown] = picture_id(number, self._family)
        self._unanswered.add(id)
        self._due += picture_commands(id, rgb, size, (shown.columns, shown.rows))

    # --- what the terminal is sent and answers --------------------------------------------------------------

    def question(self) -> str:
        """What a terminal is asked first; "" if it was."""
        if self._has_asked or not self.is_wanted:
            return ""
        self._has_asked = True
        return ASK_VERSION

    def due(self) -> str:
        """The next of what the terminal is to be sent; "" if there is nothing."""
        commands = [self._due.popleft() for _ in range(min(_AT_ONCE, len(self._due)))]
        if commands:
            self._is_open = is_open_after(commands[-1])
        return "".join(commands)

    @property
    def is_due(self) -> bool:
        return bool(self._due)

    def hear(self, answer: str) -> bool:
        """Takes an answer, without what it begins and ends with. Returns whether rows may look otherwise now."""
        if answer.startswith(">|"):
            if self._has_asked and not self.is_on and knows_placeholders(answer[2:]):
                self._due.append(ask_support(picture_id(_ASKED, self._family)))
            return False
        id, is_well = answered(answer) or (0, False)
        if id == picture_id(_ASKED, self._family):
            self.is_on = is_well
        elif id in self._unanswered:
            self._unanswered.discard(id)
            self.is_on = self.is_on and is_well  # else it has no room for more, or no use for them
        else:
            return False
        return True

    def ended(self) -> str:
        """What makes the terminal forget all pictures, before it is given back. Nothing is known of it then."""
        commands = [END] if self._is_open else []
        commands += map(deletion, self._kept.values())
        self._is_open = False
        self.forget()
        return "".join(commands)
