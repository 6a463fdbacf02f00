"""Reports which experts a model chooses while it answers, at most once a second and at the end of an answer."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from engine.protocol.events import ExpertChoices

INTERVAL_S = 1.0
"""The device counts as it computes. To read its counts, the host waits for the step that runs, so it does so seldom."""


class ChoiceReporter:
    """Reports what is chosen for requests, whichever they are. Does nothing if the runner counts nothing."""

    def __init__(
        self, read: Callable[[], list[NDArray[np.int32]]], report: Callable[[ExpertChoices], None]
    ) -> None:
        """`read` gives `ModelRunner.expert_choices`."""
        self._read, self._report, self._before = read, report, read()
        self._due_s: float | None = None  # of the next report, while there is a request

    @property
    def counts(self) -> bool:
        """Whether there is anything to report."""
        return bool(self._before)

    def skip(self) -> None:
        """Leaves out what steps have chosen that are no request's, as those of a profile."""
        if self.counts:
            self._before = self._read()

    def report_if_due(self) -> None:
        """To be called often while there are requests. Nothing is read at first, since first tokens are awaited."""
        if self._due_s is None:
            self._due_s = time.perf_counter() + INTERVAL_S
        elif time.perf_counter() >= self._due_s:
            self._due_s = time.perf_counter() + INTERVAL_S
            self._report_new()

    def end(self) -> None:
        """All requests have ended."""
        self._due_s = None
        self._report_new()

    def _report_new(self) -> None:
        """Reports what was chosen since the last report."""
        if not self.counts:
            return
        before, self._before = self._before, self._read()
        new = [now - then for now, then in zip(self._before, before, strict=True)]
        if any(counts.any() for counts in new):
            self._report(ExpertChoices(layers=tuple(tuple(counts.tolist()) for counts in new)))
