"""A model on a CPU: its weights, its KV cache, and what its steps (`cpu_step`) share."""

from __future__ import annotations

from math import ceil

import numpy as np
from numpy.typing import NDArray
from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType

from engine.formats.kv_format import KVFormat
from engine.kernels.cpu import memory
from engine.kernels.cpu.attention import mask
from engine.kernels.cpu.product import MAX_TILES
from engine.kernels.cpu.step_state import SIZE
from engine.kernels.cpu.thread_pool import ThreadPool
from engine.measure.kernel_roles import BufferUse
from engine.model.buffer_uses import BufferUses
from engine.model.lower.cpu_cache import CPUCache
from engine.model.lower.cpu_layers import (
    Attention,
    Embedded,
    FeedForward,
    LayerLoader,
    Mixture,
    Recurrence,
    SideBySide,
)
from engine.model.lower.cpu_states import CPUStates
from engine.model.lower.cpu_weights import CPUWeights
from engine.model.weights import Weights


class CPUModel:
    """A model's weights and KV cache for `parallel` sequences, and the buffers of its steps. A step reads `state` and
    `places` (see `step_state`) and `tokens`, int32 (max_chunk,), and decode writes `logits`, float32 (rows, vocab or a
    little more), of as many rows as there are sequences."""

    def __init__(
        self,
        weights: Weights,
        context: int,
        pool: ThreadPool,
        lanes: int,
        keep_packed: bool,
        parallel: int = 1,
        kv: KVFormat = KVFormat.F16,
    ) -> None:
        """`kv`: the format of the cache. Raises ModelFileError."""
        spec = self.spec = weights.spec
        self.pool, self.lanes, self.max_chunk = pool, lanes, MAX_TILES * lanes
        sizes = SIZE, 2 * self.max_chunk, self.max_chunk
        self.state, self.places, self.tokens = (memory.zeros(n, dtypes.int32) for n in sizes)
        self.cache = CPUCache(spec, context, self.max_chunk, lanes, parallel, kv)
        self.states = CPUStates(parallel)
        loader = CPUWeights(weights, pool, lanes, keep_packed)
        self.sizes = loader.sizes
        # The largest matrices first, because repacking needs memory for both forms.
        self.embedding = loader.matrix(spec.embedding)
        self.head = self.embedding if spec.is_tied else loader.matrix(spec.head)
        layers = LayerLoader(loader, spec, self.cache, self.states, kv, lanes)
        self.layers = [layers.layer(sublayer) for sublayer in spec.sublayers]
        self.output_norm = loader.vector(spec.output_norm)
        self.layer_tables = loader.layer_tables(spec)
        loader.finish()
        self.ropes = [
            [memory.array(table, dtypes.float32) for table in rope.tables(self.cache.positions, context)]
            for rope in spec.ropes
        ]
        self.temperatures = []
        if spec.temperature:
            self.temperatures = [memory.array(spec.temperature.factors(self.cache.positions), dtypes.float32)]
        self.mask = memory.array(mask(lanes), dtypes.float32)
        rows = self.max_rows(parallel)
        self.logits = memory.zeros(rows * self.head.layout.groups(spec.vocab) * lanes, dtypes.float32)
        joined = max(a.query_size + 2 * a.kv_size for a in spec.attention)
        widest = max(joined, *(weight.rows for weight in spec.weights())) + lanes
        self.zeros = memory.zeros(widest, dtypes.float32)
        self._scratch: dict[tuple[str, int, int], Tensor] = {}

    def max_rows(self, parallel: int) -> int:
        """The rows of the largest decode step for `parallel` conversations: of some, in whole tiles."""
        tile = self.tile_of(parallel)
        return ceil(parallel / tile) * tile

    def tile_of(self, rows: int) -> int:
        """The tile for a decode step of so many rows."""
        return min(1 << (rows - 1).bit_length(), self.lanes)

    def scratch(self, name: str, tile: int, n: int, dtype: DType) -> Tensor:
        """Memory (n,) that all layers share."""
        if (name, tile, n) not in self._scratch:
            self._scratch[name, tile, n] = memory.zeros(n, dtype)
        return self._scratch[name, tile, n]

    def expert_choices(self) -> list[NDArray[np.int32]]:
        """See `ModelRunner.expert_choices`."""
        mixes = (m.experts if isinstance(m := layer.mix, SideBySide) else m for layer in self.layers)
        return [memory.view(m.choices).copy() for m in mixes if isinstance(m, Mixture)]

    def uses(self) -> BufferUses:
        """The uses of the weights, the cache and the scratch buffers."""
        uses, length, sequences = BufferUses(), self.cache.positions, self.states.parallel + 1
        uses.add(BufferUse("output head"), self.head.stream)
        uses.add(BufferUse("embedding", "token", self.spec.vocab), self.embedding.stream)
        uses.add(BufferUse("attention", "token", length), *(t for tables in self.ropes for t in tables))
        uses.add(BufferUse("attention", "token", length), *self.temperatures)
        uses.add(BufferUse("attention", "token", self.max_chunk), self.places)
        uses.add(BufferUse("norm"), self.output_norm)
        # A kernel touches only as much of these two as its product, or the context, is long.
        uses.add(BufferUse("norm", "token", self.zeros.numel()), self.zeros)
        scores = [buffer for (name, *_), buffer in self._scratch.items() if name == "scores"]
        uses.add(BufferUse("attention", "context", length), *scores)
        for layer in self.layers:
            uses.add(BufferUse("norm"), layer.norm, layer.post_norm, *layer.scale)
            match layer.mix:
                case Attention() as a:
                    gates = [a.gate.stream] if a.gate else []
                    uses.add(
                        BufferUse("QKV projection"), a.bias, *(matrix.stream for matrix in a.qkv), *gates
                    )
                    cache = BufferUse("attention", "context", a.heads.length, a.heads.window)
                    uses.add(cache, *a.cached)
                    table = BufferUse("attention", "context", length * sequences, a.heads.window)
                    uses.add(table, self.cache.tables(a.heads))
                    uses.add(BufferUse("attention output"), a.o.stream)
                    uses.add(BufferUse("attention"), *a.sinks)
                    uses.add(BufferUse("norm"), a.o_bias, *a.norms)
                case Recurrence() as r:
                    matrices = r.qkv, r.gate, r.beta, r.alpha
                    uses.add(BufferUse("QKV projection"), *(matrix.stream for matrix in matrices))
                    uses.add(BufferUse("delta net", "token", self.states.parallel), r.states, r.inputs)
                    uses.add(BufferUse("delta net"), r.norm, *r.tables)
                    uses.add(BufferUse("attention output"), r.out.stream)
                case FeedForward() as f:
                    _add_dense(uses, f)
                case Mixture() as m:
                    _add_mixture(uses, m)
                case SideBySide() as b:
                    norms = b.dense_norm, b.dense_post_norm, b.experts_norm, b.experts_post_norm
                    uses.add(BufferUse("norm"), *norms, b.router_norm)
                    _add_dense(uses, b.dense)
                    _add_mixture(uses, b.experts)
                case Embedded() as e:
                    uses.add(BufferUse("FFN gate+up"), e.gate.stream)
                    uses.add(BufferUse("FFN down"), e.proj.stream)
        if tables := self.layer_tables:
            uses.add(BufferUse("embedding", "token", self.spec.vocab), tables.table.data)
            uses.add(BufferUse("embedding"), tables.projection.stream, tables.norm)
        return uses


def _add_mixture(uses: BufferUses, m: Mixture) -> None:
    uses.add(BufferUse("router"), m.router_bias, m.router.stream, m.choices, *m.scales)
    gate_up, down = [*m.biases[:2], m.gate.stream, m.up.stream], [m.biases[2], m.down.stream]
    uses.add_experts(m.spec, m.spec.used, gate_up, down)
    if m.shared:
        _add_dense(uses, m.shared.layer)
        uses.add(BufferUse("router"), m.shared.gate.stream)


def _add_dense(uses: BufferUses, f: FeedForward) -> None:
    uses.add(BufferUse("FFN gate+up"), f.gate.stream, f.up.stream)
    uses.add(BufferUse("FFN down"), f.down.stream)
