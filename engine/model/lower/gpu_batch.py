"""The kernels of a decode step of several sequences at once on a GPU:

    embed . for attention: norm . qkv . attention . o
            for a delta net: norm . inputs . delta net . out
            for a feed-forward layer: norm . gate+up . down
            for experts: as in prefill     . norm . head . next tokens

Its rows are the tokens of different sequences, a small prompt whose products are bound by memory as in decode
(`engine.kernels.gpu.few_columns`). Attention is decode's, of each row over the blocks of its own sequence. What lies
between is prefill's: a product leaves its sums, and the norm before the next one adds them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from tinygrad import Tensor, dtypes

from engine.kernels.gpu.decode_block import combine
from engine.kernels.gpu.delta_decode import delta_decode
from engine.kernels.gpu.device import multiprocessors
from engine.kernels.gpu.device_memory import device_zeros, overwrite
from engine.kernels.gpu.few_columns import (
    as_logits,
    n_blocks,
    stored,
)
from engine.kernels.gpu.flash_attention import FlashSplit, flash_attention, rows_split
from engine.kernels.gpu.kernel_sequence import KernelSequence
from engine.kernels.gpu.kv_cache import Heads
from engine.kernels.gpu.sampling import StepRows, next_tokens
from engine.model.lower.device_sampler import DeviceSampler
from engine.model.lower.gpu_layers import Attention, DeltaNet
from engine.model.lower.gpu_matrices import Product
from engine.model.lower.gpu_prefill import PrefillKernels, PromptStep
from engine.model.lower.gpu_weights import GPUModel
from engine.model.lower.prescales import Prescales

ROW_COUNTS = (4, 8, 16, 32)
"""Rows of the steps that are captured. One of 4 rows takes as long as one of 2."""

_SHORT = (
    256  # tokens of the shortest context for which a step is captured; the others are four times as long each
)


class BatchKernels(PrefillKernels):
    """Builds the kernels of steps of so many `rows`. A step reads its state, int32 (4, rows): tokens, positions,
    sequences, and what each row is (`StepRows`). It writes the next tokens, also to its state, whose positions advance,
    and `logits`."""

    def __init__(self, model: GPUModel, prescales: Prescales, context: int, rows: Sequence[int]) -> None:
        super().__init__(model, prescales, max(rows, default=1))
        self.context_limits = [_SHORT]
        while self.context_limits[-1] < context:
            self.context_limits.append(4 * self.context_limits[-1])
        self._states = {n: device_zeros(4 * n, dtypes.int32) for n in rows}
        self.logits = {n: device_zeros(n * model.spec.vocab) for n in rows}

    def rows_step(
        self, rows: int, limit: int, next_ids: Tensor, sampler: DeviceSampler | None, penalizes: bool
    ) -> KernelSequence:
        """The kernels of a step of `rows` rows after fewer than `limit` tokens each, one of `context_limits`. It writes
        the next tokens to `next_ids` (`StepRows.letter`): the most probable ones, or of rows that are sampled those
        that `sampler` draws. `penalizes`: whether any of these has a repetition penalty."""
        step = _RowsStep(self, self._model, self._prescales, rows, limit, next_ids)
        return step.kernels(sampler, penalizes)

    def state(self, rows: int) -> Tensor:
        """What a step of `rows` rows reads."""
        return self._states[rows]

    def send(
        self,
        rows: int,
        tokens: Sequence[int],
        positions: Sequence[int],
        sequences: Sequence[int],
        sampled: Sequence[bool],
    ) -> None:
        """Writes the state of a step of `rows` rows, of which the first are used."""
        state = np.zeros((4, rows), np.int32)
        kinds = [StepRows.SAMPLED if draws else StepRows.USED for draws in sampled]
        state[:, : len(tokens)] = tokens, positions, sequences, kinds
        overwrite(self._states[rows], state.reshape(-1))
        if self._model.mixtures:
            overwrite(self.prompt, np.asarray([0, len(tokens), 0], np.int32))


class _RowsStep(PromptStep):
    """Builds the kernels of one step."""

    _owner: BatchKernels

    def __init__(
        self,
        owner: BatchKernels,
        model: GPUModel,
        prescales: Prescales,
        rows: int,
        limit: int,
        next_ids: Tensor,
    ) -> None:
        super().__init__(owner, model, prescales, rows)
        self._state, self._limit, self._next_ids = owner.state(rows), limit, next_ids

    def kernels(self, sampler: DeviceSampler | None = None, penalizes: bool = False) -> KernelSequence:
        model = self._model
        self._embed(self._state, model.layers)
        for layer in model.layers:
            self._add(layer)
        self._norm(model.output_norm, "columns")
        part = model.head.single_matrix
        tiles = self._tiles(part)
        blocks = n_blocks(part.rows, tiles)
        best = {
            name: self._owner.buffer(name, blocks * self._tokens, dtype)
            for name, dtype in (("largest", dtypes.float32), ("largest_rows", dtypes.int32))
        }
        logits = self._owner.logits[self._tokens]
        self._multiply(part, self._x, tiles, as_logits(model.spec.softcap), "head", logits=logits, **best)
        if sampler:
            sampler.add_to(self._sequence, logits, self._state, self._next_ids, penalizes, self._tokens)
        else:
            kernel = next_tokens(blocks, self._tokens)
            self._sequence.add(kernel, state=self._state, tokens=self._next_ids, **best)
        return self._sequence

    def _attend(self, a: Attention) -> tuple[Tensor, int]:
        heads, tokens = a.heads, self._tokens
        rows = self._rows(a.qkv, "qkv", a.bias)
        attended = self._activations("attended", a.o.stack.cols, "columns")
        split = self._split(heads)
        parts = {
            name: self._owner.buffer(name, split.splits * tokens * n)
            for name, n in (("sums", heads.query * heads.dim), ("tops", heads.query * 2))
            if split.splits > 1
        }
        cos, sin = self._model.ropes[a.rope]
        self._sequence.add(
            flash_attention(heads, split, a.sinks is not None, a.wide, tokens),
            **(parts or {"out": attended, "sinks": a.sinks}),
            cache=a.cache,
            rows=rows,
            cos=cos,
            sin=sin,
            tables=a.tables,
            state=self._state,
            norms=a.norms,
            temperature=self._model.temperature,
        )
        if parts:
            kernel = combine(heads, split.splits, a.sinks is not None, tokens)
            gates = rows if heads.gated else None
            self._sequence.add(kernel, out=attended, **parts, sinks=a.sinks, rows=gates)
        return self._product(a.o.single_matrix, attended, "o")

    def _remember(self, d: DeltaNet) -> tuple[Tensor, int]:
        rows = self._rows(d.inputs, "delta", None)
        remembered = self._activations("remembered", d.heads.width, "columns")
        kernel = delta_decode(d.heads, self._tokens)
        self._sequence.add(kernel, out=remembered, memory=d.memory, rows=rows, **d.vectors, state=self._state)
        return self._product(d.out.single_matrix, remembered, "delta_out")

    def _rows(self, product: Product, name: str, bias: Tensor | None) -> Tensor:
        """Adds a product of the normed stream; returns its rows, of all tokens one after the other."""
        first, total = 0, product.stack.rows
        rows = self._owner.buffer(name, self._tokens * total)
        for i, part in enumerate(product.matrices):
            epilogue = stored(total, first, bias is not None)
            self._multiply(part, self._x, self._tiles(part), epilogue, f"{name}{i}", out=rows, bias=bias)
            first += part.rows
        return rows

    def _split(self, heads: Heads) -> FlashSplit:
        """How attention is split into thread blocks."""
        return rows_split(heads, self._limit, self._tokens, multiprocessors())
