"""Prefill and decode of a model on a CPU for several conversations at a time.

A decode step takes a token of each conversation in one pass over the weights, as prefill takes the tokens of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

import numpy as np
from numpy.typing import NDArray

from engine.events import Step
from engine.formats.kv_format import KVFormat
from engine.kernels.cpu import memory
from engine.kernels.cpu.kernel_builder import register_lanes
from engine.kernels.cpu.step_state import TILES, TOKENS
from engine.kernels.cpu.thread_pool import default_pool
from engine.measure.profile import Replay
from engine.measure.timeline import timeline
from engine.model.lower.cpu import CPUModel
from engine.model.lower.cpu_cache import BlockCache
from engine.model.lower.cpu_step import step_kernels
from engine.model.model_runner import Row, varied_tokens
from engine.model.sampling import Logits
from engine.model.weights import Weights


class CPUBatchRunner:
    """Implements `BatchRunner` and `StateStore`. One captured step serves chunks of any length."""

    precompiled = False
    chunk_sizes: tuple[int, ...] = (1,)
    decode_depths: tuple[int, ...] = (0,)
    max_rewind: int | None = None

    def __init__(
        self,
        weights: Weights,
        context_length: int,
        parallel: int,
        keep_packed: bool = False,
        kv: KVFormat = KVFormat.F16,
    ) -> None:
        """`keep_packed` and `kv`: as for `CPURunner`. Raises ModelFileError."""
        self.parallel, self._vocab = parallel, weights.spec.vocab
        self._lanes, pool = register_lanes(), default_pool()
        with timeline.span("weights"):
            self._model = CPUModel(weights, context_length, pool, self._lanes, keep_packed, parallel, kv)
        assert isinstance(self._model.cache, BlockCache)
        self._cache = self._model.cache
        self.kv_groups, self.assign, self.copy_block = (
            self._cache.groups,
            self._cache.assign,
            self._cache.copy_block,
        )
        self.max_chunk, states = self._model.max_chunk, self._model.states
        self.state_slots, self.state_bytes = states.state_slots, states.state_bytes
        self.state_position, self.save_state, self.load_state = (
            states.state_position,
            states.save_state,
            states.load_state,
        )
        self._state, self._tokens = memory.view(self._model.state), memory.view(self._model.tokens)
        self._logits = memory.view(self._model.logits)
        tiles = [1 << i for i in range(self._model.tile_of(parallel).bit_length())]
        rows = {tile: tile for tile in tiles} | {tiles[-1]: self._model.max_rows(parallel)}
        decode = {tile: step_kernels(self._model, tile, n) for tile, n in rows.items()}
        prefill = step_kernels(self._model, self._lanes)
        kernels = [kernel for step in (prefill, *decode.values()) for kernel in step.kernels]
        pool.compile(kernels)  # all at once, for several compiler processes
        self._decode, self._prefill = {n: step.compile() for n, step in decode.items()}, prefill.compile()
        self.row_counts = tuple(rows.values())
        self._last: Logits = np.zeros((0, self._vocab), np.float32)

    def prefill(self, tokens: Sequence[int], position: int, sequence: int = 0) -> None:
        positions = range(position, position + len(tokens))
        self._set_step(self._lanes, tokens, [sequence] * len(tokens), positions)
        self._model.states.begin(position, len(tokens), sequence)
        self._prefill()

    def decode_rows(self, rows: Sequence[Row], ahead: bool = False) -> NDArray[np.int32]:
        tile = self._model.tile_of(len(rows))
        self._set_step(
            tile, [row.token for row in rows], [row.sequence for row in rows], [row.position for row in rows]
        )
        for row in rows:
            self._model.states.begin(row.position, 1, row.sequence)
        self._decode[tile]()
        self._last = self._logits.reshape(self.row_counts[-1], -1)[: len(rows), : self._vocab]
        best: NDArray[np.int32] = self._last.argmax(1).astype(np.int32)
        return best

    def row_logits(self, rows: Sequence[int] | None = None) -> Logits:
        return self._last if rows is None else self._last[list(rows)]

    def decode(self, token: int, position: int, run_ahead: bool = False) -> int:
        return int(self.decode_rows([Row(token, position, 0)])[0])

    def logits(self) -> Logits:
        last: Logits = self._last[0]
        return last

    def expert_choices(self) -> list[NDArray[np.int32]]:
        return self._model.expert_choices()

    def replay(self, step: Step, position: int) -> Replay:
        sequence, n = (self._decode[1], 1) if step == "decode" else (self._prefill, self.max_chunk)
        positions = range(position, position + n)
        tile = 1 if step == "decode" else self._lanes
        self._set_step(tile, varied_tokens(n, self._vocab), [0] * n, positions)
        return Replay(sequence.calls, self._model.uses(), n, sequence, call_s=sequence.call_s)

    def _set_step(
        self, tile: int, tokens: Sequence[int], sequences: Sequence[int], positions: Sequence[int]
    ) -> None:
        tiles = ceil(len(tokens) / tile)
        self._state[[TILES, TOKENS]] = tiles, len(tokens)
        self._tokens[: tiles * tile] = 0
        self._tokens[: len(tokens)] = tokens
        self._cache.set_tokens(sequences, positions, tiles * tile)
