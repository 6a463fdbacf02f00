"""A loaded model: what answers requests with it, and what measures it while there are none."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray
from tinygrad import Device, Tensor
from tinygrad.helpers import GlobalCounters

from engine.cache.start_trial import start_trials
from engine.description.spec import Projection
from engine.description.sublayers import Weight
from engine.errors import SHORTEN_AT_MOST, ContextFullError, UsageError
from engine.fixes import program_cache
from engine.formats.pooling import pooling_of
from engine.formats.templates.prompt_pictures import SizedPicture
from engine.kernels import compilers
from engine.kernels.quantized_matrix import QuantizedMatrix
from engine.loading.weights import Weights
from engine.measure.bandwidth import copy_gbps
from engine.measure.compiling import kernels_reported
from engine.measure.profile import profile
from engine.measure.timeline import timeline
from engine.model.draft_head import open_head
from engine.model.load_plan import LoadPlan, plan_load
from engine.model.open_runner import open_runner
from engine.model.pending_encoder import PendingEncoder
from engine.model.ready_message import ready_message
from engine.model.step_capture import StepCapture
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
    Profile,
    Search,
    Slots,
    Tune,
    Tuned,
    Warming,
)
from engine.runtime.answer import Answer, Answers
from engine.runtime.choice_reporter import ChoiceReporter
from engine.runtime.embedding import Embeddings, Pooler, Step
from engine.runtime.model_runner import SearchRequest
from engine.runtime.prefix_folder import default_limit_bytes
from engine.runtime.prefix_store import PrefixStore
from engine.runtime.scheduler import Scheduler

Report = Callable[[Event], None]

IDLE_WIDTH = 4  # the width of a search while the engine is idle: four dozen candidates of each shape
SEARCH_S_PER_WIDTH = 20.0  # default limit of a search for schedules, for each unit of its width


class TextModel:
    """A loaded model (the worker's `Model`): `begin` makes an answer of a request, and `scheduler` gives it."""

    def __init__(self, options: EngineOptions, report: Report, prompts: PendingEncoder | None = None) -> None:
        """Loads `options.model_path` and compiles its kernels, reporting `Loading` and `Warming`. `prompts` is of that
        file. Raises ModelFileError, UsageError, and BackendError, which comes before loading if the model does not fit
        into memory."""
        prompts = prompts or PendingEncoder(options.model_path)
        plan = plan_load(options, prompts.file())
        self.context_length = plan.context_length
        if Device.DEFAULT.split(":")[0] == "CPU":  # repacking the weights keeps all cores busy
            prompts.encoder()
        loading = Loading(
            done_bytes=0,
            total_bytes=plan.spec.matrix_bytes,
            context_length=plan.context_length,
            cache_bytes=plan.need.cache_bytes,
            kv=plan.kv.value,
        )
        report(loading)
        weights = Weights(
            plan.file,
            plan.spec,
            lambda done: report(replace(loading, done_bytes=done)),
            keep_cached=plan.has_room_for_file,
        )
        program_cache.apply()
        with kernels_reported(lambda done, total: report(Warming(done=done, total=total))):
            self._open(plan, options, weights, report)
        compilers.end()
        with timeline.span("waiting for the tokenizer"):
            self.prompts = prompts.encoder()
        self.tokenizer = self.prompts.tokenizer
        self._encoder = plan.encoder
        if self._encoder:
            self.prompts.template.picture_processor = self._encoder.picture_processor
        self._only_embeds = plan.spec.both_ways
        pictures = plan.pictures
        whole_pictures = self._runner.max_chunk if pictures and pictures.whole else 0
        self._answers = Answers(self.prompts, plan.context_length, whole_pictures)
        self._embeddings = Embeddings(self.prompts, plan.context_length, _pooler(weights))
        self._choices.skip()
        with timeline.span("template"):
            self.ready = ready_message(
                plan, options, self._runner, self.prompts, self._choices.counts, self._head is not None
            )

    def _open(self, plan: LoadPlan, options: EngineOptions, weights: Weights, report: Report) -> None:
        """Makes the runner and what stands around it, and captures the steps that a first reply needs."""
        keep_packed = options.keep_packed and not options.lora
        how = plan.context_length, options.kernels, keep_packed, options.parallel, plan.kv
        runner = open_runner(weights, *how, is_early=True, pictures=plan.pictures)
        self._runner = runner
        self._choices = ChoiceReporter(runner.expert_choices, report)
        limit = options.prefix_cache_bytes
        kept_bytes = default_limit_bytes() if limit is None else limit
        layout = runner.export_layout
        store = PrefixStore(plan.file, layout + options.lora, kept_bytes) if kept_bytes and layout else None
        self._head = open_head(runner, plan.spec, plan.head, plan.target, plan.kv)
        draft = plan.draft.open(plan.context_length) if plan.draft and runner.check_rows else None
        encoder = plan.encoder.open_kept(options.kernels, kept_bytes) if plan.encoder else None
        self.scheduler = Scheduler(
            runner,
            lambda slots: self._report_slots(slots, report),
            store,
            options.token_gap,
            options.speculate,
            encoder,
            draft or self._head,
        )
        self._search(options, report)
        replies = not plan.spec.both_ways
        embeds = pooling_of(plan.file) is not None or not replies
        guesses = options.speculate != "off" and replies
        self._capture = StepCapture(
            runner, self.scheduler, plan.context_length, embeds, guesses, self._head, encoder, replies
        )
        with timeline.span("first step"):
            self._capture.first()
        start_trials.proved()
        if not runner.precompiled:  # else the first prompt and reply would wait for the compiler
            self._capture.steps()

    def warm_up(self, interrupted: Callable[[], bool]) -> None:
        """Captures the remaining steps one by one until `interrupted`. Steps that are not captured here are captured at
        their first use. What conversations have added to the KV cache is kept on disk."""
        if self.scheduler.busy:
            return
        for _ in self._capture.rest(interrupted):
            self._choices.skip()
        self.scheduler.keep(interrupted)
        if self._runner.parallel > 1 and not interrupted():  # else all would wait for the first grammar
            self._answers.prepare_grammars()

    def check_device(self) -> None:
        """Raises RuntimeError if the device works no longer: after a fault, a driver refuses all that is asked."""
        Device[Device.DEFAULT].synchronize()

    def _report_slots(self, slots: Slots, report: Report) -> None:
        """Reports what the scheduler does, and which experts its steps have chosen."""
        report(replace(slots, device_bytes=GlobalCounters.mem_used_per_device[Device.DEFAULT]))
        self._capture.while_busy.turn(sum(map(bool, slots.slots)))
        if any(slots.slots):
            self._choices.report_if_due()
        else:
            self._choices.end()

    def read_pictures(self, request: Generate) -> Iterator[SizedPicture | None]:
        """Reads the pictures of a request, until no more fit into the context. Gives None before one that takes long.
        Raises PictureError."""
        if not self._encoder or not isinstance(request.prompt, Chat):
            return
        n = 0
        for picture in request.prompt.pictures:
            for sized in self._encoder.reading(picture):
                yield sized
                n += len(sized.ids) if sized else 0
            if n > self.context_length:
                return

    def begin(self, request: Generate, report: Report) -> Answer:
        """The answer to a request, for `scheduler`. Any thread may call it. Raises ContextFullError,
        TemplateError and UsageError."""
        if self._only_embeds and not request.pooling:
            raise UsageError(
                f"{self.ready.model.name} makes embeddings of texts, and answers nothing.",
                "Choose a chat model. `orin-chat serve` gives embeddings: /v1/embeddings.",
            )
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
                self._capture.again()
            self.warm_up(interrupted)
        before_us, after_us = (times[0].before_us, times[-1].after_us) if times else (0.0, 0.0)
        return Tuned(request_id=request.request_id, before_us=before_us, after_us=after_us, left=left)


def _pooler(weights: Weights) -> Pooler:
    """Raises ModelFileError."""
    spec = weights.spec

    def steps(projections: Sequence[Projection]) -> list[Step]:
        return [
            Step(matrix(p.weight), weights.vector(p.bias) if p.bias else None, p.tanh) for p in projections
        ]

    def matrix(of: Weight) -> NDArray[np.float32]:
        rows = Tensor(weights.read(of, range(of.rows)))
        floats = QuantizedMatrix(of.type, of.rows, of.cols).dequantize_rows(rows, of.rows).numpy()
        return np.asarray(floats, np.float32)

    bias = weights.vector(spec.output_norm_bias) if spec.output_norm_bias else None
    return Pooler(
        None if spec.ends_normed else weights.vector(spec.output_norm),
        spec.stream_eps,
        steps(spec.classes),
        bias,
        steps(spec.projections),
        spec.both_ways,
    )
