"""A model's draft head on an NVIDIA GPU: steps of rows whose first one goes on by itself.

    embed . join . those of the layer's handlers . norm . head . next token . norm

A step leaves its next token, its position and what the next draft reads of it in its first row, where the next step
reads them. So a chain of drafts is launched without waiting for the tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray
from tinygrad import UOp

from engine.formats.kv_format import KVFormat
from engine.kernels.compilation import compile_once
from engine.kernels.device_memory import overwrite, to_device
from engine.loading.weights import Weights
from engine.runtime.head_drafter import normed
from engine.runtime.kv_blocks import BLOCK
from engine.runtime.model_runner import Slot
from engine.targets.nvidia.batch import BatchKernels
from engine.targets.nvidia.device_sampler import Choice, DeviceSampler, Ending
from engine.targets.nvidia.input_scales import InputScales
from engine.targets.nvidia.kernels.kernel_sequence import KernelSequence
from engine.targets.nvidia.kernels.residual_stream.joining import first_goes_on, normed_row
from engine.targets.nvidia.kernels.token_slots import TokenSlots
from engine.targets.nvidia.mixed import MixedKernels
from engine.targets.nvidia.prompt_step import RowsStep
from engine.targets.nvidia.weights import GPUModel, allocate

Floats = NDArray[np.float32]
_SIZES = (32, 64, 512)  # tokens of a prompt that it reads in a step
_ROWS = 8
"""A step of so many rows takes about as long as one of one."""


class _HeadRows(BatchKernels):
    """The kernels of a step of a draft head, whose first row goes on."""

    def __init__(self, model: GPUModel, context: int, own_norm: Floats) -> None:
        super().__init__(model, InputScales(), context, [_ROWS])
        self._own_norm = to_device(own_norm)

    def finish(self, step: RowsStep, ending: Ending) -> None:
        super().finish(step, ending)
        spec = self.spec
        step.add(normed_row(spec.dim, spec.stream_eps), out=self.hidden, rows=step.h, norm=self._own_norm)
        step.add(first_goes_on(step.tokens), state=step.state)


class NvidiaDraftHead:
    """Implements `engine.runtime.head_drafter.DraftHead`."""

    rows = _ROWS

    def __init__(
        self, weights: Weights, context: int, kv: KVFormat, trunk: GPUModel, sampler: DeviceSampler
    ) -> None:
        """`trunk`: the model, whose matrices it shares. Raises ModelFileError."""
        spec = weights.spec
        assert spec.join
        self._sizes = tuple(n for n in _SIZES if n <= context) or _SIZES[:1]
        chunk = self._sizes[-1]
        self._key = spec, context, kv, "draft head"
        self._model = model = allocate(weights, context, chunk, 1, kv, trunk=trunk)
        self._trunk_norm, self._eps = weights.vector(spec.join.trunk_norm), spec.stream_eps
        self._batch = _HeadRows(model, context, weights.vector(spec.output_norm))
        self._prefill = MixedKernels(model, InputScales(), chunk, self._batch)
        self._slots = TokenSlots(2 * _ROWS)
        self._ending = Ending(self._slots.tensor, sampler, Choice())
        self._captured: dict[tuple[str, int], Callable[[], None]] = {}
        (attention,) = model.storing
        self.places = min(context, attention.heads.pool * BLOCK)
        table = np.full(attention.heads.table_size, -1, np.int32)
        table[: attention.heads.pool] = np.arange(min(attention.heads.pool, table.size))
        overwrite(attention.tables, table)
        self.is_ready = False
        model.begin_fill(weights).result()

    def prepare(self) -> None:
        compile_once(self._key, self._linears)
        for limit in self._batch.context_limits[:2]:
            self._capture("rows", limit)
        for size in self._sizes:
            self._capture("prompt", size)
        self.is_ready = True

    def store(self, place: int, tokens: Sequence[int], streams: Floats) -> None:
        most = self._sizes[-1]
        for first in range(0, len(tokens), most):
            some = slice(first, first + most)
            inputs = tuple(tokens[some])
            size = next(size for size in self._sizes if len(inputs) <= size)
            overwrite(self._prefill.hidden, self._normed(streams[some]))
            self._prefill.send(size, [Slot(0, inputs, place + first, "none")])
            self._capture("prompt", size)()

    def draft(self, place: int, tokens: Sequence[int], streams: Floats, n: int) -> list[int]:
        count, last = len(tokens), place + len(tokens) - 1
        order = [*range(count - 1, -1, -1)]  # the last one first: it goes on
        overwrite(self._batch.hidden, self._normed(streams[::-1]))
        positions = [place + i for i in order]
        self._batch.send(_ROWS, [tokens[i] for i in order], positions, [0] * count, [False] * count)
        drafts = list[int]()
        for i in range(n + 1):
            if i < n:  # one ahead of the token that is waited for
                self._slots.expect(self._slot(last + i))
                self._capture("rows", self._batch.limit(last + i))()
            if i:
                drafts.append(self._slots.take(self._slot(last + i - 1)))
        return drafts

    @staticmethod
    def _slot(position: int) -> int:
        """Where the step of the first row at a position leaves its token (`StepRows.token_slot`)."""
        return position % 2 * _ROWS

    def _capture(self, kind: str, size: int) -> Callable[[], None]:
        if (kind, size) not in self._captured:
            self._captured[kind, size] = self._sequence(kind, size).capture()
        return self._captured[kind, size]

    def _sequence(self, kind: str, size: int) -> KernelSequence:
        if kind == "prompt":
            return self._prefill.step(size)
        return self._batch.rows_step(_ROWS, size, self._ending, checks=True)

    def _linears(self) -> list[UOp]:
        limits = self._batch.context_limits
        sequences = [self._sequence("rows", limit) for limit in limits]
        sequences += [self._sequence("prompt", size) for size in self._sizes]
        return [sequence.linear for sequence in sequences]

    def _normed(self, streams: Floats) -> Floats:
        """What the model's head reads of its residual stream, float32 (tokens * dim,)."""
        return normed(streams, self._trunk_norm, self._eps).reshape(-1)
