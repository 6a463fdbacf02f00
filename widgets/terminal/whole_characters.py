"""Rows are cut between characters, each with all that joins it: beside a page that lies over the chat, an emoji of a
family was torn into parts of another width. Rich 15 cuts a text so, but not a part of a row, and it takes the two
letters of a flag for characters of their own, also where it breaks a line."""

import re
from functools import lru_cache

import rich.cells
from rich.cells import CellSpan, split_text
from rich.segment import Segment

_FLAG = re.compile("[\U0001f1e6-\U0001f1ff]{2}")
_split_graphemes = rich.cells.split_graphemes


def _with_flags(text: str, unicode_version: str = "auto") -> tuple[list[CellSpan], int]:
    """Where each character begins and ends, with its cells, and the cells of all."""
    spans, cells = _split_graphemes(text, unicode_version)
    if pairs := {flag.start() for flag in _FLAG.finditer(text)}:
        ends = {start: end for start, end, _ in spans}
        flags = {start for start in pairs if start in ends and start + 1 in ends}
        spans = [
            (start, ends[start + 1], 2) if start in flags else (start, end, width)
            for start, end, width in spans
            if start - 1 not in flags
        ]
    return spans, cells


@lru_cache(1 << 14)
def _split(segment: Segment, cut: int) -> tuple[Segment, Segment]:
    """Splits a segment at `cut` cells. A wide character that is cut through becomes two blanks."""
    before, after = (segment.text, "") if cut >= segment.cell_length else split_text(segment.text, cut)
    return Segment(before, segment.style, segment.control), Segment(after, segment.style, segment.control)


rich.cells.split_graphemes = _with_flags
Segment._split_cells = staticmethod(_split)  # type: ignore[method-assign, assignment]
