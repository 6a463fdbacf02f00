"""A model's assistant on an NVIDIA GPU: steps of rows of which one is used, over the model's KV cache."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from tinygrad import UOp

from engine.formats.kv_format import KVFormat
from engine.kernels.compilation import compile_once
from engine.kernels.device_memory import overwrite
from engine.loading.weights import Weights
from engine.runtime.head_drafter import normed
from engine.targets.nvidia.batch import BatchKernels
from engine.targets.nvidia.device_sampler import Choice, DeviceSampler, Ending
from engine.targets.nvidia.input_scales import InputScales
from engine.targets.nvidia.kernels.kernel_sequence import KernelSequence
from engine.targets.nvidia.kernels.products.small_batch import stored
from engine.targets.nvidia.kernels.token_slots import TokenSlots
from engine.targets.nvidia.prompt_step import RowsStep
from engine.targets.nvidia.weights import GPUModel, allocate

Floats = NDArray[np.float32]
_ROWS = 4
"""A step of so many rows takes about as long as one of one."""


class _AssistantRows(BatchKernels):
    """The kernels of a step of an assistant, which leaves what the next draft reads of it."""

    def finish(self, step: RowsStep, ending: Ending) -> None:
        super().finish(step, ending)
        assert self._model.draft_input
        back = self._model.draft_input.back.single_matrix
        step.multiply(back, step.tiles(back), stored(back.rows), "back", out=self.hidden)


class NvidiaAssistant:
    """Implements `engine.runtime.assistant_drafter.Assistant`."""

    def __init__(
        self, weights: Weights, context: int, kv: KVFormat, trunk: GPUModel, sampler: DeviceSampler
    ) -> None:
        """`trunk`: the model. Raises ModelFileError."""
        model = allocate(weights, context, _ROWS, 1, kv, trunk=trunk)
        pools = tuple(a.heads.pool for a in model.attention)
        self._key = weights.spec, context, kv, pools, "assistant"
        self._norm, self._eps = trunk.output_norm.weight, trunk.spec.stream_eps
        self._batch = _AssistantRows(model, InputScales(), context, [_ROWS])
        self._slots = TokenSlots(2 * _ROWS)
        self._ending = Ending(self._slots.tensor, sampler, Choice())
        self._captured: dict[int, Callable[[], None]] = {}
        self.is_ready = False
        model.begin_fill(weights).result()

    def prepare(self) -> None:
        compile_once(self._key, self._linears)
        for limit in self._batch.context_limits[:2]:
            self._capture(limit)
        self.is_ready = True

    def draft(self, sequence: int, position: int, token: int, stream: Floats, n: int) -> list[int]:
        overwrite(self._batch.hidden, normed(stream, self._norm, self._eps))
        step = self._capture(self._batch.limit(position))
        drafts, slot = list[int](), position % 2 * _ROWS  # `StepRows.token_slot` of the first row
        while len(drafts) < n:
            self._batch.send(_ROWS, [token], [position], [sequence], [False])
            self._slots.expect(slot)
            step()
            if (token := self._slots.take(slot)) < 0:
                break
            drafts.append(token)
        return drafts

    def _capture(self, limit: int) -> Callable[[], None]:
        if limit not in self._captured:
            self._captured[limit] = self._sequence(limit).capture()
        return self._captured[limit]

    def _sequence(self, limit: int) -> KernelSequence:
        return self._batch.rows_step(_ROWS, limit, self._ending)

    def _linears(self) -> list[UOp]:
        return [self._sequence(limit).linear for limit in self._batch.context_limits]
