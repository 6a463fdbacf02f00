"""Prefill and decode of a model on an NVIDIA GPU, each step one graph launch.

The next token is written to memory of the host, so the host reads it without waiting for the device to become idle. It
stays on the device too, so the next step can run before the host has read it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import numpy as np
from numpy.typing import NDArray
from tinygrad import Device, UOp

from engine.errors import UsageError
from engine.events import Sampling, Step
from engine.fixes import compiler_processes, launch_bounds
from engine.formats.kv_format import KVFormat
from engine.kernels.compilation import compile_once, was_compiled
from engine.kernels.gpu.device_memory import overwrite
from engine.kernels.gpu.kernel_sequence import KernelSequence
from engine.kernels.gpu.mailbox import Mailbox
from engine.kernels.gpu.sampling import Shortlist
from engine.kernels.gpu.weight_repacking import repacking_kernels
from engine.measure.profile import Replay
from engine.measure.timeline import timeline
from engine.model.buffer_uses import BufferUses
from engine.model.fused.schedule_search import SearchTarget, search
from engine.model.fused.states import DeviceStates
from engine.model.fused.uses import uses_of
from engine.model.lower import REWIND
from engine.model.lower.device_sampler import DeviceSampler
from engine.model.lower.gpu_decode import DecodeKernels
from engine.model.lower.gpu_export import CacheExport
from engine.model.lower.gpu_prefill import PrefillKernels
from engine.model.lower.gpu_weights import allocate
from engine.model.lower.prescales import Prescales
from engine.model.model_runner import SearchReport, varied_tokens
from engine.model.prefix_store import export_layout
from engine.model.sampling import Logits
from engine.model.weights import Weights

CHUNK_SIZES = (32, 64, 512)
_DECODE_AT_MOST = 1  # so few tokens of a prompt are faster one by one
_DETOUR_AT_MOST = 128  # so few are so before the kernels of prefill are compiled
_UNKNOWN = (-1, -1)
_CHECK_TOKENS = (1, 77, 5, 1203)  # arbitrary: a search compares the logits after them
_TIMING_S = 0.03


class FusedRunner:
    """Implements `SamplingRunner`, `PrefixRunner`, `StateStore`, `TunableRunner` and `EarlyRunner`."""

    precompiled = True
    max_chunk = CHUNK_SIZES[-1]

    def __init__(
        self, weights: Weights, context_length: int, kv: KVFormat = KVFormat.F16, is_early: bool = False
    ) -> None:
        """`is_early`: see `EarlyRunner`; else all kernels are compiled now."""
        launch_bounds.apply()
        os.environ.setdefault("ALLOW_HALF8", "1")  # lets tinygrad load eight half-precision numbers at once
        spec, self._context, self._is_early = weights.spec, context_length, is_early
        self._set_up = spec, context_length, kv  # what the kernels follow from
        self._model = model = allocate(weights, context_length, self.max_chunk, kv=kv)
        self._prescales = Prescales()
        self._decode = DecodeKernels(model, self._prescales, context_length)
        self._prefill = PrefillKernels(model, self._prescales, self.max_chunk)
        self._sampler = DeviceSampler(Shortlist(spec.vocab), context_length)
        self._mailbox = Mailbox(context_length)
        self._states = DeviceStates(model.deltas)
        self.state_slots, self.state_bytes = self._states.state_slots, self._states.state_bytes
        self._cache_export = CacheExport(model.storing)
        self._decode_steps: dict[tuple[int, bool, bool], Callable[[], None]] = {}
        self._prefill_steps: dict[int, Callable[[], None]] = {}
        self._state = _UNKNOWN  # the token and position on the device
        self._ahead: tuple[int, bool] | None = (
            None  # a step that was launched ahead: its position, whether it samples
        )
        with timeline.span("kernels"):
            compile_once((*self._set_up, is_early), self._linears)
        filling = model.begin_fill(weights)
        with timeline.span("capture"):
            self._capture_while(filling)
        with timeline.span("waiting for the weights"):
            filling.result()

    def _linears(self) -> list[UOp]:
        """All kernels, or those of decode, to be compiled at once, so that several compilers share them."""
        compiler_processes.prepare()
        variants = ((False, False), (True, False), (True, True))
        steps = [self._decode_step(limit, *v) for limit in self._decode.context_limits for v in variants]
        if not self._is_early and self._decode.uses_tensor_cores:
            steps += [self._prefill.step(size) for size in self.chunk_sizes]
        steps += self._states.kernels()
        return [*map(repacking_kernels, self._model.piece_specs), *(step.linear for step in steps)]

    def _capture_while(self, filling: Future[None]) -> None:
        """Captures the step that shows that the device works, and while weights travel those of a first answer."""
        shortest, short_prompt = self._decode.context_limits[0], CHUNK_SIZES[0]
        self._capture_decode(shortest, False, False)
        if not filling.done():
            self._capture_decode(shortest, True, False)
        if not filling.done() and short_prompt in self.chunk_sizes and self._has_prefill(short_prompt):
            self.prepare_prefill(short_prompt)

    @property
    def chunk_sizes(self) -> tuple[int, ...]:
        return tuple(size for size in CHUNK_SIZES if size <= self._context)

    @property
    def decode_depths(self) -> tuple[int, ...]:
        return (0, *(limit for limit in self._decode.context_limits if limit < self._context))

    @property
    def max_rewind(self) -> int | None:
        return REWIND if any(a.heads.window for a in self._model.attention) else None

    def state_position(self, sequence: int = 0) -> int:
        return self._states.state_position(sequence)

    def save_state(self, slot: int, sequence: int = 0) -> None:
        self._states.save_state(slot, sequence)

    def load_state(self, slot: int, sequence: int = 0) -> None:
        self._cancel_run_ahead()
        self._states.load_state(slot, sequence)

    def prefill(self, tokens: Sequence[int], position: int) -> None:
        size = next(size for size in CHUNK_SIZES if len(tokens) <= size)
        is_short = len(tokens) <= (_DECODE_AT_MOST if self._has_prefill(size) else _DETOUR_AT_MOST)
        if is_short or not self._decode.uses_tensor_cores:
            for i, token in enumerate(tokens):
                self.decode(token, position + i)
            return
        self._cancel_run_ahead()
        self._send_chunk(tokens, position)
        self._launch_prefill(size)
        self._states.set(position + len(tokens))

    def decode(self, token: int, position: int, run_ahead: bool = False) -> int:
        """As `ModelRunner.decode`. After a step with `run_ahead`, `logits` may be those of the step after it."""
        return self._next_token(token, position, run_ahead, samples=False)

    def prepare_sampling(
        self, sampling: Sampling, tokens: Sequence[int], uniforms: NDArray[np.float64]
    ) -> bool:
        self._cancel_run_ahead()
        return self._sampler.prepare(sampling, tokens, uniforms)

    def decode_and_sample(self, token: int, position: int, run_ahead: bool = False) -> int:
        return self._next_token(token, position, run_ahead, samples=True)

    def logits(self) -> Logits:
        return np.asarray(self._decode.logits.numpy(), np.float32)

    def expert_choices(self) -> list[NDArray[np.int32]]:
        return self._model.choices.read()

    @property
    def export_layout(self) -> str:
        heads = (a.heads for a in self._model.storing)
        return export_layout(((h.kv, h.dim, h.window) for h in heads), self._states.layout)

    @property
    def widest_window(self) -> int:
        return max(a.heads.window for a in self._model.attention)

    def oldest_in_windows(self, stored: int) -> int:
        rings = [a.heads.ring for a in self._model.attention if a.heads.ring]
        return max(0, stored + 1 - min(rings)) if rings else 0  # one step may have run ahead

    def export_chunk(self, position: int) -> NDArray[np.uint8]:
        self._cancel_run_ahead()
        return self._cache_export.export_chunk(position)

    def import_chunk(self, position: int, export: NDArray[np.uint8]) -> None:
        self._cancel_run_ahead()
        self._cache_export.import_chunk(position, export)

    def export_state(self, slot: int) -> NDArray[np.uint8]:
        return self._states.export_state(slot)

    def import_state(self, slot: int, position: int, export: NDArray[np.uint8]) -> None:
        self._states.import_state(slot, position, export)

    def replay(self, step: Step, position: int) -> Replay:
        self._ahead, self._state = None, _UNKNOWN
        position = self._states.harmless(position, self._context)
        if step == "prefill":
            return self._replay_prefill(position)

        def reset() -> None:
            Device[Device.DEFAULT].synchronize()
            self._send_state(0, position)

        sequence = self._decode_step(self._limit(position), samples=False, penalizes=False)
        run = lambda: self._launch_decode(position, samples=False)
        return Replay(sequence.compile().src, self._uses(), 1, run, reset=reset)

    def _replay_prefill(self, position: int) -> Replay:
        if not self._decode.uses_tensor_cores:
            raise UsageError(
                "This GPU has no prefill step: it takes prompts token by token, with decode steps."
            )
        size, count = self.max_chunk, min(self.max_chunk, self._context - position)
        count -= bool(self._model.deltas) and count % 2 == 0
        tokens = varied_tokens(count, self._model.spec.vocab)

        def reset() -> None:
            Device[Device.DEFAULT].synchronize()
            self._send_chunk(tokens, position)

        calls = self._prefill.step(size).compile().src
        return Replay(calls, self._uses(), count, lambda: self._launch_prefill(size), reset=reset)

    # ---- the search for schedules ----

    def search(self, width: int, seconds: float, report: SearchReport, again: bool = False) -> None:
        self._cancel_run_ahead()
        shortest = self._decode.context_limits[0]
        step = lambda: self._decode_step(shortest, samples=False, penalizes=False)
        target = SearchTarget(self._model.products, step, self._check_logits, self._step_seconds)
        search(target, width, seconds, report, again)
        self._state = _UNKNOWN
        self._decode_steps.clear()

    def _check_logits(self, run: Callable[[], None]) -> Logits:
        """The logits of a captured decode step after a few tokens."""
        for position, token in enumerate(_CHECK_TOKENS[: self._context]):
            self._send_state(token % self._model.spec.vocab, position)
            run()
        return self.logits()

    def _step_seconds(self, run: Callable[[], None]) -> float:
        """Seconds of a captured decode step: the best of three measurements of `_TIMING_S` each, after a first one that
        tells how many steps fit."""
        device, best = Device[Device.DEFAULT], float("inf")
        max_steps, steps = min(self._context, self._decode.context_limits[0]) - 1, 1
        for turn in range(4):
            self._send_state(1, 0)
            device.synchronize()
            started = time.perf_counter()
            for _ in range(steps):
                run()
            device.synchronize()
            seconds = (time.perf_counter() - started) / steps
            if turn:
                best = min(best, seconds)
            else:
                steps = max(1, min(max_steps, int(_TIMING_S / seconds)))
        return best

    # ---- launching ----

    def _next_token(self, token: int, position: int, run_ahead: bool, samples: bool) -> int:
        if self._ahead == (position, samples) and self._state == (token, position):
            self._ahead = None
        else:
            self._cancel_run_ahead()
            if self._state != (token, position):
                self._send_state(token, position)
            self._launch_decode(position, samples)
        if run_ahead and position + 1 < self._context:
            self._launch_decode(position + 1, samples)
            self._ahead = position + 1, samples
        next_token = self._mailbox.take(position)
        self._state = next_token, position + 1
        self._states.set(position + 1)
        return next_token

    def _cancel_run_ahead(self) -> None:
        """Waits for a step that was launched ahead and is not needed; else its token could be taken for another's."""
        if self._ahead is not None:
            Device[Device.DEFAULT].synchronize()
            self._ahead, self._state = None, _UNKNOWN

    def _send_state(self, token: int, position: int) -> None:
        overwrite(self._decode.state, np.asarray([token, position], np.int32))

    def _send_chunk(self, tokens: Sequence[int], position: int) -> None:
        overwrite(self._prefill.prompt, np.asarray([position, len(tokens)], np.int32))
        overwrite(self._prefill.ids, np.asarray([*tokens, *[0] * (self.max_chunk - len(tokens))], np.int32))

    def _limit(self, position: int) -> int:
        """The number of tokens that the attention of a step at `position` is split for."""
        return next(limit for limit in self._decode.context_limits if position < limit)

    def _launch_decode(self, position: int, samples: bool) -> None:
        self._mailbox.expect(position)
        variant = self._limit(position), samples, samples and self._sampler.penalizes
        self._capture_decode(*variant)()

    def _capture_decode(self, limit: int, samples: bool, penalizes: bool) -> Callable[[], None]:
        variant = limit, samples, penalizes
        if variant not in self._decode_steps:
            self._decode_steps[variant] = self._decode_step(*variant).capture()
        return self._decode_steps[variant]

    def _decode_step(self, limit: int, samples: bool, penalizes: bool) -> KernelSequence:
        sampler = self._sampler if samples else None
        return self._decode.step(limit, self._mailbox.tensor, sampler, penalizes)

    def _launch_prefill(self, size: int) -> None:
        self.prepare_prefill(size)
        self._prefill_steps[size]()

    def prepare_prefill(self, size: int) -> None:
        if size not in self._prefill_steps and self._decode.uses_tensor_cores:
            compile_once((*self._set_up, "prefill", size), lambda: [self._prefill.step(size).linear])
            self._prefill_steps[size] = self._prefill.step(size).capture()

    def _has_prefill(self, size: int) -> bool:
        """Whether prefill of chunks of this size need not be compiled."""
        if size in self._prefill_steps or not self._is_early:
            return True
        return was_compiled((*self._set_up, "prefill", size))

    def _uses(self) -> BufferUses:
        parts = [*self._decode.attention_parts, *self._prefill.attention_parts]
        return uses_of(self._model, self._prescales, self._context, parts)
