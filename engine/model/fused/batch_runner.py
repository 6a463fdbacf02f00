"""Prefill and decode of several sequences on an NVIDIA GPU, each step one graph launch. The KV cache is in blocks."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray
from tinygrad import Device, UOp, dtypes

from engine.events import Sampling, Step
from engine.fixes import compiler_processes, launch_bounds
from engine.formats.kv_format import KVFormat
from engine.kernels.compilation import compile_once
from engine.kernels.gpu.device import has_tensor_cores
from engine.kernels.gpu.device_memory import device_zeros, overwrite
from engine.kernels.gpu.kernel_sequence import KernelSequence
from engine.kernels.gpu.kv_cache import copy_block
from engine.kernels.gpu.sampling import Shortlist
from engine.kernels.gpu.weight_repacking import repacking_kernels
from engine.measure.profile import Replay
from engine.measure.timeline import timeline
from engine.model.fused.row_steps import RowSteps
from engine.model.fused.states import DeviceStates
from engine.model.fused.uses import uses_of
from engine.model.kv_blocks import KVGroup
from engine.model.lower import REWIND
from engine.model.lower.device_sampler import DeviceSampler
from engine.model.lower.gpu_batch import ROW_COUNTS, BatchKernels
from engine.model.lower.gpu_decode import DecodeKernels
from engine.model.lower.gpu_prefill import PrefillKernels
from engine.model.lower.gpu_weights import allocate
from engine.model.lower.prescales import Prescales
from engine.model.model_runner import Row, varied_tokens
from engine.model.sampling import Logits
from engine.model.spec import ModelSpec
from engine.model.weights import Weights

CHUNK_SIZES = (32, 64, 128, 256, 512)
"""Between the decode steps of other conversations, prompts go in pieces that take about as long as such a step."""


def runs_batches(spec: ModelSpec) -> bool:
    """Whether the default GPU has the kernels for several sequences at once: all but its decode of one have tensor
    cores."""
    return has_tensor_cores() and all(a.head_dim % 16 == 0 for a in spec.attention)


class FusedBatchRunner:
    """Implements `BatchRunner`, `StateStore` and `RowSampler`."""

    precompiled = True
    max_chunk = CHUNK_SIZES[-1]

    def __init__(
        self, weights: Weights, context_length: int, parallel: int, kv: KVFormat = KVFormat.F16
    ) -> None:
        assert parallel > 1
        launch_bounds.apply()
        os.environ.setdefault("ALLOW_HALF8", "1")  # lets tinygrad load eight half-precision numbers at once
        self.parallel, self._context = parallel, context_length
        self._model = model = allocate(weights, context_length, self.max_chunk, parallel, kv)
        self._prescales = Prescales()
        self._one = DecodeKernels(model, self._prescales, context_length)
        self._batch = BatchKernels(model, self._prescales, context_length, self.row_counts[1:])
        self._prefill = PrefillKernels(model, self._prescales, self.max_chunk)
        counts = self.row_counts
        self._sampler = DeviceSampler(Shortlist(model.spec.vocab), context_length, parallel, counts[-1])
        self._steps = RowSteps(self._one, self._batch, self._sampler, counts, context_length, self._launch)
        by_window = {a.heads.window: a for a in model.storing}
        self._tables = [a.tables for a in by_window.values()]
        self._stale_tables: set[tuple[int, int]] = set()  # the groups and sequences of those to be sent
        self._host_tables = [
            np.full((parallel, a.heads.table_size), -1, np.int32) for a in by_window.values()
        ]
        self.kv_groups = tuple(KVGroup(w or None, a.heads.pool) for w, a in by_window.items())
        self._copied = device_zeros(2, dtypes.int32)
        self._states = DeviceStates(model.deltas, parallel)
        self.state_slots, self.state_bytes = self._states.state_slots, self._states.state_bytes
        self._copies = [self._copy_sequence(window) for window in by_window]
        self._captured: dict[tuple[str, int, int], Callable[[], None]] = {}
        self._earlier: list[Logits] = []  # of the steps before the last one of one `decode_rows`
        with timeline.span("kernels"):
            compile_once((model.spec, context_length, parallel, kv, CHUNK_SIZES), self._linears)
        filling = model.begin_fill(weights)
        with timeline.span("waiting for the weights"):
            filling.result()

    def _linears(self) -> list[UOp]:
        """All kernels, to be compiled at once, so that several compilers share them."""
        compiler_processes.prepare()
        steps = self._steps
        rows = [steps.kernels(n, limit) for n in self.row_counts for limit in steps.limits(n)]
        rows += [steps.kernels(n, steps.limits(n)[0], samples=True) for n in self.row_counts]
        prefill = [self._prefill.step(size) for size in self.chunk_sizes]
        linears = [sequence.linear for sequence in (*rows, *prefill, *self._copies, *self._states.kernels())]
        return [*map(repacking_kernels, self._model.piece_specs), *linears]

    @property
    def row_counts(self) -> tuple[int, ...]:
        fewer = sum(n < self.parallel for n in ROW_COUNTS)
        return (1, *ROW_COUNTS[: fewer + 1])

    @property
    def chunk_sizes(self) -> tuple[int, ...]:
        return tuple(size for size in CHUNK_SIZES if size <= self._context) or CHUNK_SIZES[:1]

    @property
    def decode_depths(self) -> tuple[int, ...]:
        return (0, *(limit for limit in self._steps.limits(1) if limit < self._context))

    @property
    def max_rewind(self) -> int | None:
        return REWIND if any(group.window for group in self.kv_groups) else None

    def state_position(self, sequence: int = 0) -> int:
        return self._states.state_position(sequence)

    def save_state(self, slot: int, sequence: int = 0) -> None:
        self._states.save_state(slot, sequence)

    def load_state(self, slot: int, sequence: int = 0) -> None:
        self._steps.finish()
        self._states.load_state(slot, sequence)

    # ---- the cache ----

    def assign(self, sequence: int, tables: Sequence[Sequence[int]]) -> None:
        if not any(tables):
            self._steps.end(sequence)
        for group, (host, table) in enumerate(zip(self._host_tables, tables, strict=True)):
            row = np.full(host.shape[1], -1, np.int32)
            row[: len(table)] = table
            if not np.array_equal(row, host[sequence]):
                host[sequence] = row
                self._stale_tables.add((group, sequence))

    def copy_block(self, group: int, source: int, target: int) -> None:
        overwrite(self._copied, np.asarray([source, target], np.int32))
        self._launch(("copy", group, 0), lambda: self._copies[group])

    def _copy_sequence(self, window: int) -> KernelSequence:
        """Copies a block in all layers of a window."""
        sequence = KernelSequence()
        for a in self._model.storing:
            if a.heads.window == window:
                sequence.add(copy_block(a.heads), cache=a.cache, blocks=self._copied)
        return sequence

    # ---- steps ----

    def prefill(self, tokens: Sequence[int], position: int, sequence: int = 0) -> None:
        size = next(size for size in CHUNK_SIZES if len(tokens) <= size)
        self._send_chunk(tokens, position, sequence)
        self._launch_prefill(size)
        self._states.set(position + len(tokens), sequence)

    def decode(self, token: int, position: int, run_ahead: bool = False) -> int:
        """As `ModelRunner.decode`, of sequence 0."""
        return int(self.decode_rows([Row(token, position, 0)], run_ahead)[0])

    def decode_rows(self, rows: Sequence[Row], ahead: bool = False) -> NDArray[np.int32]:
        most = self.row_counts[-1]
        chosen: list[int] = []
        self._earlier = []
        for first in range(0, len(rows), most):
            if first:  # the next step overwrites them
                self._earlier.append(self._steps.logits())
            chosen += self._steps.decode(rows[first : first + most], ahead and len(rows) <= most)
        for row in rows:
            self._states.set(row.position + 1, row.sequence)
        return np.asarray(chosen, np.int32)

    def row_logits(self, rows: Sequence[int] | None = None) -> Logits:
        if not self._earlier:
            return self._steps.logits(rows)
        logits = np.concatenate([*self._earlier, self._steps.logits()])
        return logits if rows is None else logits[list(rows)]

    def prepare_row_sampling(
        self, sequence: int, sampling: Sampling, tokens: Sequence[int], uniforms: NDArray[np.float64]
    ) -> bool:
        return self._sampler.prepare(sampling, tokens, uniforms, sequence)

    def logits(self) -> Logits:
        return np.asarray(self.row_logits()[0], np.float32)

    def expert_choices(self) -> list[NDArray[np.int32]]:
        return self._model.choices.read()

    def replay(self, step: Step, position: int) -> Replay:
        self._steps.finish()
        self._steps.end(0)
        position = self._states.harmless(position, self._context)
        parts = [*self._one.attention_parts, *self._prefill.attention_parts]
        uses = uses_of(self._model, self._prescales, self._context, parts)
        if step == "prefill":
            size, count = self.chunk_sizes[-1], min(self.chunk_sizes[-1], self._context - position)
            count -= bool(self._model.deltas) and count % 2 == 0
            tokens = varied_tokens(count, self._model.spec.vocab)
            send: Callable[[], None] = lambda: self._send_chunk(tokens, position, 0)
            calls, run = self._prefill.step(size).compile().src, lambda: self._launch_prefill(size)
        else:
            count, limit = 1, self._steps.limit(1, position)
            send = lambda: overwrite(self._one.state, np.asarray([0, position, 0], np.int32))
            calls, run = self._steps.kernels(1, limit).compile().src, lambda: self._steps.launch(1, limit)

        def reset() -> None:
            Device[Device.DEFAULT].synchronize()
            send()

        return Replay(calls, uses, count, run, reset=reset)

    def _send_chunk(self, tokens: Sequence[int], position: int, sequence: int) -> None:
        overwrite(self._prefill.prompt, np.asarray([position, len(tokens), sequence], np.int32))
        overwrite(self._prefill.ids, np.asarray([*tokens, *[0] * (self.max_chunk - len(tokens))], np.int32))

    def _launch_prefill(self, size: int) -> None:
        self._launch(("prefill", size, 0), lambda: self._prefill.step(size))

    def _launch(self, key: tuple[str, int, int], sequence: Callable[[], KernelSequence]) -> None:
        """Launches the captured graph of a sequence, which is captured when it is first used."""
        for group, of in self._stale_tables:
            table: NDArray[np.int32] = self._host_tables[group][of]
            overwrite(self._tables[group], table, of * table.size)
        self._stale_tables.clear()
        if key not in self._captured:
            self._captured[key] = sequence().capture()
        self._captured[key]()
