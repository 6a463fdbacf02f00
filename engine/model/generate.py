"""Text from a model: a prompt's tokens into the KV cache (prefill), then one token after another (decode)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from tinygrad import Device, Tensor, TinyJit, UOp

from engine.errors import ContextFullError, UsageError
from engine.events import (
    Chat,
    EngineOptions,
    Event,
    Finished,
    Generate,
    Loading,
    ModelInfo,
    Prefilling,
    RawText,
    Ready,
    StopReason,
    Thinking,
    Token,
    TokenIds,
    Warming,
)
from engine.formats.gguf import GGUF
from engine.formats.template import ChatTemplate, Prompt
from engine.formats.thinking import ThinkSplitter
from engine.formats.tokenizer import StreamDecoder, Tokenizer
from engine.measure.compiling import kernels_reported
from engine.model.cache import KVCache
from engine.model.config import ModelConfig
from engine.model.sampling import Logits, Sampler, log_probabilities
from engine.model.transformer import Transformer
from engine.model.weights import Weights

Report = Callable[[Event], None]

PREFILL_CHUNK = 32  # tokens a prefill step takes; the last step of a prompt is padded to it
DEFAULT_CONTEXT = 8192


class TextModel:
    """A loaded model that answers requests, one at a time (the worker's `Model`)."""

    def __init__(self, options: EngineOptions, report: Report) -> None:
        """Loads `options.model_path` and compiles its kernels, reporting `Loading` and `Warming`. Raises
        ModelFileError, UsageError and BackendError."""
        self._file = file = GGUF(options.model_path)
        config = ModelConfig.from_gguf(file)
        self.tokenizer = Tokenizer.from_gguf(file)
        self.template = ChatTemplate.from_gguf(file, self.tokenizer)
        self.context_length = options.context_length or min(config.trained_context, DEFAULT_CONTEXT)
        if not 1 < self.context_length <= config.trained_context:
            raise UsageError(
                f"A context of {self.context_length} tokens does not suit this model.",
                f"Choose between 2 and {config.trained_context}, which it was trained for.",
            )
        total = sum(tensor.n_bytes for tensor in file.tensors.values())
        weights = Weights(file, config, lambda done: report(Loading(done_bytes=done, total_bytes=total)))
        # Prefill writes whole chunks: the last one may reach beyond the context.
        self.cache = KVCache(config, self.context_length + PREFILL_CHUNK)
        self._transformer = Transformer(weights, self.cache)
        self._position = UOp.variable("position", 0, self.context_length - 1)
        self._prefill, self._decode = TinyJit(self._prefill_chunk), TinyJit(self._decode_token)
        with kernels_reported(lambda done, total: report(Warming(done=done, total=total))):
            self._warm_up()
        self.ready = Ready(
            model=describe(file, config, self.template.thinks),
            backend=str(Device.DEFAULT),
            device_name=getattr(Device.default, "arch", "") or str(Device.DEFAULT),
            context_length=self.context_length,
            load_ms=0.0,
        )

    def generate(self, request: Generate, report: Report, cancelled: Callable[[], bool]) -> Finished:
        """Raises ContextFullError, TemplateError and UsageError."""
        started = time.perf_counter()
        prompt = self._prompt(request)
        ids = prompt.ids
        self._check(ids)
        sampler = Sampler(request.sampling)
        decoder = StreamDecoder(self.tokenizer)
        splitter = ThinkSplitter(inside=prompt.opens_thinking) if isinstance(request.prompt, Chat) else None
        cached = self.cache.reuse(ids)
        limit = min(request.max_tokens or self.context_length, self.context_length - len(ids))

        def progress(done: int) -> None:
            report(Prefilling(request_id=request.request_id, done=done, total=len(ids), cached=cached))

        produced: list[int] = []
        first_token = last_token = started
        reason: StopReason = "length"
        if not self._fill(ids, progress, cancelled):
            reason = "cancelled"
            limit = 0
        while len(produced) < limit:
            if cancelled():
                reason = "cancelled"
                break
            token, logits = self._next(ids[-1] if not produced else produced[-1], sampler, ids, produced, request)
            last_token = time.perf_counter()
            if not produced:
                first_token = last_token
                progress(len(ids))
            produced.append(token)
            ended = token in self.tokenizer.eos_ids and not request.ignore_eos
            self._report_token(request, token, decoder, splitter, logits, report, final=ended or len(produced) == limit)
            if ended:
                reason = "stop"
                break
        return Finished(
            request_id=request.request_id,
            reason=reason,
            prompt_n=len(ids),
            cached_n=cached,
            prompt_ms=(first_token - started) * 1e3,
            predicted_n=len(produced),
            predicted_ms=(last_token - first_token) * 1e3,
            load_ms=0.0,
            context_used=len(self.cache.tokens) + 1,
            seed=sampler.seed,
        )
