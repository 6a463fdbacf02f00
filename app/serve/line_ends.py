"""Where an answer of code ends by its lines, as editors ask llama-server for completions (`n_indent`,
`t_max_predict_ms`)."""

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass
class LineEnds:
    """Ends an answer by its lines. After the first line, it ends before one that is indented by less than `min_indent`
    characters. It also ends once it has a line and has taken longer than `most_s` since its first token. 0 switches
    an end off. `found`: whether the answer has ended so. Text of a line whose indentation is not known yet is held
    back."""

    min_indent: int = 0
    most_s: float = 0.0
    clock: Callable[[], float] = time.monotonic
    found: bool = False
    _began: float | None = None
    _has_line: bool = False
    _margin: str | None = None
    """The white space of the line that begins; None within a line."""

    def feed(self, text: str) -> str:
        """The part of the text that belongs to the answer and can be shown now."""
        now = self.clock()
        self._began = now if self._began is None else self._began
        shown = self._indented(text) if self.min_indent else text
        self._has_line = self._has_line or "\n" in text
        if self.most_s and self._has_line and now - self._began > self.most_s:
            self.found = True
        return shown

    def flush(self) -> str:
        """What is still held back at the end."""
        held, self._margin = self._margin or "", None
        return "" if self.found else held

    def _indented(self, text: str) -> str:
        shown: list[str] = []
        for character in text:
            if self.found:
                break
            if self._margin is None:
                shown.append(character)
            elif character in " \t":
                self._margin += character
                continue
            elif character != "\n" and len(self._margin) < self.min_indent:
                self.found = True
                break
            else:
                shown += [self._margin, character]
            self._margin = "" if character == "\n" else None
        return "".join(shown)
