"""Turns an engine's events into the figures of the dashboard. It needs no screen and no engine, only a clock."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean, median

from app.chat.roofline import device_key, keep_best
from app.chat.slowdown import explain_slowdown
from app.screens.expert_window import ExpertWindow
from engine.protocol.events import (
    MIN_TOKENS,
    Counter,
    Event,
    ExpertChoices,
    Failed,
    Finished,
    KernelProfile,
    Measured,
    Prefilling,
    Ready,
    Seeing,
    Token,
    decode_rate,
    shown_prefill_rate,
)  # fmt: skip
from widgets.dashboard.expert_strip import ExpertUse
from widgets.dashboard.kernel_lines import CACHEABLE_BYTES, KernelProfiles
from widgets.dashboard.throughput_lines import Throughput
from widgets.dashboard.timeline import Mark, Sample
from widgets.text import counted

SAMPLE_S = 0.25
PREFILL_SAMPLE_S = 0.05
HISTORY_S = 330.0
"""How long samples and marks are kept: the graph shows five minutes, and the rest of its first cell."""
MAX_RATES = 600
"""Decode samples that the median and the best are taken from: two and a half minutes of decode."""
_CURRENT_SAMPLES = 4
MIN_STEPS = 8
"""An answer of so many tokens, or fewer, says nothing of what its tokens take: the first ones are slower."""
_MEMORY_COUNTERS = ("EMC activity", "memory activity")
_CARD_COUNTERS = ("GPU load", "memory activity", "GPU clock", "memory clock", "throttled")


class PerformanceObserver:
    """Samples the speeds. `changes` grows with each change of a figure, so that nothing is drawn twice."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, cpu_clock: Callable[[], float] = time.process_time
    ) -> None:
        """`cpu_clock` gives the seconds of CPU time that this program has taken."""
        self._clock, self._cpu_clock = clock, cpu_clock
        self.changes = 0
        self.kernels = KernelProfiles()
        self.ready: Ready | None = None
        self.last_end: Finished | None = None
        self._samples: deque[Sample] = deque()
        self._marks: deque[Mark] = deque()
        self._rates: deque[float] = deque(maxlen=MAX_RATES)  # decode samples of the engine, in tokens/s
        self._current: deque[float] = deque(maxlen=_CURRENT_SAMPLES)  # the last ones, of one answer
        self._best: tuple[float, int] | None = None  # the best current speed, and the bytes a token read then
        self._prefill: float | None = None
        self._guesses = ""
        self._position = self._cached = 0  # tokens in the context; tokens of the prompt from earlier turns
        self._tokens, self._since_s = 0, 0.0  # of the decode sample in progress
        self._in_decode = self._has_decode_sample = False  # of this answer
        self._steps_s: list[float] = []  # the times between the tokens of this answer
        self._at_s = 0.0  # of its last token
        self._prompt: tuple[int, float] | None = None  # its tokens at the last prefill sample, and its time
        self._has_prompt_sample = self._has_looked = False
        self._began: tuple[float, float] | None = None  # the prompt of this answer, by both clocks
        self._experts: ExpertWindow | None = None

    def observe(self, event: Event) -> None:
        """Takes an event of the engine."""
        match event:
            case Token():
                self._token(event)
            case Prefilling():
                self._prefilling(event)
            case Seeing():
                self._seeing(event)
            case Finished():
                self._finished(event)
            case Ready():
                self._engine_ready(event)
            case Measured(copy_gbps=copy_gbps):
                self._bandwidth_measured(copy_gbps)
            case KernelProfile():
                self._set_kernels(self.kernels.with_profile(event))
            case ExpertChoices() if self._experts:
                self._experts.add(event, self._clock())
                self.changes += 1
            case Failed():
                self._end_answer()

    def note(self, text: str) -> None:
        """Shows `text` in the kernel table."""
        self._set_kernels(replace(self.kernels, note=text))

    def _bandwidth_measured(self, copy_gbps: float) -> None:
        """The best of a device counts: other programs only make it less."""
        best = keep_best(device_key(self.ready), copy_gbps) if self.ready else copy_gbps
        self._set_kernels(replace(self.kernels, copy_gbps=best))

    def _set_kernels(self, kernels: KernelProfiles) -> None:
        self.kernels = kernels
        self.changes += 1

    # --- figures ----------------------------------------------------------------------------------------

    @property
    def bytes_per_token(self) -> int:
        """What a decode step reads at the current position; 0 if the engine does not say."""
        return round(self.ready.bytes_per_token(self._position)) if self.ready else 0

    @property
    def current(self) -> float | None:
        """The mean of the last decode samples of one answer, in tokens/s."""
        return fmean(self._current) if self._current else None

    @property
    def is_on_cpu(self) -> bool:
        return self.ready is not None and self.ready.is_on_cpu

    def relevant(self, counters: Sequence[Counter]) -> tuple[Counter, ...]:
        """The counters that bear on the speed of this engine: those of a graphics card do not if it runs on the CPU.
        (On a Jetson the CPU and the GPU share the memory; its counter has another name.)"""
        return tuple(c for c in counters if not self.is_on_cpu or c.name not in _CARD_COUNTERS)

    def throughput(self, counters: Sequence[Counter] = ()) -> Throughput:
        rates, current = self._rates, self.current
        self._forget()
        now = Sample(current or 0.0, self.bytes_per_token)
        roofline = now.roofline(self.kernels.copy_gbps)
        share = current / roofline if current and roofline else None
        return Throughput(
            samples=tuple(self._samples),
            marks=tuple(self._marks),
            now_s=self._clock(),
            current=current,
            median=median(rates) if rates else None,
            best=max(rates, default=None),
            prefill=self._prefill,
            gbps=now.gbps if current else None,
            copy_gbps=self.kernels.copy_gbps,
            measured="reading" if self.is_on_cpu else "copy",
            share=share,
            is_cached=share is not None and share > 1 and now.bytes_per_token <= CACHEABLE_BYTES,
            memory=_memory_load(self.relevant(counters)),
            guesses=self._guesses,
        )

    def experts(self) -> ExpertUse | None:
        """How often each expert was chosen in the last minute; None if the engine does not count."""
        return self._experts.use(self._clock()) if self._experts else None

    def slowdown(self, counters: Sequence[Counter]) -> str:
        """Why decode is slower than its best since the engine was ready; "" if it is not."""
        current = self.current
        if current and (self._best is None or current > self._best[0]):
            self._best = current, self.bytes_per_token
        if self._best is None:
            return ""
        best, best_bytes = self._best
        context_factor = best_bytes / self.bytes_per_token if self.bytes_per_token and best_bytes else 1.0
        return explain_slowdown(current, best, context_factor, self._position, self.relevant(counters))

    # --- events -----------------------------------------------------------------------------------------

    def _engine_ready(self, ready: Ready) -> None:
        self.ready, self.last_end, self._prefill, self._best = ready, None, None, None
        # The bandwidth of the engine before is the limit of its samples, and not of the next one's.
        limit = self.kernels.copy_gbps or 0.0
        self._samples = deque(
            replace(s, copy_gbps=limit) if s.copy_gbps is None else s for s in self._samples
        )
        self._rates.clear()
        self._current.clear()
        self._experts = ExpertWindow(ready.experts, ready.experts_used) if ready.experts else None
        self.kernels = KernelProfiles()
        self._position = self._cached = 0
        self._end_answer()

    def _prefilling(self, event: Prefilling) -> None:
        now = self._clock()
        if self._in_decode or self._prompt is None or event.done < self._prompt[0]:
            self._in_decode, self._has_prompt_sample, self._prompt = False, False, (event.done, now)
            self._began = now, self._cpu_clock()
            self.mark("P", "prompt", f"of {counted(event.total, 'token')}")
        done, since_s = self._prompt
        is_long = event.total - event.cached >= MIN_TOKENS
        if is_long and event.done > done and now - since_s >= PREFILL_SAMPLE_S:
            self._add_prefill(event.done - done, now - since_s)
            self._has_prompt_sample, self._prompt = True, (event.done, now)
        self._position, self._cached = event.done, event.cached

    def _seeing(self, event: Seeing) -> None:
        """The time in which a picture is encoded is not one of reading."""
        if event.done < event.total:
            self._has_looked = True
            self._prompt = self._prompt and (self._prompt[0], self._clock())

    def _token(self, token: Token) -> None:
        now = self._clock() if token.at_ms is None else token.at_ms / 1e3
        if not self._in_decode:
            self._end_prompt(token)
            self._in_decode, self._has_decode_sample, self._prompt = True, False, None
            self._tokens, self._since_s = -1, now
            self._steps_s = []
        else:
            self._steps_s.append(now - self._at_s)
        self._at_s = now
        self._position += 1
        self._tokens += 1
        if (elapsed_s := now - self._since_s) >= SAMPLE_S and self._tokens:
            self._add_decode(self._tokens / elapsed_s, elapsed_s)
            self._tokens, self._since_s, self._has_decode_sample = 0, now, True

    def _end_prompt(self, first: Token) -> None:
        """A prompt too short for a sample on the way is one sample, up to the `first` token of the answer. One of fewer
        than `MIN_TOKENS` new tokens is none, and so is one with pictures that were encoded: its end says how long."""
        if self._prompt is None or self._has_looked or self._position - self._cached < MIN_TOKENS:
            return
        done, since_s = self._prompt
        elapsed_s = self._clock() - since_s if first.at_ms is None else first.at_ms / 1e3
        if not self._has_prompt_sample and self._position > done and elapsed_s > 0:
            self._add_prefill(self._position - done, elapsed_s)
        if first.at_ms:
            self._prefill = shown_prefill_rate(self._position, self._cached, first.at_ms)

    def _finished(self, end: Finished) -> None:
        self.last_end = end
        speed = decode_rate(end.predicted_n, end.predicted_ms)
        if self._in_decode and not self._has_decode_sample and speed:
            self._add_decode(speed, end.predicted_ms / 1e3)
        if end.predicted_n:
            prefill = shown_prefill_rate(end.prompt_n, end.cached_n, end.prompt_ms - end.pictures_ms)
            self._prefill = prefill or self._prefill
        if speed:
            token_us = self._token_us(end, speed)
            self._set_kernels(replace(self.kernels, answer_us=token_us, screen_share=self._screen_share()))
        self._guesses = _guesses(end)
        self._position = end.context_used
        self._end_answer()

    def _screen_share(self) -> float:
        """How much of a core this program has taken since the prompt; 0 where the engine computes elsewhere."""
        if self._began is None or not self.is_on_cpu:
            return 0.0
        began_s, began_cpu_s = self._began
        return (self._cpu_clock() - began_cpu_s) / max(self._clock() - began_s, 1e-3)

    def _token_us(self, end: Finished, speed: float) -> float | None:
        """What a token of the answer usually took; None if it had few. The median leaves out the first ones, on a
        processor that was idle before; with guesses, tokens come several at a time, and the mean counts."""
        if end.predicted_n <= MIN_STEPS:
            return None
        usual_s = median(self._steps_s) if len(self._steps_s) >= MIN_STEPS and not end.draft_n else 0.0
        return 1e6 * usual_s if usual_s > 0 else 1e6 / speed

    def _end_answer(self) -> None:
        self._in_decode, self._prompt, self._has_looked = False, None, False
        self.changes += 1

    # --- samples and marks ------------------------------------------------------------------------------

    def mark(self, symbol: str, kind: str, text: str = "") -> None:
        """Marks this moment on the time axis."""
        self._marks.append(Mark(self._clock(), symbol, kind, text))
        self.changes += 1

    def _add_prefill(self, tokens: int, seconds: float) -> None:
        sample = Sample(tokens / seconds, is_prefill=True, at_s=self._clock(), seconds=seconds)
        self._samples.append(sample)
        self.changes += 1

    def _add_decode(self, rate: float, seconds: float) -> None:
        if not self._has_decode_sample:
            self._current.clear()
        self._rates.append(rate)
        self._current.append(rate)
        self._samples.append(Sample(rate, self.bytes_per_token, at_s=self._clock(), seconds=seconds))
        self.changes += 1

    def _forget(self) -> None:
        """Drops what is too old for the graph."""
        since_s = self._clock() - HISTORY_S
        for events in (self._samples, self._marks):
            while events and events[0].at_s < since_s:
                events.popleft()


def _guesses(end: Finished) -> str:
    """What guesses of next tokens were worth in an answer; "" if there were none."""
    if not end.draft_n:
        return ""
    a_step = end.predicted_n / max(1, end.predicted_n - end.draft_n_accepted)
    gain = f", {end.draft_gain:.1f}x as fast" if end.draft_gain else ""
    return f"guesses: {a_step:.1f} tokens a step, {end.draft_n_accepted / end.draft_n:.0%} right{gain}"


def _memory_load(counters: Sequence[Counter]) -> str:
    """The load of the memory controller, or why it is not known."""
    if not counters:
        return ""
    counter = next((counter for counter in counters if counter.name in _MEMORY_COUNTERS), None)
    if counter is None:
        reason = next((c.absent for c in counters if c.name == "GPU" and c.absent), "")
        return f"memory: {reason or 'no counter here'}"
    if counter.value is None:
        return f"memory: {counter.absent}"
    return f"memory {counter.value:.0f} % busy, measured"
