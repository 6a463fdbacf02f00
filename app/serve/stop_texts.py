"""Finds the texts at which an answer is to stop."""

from collections.abc import Sequence


class StopTexts:
    """Takes the text of an answer piece by piece. Text that could be the beginning of one of `texts` is held back until
    the next pieces decide. `found`: the one that was found, where the answer ends; "" so far."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = tuple(filter(None, texts))
        self._held = ""
        self.found = ""

    def feed(self, text: str) -> str:
        """What can be shown now."""
        if self.found or not self._texts:
            return "" if self.found else text
        self._held += text
        found = [(at, stop) for stop in self._texts if (at := self._held.find(stop)) >= 0]
        end, self.found = min(found, default=(len(self._held) - max(map(self._begun, self._texts)), ""))
        shown, self._held = self._held[:end], self._held[end:]
        return shown

    def flush(self) -> str:
        """What is still held back at the end."""
        shown, self._held = self._held, ""
        return "" if self.found else shown

    def _begun(self, stop: str) -> int:
        """How many characters at the end could be the beginning of `stop`."""
        longest = min(len(stop) - 1, len(self._held))
        return next((n for n in range(longest, 0, -1) if self._held.endswith(stop[:n])), 0)
