"""Finds the texts at which an answer is to stop."""

from collections.abc import Sequence


class StopTexts:
    """Takes the text of an answer piece by piece. Text that could be the beginning of one of `texts` is held back until
    the next pieces decide. `found`: the one that was found, where the answer ends; "" so far."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = tuple(filter(None, texts))
        self._held = ""
        self._first = [0] * len(self._texts)  # where each may begin in what is held: not before
        self.found = ""

    def feed(self, text: str) -> str:
        """What can be shown now."""
        if self.found or not self._texts:
            return "" if self.found else text
        self._held += text
        places = zip(self._texts, self._first, strict=True)
        found = [(at, stop) for stop, first in places if (at := self._held.find(stop, first)) >= 0]
        if found:
            end, self.found = min(found)
        else:
            self._first = [*map(self._begun, self._texts, self._first)]
            end = min(self._first)
            self._first = [first - end for first in self._first]
        shown, self._held = self._held[:end], self._held[end:]
        return shown

    def flush(self) -> str:
        """What is still held back at the end."""
        shown, self._held = self._held, ""
        return "" if self.found else shown

    def _begun(self, stop: str, first: int) -> int:
        """Where the end of what is held could be the beginning of `stop`, from `first` on; its length if nowhere."""
        at = self._held.find(stop[0], max(first, len(self._held) - len(stop) + 1))
        while at >= 0 and not stop.startswith(self._held[at:]):
            at = self._held.find(stop[0], at + 1)
        return at if at >= 0 else len(self._held)
