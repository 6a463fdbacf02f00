"""Rows are cut between characters, each with all that joins it: beside a page that lies over the chat, an emoji of a
family was torn into parts of another width. Rich 15 cuts a text so, but not a part of a row, and it takes the two
letters of a flag for characters of their own."""

import re
from functools import lru_cache

from rich.cells import split_text
from rich.segment import Segment

_LETTER = "[\U0001f1e6-\U0001f1ff]"  # regional indicators: two of them are a flag, of two cells
_BEGINS_WITH_LETTER = re.compile(_LETTER)
_ENDS_WITH_HALF_A_FLAG = re.compile(f"(?<!{_LETTER})({_LETTER}{{2}})*{_LETTER}$")


@lru_cache(1 << 14)
def _split(segment: Segment, cut: int) -> tuple[Segment, Segment]:
    """Splits a segment at `cut` cells. A wide character that is cut through becomes two blanks."""
    before, after = (segment.text, "") if cut >= segment.cell_length else split_text(segment.text, cut)
    if _BEGINS_WITH_LETTER.match(after) and _ENDS_WITH_HALF_A_FLAG.search(before):
        before, after = f"{before[:-1]} ", f" {after[1:]}"
    return Segment(before, segment.style, segment.control), Segment(after, segment.style, segment.control)


Segment._split_cells = staticmethod(_split)  # type: ignore[method-assign, assignment]
