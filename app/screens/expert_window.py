"""How often each expert of a model was chosen in the last minute."""

from collections import deque

from engine.protocol.events import ExpertChoices
from widgets.dashboard.expert_strip import ExpertUse

WINDOW_S = 60.0


class ExpertWindow:
    """Adds up events, and takes away those that are too old: a large model has thousands of experts."""

    def __init__(self, experts: int, used: int) -> None:
        self._events: deque[tuple[float, ExpertChoices]] = deque()
        self._use = ExpertUse(((0,) * experts,), used)

    def add(self, event: ExpertChoices, now_s: float) -> None:
        if len(self._use.layers) != len(event.layers):  # how many there are, the first event tells
            self._use = ExpertUse(tuple((0,) * len(counts) for counts in event.layers), self._use.used)
        self._events.append((now_s, event))
        self._count(event, 1)

    def use(self, now_s: float) -> ExpertUse:
        """The experts that were chosen in the last minute. The same object as before if nothing has changed."""
        while self._events and self._events[0][0] < now_s - WINDOW_S:
            self._count(self._events.popleft()[1], -1)
        return self._use

    def _count(self, event: ExpertChoices, sign: int) -> None:
        pairs = zip(self._use.layers, event.layers, strict=True)
        layers = tuple(tuple(a + sign * b for a, b in zip(*pair, strict=True)) for pair in pairs)
        self._use = ExpertUse(layers, self._use.used)
