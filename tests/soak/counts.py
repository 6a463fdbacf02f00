"""What became of many tries. Losses are counted, so that a table shows them; a test says how many there may be."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import ClassVar, Self


@dataclass
class Counts:
    """`survived`: tries by outcome, such as "refused". `lost`: tries that failed, by what was seen. `worst_ms`: the
    longest time that something took which a user waits for or loses. `latest` are those of the part that runs."""

    fault: str
    survived: Counter[str] = field(default_factory=Counter)
    lost: Counter[str] = field(default_factory=Counter)
    worst_ms: float = 0.0
    latest: ClassVar[Self | None] = None

    def __post_init__(self) -> None:
        type(self).latest = self

    @property
    def tries(self) -> int:
        return self.survived.total() + self.lost.total()

    def took(self, ms: float) -> None:
        self.worst_ms = max(self.worst_ms, ms)

    @contextmanager
    def trying(self) -> Iterator[None]:
        """Times the body. An exception of it is a loss."""
        started = time.perf_counter()
        try:
            yield
        except Exception as error:
            self.lost[f"{type(error).__name__}: {str(error)[:80]}"] += 1
        self.took((time.perf_counter() - started) * 1e3)

    def row(self) -> str:
        """A row of a Markdown table."""
        outcomes = ", ".join(f"{count} {what}" for what, count in self.survived.most_common())
        losses = ", ".join(f"{count} {what}" for what, count in self.lost.most_common(5)) or "none"
        return f"| {self.fault} | {self.tries} | {outcomes} | {losses} | {self.worst_ms:.0f} ms |"
