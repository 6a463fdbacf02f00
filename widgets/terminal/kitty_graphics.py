"""Kitty's graphics protocol, as far as pictures need it that stand in cells of text.

The terminal gets a picture once, with the columns and rows that it is to fill (a virtual placement). Then it draws its
parts wherever cells hold a placeholder, a character with marks for the row and the column of the part. So a picture
moves, is covered and goes as text does. (https://sw.kovidgoyal.net/kitty/graphics-protocol/#unicode-placeholders)
"""

import base64
import re
import zlib
from collections.abc import Iterator

ASK_VERSION = "\x1b[>0q"  # XTVERSION
_PLACEHOLDER = "\U0010eeee"
_RANGES = (
    *((code, code) for code in (0x305, 0x30D, 0x30E, 0x310, 0x312, 0x33D, 0x33E, 0x33F, 0x346)),
    (0x34A, 0x34C), (0x350, 0x352), (0x357, 0x357), (0x35B, 0x35B), (0x363, 0x36F), (0x483, 0x487),
    (0x592, 0x595), (0x597, 0x599), (0x59C, 0x5A1), (0x5A8, 0x5A9), (0x5AB, 0x5AC), (0x5AF, 0x5AF),
    (0x5C4, 0x5C4), (0x610, 0x617),
)  # fmt: skip
_MARKS = [chr(code) for first, last in _RANGES for code in range(first, last + 1)]
"""The first of the protocol's combining characters, which stand for the numbers from 0 on."""
MOST_CELLS = len(_MARKS)  # of a side
_CHUNK = 4096  # characters of data in a command
_ANSWER = re.compile(r"(?:\w=\d+,)*?i=(\d+)(?:,\w=\d+)*;(.*)", re.DOTALL)
_VERSION = re.compile(r"(kitty|ghostty)\W(\d{1,4})\.(\d{1,4})")
_OLDEST = {"kitty": (0, 28), "ghostty": (1, 0)}
"""The versions since which terminals know placeholders. WezTerm and Konsole know the protocol without these, and say so
in no answer."""


def knows_placeholders(version: str) -> bool:
    """Whether the terminal that answers `version` to ASK_VERSION, as in "kitty(0.42.1)", knows placeholders."""
    found = _VERSION.match(version)
    return found is not None and (int(found[2]), int(found[3])) >= _OLDEST[found[1]]


def picture_id(number: int, family: int) -> int:
    """The number of a picture, 16 to 255, whose programs' `family` (0 to MOST_CELLS - 1) keeps it apart from those of
    others. A terminal of 256 colours can show it."""
    return family << 24 | number


def ask_support(id: int) -> str:
    """Whether the terminal would take a picture."""
    return f"\x1b_Gi={id},a=q,t=d,f=24,s=1,v=1;AAAA\x1b\\"


def answered(answer: str) -> tuple[int, bool] | None:
    """Which picture an answer is about, and whether all is well. `answer` is without its beginning and its end."""
    found = _ANSWER.fullmatch(answer)
    return (int(found[1]), found[2] == "OK") if found else None


def picture_commands(id: int, rgb: bytes, size: tuple[int, int], cells: tuple[int, int]) -> Iterator[str]:
    """The commands that give the terminal a picture of `size` (width, height) pixels, to fill `cells` (columns, rows).
    It answers the last one. No other command of the protocol may come between them."""
    data = base64.standard_b64encode(zlib.compress(rgb)).decode()
    keys = f"a=T,U=1,i={id},f=24,o=z,s={size[0]},v={size[1]},c={cells[0]},r={cells[1]},"
    for at in range(0, len(data), _CHUNK):
        more = int(at + _CHUNK < len(data))
        yield f"\x1b_G{keys}m={more};{data[at : at + _CHUNK]}\x1b\\"
        keys = ""


def is_open_after(command: str) -> bool:
    """Whether the commands of a picture go on after this one."""
    return "m=1;" in command.partition(";")[0] + ";"


END = "\x1b_Gm=0,q=2;\x1b\\"
"""Ends commands of a picture that is not complete. The terminal does not answer."""


def deletion(id: int) -> str:
    """Makes the terminal forget a picture. It does not answer."""
    return f"\x1b_Ga=d,d=I,i={id},q=2\x1b\\"


def placeholder(id: int, column: int, row: int) -> str:
    """The character for a part of a picture. Its colour is the picture's number."""
    return _PLACEHOLDER + _MARKS[row] + _MARKS[column] + _MARKS[id >> 24]
