"""Decode and prefill of a model on an NVIDIA GPU, each step one graph launch.

A token arrives in host memory, where it is read without stopping the device, and lies on the device too: the step
after it can run before the host has seen it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray
from tinygrad import Device, Tensor, UOp, dtypes

from engine.errors import UsageError
from engine.events import Sampling, Step
from engine.fixes import launch_bounds
from engine.kernels.compilation import compile_all
from engine.kernels.gpu.attention import SLACK, Heads
from engine.kernels.gpu.device import capability
from engine.kernels.gpu.kernel_sequence import KernelSequence
from engine.kernels.gpu.mailbox import Mailbox, send, sent, zeros
from engine.kernels.gpu.repack import repacking
from engine.kernels.gpu.sample import Shortlist
from engine.measure.profile import Replay, Use
from engine.model.fused import schedule_search
from engine.model.fused.decode import Decode
from engine.model.fused.device_sampler import DeviceSampler
from engine.model.fused.packed_model import allocate
from engine.model.fused.prefill import Prefill
from engine.model.fused.prescales import Prescales
from engine.model.model_runner import SearchReport
from engine.model.sampling import Logits
from engine.model.weights import Weights

_CHUNKS = (64, 512)  # prompts are done in pieces of up to these sizes
_FEW = 8  # tokens that are done one by one
_NOWHERE = (-1, -1)
_ANSWERED = (1, 77, 5, 1203)  # tokens that a step is judged by
_TURN_S = 0.03


class FusedRunner:
    """The protocol `SamplingRunner`."""

    precompiled = True

    def __init__(self, weights: Weights, context_length: int) -> None:
        launch_bounds.apply()
        os.environ.setdefault("ALLOW_HALF8", "1")  # loads of 16 bytes of half-precision numbers
        config, self._context, self.max_chunk = weights.config, context_length, _CHUNKS[-1]
        self._model = model = allocate(weights)
        length = -(-context_length // SLACK) * SLACK + SLACK
        eps = config.norm_eps if model.layers[0].head_norms is not None else None
        self._heads = Heads(config.heads, config.kv_heads, config.head_dim, length, eps)
        for layer in model.layers:
            layer.keys, layer.values = (zeros(self._heads.cache_size, dtypes.float16) for _ in range(2))
        angles = np.arange(context_length)[:, None] * config.rope_frequencies
        self._tables = sent(np.cos(angles).astype(np.float32)), sent(np.sin(angles).astype(np.float32))
        self._scales = Prescales()
        self._decode = Decode(model, self._heads, self._scales, self._tables, context_length)
        self._prefill = Prefill(model, self._heads, self._scales, self._tables, self.max_chunk)
        self._sampler = DeviceSampler(Shortlist(config.vocab), context_length)
        self._mailbox = Mailbox(context_length)
        self._tensor_cores = int(capability()[3:]) >= 80 and config.head_dim % 16 == 0
        self._graphs: dict[tuple[int, bool, bool], Callable[[], None]] = {}
        self._prefills: dict[int, Callable[[], None]] = {}
        self._expected = _NOWHERE  # token and position on the device
        self._ahead: tuple[int, bool] | None = None  # position of a step that runs already, whether it draws
        self._compile()
        model.fill(weights)

    def _compile(self) -> None:
        """Compiles all that is ever going to run at once, before anything runs: compilers share it."""
        packing = {matrix.layout: None for matrix in self._model.matrices}
        ends = ((False, False), (True, False), (True, True))
        decode = [self._decode_step(limit, *end) for limit in self._decode.limits for end in ends]
        prefill = [self._prefill.step(size) for size in self.chunk_sizes if self._tensor_cores]
        compile_all([*map(repacking, packing), *(step.linear for step in (*decode, *prefill))])

    @property
    def chunk_sizes(self) -> tuple[int, ...]:
        return tuple(size for size in _CHUNKS if size <= self._context)

    @property
    def decode_depths(self) -> tuple[int, ...]:
        return (0, *(limit for limit in self._decode.limits if limit < self._context))

    def prefill(self, tokens: Sequence[int], position: int) -> None:
        if len(tokens) <= _FEW or not self._tensor_cores:
            for i, token in enumerate(tokens):
                self.decode(token, position + i)
            return
        self._settle()
        size = next(size for size in _CHUNKS if len(tokens) <= size)
        send(self._prefill.prompt, np.asarray([position, len(tokens)], np.int32))
        send(self._prefill.ids, np.asarray([*tokens, *[0] * (_CHUNKS[-1] - len(tokens))], np.int32))
        self._launch_prefill(size)

    def decode(self, token: int, position: int, run_ahead: bool = False) -> int:
        """As `ModelRunner.decode`. After a step with `run_ahead`, `logits` may be those of the step after it."""
        return self._next(token, position, run_ahead, draws=False)

    def prepare_sampling(
        self, sampling: Sampling, tokens: Sequence[int], uniforms: NDArray[np.float64]
    ) -> bool:
        self._settle()
        return self._sampler.prepare(sampling, tokens, uniforms)

    def decode_and_sample(self, token: int, position: int, run_ahead: bool = False) -> int:
        return self._next(token, position, run_ahead, draws=True)

    def logits(self) -> Logits:
        return np.asarray(self._decode.logits.numpy(), np.float32)

    def replay(self, step: Step, position: int) -> Replay:
        self._ahead, self._expected = None, _NOWHERE
        if step == "prefill":
            return self._replay_prefill(position)

        def reset() -> None:
            Device[Device.DEFAULT].synchronize()
            send(self._decode.state, np.asarray([0, position], np.int32))

        sequence = self._decode_step(self._limit(position), draws=False, penalizes=False)
        run = lambda: self._launch(position, draws=False)
        return Replay(sequence.compile().src, self._uses(), 1, run, reset=reset)

    def _replay_prefill(self, position: int) -> Replay:
        if not self._tensor_cores:
            raise UsageError("This GPU takes prompts token by token: its steps are those of decode.")
        size, count = self.max_chunk, min(self.max_chunk, self._context - position)

        def reset() -> None:
            Device[Device.DEFAULT].synchronize()
            send(self._prefill.prompt, np.asarray([position, count], np.int32))
            send(self._prefill.ids, np.zeros(size, np.int32))

        calls = self._prefill.step(size).compile().src
        return Replay(calls, self._uses(), count, lambda: self._launch_prefill(size), reset=reset)

    # ---- the search for schedules ----

    def search(self, width: int, seconds: float, report: SearchReport, again: bool = False) -> None:
        """As `engine.model.fused.schedule_search.search`; it spoils the KV cache."""
        self._settle()
        short = self._decode.limits[0]
        step = lambda: self._decode_step(short, draws=False, penalizes=False)
        bench = schedule_search.Bench(self._model.products, step, self._answer, self._seconds)
        schedule_search.search(bench, width, seconds, report, again)
        self._expected = _NOWHERE
        self._graphs.clear()

    def _answer(self, run: Callable[[], None]) -> Logits:
        for position, token in enumerate(_ANSWERED[: self._context]):
            send(self._decode.state, np.asarray([token % self._model.config.vocab, position], np.int32))
            run()
        return self.logits()

    def _seconds(self, run: Callable[[], None]) -> float:
        """The least of a few turns, each of so many steps that the clock does not matter."""
        device, least = Device[Device.DEFAULT], float("inf")
        most, times = min(self._context, self._decode.limits[0]) - 1, 1
        for turn in range(4):
            send(self._decode.state, np.asarray([1, 0], np.int32))
            device.synchronize()
            started = time.perf_counter()
            for _ in range(times):
                run()
            device.synchronize()
            took = (time.perf_counter() - started) / times
            if turn:
                least = min(least, took)
            else:  # the first tells how many fit
                times = max(1, min(most, int(_TURN_S / took)))
        return least

    # ---- launching ----

    def _next(self, token: int, position: int, ahead: bool, draws: bool) -> int:
        if self._ahead == (position, draws) and self._expected == (token, position):
            self._ahead = None
        else:
            self._settle()
            if self._expected != (token, position):
                send(self._decode.state, np.asarray([token, position], np.int32))
            self._launch(position, draws)
        if ahead and position + 1 < self._context:
            self._launch(position + 1, draws)
            self._ahead = position + 1, draws
        following = self._mailbox.take(position)
        self._expected = (following, position + 1)
        return following

    def _settle(self) -> None:
        """Waits for a step that ran ahead and is not wanted, or it would answer for one launched later."""
        if self._ahead is not None:
            Device[Device.DEFAULT].synchronize()
            self._ahead, self._expected = None, _NOWHERE

    def _limit(self, position: int) -> int:
        """The number of tokens that the attention of a step at `position` is laid out for."""
        return next(limit for limit in self._decode.limits if position < limit)

    def _launch(self, position: int, draws: bool) -> None:
        self._mailbox.expect(position)
        which = self._limit(position), draws, draws and self._sampler.penalizes
        if which not in self._graphs:
            self._graphs[which] = self._decode_step(*which).capture()
        self._graphs[which]()

    def _decode_step(self, limit: int, draws: bool, penalizes: bool) -> KernelSequence:
        drawing = self._sampler if draws else None
        return self._decode.step(self._decode.split(limit), self._mailbox.tensor, drawing, penalizes)

    def _launch_prefill(self, size: int) -> None:
        if size not in self._prefills:
            self._prefills[size] = self._prefill.step(size).capture()
        self._prefills[size]()

    # ---- what is what ----

    def _uses(self) -> dict[UOp, Use]:
        """What the buffers of the weights and the cache are for."""
        uses: dict[UOp, Use] = {}

        def note(use: Use, *tensors: Tensor | None) -> None:
            uses.update((tensor.uop.base, use) for tensor in tensors if tensor is not None)

        model = self._model
        note(Use("output head"), *model.head.planes)
        note(Use("embedding", "token", model.config.vocab), *model.embedding.planes)
        note(Use("attention", "token", self._context), *self._tables)
        note(Use("attention"), *self._decode.partial)
        if self._tensor_cores:
            note(Use("attention", "past", self._heads.length), *self._prefill.past)
        note(Use("norm"), *self._scales.norms.values())
        for layer in model.layers:
            note(Use("QKV projection"), layer.bias, *layer.qkv.planes)
            note(Use("attention", "context", self._heads.length), layer.keys, layer.values)
            note(Use("attention output"), *layer.o.planes)
            note(Use("FFN gate+up"), *layer.gate_up.planes)
            note(Use("FFN down"), *layer.down.planes)
        return uses
