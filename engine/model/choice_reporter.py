"""Reports which experts a model chooses while it answers, at most once a second and at the end."""

from __future__ import annotations

import time
from collections.abc import Callable

from engine.events import Event, ExpertChoices
from engine.model.model_runner import ModelRunner

INTERVAL_S = 1.0
"""The device counts as it computes. To read its counts, the host waits for the step that runs, so it does so seldom."""


class ChoiceReporter:
    """Reports the choices of one request, from now on. Those of warm-up steps and profiles before are left out. Does
    nothing if the runner counts none."""

    def __init__(self, request_id: int, runner: ModelRunner, report: Callable[[Event], None]) -> None:
        self._request_id, self._runner, self._report = request_id, runner, report
        self._before = runner.expert_choices()
        self._due_s = time.perf_counter() + INTERVAL_S

    def report_if_due(self) -> None:
        if self._before and time.perf_counter() >= self._due_s:
            self.report()

    def report(self) -> None:
        """Reports what was chosen since the last report."""
        if not self._before:
            return
        before, self._before = self._before, self._runner.expert_choices()
        new = [now - then for now, then in zip(self._before, before, strict=True)]
        self._due_s = time.perf_counter() + INTERVAL_S
        if any(counts.any() for counts in new):
            layers = tuple(tuple(counts.tolist()) for counts in new)
            self._report(ExpertChoices(request_id=self._request_id, layers=layers))
