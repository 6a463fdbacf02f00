"""Prefill and decode of a model on a CPU, each one job of a pool of threads."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

import numpy as np
from numpy.typing import NDArray

from engine.events import Step
from engine.formats.kv_format import KVFormat
from engine.kernels.cpu import memory
from engine.kernels.cpu.kernel_builder import register_lanes
from engine.kernels.cpu.step_state import POSITION, TILES, TOKENS
from engine.kernels.cpu.thread_pool import default_pool
from engine.measure.profile import Replay
from engine.measure.timeline import timeline
from engine.model.lower.cpu import CPUModel
from engine.model.lower.cpu_cache import ContiguousCache
from engine.model.lower.cpu_export import CachedLayer, export_chunk, import_chunk
from engine.model.lower.cpu_step import step_kernels
from engine.model.model_runner import varied_tokens
from engine.model.prefix_store import export_layout
from engine.model.sampling import Logits
from engine.model.weights import Weights


class CPURunner:
    """Implements `PrefixRunner` and `StateStore`. One captured step serves chunks of any length."""

    precompiled = False
    chunk_sizes: tuple[int, ...] = (1,)
    decode_depths: tuple[int, ...] = (0,)

    def __init__(
        self,
        weights: Weights,
        context_length: int,
        keep_packed: bool = False,
        kv: KVFormat = KVFormat.F16,
    ) -> None:
        """`keep_packed`: reads packed weights from the cache on disk, or writes them there (`packed_weights_cache`).
        `kv`: the format of the KV cache. Raises ModelFileError."""
        with timeline.span("threads"):
            self._lanes, pool = register_lanes(), default_pool()
        with timeline.span("weights"):
            self._model = CPUModel(weights, context_length, pool, self._lanes, keep_packed, kv=kv)
        self.max_chunk, states = self._model.max_chunk, self._model.states
        self.state_slots, self.state_bytes = states.state_slots, states.state_bytes
        self.state_position, self.save_state, self.load_state = (
            states.state_position,
            states.save_state,
            states.load_state,
        )
        self.export_state, self.import_state = states.export_state, states.import_state
        self._state, self._tokens = memory.view(self._model.state), memory.view(self._model.tokens)
        self._logits = memory.view(self._model.logits)[: weights.spec.vocab]
        decode, prefill = step_kernels(self._model, 1), step_kernels(self._model, self._lanes)
        with timeline.span("kernels"):
            pool.compile([*prefill.kernels, *decode.kernels])  # all at once, for several compiler processes
            self._decode, self._prefill = decode.compile(), prefill.compile()

    @property
    def max_rewind(self) -> int | None:
        return self._model.cache.max_rewind

    def prefill(self, tokens: Sequence[int], position: int) -> None:
        self._tokens[: len(tokens)] = tokens
        self._set_state(position, len(tokens))
        self._model.states.begin(position, len(tokens))
        self._prefill()

    def decode(self, token: int, position: int, run_ahead: bool = False) -> int:
        self._tokens[0] = token
        self._set_state(position, 1)
        self._model.states.begin(position, 1)
        self._decode()
        return int(self._logits.argmax())

    def logits(self) -> Logits:
        return self._logits

    def expert_choices(self) -> list[NDArray[np.int32]]:
        return self._model.expert_choices()

    @property
    def export_layout(self) -> str:
        return export_layout(((h.kv, h.dim, h.window) for h, _ in self._layers), self._model.states.layout)

    @property
    def widest_window(self) -> int:
        return max(heads.window for heads, _ in self._layers)

    def oldest_in_windows(self, stored: int) -> int:
        rings = [heads.length for heads, _ in self._layers if heads.window]
        return max(0, stored + self.max_chunk - min(rings)) if rings else 0

    def export_chunk(self, position: int) -> NDArray[np.uint8]:
        return export_chunk(self._layers, position)

    def import_chunk(self, position: int, export: NDArray[np.uint8]) -> None:
        import_chunk(self._layers, position, export)

    @property
    def _layers(self) -> list[CachedLayer]:
        assert isinstance(self._model.cache, ContiguousCache)
        return self._model.cache.layers

    def replay(self, step: Step, position: int) -> Replay:
        sequence, tokens = (self._decode, 1) if step == "decode" else (self._prefill, self.max_chunk)
        self._tokens[:tokens] = varied_tokens(tokens, self._model.spec.vocab)
        self._set_state(position, tokens)
        return Replay(sequence.calls, self._model.uses(), tokens, sequence, call_s=sequence.call_s)

    def _set_state(self, position: int, tokens: int) -> None:
        self._state[[POSITION, TILES, TOKENS]] = position, ceil(tokens / self._lanes), tokens
