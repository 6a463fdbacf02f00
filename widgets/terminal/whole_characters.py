"""Rows are cut between characters, each with all that joins it: beside a page that lies over the chat, an emoji of a
family was torn into parts of another width. Rich 15 cuts a text so, but not a part of a row."""

from functools import lru_cache

from rich.cells import split_text
from rich.segment import Segment


@lru_cache(1 << 14)
def _split(segment: Segment, cut: int) -> tuple[Segment, Segment]:
    """Splits a segment at `cut` cells. A wide character that is cut through becomes two blanks."""
    before, after = (segment.text, "") if cut >= segment.cell_length else split_text(segment.text, cut)
    return Segment(before, segment.style, segment.control), Segment(after, segment.style, segment.control)


Segment._split_cells = staticmethod(_split)  # type: ignore[method-assign, assignment]
