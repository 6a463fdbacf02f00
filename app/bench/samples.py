"""What one repetition of a test gave: an answer, or several at the same time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from engine.events import Finished, decode_rate


@dataclass
class Sample:
    """One answer: its end, and when each token came, in milliseconds by the engine's clock (None: not known). The
    request was sent at `sent_s`, and the engine's clock was at zero at `began_s` (time.perf_counter)."""

    end: Finished
    times_ms: list[float | None]
    sent_s: float = 0.0
    began_s: float = 0.0

    @property
    def intervals_ms(self) -> list[float]:
        """From each token to the next."""
        return self.intervals_between(-math.inf, math.inf)

    def intervals_between(self, start_ms: float, end_ms: float) -> list[float]:
        """From each token to the next, of tokens after `start_ms` and until `end_ms` by the common clock. llama-server
        reports the tokens of one character at once; these share the time since the token before them."""
        groups = [(time, len(list(group))) for time, group in groupby(self.common_times_ms)]
        return [
            (time - before) / count
            for (before, _), (time, count) in pairwise(groups)
            if start_ms < time <= end_ms
            for _ in range(count)
        ]

    @property
    def common_times_ms(self) -> list[float]:
        """When each token came, by a clock that all answers share."""
        return [self.began_s * 1e3 + time for time in self.times_ms if time is not None]

    @property
    def first_token_ms(self) -> float | None:
        """From sending the request to the first token, also while it waits for others. None: not known."""
        times_ms = self.common_times_ms
        return times_ms[0] - self.sent_s * 1e3 if times_ms else None


@dataclass(frozen=True)
class SharedDecode:
    """The time in which all of several answers decode, and the rate of each in tokens/s."""

    ms: float
    rates: list[float]


@dataclass
class Together:
    """Several conversations at once. `fresh` are answers to prompts that all come at the same moment. `decode` is from
    answers to the same prompts again, which are in the KV cache then, so that no prefill comes between their tokens."""

    fresh: list[Sample]
    decode: SharedDecode


def shared_decode(streams: Sequence[Sequence[float]]) -> SharedDecode | None:
    """Decode of several answers at once, from the times of their tokens in milliseconds on one clock.

    It lasts from the first token of the answer that begins last to the last token of the one that ends first. The rate
    of an answer is the `decode_rate` of its tokens in this time; the total is the sum of these rates. None if an answer
    has fewer than two tokens in it.
    """
    if not all(streams):
        return None
    start, end = max(times[0] for times in streams), min(times[-1] for times in streams)
    rates = []
    for times in streams:
        inside = [time for time in times if start <= time <= end]
        after_first = sum(time > inside[0] for time in inside)  # tokens may be reported together
        rates.append(decode_rate(after_first + 1, inside[-1] - inside[0]) if inside else 0.0)
    return SharedDecode(end - start, rates) if all(rates) else None
