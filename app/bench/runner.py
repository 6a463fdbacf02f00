"""Measures engines: prompts (pp) and generation (tg) at depths of context, repeated, interleaved, with a run of
warm-up apart. Everything goes through the same engines and events as a chat."""

from __future__ import annotations

import statistics
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby, pairwise

import numpy as np
from msgspec.structs import replace

from app.bench.report import OURS, PEER, Result, in_samples
from app.cli.progress import describe
from engine.client import LocalEngine, Measurable
from engine.devices.device_name import device_name
from engine.events import (
    EngineOptions,
    Event,
    Failed,
    Finished,
    Generate,
    Measured,
    Ready,
    Sampling,
    Token,
    TokenIds,
    decode_rate,
    prefill_rate,
)
from engine.measure.memory import gpu_used_bytes, resident
from engine.peers.llama_server import LlamaServer

GREEDY = Sampling(temperature=0)


@dataclass(frozen=True)
class Case:
    """`n_prompt` tokens of prompt, or `n_gen` tokens of generation, after `n_depth` tokens of context."""

    n_prompt: int
    n_gen: int
    n_depth: int

    @property
    def context(self) -> int:
        """Tokens that it needs room for."""
        return self.n_depth + self.n_prompt + self.n_gen + 1

    @property
    def name(self) -> str:
        return Result(n_prompt=self.n_prompt, n_gen=self.n_gen, n_depth=self.n_depth).test


@dataclass
class Run:
    """One answer: how it ended, and when each token was there, in milliseconds since the request."""

    end: Finished
    times_ms: list[float | None]

    @property
    def intervals_ms(self) -> list[float]:
        """From each token to the next. Where several were told of at once, as llama-server does with those that
        are a character together, their time is shared out among them."""
        at_once = [(time, len(list(group))) for time, group in groupby(self.times_ms) if time is not None]
        return [
            (after - before) / count
            for (before, _), (after, count) in pairwise(at_once)
            for _ in range(count)
        ]


class BenchError(Exception):
    """An engine could not be measured any further, for the reason in `failed`."""

    def __init__(self, failed: Failed) -> None:
        super().__init__(failed.message)
        self.failed = failed


@dataclass
class Subject:
    """An engine that is measured, with what is known of it."""

    engine: LocalEngine | LlamaServer
    name: str
    ready: Ready | None = None
    measured: Measured | None = None
    load_ms: float = 0.0
    device_bytes: int | None = None
    peak_resident_bytes: int | None = None
    failed: Failed | None = None
    runs: dict[Case, list[Run]] = field(default_factory=dict)

    async def start(self) -> AsyncIterator[Event]:
        """Starts it, and lets others see how. Where it fails, `failed` says why."""
        began, used = time.perf_counter(), gpu_used_bytes()
        async for event in self.engine.start():
            if isinstance(event, Failed):
                self.failed = event
            elif isinstance(event, Ready):
                self.ready, self.load_ms = event, (time.perf_counter() - began) * 1e3
            yield event
        now = gpu_used_bytes()
        if self.ready and used is not None and now is not None:
            self.device_bytes = max(0, now - used)
        if self.ready and isinstance(self.engine, Measurable):
            measured = await self.engine.measure()
            self.measured = measured if isinstance(measured, Measured) else None
            if self.measured and not self.ready.backend.startswith("CPU"):
                self.device_bytes = self.measured.device_bytes

    async def run(self, ids: tuple[int, ...], max_tokens: int, *, fresh: bool) -> Run:
        """Raises BenchError."""
        request = Generate(
            request_id=1,
            prompt=TokenIds(ids=ids),
            sampling=GREEDY,
            max_tokens=max_tokens,
            ignore_eos=True,
            fresh=fresh,
        )
        times: list[float | None] = []
        async for event in self.engine.generate(request):
            if isinstance(event, Token):
                times.append(event.at_ms)
            elif isinstance(event, Finished):
                return Run(event, times)
            elif isinstance(event, Failed):
                raise BenchError(event)
        raise AssertionError("an engine's stream ends with Finished or Failed")


class Bench:
    """Measures `tests` on a model with one setup. `subjects` are measured in turn, the order alternating, so
    that what else the machine does meets them alike. `on_step` is told what is being done before each run."""

    def __init__(
        self,
        options: EngineOptions,
        tests: Sequence[Case],
        *,
        vocab_size: int,
        repetitions: int,
        preset: str = "",
        peer: Callable[[EngineOptions], LlamaServer] | None = None,
        on_step: Callable[[str, int], None] = lambda words, done: None,
        seed: int = 0,
    ) -> None:
        self.options = options
        self.tests = sorted(tests, key=lambda test: test.n_depth)  # one depth after another: its tokens stay
        self.repetitions = repetitions
        self.preset = preset
        self.subjects = [Subject(LocalEngine(options), OURS)]
        self._make_peer = peer
        self._on_step = on_step
        self._done = 0
        self._vocab_size = vocab_size
        self._random = np.random.default_rng(seed)
        self._depths = {depth: self._ids(depth) for depth in {test.n_depth for test in tests}}
        self._began = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")

    @property
    def steps(self) -> int:
        """How often `on_step` is called for runs."""
        return len(self.tests) * (self.repetitions + 1) * (2 if self._make_peer else 1)

    async def run(self) -> None:
        """Measures everything; engines that fail are left out from there on. They are closed at the end."""
        try:
            await self._start()
            for test in self.tests:
                for repetition in range(self.repetitions + 1):  # the first is the warm-up
                    await self._repeat(test, repetition)
        finally:
            for subject in self.subjects:
                memory = resident(subject.engine.pid)
                subject.peak_resident_bytes = memory.peak if memory else None
                await subject.engine.close()

    async def _start(self) -> None:
        """One after the other: how long each takes to load is measured too."""
        await self._start_one(self.subjects[0])
        ready = self.subjects[0].ready
        if self._make_peer:  # on the same kind of device
            options = replace(self.options, backend=ready.backend) if ready else self.options
            self.subjects.append(Subject(self._make_peer(options), PEER))
            await self._start_one(self.subjects[1])

    async def _start_one(self, subject: Subject) -> None:
        async for event in subject.start():
            if words := describe(event):
                self._on_step(f"{subject.name}: {words}", 0)

    async def _repeat(self, test: Case, repetition: int) -> None:
        prompt = self._prompt(test)
        for subject in self._in_turn(repetition):
            number = f"{repetition} of {self.repetitions}" if repetition else "warm-up"
            self._on_step(f"{test.name}, {number}: {subject.name}", self._done)
            self._done += 1
            try:
                run = await subject.run(prompt, test.n_gen + 1, fresh=not test.n_depth)
            except BenchError as error:
                subject.failed = error.failed
            else:
                if repetition:
                    subject.runs.setdefault(test, []).append(run)

    def _in_turn(self, repetition: int) -> Iterator[Subject]:
        order = self.subjects if repetition % 2 else self.subjects[::-1]
        return (subject for subject in order if not subject.failed)

    def _ids(self, n: int) -> tuple[int, ...]:
        return tuple(self._random.integers(0, self._vocab_size, n).tolist())

    def _prompt(self, test: Case) -> tuple[int, ...]:
        """The depth's tokens, which stay in the cache, and others each time. Generation goes on from the depth
        itself, or from one token where there is none."""
        if test.n_gen:
            return self._depths[test.n_depth] or self._ids(1)
        return (*self._depths[test.n_depth], *self._ids(test.n_prompt))

    # --- results ----------------------------------------------------------------------------------------

    def results(self) -> list[Result]:
        """One for each test of each engine that was repeated at least once, the tests in their order."""
        return [
            self._result(subject, test, runs)
            for test in self.tests
            for subject in self.subjects
            if (runs := subject.runs.get(test)) and subject.ready
        ]

    def _result(self, subject: Subject, test: Case, runs: Sequence[Run]) -> Result:
        ours = self.subjects[0]
        ready = ours.ready or subject.ready
        assert ready and subject.ready
        ends = [run.end for run in runs]
        if test.n_gen:
            times_ms = [end.predicted_ms for end in ends]
            rates = [decode_rate(end.predicted_n, end.predicted_ms) for end in ends]
        else:
            times_ms = [end.prompt_ms for end in ends]
            rates = [prefill_rate(end.prompt_n, end.cached_n, end.prompt_ms) for end in ends]
        measured = ours.measured
        result = Result(
            build_commit=_build(subject),
            cpu_info=device_name("CPU"),
            gpu_info="" if ready.backend.startswith("CPU") else ready.device_name,
            backends=ready.backend,
            model_filename=self.options.model_path,
            model_type=f"{ready.model.architecture} {ready.model.quantization}",
            model_size=ready.model.file_bytes,
            model_n_params=ready.model.parameters,
            n_prompt=test.n_prompt,
            n_gen=test.n_gen,
            n_depth=test.n_depth,
            test_time=self._began,
            engine=subject.name,
            preset=self.preset,
            n_ctx=subject.ready.context_length,
            load_ms=subject.load_ms,
            kernels_per_token=subject.measured.kernels_per_token if subject.measured else None,
            peak_resident_bytes=subject.peak_resident_bytes,
            device_bytes=subject.device_bytes,
            copy_gbps=measured.copy_gbps if measured else None,
            **in_samples([round(ms * 1e6) for ms in times_ms], rates),
        )
        if not test.n_gen:
            return replace(result, first_token_ms=statistics.median(times_ms))
        # All engines read the same file, and a KV cache of 16 bits a number.
        n_bytes = round(
            ready.weight_bytes_per_token + ready.kv_bytes_per_token * (test.n_depth + test.n_gen / 2)
        )
        gbps = n_bytes * result.median_ts / 1e9
        intervals = [ms for run in runs for ms in run.intervals_ms]
        p50, p90, p99 = np.percentile(intervals, (50, 90, 99)).tolist() if intervals else (None,) * 3
        return replace(
            result,
            latency_p50_ms=p50,
            latency_p90_ms=p90,
            latency_p99_ms=p99,
            bytes_per_token=n_bytes,
            gbps=gbps,
            roofline_share=gbps / measured.copy_gbps if measured else None,
        )


def _build(subject: Subject) -> str:
    if subject.name == OURS:
        with suppress(PackageNotFoundError):  # a checkout that was not installed has no version
            return version("orin-chat")
        return "checkout"
    return subject.ready.device_name if subject.ready else ""
