"""Answers that go on while prompts keep arriving: how much these delay the next token."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from app.bench.samples import Sample
from engine.events import Failed

Ids = tuple[int, ...]


class Answer(Protocol):
    async def __call__(
        self, ids: Ids, max_tokens: int, *, fresh: bool, on_token: Callable[[], object]
    ) -> Sample | Failed: ...


@dataclass
class Interrupted:
    """The milliseconds from token to token of `streams` answers, without (`quiet_ms`) and with prompts that arrive
    (`busy_ms`), in times in which all of them decode; and from the arrival of each prompt to its first token."""

    streams: int
    quiet_ms: list[float]
    busy_ms: list[float]
    first_token_ms: list[float]

    @property
    def rate(self) -> float:
        """Tokens a second of all answers together, while prompts arrive."""
        return self.streams * 1e3 / statistics.fmean(self.busy_ms)


async def interrupted(
    answer: Answer, prompts: Sequence[Ids], max_tokens: int, arrival: Callable[[], Ids]
) -> Interrupted | Failed | None:
    """Answers all prompts at once, and then again while prompts of `arrival` come, one after another. None if there was
    no time in which all decoded."""
    quiet = await _together(answer, prompts, max_tokens, [lambda: None] * len(prompts))
    if isinstance(quiet, Failed):
        return quiet
    begun = [asyncio.Event() for _ in prompts]
    first_sent_s, arrived = float("inf"), list[Sample | Failed]()

    async def arrive() -> None:
        nonlocal first_sent_s
        await asyncio.gather(*(event.wait() for event in begun))
        first_sent_s = time.perf_counter()
        while not arrived or isinstance(arrived[-1], Sample):
            arrived.append(await answer(arrival(), 1, fresh=True, on_token=lambda: None))

    arriving = asyncio.create_task(arrive())
    busy = await _together(answer, prompts, max_tokens, [event.set for event in begun])
    arriving.cancel()
    with suppress(asyncio.CancelledError):
        await arriving
    if isinstance(busy, Failed):
        return busy
    samples = [sample for sample in arrived if isinstance(sample, Sample)]
    if failed := next((sample for sample in arrived if isinstance(sample, Failed)), None):
        return failed
    quiet_ms, busy_ms = _shared_intervals(quiet), _shared_intervals(busy, first_sent_s * 1e3)
    first_token_ms = [ms for sample in samples if (ms := sample.first_token_ms) is not None]
    return Interrupted(len(prompts), quiet_ms, busy_ms, first_token_ms) if quiet_ms and busy_ms else None


async def _together(
    answer: Answer, prompts: Sequence[Ids], max_tokens: int, on_token: Sequence[Callable[[], object]]
) -> list[Sample] | Failed:
    answers = await asyncio.gather(
        *(
            answer(ids, max_tokens, fresh=False, on_token=call)
            for ids, call in zip(prompts, on_token, strict=True)
        )
    )
    failed = next((answer for answer in answers if isinstance(answer, Failed)), None)
    return failed or [answer for answer in answers if isinstance(answer, Sample)]


def _shared_intervals(samples: Sequence[Sample], since_ms: float = 0.0) -> list[float]:
    """Between the tokens of all samples, from when the last one has begun (and `since_ms`) until the first one ends."""
    times = [sample.common_times_ms for sample in samples]
    if not all(times):
        return []
    start, end = max(since_ms, *(each[0] for each in times)), min(each[-1] for each in times)
    return [ms for sample in samples for ms in sample.intervals_between(start, end)]
