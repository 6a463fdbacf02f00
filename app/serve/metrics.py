"""The server's counters, in Prometheus' text format (https://prometheus.io/docs/instrumenting/exposition_formats/)."""

import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from engine.protocol.events import Finished, Slots

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
RECENT_S, MOST_RECENT = 60.0, 1024


@dataclass
class Histogram:
    """Times in seconds, by upper bound."""

    bounds: tuple[float, ...] = _SECONDS
    counts: list[int] = field(init=False)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.total += seconds

    @property
    def count(self) -> int:
        return sum(self.counts)

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0


@dataclass(frozen=True)
class Gauges:
    """What holds now: `processing` answers are computed, `waiting` requests wait for that. `resident_bytes`: of the
    engine process; `gpu_bytes`: of all programs on all GPUs. None: not known."""

    processing: int
    waiting: int
    slots: Slots | None = None
    resident_bytes: int | None = None
    gpu_bytes: int | None = None


@dataclass
class Metrics:
    requests: Counter[int] = field(default_factory=Counter)  # by status
    prompt_tokens: int = 0
    cached_tokens: int = 0
    predicted_tokens: int = 0
    prompt_s: float = 0.0
    predicted_s: float = 0.0
    first_token: Histogram = field(default_factory=Histogram)  # from the arrival of the request on
    between_tokens: Histogram = field(default_factory=lambda: Histogram(_TOKEN_SECONDS))
    answers: Histogram = field(default_factory=Histogram)
    clock: Callable[[], float] = time.monotonic
    _recent: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=MOST_RECENT))
    """When the last requests got their first token, and after how many seconds."""

    def begun(self, first_token_s: float) -> None:
        """A request has got its first token, so long after its arrival."""
        self.first_token.add(first_token_s)
        self._recent.append((self.clock(), first_token_s))

    def recent_first_tokens(self) -> list[float]:
        """Seconds from arrival to first token, of the requests that got it in the last `RECENT_S`, and of `MOST_RECENT`
        at most."""
        since = self.clock() - RECENT_S
        return [seconds for at, seconds in self._recent if at >= since]

    def answered(self, end: Finished, answer_s: float) -> None:
        self.prompt_tokens += end.prompt_n
        self.cached_tokens += end.cached_n
        self.predicted_tokens += end.predicted_n
        self.prompt_s += end.prompt_ms / 1e3
        self.predicted_s += end.predicted_ms / 1e3
        self.answers.add(answer_s)

    def text(self, now: Gauges) -> str:
        lines: list[str] = []

        def add(name: str, kind: str, help: str, *samples: tuple[str, float]) -> None:
            lines.append(f"# HELP orin_chat_{name} {help}")
            lines.append(f"# TYPE orin_chat_{name} {kind}")
            lines.extend(f"orin_chat_{name}{labels} {value}" for labels, value in samples)

        by_status = [(f'{{status="{status}"}}', n) for status, n in sorted(self.requests.items())]
        add("requests_total", "counter", "Requests for completions, by HTTP status.", *by_status)
        add("requests_processing", "gauge", "Answers that are being computed.", ("", now.processing))
        add("requests_waiting", "gauge", "Requests that wait for the engine.", ("", now.waiting))
        if now.slots:
            blocks = [
                (f'{{group="{i}",state="{state}"}}', n)
                for i, group in enumerate(now.slots.blocks)
                for state, n in (("free", group.free), ("held", group.held), ("cached", group.cached))
            ]
            add("kv_cache_blocks", "gauge", "Blocks of the KV cache, by group of layers.", *blocks)
            if any(now.slots.checkpoints):
                states = "Checkpoints of recurrent states that are kept."
                add("state_checkpoints", "gauge", states, ("", now.slots.checkpoints[0]))
            for name, help, n in (
                ("step_rows", "Replies whose next token the last step computed.", now.slots.rows),
                ("step_prompt_tokens", "Tokens of prompts that it read.", now.slots.prompt_tokens),
                ("step_room_tokens", "The most tokens of prompts that it could read.", now.slots.room),
            ):
                add(name, "gauge", help, ("", n))
            device = "Device memory of the engine."
            add("device_memory_bytes", "gauge", device, ("", now.slots.device_bytes))
        if now.resident_bytes is not None:
            add("resident_memory_bytes", "gauge", "Memory of the engine process.", ("", now.resident_bytes))
        if now.gpu_bytes is not None:
            add("gpu_memory_used_bytes", "gauge", "Memory of all programs on all GPUs.", ("", now.gpu_bytes))
        for name, help, value in (
            ("prompt_tokens_total", "Tokens of prompts.", self.prompt_tokens),
            ("prompt_tokens_cached_total", "Those of them that were in the KV cache.", self.cached_tokens),
            ("prompt_seconds_total", "Time from the start of prefill to the first token.", self.prompt_s),
            ("predicted_tokens_total", "Tokens of answers.", self.predicted_tokens),
            ("predicted_seconds_total", "Time from first tokens to last ones.", self.predicted_s),
        ):
            add(name, "counter", help, ("", value))
        for name, help, histogram in (
            ("time_to_first_token_seconds", "Time from a request to its first token.", self.first_token),
            ("inter_token_latency_seconds", "Time between two tokens of an answer.", self.between_tokens),
            ("answer_seconds", "Time from a request to the end of its answer.", self.answers),
        ):
            add(name, "histogram", help, *_samples(histogram))
        return "\n".join(lines) + "\n"


def _samples(histogram: Histogram) -> list[tuple[str, float]]:
    bounds = [*map(str, histogram.bounds), "+Inf"]
    sums = [sum(histogram.counts[: i + 1]) for i in range(len(bounds))]
    buckets = ((f'_bucket{{le="{bound}"}}', n) for bound, n in zip(bounds, sums, strict=True))
    return [*buckets, ("_sum", histogram.total), ("_count", histogram.count)]
