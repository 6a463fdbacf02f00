"""Text from a model: a prompt's tokens into the KV cache (prefill), then one token after another (decode)."""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from tinygrad import Device
from tinygrad.helpers import GlobalCounters

from engine.devices.device_name import device_name
from engine.errors import ContextFullError, UsageError
from engine.events import (
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
    Prefilling,
    Profile,
    Ready,
    Sampling,
    StopReason,
    Thinking,
    Token,
    TopToken,
    Warming,
)
from engine.fixes import compiler_processes, program_cache
from engine.formats.gguf import GGUF
from engine.formats.prompt import PromptEncoder
from engine.formats.template import Prompt
from engine.formats.thinking import ThinkSplitter
from engine.formats.tokenizer import StreamDecoder
from engine.measure.bandwidth import copy_gbps
from engine.measure.compiling import kernels_reported
from engine.measure.profile import profile
from engine.model import summary
from engine.model.cache import KVCache
from engine.model.config import ModelConfig
from engine.model.sampling import Sampler, log_probabilities
from engine.model.steps import SECONDS_A_WIDTH, DrawingSteps, SearchableSteps, Steps, open_steps
from engine.model.weights import Weights

Report = Callable[[Event], None]

DEFAULT_CONTEXT = 8192


class TextModel:
    """A loaded model that answers requests, one at a time (the worker's `Model`)."""

    def __init__(self, options: EngineOptions, report: Report) -> None:
        """Loads `options.model_path` and compiles its kernels, reporting `Loading` and `Warming`. Raises
        ModelFileError, UsageError and BackendError."""
        file = GGUF(options.model_path)
        config = ModelConfig.from_gguf(file)
        with_weights = ThreadPoolExecutor(1)
        prompts = with_weights.submit(PromptEncoder, file)
        if Device.DEFAULT.split(":")[0] == "CPU":  # whose cores have enough to do with the weights
            prompts.result()
        self.context_length = _context_length(options, config)
        total = sum(tensor.n_bytes for tensor in file.tensors.values())
        weights = Weights(file, config, lambda done: report(Loading(done_bytes=done, total_bytes=total)))
        self._cached: list[int] = []  # the tokens whose keys and values are in the KV cache
        program_cache.apply()
        with kernels_reported(lambda done, total: report(Warming(done=done, total=total))):
            self._steps: Steps = open_steps(
                weights, self.context_length, options.kernels, options.keep_packed
            )
            self._search(options, report)
            self._warming = self._first_uses()
            next(self._warming)
            if not self._steps.compiled:  # or a first prompt, or a reply, would stop for seconds
                collections.deque(self._warming, 0)
        compiler_processes.dismiss()
        self.prompts = prompts.result()
        with_weights.shutdown()
        self.tokenizer = self.prompts.tokenizer
        self.ready = Ready(
            model=_describe(file, config, self.prompts.template.thinks),
            backend=str(Device.DEFAULT),
            device_name=device_name(str(Device.DEFAULT)),
            context_length=self.context_length,
            load_ms=0.0,
            warnings=self.prompts.warnings,
            weight_bytes_per_token=summary.weight_bytes_per_token(file),
            kv_bytes_per_token=KVCache.bytes_per_token(config),
        )

    def warm_up(self, interrupted: Callable[[], bool]) -> None:
        """Captures steps that are left, one after the other until `interrupted`, as long as no conversation is in
        the KV cache. What is left after that waits for its first use."""
        while not self._cached and not interrupted() and next(self._warming, self) is None:
            pass

    def generate(self, request: Generate, report: Report, cancelled: Callable[[], bool]) -> Finished:
        """Raises ContextFullError, TemplateError and UsageError."""
        started = time.perf_counter()
        prompt = self.prompts.encode(request.prompt)
        limit = self._room(prompt.ids, request.max_tokens)
        sampler = Sampler(request.sampling)
        speaker = _Speaker(request, StreamDecoder(self.tokenizer), _splitter(request, prompt), report)
        if request.fresh:
            self._cached.clear()
        cached = self._reuse(prompt.ids)

        def progress(done: int) -> None:
            report(Prefilling(request_id=request.request_id, done=done, total=len(prompt.ids), cached=cached))

        draws = self._draws(request, sampler, prompt.ids, limit)
        reason: StopReason = "length"
        first_token = last_token = started
        if not self._prefill(prompt.ids, progress, cancelled):
            reason, limit = "cancelled", 0
        tokens = list(prompt.ids)
        for produced in range(limit):
            if cancelled():
                reason = "cancelled"
                break
            more = produced < limit - 1
            token = self._next(tokens, sampler, draws, more and not request.logprobs)
            last_token = time.perf_counter()
            if not produced:
                first_token = last_token
                progress(len(prompt.ids))
            tokens.append(token)
            self._cached = tokens[:-1]
            ended = token in self.tokenizer.eos_ids and not request.ignore_eos
            speaker.say(token, self._steps, last=ended or not more)
            if ended:
                reason = "stop"
                break
        return Finished(
            request_id=request.request_id,
            reason=reason,
            prompt_n=len(prompt.ids),
            cached_n=cached,
            prompt_ms=(first_token - started) * 1e3,
            predicted_n=len(tokens) - len(prompt.ids),
            predicted_ms=(last_token - first_token) * 1e3,
            load_ms=0.0,
            seed=sampler.seed,
        )

    def measure(self, request: Measure) -> Measured:
        position = min(len(self._cached), self.context_length - 1)
        del self._cached[position:]
        return Measured(
            request_id=request.request_id,
            kernels_per_token=len(self._steps.replay("decode", position).calls),
            device_bytes=GlobalCounters.mem_used_per_device[Device.DEFAULT],
            copy_gbps=copy_gbps(Device.DEFAULT),
        )

    def profile(self, request: Profile, interrupted: Callable[[], bool]) -> KernelProfile:
        """Raises PreemptedError where `interrupted` says so, UsageError for a step that there is not."""
        position = min(len(self._cached), self.context_length - 1)
        del self._cached[position:]
        return profile(request, self._steps.replay(request.step, position), position, interrupted)

    def _draws(self, request: Generate, sampler: Sampler, prompt: list[int], limit: int) -> bool:
        """Whether the device draws the reply's tokens. Log-probabilities are of logits as they were, which it does
        not keep."""
        if sampler.greedy or request.logprobs or not isinstance(self._steps, DrawingSteps):
            return False
        return self._steps.prepare(request.sampling, prompt, sampler.numbers(limit))

    def _next(self, tokens: list[int], sampler: Sampler, draws: bool, more: bool) -> int:
        """The token after `tokens`; `more` are going to be asked for, without logits."""
        last, position = tokens[-1], len(tokens) - 1
        if draws:
            assert isinstance(self._steps, DrawingSteps)
            return self._steps.draw(last, position, more)
        token = self._steps.decode(last, position, more and sampler.greedy)
        return token if sampler.greedy else sampler.draw(self._steps.logits(), tokens)

    def _room(self, prompt: list[int], max_tokens: int | None) -> int:
        """How many tokens a reply may have. The last one need not be stored."""
        room = self.context_length - len(prompt) + 1
        if room < 1:
            raise ContextFullError(
                f"The conversation has {len(prompt)} tokens and the context holds {self.context_length}.",
                "Start a new chat, shorten the prompt, or restart with a larger --context.",
            )
        return room if max_tokens is None else min(room, max_tokens)

    def _reuse(self, prompt: list[int]) -> int:
        """How many tokens of the prompt are in the KV cache already: the longest common prefix, but never the
        last token, whose output is always needed. A reply is read again from where its template writes it
        otherwise than the model did: most leave out of earlier turns what was thought."""
        common = 0
        for have, want in zip(self._cached, prompt[:-1], strict=False):
            if have != want:
                break
            common += 1
        del self._cached[common:]
        return common

    def _prefill(
        self, prompt: list[int], progress: Callable[[int], None], cancelled: Callable[[], bool]
    ) -> bool:
        """Stores all tokens of the prompt but the last, which the first decode takes. False if cancelled."""
        while (done := len(self._cached)) < len(prompt) - 1:
            progress(done)
            if cancelled():
                return False
            chunk = prompt[done : min(done + self._steps.chunk, len(prompt) - 1)]
            self._steps.prefill(chunk, done)
            self._cached += chunk
        return True

    def _search(self, options: EngineOptions, report: Report) -> None:
        """Searches for faster kernels where a width is asked for and the steps are not tinygrad's to search."""
        width = options.search_width
        if not width or not isinstance(self._steps, SearchableSteps):
            return
        seconds = SECONDS_A_WIDTH * width if options.search_s is None else options.search_s
        told = lambda done, total, cached, search: report(
            Warming(done=done, total=total, cached=cached, search=search)
        )
        with kernels_reported(lambda done, total: None):  # the candidates' are told of as candidates
            self._steps.search(width, seconds, told, options.search_again)

    def _first_uses(self) -> Iterator[None]:
        """Runs, and so captures, each step that there is, one after the other: first of all what shows that the
        device works."""
        steps = self._steps
        steps.decode(0, 0)
        steps.logits()
        yield
        for size in steps.chunks:
            steps.prefill([0] * (size // 2 + 1), 0)
            yield
        if isinstance(steps, DrawingSteps):
            for sampling in (Sampling(), Sampling(repeat_penalty=1.1)):
                for depth in steps.depths:
                    if steps.prepare(sampling, [0], np.zeros(1)):
                        steps.draw(0, depth)
                    yield
        for depth in steps.depths[1:]:
            steps.decode(0, depth)
            yield


@dataclass(frozen=True)
class _Speaker:
    """Tells of each token as an event."""

    request: Generate
    decoder: StreamDecoder
    splitter: ThinkSplitter | None
    report: Report

    def say(self, token: int, steps: Steps, *, last: bool) -> None:
        text = self.decoder.feed(token) + (self.decoder.flush() if last else "")
        thinking = False
        if self.splitter is not None:
            thinking, text = self.splitter.feed(text)
            text += self.splitter.flush()[1] if last else ""
        logprob: float | None = None
        top: tuple[TopToken, ...] = ()
        if self.request.logprobs:
            logprob, top = log_probabilities(steps.logits(), token, self.request.logprobs)
        kind = Thinking if thinking else Token
        self.report(kind(request_id=self.request.request_id, id=token, text=text, logprob=logprob, top=top))


def _splitter(request: Generate, prompt: Prompt) -> ThinkSplitter | None:
    """Only a chat's reply is told apart: raw text is the user's to read."""
    return ThinkSplitter(inside=prompt.opens_thinking) if isinstance(request.prompt, Chat) else None


def _context_length(options: EngineOptions, config: ModelConfig) -> int:
    if options.context_length is None:
        return min(config.trained_context, DEFAULT_CONTEXT)
    if not 1 < options.context_length <= config.trained_context:
        raise UsageError(
            f"A context of {options.context_length} tokens does not suit {config.name}.",
            f"Choose one between 2 and {config.trained_context} tokens, which it was trained for.",
        )
    return options.context_length


def _describe(file: GGUF, config: ModelConfig, thinks: bool) -> ModelInfo:
    return ModelInfo(
        name=config.name,
        architecture=config.architecture,
        quantization=summary.quantization(file),
        parameters=summary.parameters(file),
        file_bytes=file.file_bytes,
        trained_context=config.trained_context,
        thinks=thinks,
    )
