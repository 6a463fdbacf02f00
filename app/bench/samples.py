"""What one repetition of a test gives: of one answer, of several at once, or of several while prompts arrive."""

import asyncio
import math
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from typing import Protocol

from engine.protocol.events import Failed, Finished, decode_rate

Ids = tuple[int, ...]


class AnswerFailedError(Exception):
    """An engine did not answer; `failed` says why."""

    def __init__(self, failed: Failed) -> None:
        super().__init__(failed.message)
        self.failed = failed


@dataclass
class TimedAnswer:
    """One answer: its end, and when each token came, in milliseconds by the engine's clock (None: not known). The
    request was sent at `sent_s`, and the engine's clock was at zero at `began_s` (time.perf_counter)."""

    end: Finished
    times_ms: list[float | None]
    sent_s: float = 0.0
    began_s: float = 0.0

    def intervals_ms(self, start_ms: float = -math.inf, end_ms: float = math.inf) -> list[float]:
        """The times from each token to the next, of tokens after `start_ms` and until `end_ms` by the common clock.
        llama-server reports the tokens of one character at once; these share the time since the token before them."""
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
    def first_token_ms(self) -> list[float]:
        """The time from sending the request to the first token, also while it waits for others. Empty: not known."""
        return [time - self.sent_s * 1e3 for time in self.common_times_ms[:1]]


class AskEngine(Protocol):
    """Asks an engine for an answer to token ids. Raises AnswerFailedError."""

    async def __call__(
        self, ids: Ids, max_tokens: int, *, fresh: bool, on_token: Callable[[], object] = ...
    ) -> TimedAnswer: ...


@dataclass(frozen=True)
class Repetition:
    """It took `ms` at `rate` tokens/s, which is that of all answers together; `stream_rates` are those of each. The
    other times are in milliseconds: from token to token, to first tokens, and from token to token before prompts
    arrived."""

    ms: float
    rate: float
    latencies_ms: list[float] = field(default_factory=list)
    first_token_ms: list[float] = field(default_factory=list)
    stream_rates: list[float] = field(default_factory=list)
    quiet_ms: list[float] = field(default_factory=list)


async def together(ask: AskEngine, prompts: Sequence[Ids], max_tokens: int) -> Repetition | None:
    """Answers all prompts at once, and then again. The times are of the first round. The rates are of the second: the
    prompts are in the KV cache then, so that no prefill comes between the tokens. None if there was no time in which
    all decoded. Raises AnswerFailedError."""
    fresh = await _answers(ask, prompts, max_tokens)
    again = await _answers(ask, prompts, max_tokens)
    if not (decode := shared_decode([sample.common_times_ms for sample in again])):
        return None
    return Repetition(
        decode.ms,
        sum(decode.rates),
        [ms for sample in fresh for ms in sample.intervals_ms()],
        [ms for sample in fresh for ms in sample.first_token_ms],
        decode.rates,
    )


async def interrupted(
    ask: AskEngine, prompts: Sequence[Ids], max_tokens: int, arrival: Callable[[], Ids]
) -> Repetition | None:
    """Answers all prompts at once, and then again while prompts of `arrival` come, one after another: how much these
    delay the next token. None if there was no time in which all decoded. Raises AnswerFailedError."""
    quiet_ms = _shared_intervals(await _answers(ask, prompts, max_tokens))
    begun = [asyncio.Event() for _ in prompts]
    first_sent_s, first_token_ms = math.inf, list[float]()

    async def arrive() -> None:
        nonlocal first_sent_s
        await asyncio.gather(*(event.wait() for event in begun))
        first_sent_s = time.perf_counter()
        while True:
            first_token_ms.extend((await ask(arrival(), 1, fresh=True)).first_token_ms)

    arriving = asyncio.create_task(arrive())
    try:
        busy = await _answers(ask, prompts, max_tokens, [event.set for event in begun])
    finally:
        arriving.cancel()
        await asyncio.gather(arriving, return_exceptions=True)
    with suppress(asyncio.CancelledError):
        arriving.result()
    busy_ms = _shared_intervals(busy, first_sent_s * 1e3)
    if not quiet_ms or not busy_ms:
        return None
    mean_ms = statistics.fmean(busy_ms)
    rate = 1e3 / mean_ms
    return Repetition(mean_ms, len(prompts) * rate, busy_ms, first_token_ms, [rate], quiet_ms)


async def _answers(
    ask: AskEngine, prompts: Sequence[Ids], max_tokens: int, on_token: Sequence[Callable[[], object]] = ()
) -> list[TimedAnswer]:
    """The answers to prompts that come at the same moment. Raises AnswerFailedError when all have ended."""
    calls = on_token or [lambda: None] * len(prompts)
    answers = await asyncio.gather(
        *(ask(ids, max_tokens, fresh=False, on_token=call) for ids, call in zip(prompts, calls, strict=True)),
        return_exceptions=True,
    )
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    return [answer for answer in answers if isinstance(answer, TimedAnswer)]


def _shared_intervals(samples: Sequence[TimedAnswer], since_ms: float = 0.0) -> list[float]:
    """Between the tokens of all samples, from when the last one has begun (and `since_ms`) until the first one ends."""
    times = [sample.common_times_ms for sample in samples]
    if not all(times):
        return []
    start, end = max(since_ms, *(each[0] for each in times)), min(each[-1] for each in times)
    return [ms for sample in samples for ms in sample.intervals_ms(start, end)]


@dataclass(frozen=True)
class SharedDecode:
    """The time in which all of several answers decode, and the rate of each in tokens/s."""

    ms: float
    rates: list[float]


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
