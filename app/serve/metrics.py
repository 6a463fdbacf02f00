"""The server's counters, in Prometheus' text format (https://prometheus.io/docs/instrumenting/exposition_formats/)."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field

from engine.events import Finished

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


@dataclass
class Histogram:
    """Times in seconds, by upper bound."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(_SECONDS) + 1))
    total: float = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(_SECONDS, seconds)] += 1
        self.total += seconds

    @property
    def count(self) -> int:
        return sum(self.counts)

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0


@dataclass
class Metrics:
    requests: Counter[int] = field(default_factory=Counter)  # by status
    prompt_tokens: int = 0
    cached_tokens: int = 0
    predicted_tokens: int = 0
    prompt_s: float = 0.0
    predicted_s: float = 0.0
    first_token: Histogram = field(default_factory=Histogram)  # from the arrival of the request on
    answers: Histogram = field(default_factory=Histogram)

    def answered(self, end: Finished, first_token_s: float, answer_s: float) -> None:
        self.prompt_tokens += end.prompt_n
        self.cached_tokens += end.cached_n
        self.predicted_tokens += end.predicted_n
        self.prompt_s += end.prompt_ms / 1e3
        self.predicted_s += end.predicted_ms / 1e3
        self.first_token.add(first_token_s)
        self.answers.add(answer_s)

    def text(self, processing: int, waiting: int) -> str:
        """`processing` answers are being computed now, and `waiting` requests wait for that."""
        lines: list[str] = []

        def add(name: str, kind: str, help: str, *samples: tuple[str, float]) -> None:
            lines.append(f"# HELP orin_chat_{name} {help}")
            lines.append(f"# TYPE orin_chat_{name} {kind}")
            lines.extend(f"orin_chat_{name}{labels} {value}" for labels, value in samples)

        by_status = [(f'{{status="{status}"}}', n) for status, n in sorted(self.requests.items())]
        add("requests_total", "counter", "Requests for completions, by HTTP status.", *by_status)
        add("requests_processing", "gauge", "Answers that are being computed.", ("", processing))
        add("requests_waiting", "gauge", "Requests that wait for the engine.", ("", waiting))
        for name, help, value in (
            ("prompt_tokens_total", "Tokens of prompts.", self.prompt_tokens),
            ("prompt_tokens_cached_total", "Those of them that were in the KV cache.", self.cached_tokens),
            ("prompt_seconds_total", "Time from the start of prefill to the first token.", self.prompt_s),
            ("predicted_tokens_total", "Tokens of answers.", self.predicted_tokens),
            ("predicted_seconds_total", "Time from first tokens to last ones.", self.predicted_s),
        ):
            add(name, "counter", help, ("", value))
        for name, help, histogram in (
            ("first_token_seconds", "Time from a request to its first token.", self.first_token),
            ("answer_seconds", "Time from a request to the end of its answer.", self.answers),
        ):
            add(name, "histogram", help, *_samples(histogram))
        return "\n".join(lines) + "\n"


def _samples(histogram: Histogram) -> list[tuple[str, float]]:
    bounds = [*map(str, _SECONDS), "+Inf"]
    sums = [sum(histogram.counts[: i + 1]) for i in range(len(bounds))]
    buckets: list[tuple[str, float]] = [
        (f'_bucket{{le="{bound}"}}', n) for bound, n in zip(bounds, sums, strict=True)
    ]
    return [*buckets, ("_sum", histogram.total), ("_count", histogram.count)]
