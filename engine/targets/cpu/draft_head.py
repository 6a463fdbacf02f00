"""A model's draft head on a CPU: steps of a runner of its own, whose tokens come with what the model made of those
before."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from engine.loading.weights import Weights
from engine.runtime.head_drafter import normed
from engine.runtime.kv_blocks import BLOCK
from engine.runtime.model_runner import ModelRunner, Slot
from engine.targets.cpu.kernels import memory
from engine.targets.cpu.model import CPUModel

Floats = NDArray[np.float32]


class CPUDraftHead:
    """Implements `engine.runtime.head_drafter.DraftHead` with a `runner` of the head's `model`."""

    def __init__(self, runner: ModelRunner, model: CPUModel, weights: Weights) -> None:
        """Raises ModelFileError."""
        spec = weights.spec
        assert spec.join and model.draft_input
        self._runner, self._eps = runner, spec.stream_eps
        self._hidden = memory.view(model.draft_input.hidden).reshape(-1, spec.dim)
        self._trunk_norm, self._own_norm = (
            weights.vector(norm) for norm in (spec.join.trunk_norm, spec.output_norm)
        )
        self.rows = max(runner.check_rows)
        self.places = runner.kv_groups[0].blocks * BLOCK
        runner.assign(0, [range(group.blocks) for group in runner.kv_groups])

    @property
    def is_ready(self) -> bool:
        return self._runner.can_check(self.rows)

    def prepare(self) -> None:
        self._runner.prepare_check(self.rows)

    def store(self, place: int, tokens: Sequence[int], streams: Floats) -> None:
        most = self._runner.max_chunk
        for first in range(0, len(tokens), most):
            some = slice(first, first + most)
            inputs = tuple(tokens[some])
            self._hidden[: len(inputs)] = normed(streams[some], self._trunk_norm, self._eps)
            self._runner.run([Slot(0, inputs, place + first, "none")])

    def draft(self, place: int, tokens: Sequence[int], streams: Floats, n: int) -> list[int]:
        count, drafts = len(tokens), list[int]()
        self._hidden[:count] = normed(streams, self._trunk_norm, self._eps)
        rows = [Slot(0, (token,), place + i) for i, token in enumerate(tokens)]
        while True:
            token = int(self._runner.run(rows)[-1])
            if token < 0:
                return drafts
            drafts.append(token)
            if len(drafts) == n:
                return drafts
            stream = self._runner.streams(len(rows))
            assert stream is not None
            self._hidden[0] = normed(stream[-1:], self._own_norm, self._eps)[0]
            rows = [Slot(0, (token,), rows[-1].position + 1)]
