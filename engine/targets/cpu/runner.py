"""Prefill and decode of a model on a CPU, each one job of a pool of threads.

A decode step takes a token of each sequence in one pass over the weights, as prefill takes the tokens of one.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from math import ceil, isfinite

import numpy as np
from numpy.typing import NDArray

from engine.errors import ModelFileError
from engine.formats.kv_format import KVFormat
from engine.loading.weights import Weights
from engine.measure.profile import Replay
from engine.measure.timeline import timeline
from engine.protocol.events import Step
from engine.runtime.model_runner import Ahead, SearchRequest, Slot, varied_tokens
from engine.runtime.pictures import PictureRoom, positions_of
from engine.runtime.prefix_store import export_layout
from engine.runtime.sampling import Logits
from engine.targets.cpu.assistant import CPUAssistant
from engine.targets.cpu.draft_head import CPUDraftHead
from engine.targets.cpu.kernels import memory
from engine.targets.cpu.kernels.kernel_sequence import CompiledSequence
from engine.targets.cpu.kernels.lanes import register_lanes
from engine.targets.cpu.kernels.step_state import TILES, TOKENS
from engine.targets.cpu.kernels.thread_pool import default_pool
from engine.targets.cpu.model import CPUModel
from engine.targets.cpu.states import CHECKED
from engine.targets.cpu.step import step_kernels
from engine.targets.not_finite import not_finite

CHECK_ROWS = (4, 8)
"""See `ModelRunner.check_rows`."""


class CPURunner:
    """Implements `ModelRunner`. One captured step serves pieces of prompts of any length."""

    sampler = None
    precompiled, captures = True, False
    chunk_sizes: tuple[int, ...] = (1,)
    search_tokens = 0

    def __init__(
        self,
        weights: Weights,
        context_length: int,
        parallel: int = 1,
        keep_packed: bool = False,
        kv: KVFormat = KVFormat.F16,
        pictures: PictureRoom | None = None,
        trunk: CPUModel | None = None,
    ) -> None:
        """`keep_packed`: reads packed weights from the cache on disk, or writes them there (`packed_weights_cache`).
        `kv`: the format of the KV cache. `pictures`: if prompts may have some. `trunk`: of a draft head the model.
        Raises ModelFileError."""
        self.parallel, self._context, self._vocab = parallel, context_length, weights.spec.vocab
        with timeline.span("threads"):
            self._lanes, pool = register_lanes(), default_pool()
        with timeline.span("weights"):
            most = max((n for n in CHECK_ROWS if n <= self._lanes), default=1)
            model = CPUModel(
                weights, context_length, pool, self._lanes, keep_packed, parallel, kv, most, pictures, trunk
            )
        self._model, self._cache, self.max_chunk = model, model.cache, model.max_chunk
        self.kv_groups, self.assign, self.copy_block = (
            self._cache.groups,
            self._cache.assign,
            self._cache.copy_block,
        )
        self.export_blocks, self.import_blocks = self._cache.export_blocks, self._cache.import_blocks
        states = model.states
        self.state_slots, self.state_bytes = states.state_slots, states.state_bytes
        self.state_position, self.save_state, self.load_state = (
            states.state_position,
            states.save_state,
            states.load_state,
        )
        self.cut_state = states.cut_state
        self.export_state, self.import_state = states.export_state, states.import_state
        layers = ((heads.kv, heads.dim, heads.window) for heads, _ in self._cache.layers)
        self.export_layout = export_layout(layers, states.layout)
        self._state, self._tokens = memory.view(model.state), memory.view(model.tokens)
        self._positions, self._sequences = memory.view(model.places).reshape(-1, 2).T
        fewer = (1 << i for i in range(model.tile_of(parallel).bit_length() - 1))
        self.row_counts = (*fewer, model.max_rows(parallel))
        self._piece_sizes = (*(1 << i for i in range(5, self.max_chunk.bit_length() - 1)), self.max_chunk)
        widest = min(most, CHECKED) if states.state_slots else most
        self.check_rows = tuple(n for n in CHECK_ROWS if n <= widest)
        most = max(most, self.row_counts[-1])
        self._logits = memory.view(model.logits).reshape(most, -1)[:, : self._vocab]
        self._last: Logits = self._logits[:0]
        self._step: CompiledSequence | None = None  # the last one with rows
        self._whole: CompiledSequence | None = None  # prefill that gives what embeddings are made of
        self._hidden: list[NDArray[np.float32]] = []
        with timeline.span("kernels"):
            decode = {n: step_kernels(model, model.tile_of(n), n) for n in self.row_counts}
            prefill = {n: step_kernels(model, self._lanes, most=n) for n in model.prompt_sizes}
            kernels = [kernel for step in (*prefill.values(), *decode.values()) for kernel in step.kernels]
            pool.compile(kernels)  # all at once, for several compiler processes
            self._decode, self._prefill = (
                {n: step.compile() for n, step in steps.items()} for steps in (decode, prefill)
            )

    def decode_depths(self, rows: int) -> tuple[int, ...]:
        return (0,)

    def piece_sizes(self, rows: int) -> tuple[int, ...]:
        return self._piece_sizes

    def prepare(self, size: int) -> None:
        pass  # all steps are there

    def can_check(self, count: int) -> bool:
        return count <= self.row_counts[-1] or count in self._decode

    def prepare_check(self, count: int) -> None:
        self.prepare_rows(count)

    def prepare_rows(self, count: int) -> None:
        if not self.can_check(count):
            step = step_kernels(self._model, self._model.tile_of(count), count)
            default_pool().compile(step.kernels)
            self._decode[count] = step.compile()

    def run(self, slots: Sequence[Slot], ahead: Ahead | None = None) -> NDArray[np.int32]:
        rows = [slot for slot in slots if slot.want == "last"]
        self._hidden = []
        for slot in slots:
            assert self._cache.has_blocks(slot.sequence, slot.position + len(slot.inputs) - 1)
            if slot.want == "none":
                self._set(self._lanes, [slot])
                self._prefill_of(len(slot.inputs))()
            elif slot.want == "hidden":
                self._set(self._lanes, [slot])
                self._hidden.append(self._stream(len(slot.inputs)))
        if rows:
            count = min(n for n in self._decode if n >= len(rows))
            self._set(self._model.tile_of(count), rows)
            self._step = self._decode[count]
            self._step()
        self._last = self._logits[: len(rows)]
        best: NDArray[np.int32] = self._last.argmax(1).astype(np.int32)  # the first NaN, if there is one
        for row, token in enumerate(best):  # faster than all at once: there are few rows
            if not isfinite(self._last[row, token]):
                best[row] = -1
        return best

    def _prefill_of(self, tokens: int) -> CompiledSequence:
        return next(step for most, step in self._prefill.items() if tokens <= most)

    def _stream(self, n: int) -> NDArray[np.float32]:
        """Runs prefill of the whole model; gives the residual stream of the step's `n` tokens, float32 (n, dim)."""
        if self._whole is None:
            step = step_kernels(self._model, self._lanes, whole=True)
            default_pool().compile(step.kernels)
            self._whole = step.compile()
        self._whole()
        dim = self._model.spec.dim
        return self._whole.last_output[: n * dim].reshape(n, dim).copy()

    def streams(self, rows: int) -> NDArray[np.float32] | None:
        assert self._step
        dim = self._model.spec.dim
        return self._step.last_output[: rows * dim].reshape(rows, dim).copy()

    def draft_head(self, weights: Weights, kv: KVFormat) -> CPUDraftHead:
        """The draft head of the model's file. Raises ModelFileError."""
        runner = CPURunner(weights, self._context, kv=kv, trunk=self._model)
        return CPUDraftHead(runner, runner._model, weights)

    def assistant(self, weights: Weights, kv: KVFormat) -> CPUAssistant:
        """An assistant of the model. Raises ModelFileError."""
        return CPUAssistant(weights, self._context, kv, self._model)

    def hidden(self) -> list[NDArray[np.float32]]:
        return self._hidden

    def not_finite(self, slot: Slot) -> ModelFileError:
        self._set(1, [slot])
        return not_finite(self._model.spec, self._decode[1].outputs())

    def logits(self, rows: Sequence[int] | None = None) -> Logits:
        return self._last if rows is None else self._last[list(rows)]

    def expert_choices(self) -> list[NDArray[np.int32]]:
        return self._model.expert_choices()

    def replay(self, step: Step, position: int) -> Replay:
        tile, sequence, n = 1, self._decode[1], 1
        if step == "prefill":
            tile, n = self._lanes, min(self.max_chunk, self._context - position)
            sequence = self._prefill_of(n)
        self._set(tile, [Slot(0, tuple(varied_tokens(n, self._vocab)), position)])
        return Replay(sequence.calls, self._model.uses(), n, sequence, call_s=sequence.call_s)

    def search(self, request: SearchRequest) -> bool:
        """There is nothing to search for."""
        return False

    def _set(self, tile: int, slots: Sequence[Slot]) -> None:
        """Makes the next step, in tiles of `tile` tokens, one of these slots."""
        done = 0
        for slot in slots:
            position, n = slot.position, len(slot.inputs)
            if n == 1:  # numbers are faster than slices, and the step of a small model is short
                self._tokens[done], self._positions[done] = slot.inputs[0], position
                self._sequences[done] = slot.sequence
            else:
                piece = slice(done, done + n)
                self._tokens[piece], self._positions[piece] = slot.inputs, range(position, position + n)
                self._sequences[piece] = slot.sequence
            if self._model.of_pictures:
                self._set_pictures(slot, done)
            done += n
        if self.state_slots:
            self._begin_states(slots)
        tiles = ceil(done / tile)
        self._state[TILES], self._state[TOKENS] = tiles, done
        if done < tiles * tile:
            filled = slice(done, tiles * tile)
            self._tokens[filled] = self._positions[filled] = 0
            self._sequences[filled] = self.parallel  # of none

    def _begin_states(self, slots: Sequence[Slot]) -> None:
        states, row = self._model.states, 0
        states.settle()
        for sequence, group in itertools.groupby(slots, lambda slot: slot.sequence):
            first, *others = group
            if others:
                states.begin_check(row, first.position, 1 + len(others), sequence)
            else:
                states.begin(row, first.position, len(first.inputs), sequence)
            row += 1 + len(others)

    def _set_pictures(self, slot: Slot, first: int) -> None:
        """Says of the slot's tokens, which are those from `first` on in the step, what pictures change."""
        model, pictures, (position, n) = self._model, slot.pictures, (slot.position, len(slot.inputs))
        dim = model.spec.dim
        tokens = slice(first, first + n)
        if slot.want != "last":
            seen = memory.view(model.seen)
            seen[:] = np.arange(position + 1, position + len(seen) + 1)
            if pictures:
                seen[:n] = pictures.seen(position, n)
            embeddings = pictures.embeddings(position, n) if pictures else None
            for i, part in enumerate(model.of_pictures):
                rows = memory.view(part).reshape(-1, dim)
                if embeddings is not None:
                    rows[:n] = embeddings[:, i * dim : (i + 1) * dim]
                elif i:
                    rows[:n] = 0
        for i, tables in model.turned.items():
            rope = model.spec.ropes[i]
            places = positions_of(pictures, position, n)
            for table, rows in zip(tables, model.ropes[i], strict=True):
                out = memory.view(rows).reshape(-1, rope.pairs)
                out[tokens] = table[places[rope.turned_by].T, np.arange(rope.pairs)]
