"""From an engine's events to what the dashboard shows of its speed. No screen and no engine here: events and a
clock."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median

from engine.events import (
    Counter,
    Event,
    Failed,
    Finished,
    KernelProfile,
    Measured,
    Prefilling,
    Ready,
    Token,
    decode_rate,
    prefill_rate,
)
from widgets.kernel_lines import CACHEABLE_BYTES, KernelProfiles
from widgets.throughput_graph import GAP, Sample, Throughput

SAMPLE_S = 0.25
PREFILL_SAMPLE_S = 0.05
KEPT = 600
"""Samples: two and a half minutes of work, more than the widest graph shows."""
_RECENT = 4  # samples that make the current speed
_MEMORY_COUNTERS = ("EMC activity", "memory activity")
_OF_A_CARD = ("GPU load", "memory activity", "GPU clock", "memory clock", "throttled")


class PerformanceObserver:
    """Folds events into samples of speed. `changes` counts what has changed, so that a screen need not draw
    what it has drawn before."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.changes = 0
        self.kernels = KernelProfiles()
        self.ready: Ready | None = None
        self.copy_gbps: float | None = None
        self.last_end: Finished | None = None
        self._samples: deque[Sample] = deque(maxlen=KEPT)
        self._prefill: float | None = None
        self._position = self._cached = 0  # tokens; the second: of the prompt, known from earlier turns
        self._tokens, self._since_s = 0, 0.0  # of the sample that is being taken
        self._in_decode = self._sampled = False  # the second: since decode began
        self._prompt: tuple[int, float] | None = None  # tokens done, at what time
        self._prompt_began: tuple[int, float] | None = None  # as `_prompt`; None once there is a sample

    def observe(self, event: Event) -> None:
        match event:
            case Token():
                self._token(event)
            case Prefilling():
                self._prompt_progress(event)
            case Finished():
                self._end(event)
            case Ready():
                self._started(event)
            case Measured(copy_gbps=copy_gbps):
                self.copy_gbps = copy_gbps
                self.kernels = replace(self.kernels, copy_gbps=copy_gbps)
                self.changes += 1
            case KernelProfile(step="decode"):
                self.kernels = replace(self.kernels, note="", decode=event)
                self.changes += 1
            case KernelProfile():
                self.kernels = replace(self.kernels, note="", prefill=event)
                self.changes += 1
            case Failed():
                self._pause()

    def note(self, text: str) -> None:
        """What is to be said of the kernels."""
        self.kernels = replace(self.kernels, note=text)
        self.changes += 1

    # --- figures ----------------------------------------------------------------------------------------

    @property
    def position(self) -> int:
        """Tokens in the context."""
        return self._position

    def bytes_per_token(self, position: int) -> int:
        """What a decode step there must read, 0 where the engine does not tell."""
        return round(self.ready.bytes_per_token(position)) if self.ready else 0

    @property
    def decode_rates(self) -> list[float]:
        """Tokens per second of the samples kept, oldest first."""
        return [s.tokens_per_s for s in self._samples if s is not GAP and not s.is_prefill]

    @property
    def current(self) -> float | None:
        """Tokens per second over the last second or so of decode, of one answer."""
        rates: list[float] = []
        for sample in reversed(self._samples):
            if len(rates) == _RECENT or (rates and sample is GAP):
                break
            if sample is not GAP and not sample.is_prefill:
                rates.append(sample.tokens_per_s)
        # The mean of speeds over equal times; samples are that, but for their last token.
        return sum(rates) / len(rates) if rates else None

    @property
    def _is_on_cpu(self) -> bool:
        return self.ready is not None and self.ready.is_on_cpu

    def bearing(self, counters: Sequence[Counter]) -> tuple[Counter, ...]:
        """Those that bear on the engine's speed: of one on the CPU, the counters of a graphics card do not. (On a
        Jetson the CPU and the GPU share their memory, whose activity has a name of its own.)"""
        return tuple(c for c in counters if not self._is_on_cpu or c.name not in _OF_A_CARD)

    def throughput(self, counters: Sequence[Counter] = ()) -> Throughput:
        rates, current = self.decode_rates, self.current
        now = Sample(current or 0.0, self.bytes_per_token(self._position))
        roofline = now.roofline(self.copy_gbps)
        share = current / roofline if current and roofline else None
        return Throughput(
            samples=tuple(self._samples),
            current=current,
            median=median(rates) if rates else None,
            best=max(rates, default=None),
            prefill=self._prefill,
            gbps=now.gbps if current else None,
            copy_gbps=self.copy_gbps,
            measured="reading" if self._is_on_cpu else "copy",
            share=share,
            is_cached=share is not None and share > 1 and now.bytes_per_token <= CACHEABLE_BYTES,
            memory=_memory_line(self.bearing(counters)),
        )

    # --- events -----------------------------------------------------------------------------------------

    def _started(self, ready: Ready) -> None:
        self.ready, self.copy_gbps, self.last_end, self._prefill = ready, None, None, None
        self._samples.clear()
        self.kernels = KernelProfiles()
        self._position = self._cached = 0
        self._pause()

    def _prompt_progress(self, event: Prefilling) -> None:
        now = self._clock()
        if self._in_decode or self._prompt is None or event.done < self._prompt[0]:
            self._in_decode, self._prompt = False, (event.done, now)
            self._prompt_began = self._prompt
        done, since = self._prompt
        if event.done > done and now - since >= PREFILL_SAMPLE_S:
            self._add(Sample((event.done - done) / (now - since), is_prefill=True))
            self._prompt, self._prompt_began = (event.done, now), None
        self._position, self._cached = event.done, event.cached

    def _token(self, event: Token) -> None:
        now = self._clock() if event.at_ms is None else event.at_ms / 1e3
        if not self._in_decode:
            self._end_prompt(event)
        self._position += 1
        if not self._in_decode:
            self._in_decode, self._prompt, self._sampled = True, None, False
            self._tokens, self._since_s = 0, now
            return
        self._tokens += 1
        if (taken := now - self._since_s) < SAMPLE_S:
            return
        rate = self._tokens / taken
        self._add(Sample(rate, self.bytes_per_token(self._position)))
        self._tokens, self._since_s, self._sampled = 0, now, True

    def _end_prompt(self, first: Token) -> None:
        """A prompt that was read too fast for samples on the way is one as a whole, up to its `first` token."""
        if self._prompt_began is not None:
            done, since = self._prompt_began
            taken = self._clock() - since if first.at_ms is None else first.at_ms / 1e3
            if self._position > done and taken > 0:
                self._add(Sample((self._position - done) / taken, is_prefill=True))
        self._prompt_began = None
        if self._prompt is not None and first.at_ms and self._position > self._cached:
            self._prefill = prefill_rate(self._position, self._cached, first.at_ms)

    def _end(self, end: Finished) -> None:
        self.last_end = end
        speed = decode_rate(end.predicted_n, end.predicted_ms)
        if self._in_decode and not self._sampled and speed:  # too short an answer for a sample
            self._add(Sample(speed, self.bytes_per_token(self._position)))
        if end.prompt_n > end.cached_n and end.predicted_n:
            self._prefill = prefill_rate(end.prompt_n, end.cached_n, end.prompt_ms)
        self._position = end.context_used
        self._pause()

    def _pause(self) -> None:
        self._in_decode, self._prompt, self._prompt_began = False, None, None
        if self._samples and self._samples[-1] is not GAP:
            self._samples.append(GAP)
        self.changes += 1

    def _add(self, sample: Sample) -> None:
        self._samples.append(sample)
        self.changes += 1


def _memory_line(counters: Sequence[Counter]) -> str:
    """What the memory controller itself measures, or why that is not known."""
    if not counters:
        return ""
    found = next((counter for counter in counters if counter.name in _MEMORY_COUNTERS), None)
    if found is None:
        reason = next((c.absent for c in counters if c.name == "GPU" and c.absent), "")
        return f"memory: not available: {reason or 'no counter here'}"
    if found.value is None:
        return f"memory: not available: {found.absent}"
    return f"memory {found.value:.0f} % busy, measured"
