"""Text generation: prefill stores the prompt in the KV cache, decode produces the reply token by token."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace
from tinygrad import Device
from tinygrad.helpers import GlobalCounters

from engine.devices.device_name import device_name
from engine.events import (
    EngineOptions,
    Event,
    Finished,
    Generate,
    KernelProfile,
    Loading,
    Measure,
    Measured,
    ModelInfo,
    Profile,
    Ready,
    Sampling,
    Slots,
    Warming,
)
from engine.fixes import compiler_processes, program_cache
from engine.formats.gguf import GGUF
from engine.formats.kv_format import KVFormat
from engine.formats.template import ChatTemplate
from engine.measure.bandwidth import copy_gbps
from engine.measure.compiling import kernels_reported
from engine.measure.free_memory import free_bytes, host_free_bytes, uses_host_memory
from engine.measure.profile import profile
from engine.measure.timeline import timeline
from engine.model import file_summary, packed_weights_cache
from engine.model.answer import Answer, Answers
from engine.model.architectures import read_spec
from engine.model.checkpoints import Checkpoints, StateStore
from engine.model.choice_reporter import ChoiceReporter
from engine.model.lower.coverage import runs_as_graph_because
from engine.model.memory_need import MemoryNeed, check_fits, chosen_context, squeezed_because
from engine.model.model_runner import (
    BatchRunner,
    EarlyRunner,
    ModelRunner,
    PrefixRunner,
    Row,
    RowSampler,
    SamplingRunner,
    TunableRunner,
)
from engine.model.open_runner import open_runner
from engine.model.pending_encoder import PendingEncoder
from engine.model.prefix_folder import default_limit_bytes
from engine.model.prefix_keeper import PrefixKeeper
from engine.model.prefix_store import PrefixStore
from engine.model.scheduler import Scheduler
from engine.model.spec import ModelSpec
from engine.model.weights import Weights

Report = Callable[[Event], None]

SEARCH_S_PER_WIDTH = 20.0  # default limit of a search for schedules, for each unit of its width


class TextModel:
    """A loaded model that answers requests (the worker's `Model`): one at a time, or several if `scheduler` is set."""

    def __init__(self, options: EngineOptions, report: Report, prompts: PendingEncoder | None = None) -> None:
        """Loads `options.model_path` and compiles its kernels, reporting `Loading` and `Warming`. `prompts` is of that
        file. Raises ModelFileError, UsageError, and BackendError, which comes before loading if the model does not fit
        into memory."""
        prompts = prompts or PendingEncoder(options.model_path)
        file = prompts.file()
        spec = read_spec(file)
        free, device, kv = free_bytes(Device.DEFAULT), str(Device.DEFAULT), KVFormat.parse(options.kv)
        set_up = device, options.kernels, options.parallel, kv
        self.context_length = chosen_context(spec, options.context_length, free, *set_up)
        need = check_fits(spec, self.context_length, free, *set_up)
        if Device.DEFAULT.split(":")[0] == "CPU":  # repacking the weights keeps all cores busy
            prompts.encoder()
        loading = Loading(
            done_bytes=0,
            total_bytes=spec.matrix_bytes,
            context_length=self.context_length,
            cache_bytes=need.cache_bytes,
            kv=kv.value,
        )
        report(loading)
        weights = Weights(
            file,
            spec,
            lambda done: report(replace(loading, done_bytes=done)),
            keep_cached=_has_room_for(file, need),
        )
        self._cached: list[int] = []  # the tokens whose keys and values are in the KV cache
        self._stored = 0  # the most tokens that were in the KV cache since it was empty
        self._prompt_end = 0  # where the messages of the last prompt end, in tokens
        program_cache.apply()
        with kernels_reported(lambda done, total: report(Warming(done=done, total=total))):
            how = self.context_length, options.kernels, options.keep_packed, options.parallel, kv
            self._runner: ModelRunner = open_runner(weights, *how, is_early=True)
            self._choices = ChoiceReporter(self._runner.expert_choices, report)
            self._states = _checkpoints(self._runner)
            self.scheduler: Scheduler | None = None
            if isinstance(self._runner, BatchRunner):
                self.scheduler = Scheduler(self._runner, lambda slots: self._report_slots(slots, report))
            self._keeper = _keeper(file, self._runner, self._states, options.prefix_cache_bytes)
            self._search(options, report)
            self._captures = self._capture_steps()
            with timeline.span("first step"):
                next(self._captures)
            if not self._runner.precompiled:  # else the first prompt and reply would wait for the compiler
                collections.deque(self._captures, 0)
        compiler_processes.dismiss()
        with timeline.span("waiting for the tokenizer"):
            self.prompts = prompts.encoder()
        self.tokenizer = self.prompts.tokenizer
        self._answers = Answers(self.prompts, self.context_length)
        self._choices.skip()
        with timeline.span("template"):
            warnings = self._warnings(spec, options)
        self.ready = Ready(
            model=_model_info(file, spec, self.prompts.template),
            backend=str(Device.DEFAULT),
            device_name=device_name(str(Device.DEFAULT)),
            context_length=self.context_length,
            load_ms=0.0,
            cache_bytes=need.cache_bytes,
            kv=kv.value,
            is_squeezed=bool(squeezed_because(spec, options.context_length, self.context_length)),
            warnings=warnings,
            parallel=options.parallel if self.scheduler else 1,
            weight_bytes_per_token=spec.weight_bytes_per_token,
            kv_bytes_per_token=spec.kv_bytes_per_token(windowed=False, kv=kv),
            window=spec.window,
            window_kv_bytes_per_token=spec.kv_bytes_per_token(windowed=True, kv=kv),
            state_bytes=spec.state_bytes,
            states_bytes=need.states_bytes,
            checkpoints=self._runner.state_slots if isinstance(self._runner, StateStore) else 0,
            **self._experts(spec),
        )

    def _experts(self, spec: ModelSpec) -> dict[str, Any]:
        """The fields of `Ready` about experts."""
        if not self._choices.counts:
            return {}
        return {"experts": spec.experts[0].count, "experts_used": spec.experts[0].used}

    def _warnings(self, spec: ModelSpec, options: EngineOptions) -> tuple[str, ...]:
        """Sentences about what a user would not expect of this model."""
        as_graph = "" if options.kernels == "graph" else runs_as_graph_because(spec, str(Device.DEFAULT))
        in_turn = (
            ""
            if self.scheduler or options.parallel == 1
            else (
                f"Conversations are answered one after another: the kernels for {Device.DEFAULT} compute one at a time."
            )
        )
        unkept = ""
        packs = str(Device.DEFAULT) == "CPU" and not as_graph and options.kernels != "graph"
        if packs and options.keep_packed and not packed_weights_cache.cached_files(Path(options.model_path)):
            unkept = "The packed weights are not kept: the disk has no room for them, or cannot be written."
        shorter = squeezed_because(spec, options.context_length, self.context_length)
        text_only = [
            f"Its {encoder} encoder is not loaded: orin-chat gives it text alone."
            for encoder in spec.encoders
        ]
        return (*self.prompts.warnings, *filter(None, [as_graph, in_turn, unkept, shorter, *text_only]))

    def warm_up(self, interrupted: Callable[[], bool]) -> None:
        """Captures the remaining steps one by one until `interrupted`, as long as the KV cache is empty. Steps that
        are not captured here are captured at their first use. What a conversation has added to the KV cache is kept
        on disk."""
        idle = self.scheduler is None or not self.scheduler.busy
        while idle and not self._cached and not interrupted() and next(self._captures, self) is None:
            self._choices.skip()
        compiler_processes.dismiss()
        if self._keeper and self._cached:
            self._stored = max(self._stored, len(self._cached))
            self._keeper.keep(self._cached, self._stored, self._prompt_end, interrupted)

    def generate(self, request: Generate, report: Report, cancelled: Callable[[], bool]) -> Finished:
        """Answers a request, reporting `Prefilling`, then a `Thinking` or `Token` for each token. Stops before the
        next token or prompt chunk when `cancelled`. Raises ContextFullError, TemplateError and UsageError."""
        answer = self._answers.begin(request, report)
        self._prompt_end = max(answer.turn_ends, default=len(answer.tokens) - 1)
        if request.fresh:
            self._cached.clear()
            self._prepare_prefill()
        answer.cached = self._reuse_prefix(answer.tokens)
        if self._keeper and not request.fresh:
            answer.cached = self._restore(self._keeper, answer.tokens, cancelled)
        self._choices.begin()
        on_device = self._prepare_sampling(answer)
        if not self._prefill(answer, cancelled):
            answer.cancel()
        while not answer.reason:
            if cancelled():
                answer.cancel()
                break
            token = self._next_token(answer, on_device)
            self._cached = list(answer.tokens)
            if self._states:
                self._cached = [*answer.tokens, token][: self._states.position()]
                self._states.save(self._cached)
            answer.add(token, self._runner.logits)
            self._choices.report_if_due()
        self._choices.report()
        return answer.finished()

    def _prepare_prefill(self) -> None:
        """Lets no prompt be answered without the kernels of prefill, which an `EarlyRunner` may still lack."""
        if isinstance(self._runner, EarlyRunner):
            for size in self._runner.chunk_sizes:
                self._runner.prepare_prefill(size)

    def _report_slots(self, slots: Slots, report: Report) -> None:
        """Reports what the scheduler does, and which experts its steps have chosen."""
        report(replace(slots, device_bytes=GlobalCounters.mem_used_per_device[Device.DEFAULT]))
        if any(slots.slots):
            self._choices.report_if_due()
        else:
            self._choices.report()

    def begin(self, request: Generate, report: Report) -> Answer:
        """The answer to a request, for `scheduler`. Only one thread may call it, but any. Raises ContextFullError,
        TemplateError and UsageError."""
        return self._answers.begin(request, report)

    def measure(self, request: Measure) -> Measured:
        """Counts the kernels of a decode step and the device's memory in use, and times a copy."""
        with self._replay_position(1) as position:
            kernels = len(self._runner.replay("decode", position).calls)
        return Measured(
            request_id=request.request_id,
            kernels_per_token=kernels,
            device_bytes=GlobalCounters.mem_used_per_device[Device.DEFAULT],
            copy_gbps=copy_gbps(Device.DEFAULT),
        )

    def profile(self, request: Profile, interrupted: Callable[[], bool]) -> KernelProfile:
        """Times the kernels of a step after the tokens in the cache. Raises PreemptedError when `interrupted`,
        UsageError if the runner has no such step."""
        try:
            with self._replay_position(1 if request.step == "decode" else self._runner.max_chunk) as position:
                return profile(request, self._runner.replay(request.step, position), position, interrupted)
        finally:
            self._choices.skip()

    @contextmanager
    def _replay_position(self, tokens: int) -> Iterator[int]:
        """Where a step of so many tokens may be replayed: after the tokens in the cache, or in place of the last one if
        it is full. With a scheduler, in room of its own that is as deep in the context as the last conversation."""
        if self.scheduler is None:
            position = min(len(self._cached), self.context_length - 1)
            if self._states and self._states.position() == len(self._cached):
                self._states.save(self._cached, ends_turn=True)
            del self._cached[position:]
            try:
                yield position
            finally:
                if self._states:
                    self._states.load(self._cached, position)
            return
        position = min(self.scheduler.last_length, self.context_length - 1)
        with self.scheduler.blocks.room(position + tokens):
            yield position

    def _prepare_sampling(self, answer: Answer) -> bool:
        """Whether the device samples the reply's tokens."""
        if not answer.fits_device or not isinstance(self._runner, SamplingRunner):
            return False
        return self._runner.prepare_sampling(answer.request.sampling, answer.tokens, answer.uniforms)

    def _next_token(self, answer: Answer, on_device: bool) -> int:
        """The token after those of the answer. The runner may run ahead if the one after it will be asked for too,
        and the host needs no logits."""
        token, position, more = answer.tokens[-1], len(answer.tokens) - 1, answer.left > 1
        if on_device:
            assert isinstance(self._runner, SamplingRunner)
            return self._runner.decode_and_sample(token, position, more)
        best = self._runner.decode(token, position, more and not answer.needs_logits)
        return best if answer.is_best_token else answer.choose(self._runner.logits())

    def _reuse_prefix(self, prompt: list[int]) -> int:
        """Cuts the KV cache to the longest prefix that it shares with the prompt, without the prompt's last token,
        whose logits are always needed; returns its length. Most templates leave the thinking out of earlier turns,
        so a reply that had some is prefilled again from there. If a layer with a window no longer has the tokens that
        it needs (`ModelRunner.max_rewind`), nothing is shared. A recurrent state is shared up to a checkpoint."""
        common = 0
        for cached, wanted in zip(self._cached, prompt[:-1], strict=False):
            if cached != wanted:
                break
            common += 1
        self._stored = max(self._stored, len(self._cached))
        rewind = self._runner.max_rewind
        if not common or (rewind is not None and self._stored - common > rewind):
            common = self._stored = 0
        if self._states:
            self._states.forget_after(common)
            if not common == len(self._cached) == self._states.position():
                common = self._states.load(prompt, common)
        del self._cached[common:]
        return common

    def _restore(self, keeper: PrefixKeeper, prompt: list[int], cancelled: Callable[[], bool]) -> int:
        """Reads what the disk has of the prompt, but for its last token; returns how many tokens were not computed."""
        shared = len(self._cached)
        done, known = keeper.restore(prompt[:-1], shared, cancelled)
        self._cached = prompt[:done]
        if known > shared:  # a layer with a window has only the last one: nothing may be cut back
            self._stored = done + (self._runner.max_rewind or 0)
        return known

    def _prefill(self, answer: Answer, cancelled: Callable[[], bool]) -> bool:
        """Stores all tokens of the prompt but the last one, which the first decode step runs. False if cancelled."""
        prompt, end = answer.tokens, len(answer.tokens) - 1
        turns = answer.turn_ends if self._states else []
        places = {len(self._cached), *turns, end}  # where others are likely to begin
        while True:
            done = len(self._cached)
            if self._states:
                self._states.save(self._cached, ends_turn=done in places)
            if done == end:
                return True
            self._choices.report_if_due()
            answer.report_prefill(done)
            if cancelled():
                return False
            step = min(done + self._runner.max_chunk, end)
            if self._states:
                step = self._states.end_of_step(done, step, turns)
            self._runner.prefill(prompt[done:step], done)
            self._cached += prompt[done:step]

    def _search(self, options: EngineOptions, report: Report) -> None:
        """Searches for faster schedules if the options give a width and the runner has kernels of its own. (Tensor
        graphs are searched by tinygrad while it compiles them.)"""
        width = options.search_width
        if not width or not isinstance(self._runner, TunableRunner):
            return
        seconds = SEARCH_S_PER_WIDTH * width if options.search_s is None else options.search_s
        progress = lambda done, total, cached, search: report(
            Warming(done=done, total=total, cached=cached, search=search)
        )
        with kernels_reported(lambda done, total: None):  # the search reports its candidates itself
            self._runner.search(width, seconds, progress, options.search_again)

    def _capture_steps(self) -> Iterator[None]:
        """Captures each step of the runner by running it, one a turn. The first is a decode step with its logits: it
        shows that the device works."""
        runner = self._runner
        if isinstance(runner, BatchRunner):
            yield from self._capture_batch_steps(runner)
            return
        runner.decode(0, 0)
        runner.logits()
        yield
        for size in runner.chunk_sizes:
            if isinstance(runner, EarlyRunner):
                runner.prepare_prefill(size)
            runner.prefill([0] * (size // 2 + 1), 0)
            yield
        if isinstance(runner, SamplingRunner):
            for sampling in (Sampling(), Sampling(repeat_penalty=1.1)):
                for depth in runner.decode_depths:
                    if runner.prepare_sampling(sampling, [0], np.zeros(1)):
                        runner.decode_and_sample(0, depth)
                    yield
        for depth in runner.decode_depths[1:]:
            runner.decode(0, depth)
            yield

    def _capture_batch_steps(self, runner: BatchRunner) -> Iterator[None]:
        assert self.scheduler
        blocks = self.scheduler.blocks
        for samples in (False, True) if isinstance(runner, RowSampler) else (False,):
            for count in runner.row_counts:
                rows = [Row(0, 0, sequence, samples) for sequence in range(min(count, runner.parallel))]
                with blocks.room(*[1] * len(rows)):
                    runner.decode_rows(rows)
                    runner.row_logits()
                yield
        for size in runner.chunk_sizes:
            with blocks.room(size // 2 + 1):
                runner.prefill([0] * (size // 2 + 1), 0)
            yield
        for depth in runner.decode_depths[1:]:
            with blocks.room(depth + 1):
                runner.decode_rows([Row(0, depth, 0)])
            yield


def _checkpoints(runner: ModelRunner) -> Checkpoints | None:
    """None for a model without recurrent state."""
    return Checkpoints(runner) if isinstance(runner, StateStore) and runner.state_slots else None


def _has_room_for(file: GGUF, need: MemoryNeed) -> bool:
    """Whether the machine's memory has room for the file beside the model, so that the next start need not read the
    disk."""
    needed, free = file.file_bytes, host_free_bytes()
    if uses_host_memory(Device.DEFAULT):
        needed += need.total_bytes
    return free is None or needed <= free


def _keeper(
    file: GGUF, runner: ModelRunner, states: Checkpoints | None, limit_bytes: int | None
) -> PrefixKeeper | None:
    """Keeps up to so many bytes of conversations on disk, if the runner can."""
    limit = default_limit_bytes() if limit_bytes is None else limit_bytes
    if not limit or not isinstance(runner, PrefixRunner) or not runner.export_layout:
        return None
    return PrefixKeeper(runner, PrefixStore(file, runner.export_layout, limit), states)


def _model_info(file: GGUF, spec: ModelSpec, template: ChatTemplate) -> ModelInfo:
    return ModelInfo(
        name=spec.name,
        architecture=spec.architecture,
        quantization=file_summary.quantization(file),
        parameters=file_summary.parameters(file),
        file_bytes=file.file_bytes,
        trained_context=spec.trained_context,
        thinks=template.thinks,
        takes_effort=template.takes_effort,
    )
