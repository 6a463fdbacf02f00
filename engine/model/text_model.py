"""A loaded model: what answers requests with it, and what measures it while there are none."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec.structs import replace
from tinygrad import Device, Tensor
from tinygrad.helpers import GlobalCounters

from engine.description import file_summary
from engine.description.architectures import read_spec
from engine.description.assistant import is_assistant
from engine.description.spec import ModelSpec
from engine.devices.device_name import device_name
from engine.errors import SHORTEN_AT_MOST, ContextFullError, PreemptedError, UsageError
from engine.fixes import compiler_processes, program_cache
from engine.formats.gguf import GGUF
from engine.formats.kv_format import KVFormat
from engine.formats.pooling import pooling_of
from engine.formats.template import ChatTemplate
from engine.kernels.compilation import interruptible
from engine.kernels.quantized_matrix import QuantizedMatrix
from engine.loading import packed_weights_cache
from engine.loading.weights import Weights, blank_end
from engine.measure.bandwidth import copy_gbps
from engine.measure.compiling import kernels_reported
from engine.measure.free_memory import free_bytes, host_free_bytes, uses_host_memory
from engine.measure.profile import profile
from engine.measure.timeline import timeline
from engine.model.busy_preparation import BusyPreparation
from engine.model.coverage import runs_as_graph_because, target_of
from engine.model.draft_head import NO_CHECKS, NO_HEAD, head_of, open_head
from engine.model.draft_model import DraftModel
from engine.model.memory_need import (
    MemoryNeed,
    check_fits,
    chosen_context,
    draft_head_bytes,
    squeezed_because,
)
from engine.model.open_runner import open_runner
from engine.model.pending_encoder import PendingEncoder
from engine.protocol.events import (
    Chat,
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
    Search,
    Slots,
    Tune,
    Tuned,
    Warming,
)
from engine.runtime.answer import Answer, Answers
from engine.runtime.choice_reporter import ChoiceReporter
from engine.runtime.embedding import Embeddings, Pooler
from engine.runtime.model_runner import Drawing, SearchRequest, Slot, Want
from engine.runtime.pictures import PictureEncoder
from engine.runtime.prefix_folder import default_limit_bytes
from engine.runtime.prefix_store import PrefixStore
from engine.runtime.scheduler import Scheduler
from engine.start_trial import start_trials

if TYPE_CHECKING:
    from engine.model.eyes import EncoderFile

Report = Callable[[Event], None]

IDLE_WIDTH = 4  # of a search while the engine is idle: four dozen candidates of each shape
SEARCH_S_PER_WIDTH = 20.0  # default limit of a search for schedules, for each unit of its width


class TextModel:
    """A loaded model (the worker's `Model`): `begin` makes an answer of a request, and `scheduler` gives it."""

    def __init__(self, options: EngineOptions, report: Report, prompts: PendingEncoder | None = None) -> None:
        """Loads `options.model_path` and compiles its kernels, reporting `Loading` and `Warming`. `prompts` is of that
        file. Raises ModelFileError, UsageError, and BackendError, which comes before loading if the model does not fit
        into memory."""
        prompts = prompts or PendingEncoder(options.model_path)
        file = prompts.file()
        spec = read_spec(file)
        encoder = _encoder_file(options.mmproj, spec) if options.mmproj else None
        free, device, kv = free_bytes(Device.DEFAULT), str(Device.DEFAULT), KVFormat.parse(options.kv)
        set_up = target_of(spec, device, options.kernels), options.parallel, kv
        left = free if encoder is None or free is None else free - encoder.need_bytes
        draft_file = GGUF(options.draft) if options.draft else None
        if head := head_of(file, spec, draft_file, options, set_up[0]):
            left = None if left is None else left - draft_head_bytes(spec, head.spec, set_up[0], kv)
            spec = head.beside(spec)
        draft = None
        if draft_file and not is_assistant(draft_file) and options.speculate != "heads":
            draft = DraftModel(draft_file, options, device, file, spec.vocab)
        room = left if draft is None or left is None else left - draft.need(None).total_bytes
        self.context_length = chosen_context(spec, options.context_length, room, *set_up)
        need = check_fits(spec, self.context_length, left, *set_up)
        if draft:
            draft.check_fits(self.context_length, None if left is None else left - need.total_bytes)
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
        program_cache.apply()
        with kernels_reported(lambda done, total: report(Warming(done=done, total=total))):
            how = self.context_length, options.kernels, options.keep_packed, options.parallel, kv
            pictures = encoder.room(spec) if encoder else None
            self._runner = open_runner(weights, *how, is_early=True, pictures=pictures)
            self._choices = ChoiceReporter(self._runner.expert_choices, report)
            limit = options.prefix_cache_bytes
            kept_bytes = default_limit_bytes() if limit is None else limit
            layout = self._runner.export_layout
            store = PrefixStore(file, layout, kept_bytes) if kept_bytes and layout else None
            self._head = open_head(self._runner, spec, head, set_up[0], kv)
            model = draft.open(self.context_length) if draft and self._runner.check_rows else None
            seeing = encoder.open_kept(options.kernels, kept_bytes) if encoder else None
            self.scheduler = Scheduler(
                self._runner,
                lambda slots: self._report_slots(slots, report),
                store,
                options.token_gap,
                options.speculate,
                seeing,
                model or self._head,
            )
            self._search(options, report)
            self._embeds = pooling_of(file) is not None
            self._interrupted: Callable[[], bool] = lambda: False
            self._captures = self._capture_steps()
            self._busy_preparation = BusyPreparation(self._compilations())
            with timeline.span("first step"):
                next(self._captures)
            start_trials.proved()
            if not self._runner.precompiled:  # else the first prompt and reply would wait for the compiler
                collections.deque(self._captures, 0)
            if options.speculate != "off":
                self._captures = chain(self._captures, self._capture_checks())
            if seeing:
                self._captures = chain(self._captures, self._prepare_pictures(seeing))
        compiler_processes.dismiss()
        with timeline.span("waiting for the tokenizer"):
            self.prompts = prompts.encoder()
        self.tokenizer = self.prompts.tokenizer
        if encoder:
            self.prompts.template.eyes = encoder.eyes
        whole_pictures = self._runner.max_chunk if pictures and pictures.whole else 0
        self._answers = Answers(self.prompts, self.context_length, whole_pictures)
        self._embeddings = Embeddings(self.prompts, self.context_length, _pooler(weights))
        self._choices.skip()
        with timeline.span("template"):
            warnings = self._warnings(file, spec, options)
            if draft and not self._runner.check_rows:
                warnings += (NO_CHECKS,)
            is_asked_for = options.speculate == "heads" or (head and head.is_assistant)
            if is_asked_for and not self._head:
                warnings += (NO_CHECKS if head else NO_HEAD,)
        self.ready = Ready(
            model=_model_info(file, spec, self.prompts.template, sees=encoder is not None),
            backend=str(Device.DEFAULT),
            device_name=device_name(str(Device.DEFAULT)),
            context_length=self.context_length,
            load_ms=0.0,
            cache_bytes=need.cache_bytes,
            kv=kv.value,
            is_squeezed=bool(squeezed_because(spec, options.context_length, self.context_length)),
            warnings=warnings,
            parallel=self._runner.parallel,
            weight_bytes_per_token=spec.weight_bytes_per_token,
            kv_bytes_per_token=spec.kv_bytes_per_token(windowed=False, kv=kv),
            window=spec.window,
            window_kv_bytes_per_token=spec.kv_bytes_per_token(windowed=True, kv=kv),
            state_bytes=spec.state_bytes,
            states_bytes=need.states_bytes,
            checkpoints=self._runner.state_slots,
            **self._experts(spec),
        )

    def _experts(self, spec: ModelSpec) -> dict[str, Any]:
        """The fields of `Ready` about experts."""
        if not self._choices.counts:
            return {}
        return {"experts": spec.experts[0].count, "experts_used": spec.experts[0].used}

    def _warnings(self, file: GGUF, spec: ModelSpec, options: EngineOptions) -> tuple[str, ...]:
        """Sentences about what a user would not expect of this model."""
        as_graph = "" if options.kernels == "graph" else runs_as_graph_because(spec, str(Device.DEFAULT))
        unkept = ""
        packs = str(Device.DEFAULT) == "CPU" and not as_graph and options.kernels != "graph"
        if packs and options.keep_packed and not packed_weights_cache.cached_files(Path(options.model_path)):
            unkept = "The packed weights are not kept: the disk has no room for them, or cannot be written."
        shorter = squeezed_because(spec, options.context_length, self.context_length)
        text_only = [
            f"Its {encoder} encoder is not loaded: orin-chat gives it text alone."
            for encoder in spec.encoders
        ]
        dropped = ""
        if start_trials.dropped:
            dropped = (
                "What a search of schedules found made an earlier start fail, so it is not used any more."
            )
        stands_in = options.chip and f"The kernels are those of {options.chip}, as if this were such a GPU."
        notes = [blank_end(file, spec), stands_in, as_graph, unkept, dropped, shorter, *text_only]
        return (*self.prompts.warnings, *filter(None, notes))

    def warm_up(self, interrupted: Callable[[], bool]) -> None:
        """Captures the remaining steps one by one until `interrupted`. Steps that are not captured here are captured at
        their first use. What conversations have added to the KV cache is kept on disk."""
        if self.scheduler.busy:
            return
        self._interrupted = interrupted
        while not interrupted() and next(self._captures, self) is None:
            self._choices.skip()
        compiler_processes.dismiss()
        self.scheduler.keep(interrupted)

    def check_device(self) -> None:
        """Raises RuntimeError if the device works no longer: after a fault, a driver refuses all that is asked."""
        Device[Device.DEFAULT].synchronize()

    def _report_slots(self, slots: Slots, report: Report) -> None:
        """Reports what the scheduler does, and which experts its steps have chosen."""
        report(replace(slots, device_bytes=GlobalCounters.mem_used_per_device[Device.DEFAULT]))
        self._busy_preparation.turn(sum(map(bool, slots.slots)))
        if any(slots.slots):
            self._choices.report_if_due()
        else:
            self._choices.end()

    def begin(self, request: Generate, report: Report) -> Answer:
        """The answer to a request, for `scheduler`. Any thread may call it. Raises ContextFullError,
        TemplateError and UsageError."""
        if isinstance(request.prompt, Chat) and request.prompt.pictures and not self.ready.model.sees:
            raise UsageError(
                f"{self.ready.model.name} sees no pictures: it has no encoder for them.",
                "Take a model that does, or name its encoder: --mmproj FILE.",
            )
        try:
            answers = self._embeddings if request.pooling else self._answers
            return answers.begin(request, report)
        except ContextFullError as error:
            if self.context_length >= self.ready.model.trained_context:
                error.hint = SHORTEN_AT_MOST
            raise

    def generate(self, request: Generate, report: Report, cancelled: Callable[[], bool]) -> Finished:
        """Answers one request at once, for callers that have no worker. Raises what `begin` and the steps raise."""
        ends: list[Finished | Exception] = []
        self.scheduler.add(self.begin(request, report), cancelled, ends.append)
        while not ends:
            self.scheduler.step()
        [end] = ends
        if isinstance(end, Exception):
            raise end
        return end

    def measure(self, request: Measure) -> Measured:
        """Counts the kernels of a decode step and the device's memory in use, and times a copy."""
        with self.scheduler.room_after_last(1, self.context_length) as position:
            kernels = len(self._runner.replay("decode", position).calls)
        return Measured(
            request_id=request.request_id,
            kernels_per_token=kernels,
            device_bytes=GlobalCounters.mem_used_per_device[Device.DEFAULT],
            copy_gbps=copy_gbps(Device.DEFAULT),
        )

    def profile(self, request: Profile, interrupted: Callable[[], bool]) -> KernelProfile:
        """Times the kernels of a step after the conversation that ended last. Raises PreemptedError when `interrupted`,
        UsageError if the runner has no such step."""
        tokens = 1 if request.step == "decode" else self._runner.max_chunk
        try:
            with self.scheduler.room_after_last(tokens, self.context_length) as position:
                return profile(request, self._runner.replay(request.step, position), position, interrupted)
        finally:
            self._choices.skip()

    def _search(self, options: EngineOptions, report: Report) -> None:
        """Searches for faster schedules if the options give a width and the runner has kernels of its own. (Tensor
        graphs are searched by tinygrad while it compiles them.)"""
        width = options.search_width
        if not width or not self._runner.search_tokens:
            return
        seconds = SEARCH_S_PER_WIDTH * width if options.search_s is None else options.search_s
        progress = lambda done, total, cached, search: report(
            Warming(done=done, total=total, cached=cached, search=search)
        )
        with (
            kernels_reported(lambda done, total: None),  # the search reports its candidates itself
            self.scheduler.blocks.room(self._runner.search_tokens),
        ):
            self._runner.search(SearchRequest(width, seconds, progress, options.search_again))

    def tune(self, request: Tune, interrupted: Callable[[], bool]) -> Tuned:
        """Searches for faster schedules, as `orin-chat tune`, and takes them from then on. Does nothing if the KV cache
        would have to give up something for it, or if all products were searched before."""
        tokens = self._runner.search_tokens
        times, left = list[Search](), min(tokens, 1)

        def progress(done: int, total: int, cached: int, search: Search) -> None:
            nonlocal left
            left = total - done
            times.extend([] if search.found else [search])

        if tokens and self.scheduler.blocks.has_free([tokens]):
            with kernels_reported(lambda done, total: None), self.scheduler.blocks.room(tokens):
                search = SearchRequest(IDLE_WIDTH, request.seconds, progress, interrupted=interrupted)
                is_changed = self._runner.search(search)
            self._choices.skip()
            if is_changed:
                self._captures = self._capture_steps()
                self._busy_preparation = BusyPreparation(self._compilations())
            self.warm_up(interrupted)
        before_us, after_us = (times[0].before_us, times[-1].after_us) if times else (0.0, 0.0)
        return Tuned(request_id=request.request_id, before_us=before_us, after_us=after_us, left=left)

    def _capture_steps(self) -> Iterator[None]:
        """Captures each step of the runner by running it, one a turn, if there are free blocks for it. The first is a
        decode step with its logits: it shows that the device works."""
        runner = self._runner
        self._run(1, 0)
        runner.logits()
        yield
        # The smallest size does for all until they are compiled.
        for size in dict.fromkeys((runner.chunk_sizes[0], *self._sizes_to_compile())):
            yield from self._prepare(partial(runner.prepare, size))
            self._run(0, size // 2 + 1)
            yield
            if self._embeds:
                yield from self._prepare(partial(self._run, 0, size // 2 + 1, want="hidden"))
                yield
        for drawing in (None, *_drawings()) if runner.sampler else (None,):
            for count in runner.row_counts:
                yield from self._prepare(partial(runner.prepare_rows, count))
                for depth in self._depths(count):
                    self._run(min(count, runner.parallel), 0, depth, drawing)
                    yield
            if runner.precompiled and not drawing:
                yield from self._capture_mixed_steps()

    def _compilations(self) -> Iterator[Callable[[], None]]:
        """What compiles the kernels of steps, those first that make most of a difference."""
        runner = self._runner
        if runner.precompiled:
            largest, *sizes = self._sizes_to_compile()
            yield partial(runner.prepare, largest)
            yield from (partial(runner.prepare_rows, count) for count in runner.row_counts)
            yield from (partial(runner.prepare, size) for size in sizes)

    def _sizes_to_compile(self) -> Iterable[int]:
        """The sizes of a prompt's steps. The largest comes first: long prompts gain most."""
        sizes = self._runner.chunk_sizes
        return dict.fromkeys((sizes[-1], *sizes))

    def _capture_mixed_steps(self) -> Iterator[None]:
        """Captures steps of prompts and replies."""
        runner = self._runner
        for count in runner.row_counts[1:]:
            rows = min(count, runner.parallel - 1)  # one sequence is that of the prompt
            for size in runner.piece_sizes(rows)[:-1]:
                for depth in self._depths(count):
                    self._run(rows, size, depth)
                    yield

    def _capture_checks(self) -> Iterator[None]:
        """Captures steps that check guesses of the next tokens of one reply."""
        for rows in self._runner.check_rows:
            yield from self._prepare(partial(self._runner.prepare_check, rows))
            yield
            for drawing in (None, *_drawings())[: 2 if self._runner.sampler else 1]:
                for depth in self._runner.decode_depths(rows):
                    self._run(rows, 0, depth, drawing, checks=True)
                    yield
        if head := self._head:
            for size in self._runner.chunk_sizes if head.reads_of_prompt else ():
                yield from self._prepare(partial(self._run, 0, size // 2 + 1, want="hidden"))
                yield
            yield from self._prepare(head.prepare)
            yield

    def _prepare_pictures(self, encoder: PictureEncoder) -> Iterator[None]:
        """Compiles what pictures need."""
        for prepare in encoder.preparations():
            yield from self._prepare(prepare)
            yield

    def _prepare(self, prepare: Callable[[], None]) -> Iterator[None]:
        """Compiles the kernels of a step. A turn ends early if that is interrupted, and the next one goes on."""
        while True:
            try:
                with interruptible(self._interrupted):
                    return prepare()
            except PreemptedError:
                yield

    def _depths(self, rows: int) -> tuple[int, ...]:
        """The positions at which steps of so many replies are captured. There are many steps of several."""
        depths = self._runner.decode_depths(rows)
        return depths if rows == 1 else depths[:2]

    def _run(
        self,
        rows: int,
        prompt_tokens: int,
        position: int = 0,
        drawing: Drawing | None = None,
        checks: bool = False,
        want: Want = "none",
    ) -> None:
        """Runs a step of so many replies at a position and a prompt's piece, if there are free blocks for it. All
        sequences are empty before and after. `drawing`: what the first reply is drawn with. If it `checks`, all rows
        are of that. `want`: of the piece."""
        lengths = [position + rows] if checks else [position + 1] * rows
        lengths += [prompt_tokens] * (prompt_tokens > 0)
        if max(lengths) > self.context_length or not self.scheduler.blocks.has_free(lengths):
            return
        is_drawn = drawing and self._runner.sampler and self._runner.sampler.prepare(0, drawing)
        places = [(0, position + i) if checks else (i, position) for i in range(rows)]
        slots = [Slot(sequence, (0,), place, draw=bool(is_drawn)) for sequence, place in places]
        if prompt_tokens:
            slots.insert(0, Slot(rows, (0,) * prompt_tokens, 0, want))
        with self.scheduler.blocks.room(*lengths):
            self._runner.run(slots)


def _drawings() -> Iterator[Drawing]:
    """For each way in which a step draws tokens, one that needs it: with and without penalties, and those that need
    most, with masks and log-probabilities."""
    for penalty, top in ((1.0, 0), (1.1, 0), (1.1, 1)):
        yield Drawing(Sampling(repeat_penalty=penalty), [0], np.zeros(1), top=top, masks=top > 0)


def _has_room_for(file: GGUF, need: MemoryNeed) -> bool:
    """Whether the machine's memory has room for the file beside the model, so that the next start need not read the
    disk."""
    needed, free = file.file_bytes, host_free_bytes()
    if uses_host_memory(Device.DEFAULT):
        needed += need.total_bytes
    return free is None or needed <= free


def _pooler(weights: Weights) -> Pooler:
    """Raises ModelFileError."""
    spec, classes = weights.spec, None
    if of := spec.classes:
        rows = Tensor(weights.read(of, range(of.rows)))
        classes = QuantizedMatrix(of.type, of.rows, of.cols).dequantize_rows(rows, of.rows).numpy()
    return Pooler(weights.vector(spec.output_norm), spec.stream_eps, classes)


def _encoder_file(path: str, spec: ModelSpec) -> EncoderFile:
    """An encoder of pictures. Raises ModelFileError. Its modules take a twentieth of a second of a start."""
    from engine.model.eyes import EncoderFile

    return EncoderFile(path, spec)


def _model_info(file: GGUF, spec: ModelSpec, template: ChatTemplate, sees: bool) -> ModelInfo:
    return ModelInfo(
        name=spec.name,
        architecture=spec.architecture,
        quantization=file_summary.quantization(file),
        parameters=file_summary.parameters(file),
        file_bytes=file.file_bytes,
        trained_context=spec.trained_context,
        thinks=template.thinks,
        takes_effort=template.takes_effort,
        sees=sees,
    )
