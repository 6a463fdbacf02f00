"""A model's assistant on a CPU: a step of a single row that reads the model's KV cache."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from engine.formats.kv_format import KVFormat
from engine.loading.weights import Weights
from engine.runtime.head_drafter import normed
from engine.targets.cpu.kernels import memory
from engine.targets.cpu.kernels.kernel_sequence import CompiledSequence
from engine.targets.cpu.kernels.lanes import register_lanes
from engine.targets.cpu.kernels.thread_pool import default_pool
from engine.targets.cpu.model import CPUModel
from engine.targets.cpu.step import step_kernels

Floats = NDArray[np.float32]


class CPUAssistant:
    """Implements `engine.runtime.assistant_drafter.Assistant` for the model `trunk`, whose texts have up to `context`
    tokens."""

    def __init__(self, weights: Weights, context: int, kv: KVFormat, trunk: CPUModel) -> None:
        """Raises ModelFileError."""
        model = CPUModel(weights, context, default_pool(), register_lanes(), False, kv=kv, trunk=trunk)
        assert model.draft_input
        self._model, self._eps = model, trunk.spec.stream_eps
        self._step: CompiledSequence | None = None
        self._hidden = memory.view(model.draft_input.hidden)[: trunk.spec.dim]
        self._norm = memory.view(trunk.output_norm)[: trunk.spec.dim]
        self._logits = memory.view(model.logits)[: weights.spec.vocab]
        self._token = memory.view(model.tokens)[:1]
        self._place = memory.view(model.places)[:2]

    @property
    def is_ready(self) -> bool:
        return self._step is not None

    def prepare(self) -> None:
        step = step_kernels(self._model, 1, 1)
        default_pool().compile(step.kernels)
        self._step = step.compile()

    def draft(self, sequence: int, position: int, token: int, stream: Floats, n: int) -> list[int]:
        assert self._step
        drafts = list[int]()
        self._hidden[:] = normed(stream, self._norm, self._eps)
        self._place[:] = position, sequence
        while len(drafts) < n:
            self._token[0] = token
            self._step()
            token = int(self._logits.argmax())  # the first NaN, if there is one
            if not np.isfinite(self._logits[token]):
                break
            drafts.append(token)
        return drafts
