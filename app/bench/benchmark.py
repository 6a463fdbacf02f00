"""Measures engines: prompts (pp) and generation (tg) at depths of context. Each test has a warm-up and is repeated,
and the engines take turns. A measurement uses the same engines and events as a chat."""

from __future__ import annotations

import statistics
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby, pairwise

import numpy as np
from msgspec.structs import replace

from app.bench.results import OURS, PEER, Result, sample_fields
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
from engine.measure.memory import gpu_used_bytes, resident_memory
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
        """Tokens that the context must hold."""
        return self.n_depth + self.n_prompt + self.n_gen + 1

    @property
    def name(self) -> str:
        return Result(n_prompt=self.n_prompt, n_gen=self.n_gen, n_depth=self.n_depth).test


@dataclass
class Sample:
    """One answer: its end, and when each token came, in milliseconds after the request (None: not known)."""

    end: Finished
    times_ms: list[float | None]

    @property
    def intervals_ms(self) -> list[float]:
        """From each token to the next. llama-server reports the tokens of one character at once; these share the time
        since the token before them."""
        groups = [(time, len(list(group))) for time, group in groupby(self.times_ms) if time is not None]
        return [
            (time - before) / count for (before, _), (time, count) in pairwise(groups) for _ in range(count)
        ]


@dataclass
class MeasuredEngine:
    """An engine and what was measured of it. `failed` says why there is no more."""

    engine: LocalEngine | LlamaServer
    name: str
    ready: Ready | None = None
    measured: Measured | None = None
    load_ms: float = 0.0
    device_bytes: int | None = None
    peak_resident_bytes: int | None = None
    failed: Failed | None = None
    samples: dict[Case, list[Sample]] = field(default_factory=dict)

    async def start(self) -> AsyncIterator[Event]:
        """Starts the engine and yields its events."""
        began, used_before = time.perf_counter(), gpu_used_bytes()
        async for event in self.engine.start():
            if isinstance(event, Failed):
                self.failed = event
            elif isinstance(event, Ready):
                self.ready, self.load_ms = event, (time.perf_counter() - began) * 1e3
            yield event
        if self.ready is None:
            return
        used_after = gpu_used_bytes()
        if used_before is not None and used_after is not None:
            self.device_bytes = max(0, used_after - used_before)
        if isinstance(self.engine, Measurable) and isinstance(
            measured := await self.engine.measure(), Measured
        ):
            self.measured = measured
            if not self.ready.is_on_cpu:
                self.device_bytes = measured.device_bytes

    async def answer(self, ids: tuple[int, ...], max_tokens: int, *, fresh: bool) -> Sample | Failed:
        request = Generate(
            request_id=1,
            prompt=TokenIds(ids=ids),
            sampling=GREEDY,
            max_tokens=max_tokens,
            ignore_eos=True,
            fresh=fresh,
        )
        times_ms: list[float | None] = []
        async for event in self.engine.generate(request):
            if isinstance(event, Token):
                times_ms.append(event.at_ms)
            elif isinstance(event, Finished):
                return Sample(event, times_ms)
            elif isinstance(event, Failed):
                return event
        raise AssertionError("an engine's stream ends with Finished or Failed")


class Benchmark:
    """Measures `cases` on one model with one setup. The engines answer in turn, and the order alternates, so that a
    change of the machine affects both. `on_step` gets a description of each step, and how many are done."""

    def __init__(
        self,
        options: EngineOptions,
        cases: Sequence[Case],
        *,
        vocab_size: int,
        repetitions: int,
        preset: str = "",
        make_peer: Callable[[EngineOptions], LlamaServer] | None = None,
        on_step: Callable[[str, int], None] = lambda words, done: None,
        seed: int = 0,
    ) -> None:
        self.options = options
        self.cases = sorted(cases, key=lambda case: case.n_depth)  # the tokens of a depth stay cached
        self.repetitions = repetitions
        self.preset = preset
        self.engines = [MeasuredEngine(LocalEngine(options), OURS)]
        self._make_peer = make_peer
        self._on_step = on_step
        self._done = 0
        self._vocab_size = vocab_size
        self._random = np.random.default_rng(seed)
        self._depths = {depth: self._ids(depth) for depth in {case.n_depth for case in cases}}
        self._began = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")

    @property
    def steps(self) -> int:
        """How many answers there will be."""
        return len(self.cases) * (self.repetitions + 1) * (2 if self._make_peer else 1)

    async def run(self) -> None:
        """Measures everything, without an engine that has failed. Closes the engines."""
        try:
            await self._start()
            for case in self.cases:
                for repetition in range(self.repetitions + 1):  # the first is the warm-up
                    await self._repeat(case, repetition)
        finally:
            for engine in self.engines:
                memory = resident_memory(engine.engine.pid)
                engine.peak_resident_bytes = memory.peak_bytes if memory else None
                await engine.engine.close()

    async def _start(self) -> None:
        """Starts the engines one after the other, since their load times are measured, too."""
        await self._start_one(self.engines[0])
        if self._make_peer:
            ready = self.engines[0].ready
            same_device = replace(self.options, backend=ready.backend) if ready else self.options
            self.engines.append(MeasuredEngine(self._make_peer(same_device), PEER))
            await self._start_one(self.engines[1])

    async def _start_one(self, engine: MeasuredEngine) -> None:
        async for event in engine.start():
            if words := describe(event):
                self._on_step(f"{engine.name}: {words}", 0)

    async def _repeat(self, case: Case, repetition: int) -> None:
        prompt = self._prompt(case)
        for engine in self.engines if repetition % 2 else self.engines[::-1]:
            if engine.failed:
                continue
            number = f"{repetition} of {self.repetitions}" if repetition else "warm-up"
            self._on_step(f"{case.name}, {number}: {engine.name}", self._done)
            self._done += 1
            sample = await engine.answer(prompt, case.n_gen + 1, fresh=not case.n_depth)
            if isinstance(sample, Failed):
                engine.failed = sample
            elif repetition:
                engine.samples.setdefault(case, []).append(sample)

    def _ids(self, n: int) -> tuple[int, ...]:
        return tuple(self._random.integers(0, self._vocab_size, n).tolist())

    def _prompt(self, case: Case) -> tuple[int, ...]:
        """The tokens of the depth, which stay cached, and new ones for a prompt. Generation starts from the tokens of
        the depth, or from one token."""
        if case.n_gen:
            return self._depths[case.n_depth] or self._ids(1)
        return (*self._depths[case.n_depth], *self._ids(case.n_prompt))

    # --- results ----------------------------------------------------------------------------------------

    def results(self) -> list[Result]:
        """One for each case and engine that was repeated at least once."""
        return [
            self._result(engine, engine.ready, case, samples)
            for case in self.cases
            for engine in self.engines
            if (samples := engine.samples.get(case)) and engine.ready
        ]

    def _result(self, engine: MeasuredEngine, ready: Ready, case: Case, samples: Sequence[Sample]) -> Result:
        ours = self.engines[0]
        model = ours.ready or ready
        ends = [sample.end for sample in samples]
        if case.n_gen:
            times_ms = [end.predicted_ms for end in ends]
            rates = [decode_rate(end.predicted_n, end.predicted_ms) for end in ends]
        else:
            times_ms = [end.prompt_ms for end in ends]
            rates = [prefill_rate(end.prompt_n, end.cached_n, end.prompt_ms) for end in ends]
        copy_gbps = ours.measured.copy_gbps if ours.measured else None
        result = Result(
            build_commit=_build(engine),
            cpu_info=device_name("CPU"),
            gpu_info="" if model.is_on_cpu else model.device_name,
            backends=model.backend,
            model_filename=self.options.model_path,
            model_type=f"{model.model.architecture} {model.model.quantization}",
            model_size=model.model.file_bytes,
            model_n_params=model.model.parameters,
            n_prompt=case.n_prompt,
            n_gen=case.n_gen,
            n_depth=case.n_depth,
            test_time=self._began,
            engine=engine.name,
            preset=self.preset,
            n_ctx=ready.context_length,
            load_ms=engine.load_ms,
            kernels_per_token=engine.measured.kernels_per_token if engine.measured else None,
            peak_resident_bytes=engine.peak_resident_bytes,
            device_bytes=engine.device_bytes,
            copy_gbps=copy_gbps,
            **sample_fields([round(ms * 1e6) for ms in times_ms], rates),
        )
        if not case.n_gen:
            return replace(result, first_token_ms=statistics.median(times_ms))
        # Both engines read the same file, and a KV cache of 16 bits a number.
        n_bytes = round(model.bytes_per_token(case.n_depth + case.n_gen / 2))
        gbps = n_bytes * result.median_ts / 1e9
        intervals_ms = [ms for sample in samples for ms in sample.intervals_ms]
        p50, p90, p99 = np.percentile(intervals_ms, (50, 90, 99)).tolist() if intervals_ms else (None,) * 3
        return replace(
            result,
            latency_p50_ms=p50,
            latency_p90_ms=p90,
            latency_p99_ms=p99,
            bytes_per_token=n_bytes,
            gbps=gbps,
            roofline_share=gbps / copy_gbps if copy_gbps else None,
        )


def _build(engine: MeasuredEngine) -> str:
    if engine.name == OURS:
        with suppress(PackageNotFoundError):  # a checkout that was not installed has no version
            return version("orin-chat")
        return "checkout"
    return engine.ready.device_name if engine.ready else ""
