"""Tells the thinking of a reply from its answer while it streams."""

from __future__ import annotations

from enum import Enum, auto

OPEN, CLOSE = "<think>", "</think>"


class _At(Enum):
    START = auto()
    THINKING = auto()
    ANSWER = auto()


class ThinkSplitter:
    """Fed the text of one token after another; tells of each whether it is thinking, and what of it to show.

    A reply thinks only at its start: from `<think>`, or at once if `inside` (the prompt ended in it), up to
    the first `</think>`. Later marks are text like any other. The marks are left out, and so are line breaks
    after them and white space before the first. A mark may come as one token or as several: text that could
    be the beginning of one is held back until that is known.
    """

    def __init__(self, *, inside: bool = False) -> None:
        self._at = _At.THINKING if inside else _At.START
        self._held = ""
        self._after_mark = inside

    def feed(self, text: str) -> tuple[bool, str]:
        """(whether the token is thinking, the text that can be shown now). What comes after a `</think>` in
        the same token is told with the next one."""
        self._held += text
        if self._at is _At.START:
            begun = self._held.lstrip()
            if len(begun) < len(OPEN) and OPEN.startswith(begun):
                return False, ""
            if begun.startswith(OPEN):
                self._at, self._after_mark, self._held = _At.THINKING, True, begun[len(OPEN) :]
            else:
                self._at = _At.ANSWER
        if self._at is _At.ANSWER:
            return False, self._take(len(self._held))
        thought, mark, rest = self._held.partition(CLOSE)
        if not mark:
            return True, self._take(len(self._held) - _overlap(self._held, CLOSE))
        self._held = thought
        shown = self._take(len(thought))
        self._at, self._after_mark, self._held = _At.ANSWER, True, rest
        return True, shown

    def flush(self) -> tuple[bool, str]:
        """What was held back and turned out to be no mark, at the end of the reply."""
        return self._at is _At.THINKING, self._take(len(self._held))

    def _take(self, n: int) -> str:
        """The first `n` characters held, without the line breaks that follow a mark."""
        taken, self._held = self._held[:n], self._held[n:]
        if self._after_mark:
            taken = taken.lstrip("\n")
            self._after_mark = not taken
        return taken


def _overlap(text: str, mark: str) -> int:
    """How many characters at the end of `text` could be the beginning of `mark`."""
    return next((n for n in range(len(mark) - 1, 0, -1) if text.endswith(mark[:n])), 0)
