"""Measures engines: prompts (pp) and generation (tg) at depths of context, of one conversation or several at once. Each
test has a warm-up and is repeated, and the engines take turns. A measurement uses the same engines and events as a
chat."""

import math
import statistics
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime

import numpy as np
from msgspec.structs import replace

from app.bench.results import OURS, PEER, PLAIN, KernelRow, Result, power_fields, sample_fields
from app.bench.samples import AnswerFailedError, Ids, Repetition, TimedAnswer, interrupted, together
from app.cli.progress import describe
from engine.devices.device_name import device_name
from engine.devices.nvidia import is_jetson
from engine.measure.counters import device_counters
from engine.measure.memory import gpu_used_bytes, resident_memory
from engine.measure.power import PowerMeter, Samples, merged
from engine.peers.llama_server import LlamaServer
from engine.protocol.client import LocalEngine, Measurable
from engine.protocol.events import (
    EngineOptions,
    Event,
    Failed,
    Finished,
    Generate,
    KernelProfile,
    Measured,
    Ready,
    Sampling,
    Token,
    TokenIds,
    decode_rate,
    prefill_rate,
)
from engine.system.invocation import own_version

GREEDY = Sampling(temperature=0)


@dataclass(frozen=True)
class Case:
    """`n_prompt` tokens of prompt, or `n_gen` tokens of generation, after `n_depth` tokens of context. With
    `n_parallel`, generation of so many conversations at once, each after a prompt of its own of `n_depth` tokens. With
    `n_arrival`, one of these makes room for prompts of so many tokens, which keep arriving."""

    n_prompt: int
    n_gen: int
    n_depth: int
    n_parallel: int = 0
    n_arrival: int = 0

    @property
    def context(self) -> int:
        """Tokens that the context must hold."""
        return max(self.n_depth + self.n_prompt + self.max_tokens, self.n_arrival + 1)

    @property
    def max_tokens(self) -> int:
        """Tokens of an answer: one belongs to the prompt. Conversations may begin a token apart from each other."""
        return self.n_gen + max(1, self.n_parallel)

    @property
    def name(self) -> str:
        return Result(**asdict(self)).test


@dataclass
class MeasuredEngine:
    """An engine and what was measured of it. `failed` says why there is no more. Without `guesses`, each token has a
    step."""

    engine: LocalEngine | LlamaServer
    name: str
    guesses: bool = True
    ready: Ready | None = None
    measured: Measured | None = None
    load_ms: float = 0.0
    device_bytes: int | None = None
    peak_resident_bytes: int | None = None
    failed: Failed | None = None
    repetitions: dict[Case, list[Repetition]] = field(default_factory=dict)

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
        measured = await self.engine.measure() if isinstance(self.engine, Measurable) else None
        if isinstance(measured, Measured):
            self.measured = measured
            if not self.ready.is_on_cpu:
                self.device_bytes = measured.device_bytes

    async def answer(
        self, ids: Ids, max_tokens: int, *, fresh: bool, on_token: Callable[[], object] = lambda: None
    ) -> TimedAnswer:
        """Raises AnswerFailedError."""
        request = Generate(
            request_id=1,
            prompt=TokenIds(ids=ids),
            sampling=GREEDY,
            max_tokens=max_tokens,
            ignore_eos=True,
            fresh=fresh,
            guesses=self.guesses,
        )
        times_ms: list[float | None] = []
        sent_s, began_s = time.perf_counter(), math.inf
        async with aclosing(self.engine.generate(request)) as events:
            async for event in events:
                if isinstance(event, Token):
                    on_token()
                    times_ms.append(event.at_ms)
                    if event.at_ms is not None:
                        # Events come late at times; the quickest one tells when the clock began.
                        began_s = min(began_s, time.perf_counter() - event.at_ms / 1e3)
                elif isinstance(event, Finished):
                    return TimedAnswer(event, times_ms, sent_s, began_s)
                elif isinstance(event, Failed):
                    raise AnswerFailedError(event)
        raise AssertionError("an engine's stream ends with Finished or Failed")

    async def measure(
        self, case: Case, prompts: Sequence[Ids], arrival: Callable[[], Ids]
    ) -> Repetition | None:
        """One repetition of a test. `arrival` gives the prompts that arrive. None if its answers did not decode at the
        same time. Raises AnswerFailedError."""
        if case.n_arrival:
            return await interrupted(self.answer, prompts, case.max_tokens, arrival)
        if case.n_parallel:
            return await together(self.answer, prompts, case.max_tokens)
        sample = await self.answer(prompts[0], case.max_tokens, fresh=not case.n_depth)
        end = sample.end
        if case.n_gen:
            rate = decode_rate(end.predicted_n, end.predicted_ms)
            return Repetition(end.predicted_ms, rate, sample.intervals_ms())
        rate = prefill_rate(end.prompt_n, end.cached_n, end.prompt_ms)
        return Repetition(end.prompt_ms, rate, first_token_ms=[end.prompt_ms])


class Benchmark:
    """Measures `cases` on one model with one setup. The engines answer in turn, and the order alternates, so that a
    change of the machine affects all. If ours guesses next tokens, it takes a turn without guesses too. `on_step` gets
    a description of each step, and how many are done."""

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
        meter: PowerMeter | None = None,
        with_kernels: bool = False,
    ) -> None:
        self.options = options
        # The tokens of a depth stay cached.
        self.cases = sorted(cases, key=lambda case: (case.n_depth, case.n_parallel))
        self.left_out: list[str] = []
        """Sentences about what was not measured."""
        self.repetitions = repetitions
        self.preset = preset
        self.engines = [MeasuredEngine(LocalEngine(options), OURS)]
        if options.speculate != "off":
            self.engines.append(MeasuredEngine(self.engines[0].engine, PLAIN, guesses=False))
        self._make_peer = make_peer
        self._on_step = on_step
        self._with_kernels, self._kernels = with_kernels, tuple[KernelRow, ...]()
        self._meter = meter or PowerMeter(device_counters().read)
        self._samples: dict[tuple[str, Case], list[Samples]] = {}
        self._done = 0
        self._vocab_size = vocab_size
        self._random = np.random.default_rng(0)
        self._depths = {depth: self._ids(depth) for depth in {case.n_depth for case in cases}}
        self._began = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")

    @property
    def steps(self) -> int:
        """How many answers there will be."""
        of_replies = sum(case.n_gen > 0 for case in self.cases) * (self.options.speculate != "off")
        answers = len(self.cases) * (2 if self._make_peer else 1) + of_replies
        return answers * (self.repetitions + 1)

    async def run(self) -> None:
        """Measures everything, without an engine that has failed. Closes the engines."""
        try:
            await self._start()
            for case in self.cases:
                for repetition in range(self.repetitions + 1):  # the first is the warm-up
                    await self._repeat(case, repetition)
            if self._with_kernels:
                self._kernels = await self._profile()
        finally:
            for engine in self.engines:
                memory = resident_memory(engine.engine.pid)
                engine.peak_resident_bytes = memory.peak_bytes if memory else None
            for engine in self.engines:
                await engine.engine.close()

    async def _start(self) -> None:
        """Starts the engines one after the other, since their load times are measured, too."""
        ours, *plain = self.engines
        await self._start_one(ours)
        for engine in plain:
            engine.ready, engine.failed = ours.ready, ours.failed
            engine.measured, engine.device_bytes, engine.load_ms = (
                ours.measured,
                ours.device_bytes,
                ours.load_ms,
            )
        if self._make_peer:
            ready = ours.ready
            same_device = replace(self.options, backend=ready.backend) if ready else self.options
            self.engines.append(MeasuredEngine(self._make_peer(same_device), PEER))
            await self._start_one(self.engines[-1])

    async def _start_one(self, engine: MeasuredEngine) -> None:
        async for event in engine.start():
            if words := describe(event):
                self._on_step(f"{engine.name}: {words}", 0)
        can = engine.ready.parallel if engine.ready else 1
        widths = dict.fromkeys(case.n_parallel for case in self.cases)
        if engine.ready and (left_out := [str(width) for width in widths if width > can]):
            at_once = "one conversation after another" if can == 1 else f"{can} conversations at a time"
            message = f"{engine.name} answers {at_once} here: {', '.join(left_out)} at once are left out."
            if len(left_out) == len(widths):
                engine.failed = Failed(kind="backend", message=message)
            else:
                self._leave_out(message)

    async def _profile(self) -> tuple[KernelRow, ...]:
        """The kernels of our decode step, those that take most time first."""
        engine = self.engines[0].engine
        profile = (
            await engine.profile() if isinstance(engine, Measurable) and not self.engines[0].failed else None
        )
        if not isinstance(profile, KernelProfile):
            self._leave_out("The kernels of a step could not be measured.")
            return ()
        by_time = sorted(profile.kernels, key=lambda kernel: -kernel.total_us)
        return tuple(
            KernelRow(k.name, k.role, k.calls, k.total_us, k.bytes / k.total_us / 1e3 if k.total_us else 0.0)
            for k in by_time
        )

    def _leave_out(self, sentence: str) -> None:
        if sentence not in self.left_out:
            self.left_out.append(sentence)

    async def _repeat(self, case: Case, repetition: int) -> None:
        prompts = [self._prompt(case) for _ in range(max(1, case.n_parallel - bool(case.n_arrival)))]
        for engine in self.engines if repetition % 2 else self.engines[::-1]:
            if engine.failed or not engine.ready or case.n_parallel > engine.ready.parallel:
                continue
            if not (engine.guesses or case.n_gen):
                continue
            number = f"{repetition} of {self.repetitions}" if repetition else "warm-up"
            self._on_step(f"{case.name}, {number}: {engine.name}", self._done)
            self._done += 1
            try:
                with self._meter.running() as samples:
                    measured = await engine.measure(case, prompts, lambda: self._ids(case.n_arrival))
            except AnswerFailedError as error:
                engine.failed = error.failed
                continue
            if measured is None:
                self._leave_out(f"{case.name}: {engine.name} did not decode all of them at the same time.")
            elif repetition:
                engine.repetitions.setdefault(case, []).append(measured)
                self._samples.setdefault((engine.name, case), []).append(samples)

    def _ids(self, n: int) -> Ids:
        return tuple(self._random.integers(0, self._vocab_size, n).tolist())

    def _prompt(self, case: Case) -> Ids:
        """The tokens of the depth, which stay cached, and new ones for a prompt. Generation starts from the tokens of
        the depth, or from one token. Several conversations share nothing."""
        if case.n_parallel:
            return self._ids(case.n_depth)
        if case.n_gen:
            return self._depths[case.n_depth] or self._ids(1)
        return (*self._depths[case.n_depth], *self._ids(case.n_prompt))

    def results(self) -> list[Result]:
        """A result for each case and engine that was repeated at least once."""
        return [
            self._result(engine, engine.ready, case, repetitions)
            for case in self.cases
            for engine in self.engines
            if engine.ready and (repetitions := engine.repetitions.get(case))
        ]

    def _result(
        self, engine: MeasuredEngine, ready: Ready, case: Case, repetitions: Sequence[Repetition]
    ) -> Result:
        ours = self.engines[0]
        model = ours.ready or ready
        p50, p90, p99 = _percentiles(each.latencies_ms for each in repetitions)
        first_p50, _, first_p99 = _percentiles(each.first_token_ms for each in repetitions)
        quiet_p50, _, quiet_p99 = _percentiles(each.quiet_ms for each in repetitions)
        stream_rates = [rate for each in repetitions for rate in each.stream_rates]
        result = Result(
            build_commit=ready.device_name if engine.name == PEER else own_version(),
            cpu_info=device_name("CPU"),
            gpu_info="" if model.is_on_cpu else model.device_name,
            backends=model.backend,
            model_filename=self.options.model_path,
            model_type=f"{model.model.architecture} {model.model.quantization}",
            model_size=model.model.file_bytes,
            model_n_params=model.model.parameters,
            test_time=self._began,
            engine=engine.name,
            preset=self.preset,
            type_k=self.options.kv,
            type_v=self.options.kv,
            n_ctx=ready.context_length,
            stream_ts=statistics.median(stream_rates) if stream_rates else None,
            first_token_ms=first_p50,
            first_token_p99_ms=first_p99 if case.n_parallel else None,
            latency_p50_ms=p50,
            latency_p90_ms=p90,
            latency_p99_ms=p99,
            latency_max_ms=max(ms for each in repetitions for ms in each.latencies_ms)
            if case.n_arrival
            else None,
            quiet_p50_ms=quiet_p50,
            quiet_p99_ms=quiet_p99,
            load_ms=engine.load_ms,
            kernels_per_token=engine.measured.kernels_per_token if engine.measured else None,
            peak_resident_bytes=engine.peak_resident_bytes,
            device_bytes=engine.device_bytes,
            copy_gbps=ours.measured.copy_gbps if ours.measured else None,
            **asdict(case),
            **sample_fields([each.ms for each in repetitions], [each.rate for each in repetitions]),
        )
        taken = merged(self._samples.get((engine.name, case), []))
        if not model.is_on_cpu or is_jetson():  # a card's power is not that of the CPU beside it
            result = replace(result, **power_fields(taken, result.median_ts))
        if case.n_parallel or not case.n_gen:
            return result
        # Both engines read the same file, and a KV cache of 16 bits a number.
        n_bytes = round(model.bytes_per_token(case.n_depth + case.n_gen / 2))
        gbps = n_bytes * result.median_ts / 1e9
        share = gbps / result.copy_gbps if result.copy_gbps else None
        kernels = self._kernels if engine.name == OURS and not case.n_depth else ()
        return replace(result, bytes_per_token=n_bytes, gbps=gbps, roofline_share=share, kernels=kernels)


def _percentiles(repetitions: Iterable[Sequence[float]]) -> tuple[float | None, float | None, float | None]:
    """The 50th, 90th and 99th of all times; None if there are none."""
    if not (times_ms := [ms for times_ms in repetitions for ms in times_ms]):
        return None, None, None
    p50, p90, p99 = np.percentile(times_ms, (50, 90, 99)).tolist()
    return p50, p90, p99
