"""What a machine took and how fast its clocks were while something was measured on it.

A thread reads the machine's counters some times a second. The power is that of the whole board on a Jetson (VDD_IN, or
the sum of its rails), and that of the graphics card elsewhere. It is a mean over the samples; NVML's own samples are
means of up to a second.
"""

from __future__ import annotations

import statistics
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from engine.protocol.events import Counter

_EACH_S = 0.2
_FULL, _FULL_ON_CARDS = 0.97, 0.8
"""A clock above this share of its maximum counts as full. Graphics cards choose theirs, and seldom the highest."""
_CLOCKS = ("GPU clock", "EMC clock", "memory clock")
_OF_BOARDS = "For full clocks: sudo nvpmodel -m 0 && sudo jetson_clocks"
_OF_CARDS = "See: nvidia-smi -q -d PERFORMANCE"

Readings = tuple[Counter, ...]


@dataclass
class Samples:
    """The counters that were read during a measurement."""

    readings: list[Readings] = field(default_factory=list)

    def _values(self, name: str) -> list[float]:
        counters = (counter for reading in self.readings for counter in reading if counter.name == name)
        return [counter.value for counter in counters if counter.value is not None]

    def _last(self, name: str) -> Counter | None:
        counters = [c for reading in self.readings for c in reading if c.name == name and not c.absent]
        return counters[-1] if counters else None

    def value(self, name: str) -> float | None:
        """The median of a counter; None if it could not be read."""
        values = self._values(name)
        return statistics.median(values) if values else None

    def maximum(self, name: str) -> float | None:
        counter = self._last(name)
        return counter.maximum if counter else None

    @property
    def watts(self) -> float | None:
        """The mean power."""
        values = self._values("power")
        return statistics.fmean(values) if values else None

    def text(self, name: str) -> str:
        """The last text of a counter, as that of "power mode"; "" if it has none."""
        counter = self._last(name)
        return counter.text if counter else ""

    @property
    def throttled(self) -> str:
        """All reasons that slowed the clocks down; "" if none did or nobody knows."""
        parts = [p for reading in self.readings for c in reading if c.name == "throttled" for p in c.parts]
        return ", ".join(dict.fromkeys(parts))

    def below_full(self) -> str:
        """What kept the machine below its full speed, in a sentence with advice; "" if nothing is known to."""
        causes, mode = [], self.text("power mode")
        is_board = bool(mode or self.text("jetson_clocks"))
        for name in _CLOCKS:
            now, most = self.value(name), self.maximum(name)
            if now and most and now < (_FULL if is_board else _FULL_ON_CARDS) * most:
                causes.append(f"the {name} was {now:,.0f} of {most:,.0f} MHz")
        if self.throttled:
            causes.append(f"the clocks were throttled ({self.throttled})")
        if mode and not mode.upper().startswith("MAXN"):
            causes.append(f"the power mode was {mode}, which limits clocks and cores")
        if not causes:
            return ""
        said = " and ".join(causes)
        return f"Below full speed: {said}. {_OF_BOARDS if is_board else _OF_CARDS}"


class PowerMeter:
    """Reads counters while it is `running`."""

    def __init__(self, read: Callable[[], Iterable[Counter]], each_s: float = _EACH_S) -> None:
        self._read, self._each_s = read, each_s

    @contextmanager
    def running(self) -> Iterator[Samples]:
        """The samples fill up until the end; one is taken at least."""
        samples, ended = Samples(), threading.Event()

        def sample() -> None:
            while True:
                samples.readings.append(tuple(self._read()))
                if ended.wait(self._each_s):
                    return

        thread = threading.Thread(target=sample, name="power", daemon=True)
        thread.start()
        try:
            yield samples
        finally:
            ended.set()
            thread.join()


def merged(samples: Sequence[Samples]) -> Samples:
    """The samples of several measurements as those of one."""
    return Samples([reading for each in samples for reading in each.readings])


def with_efficiency(counters: Readings, tokens_per_s: float | None, is_on_cpu: bool = False) -> Readings:
    """The counters, and how many tokens a joule gives at such a rate, if the power is known: a card's is not that of
    the CPU beside it, but a Jetson's is the whole board's."""
    if is_on_cpu and not any(counter.name == "power mode" for counter in counters):
        return counters
    power = next((c.value for c in counters if c.name == "power" and c.value), None)
    if not tokens_per_s or not power:
        return counters
    return (*counters, Counter(name="tokens a joule", value=tokens_per_s / power, unit="tok/J"))
