"""Attention on a CPU."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import numpy as np
from tinygrad import Tensor, dtypes

from engine.description.attention import Attention
from engine.measure.kernel_roles import BufferUse
from engine.runtime.kv_blocks import BLOCK
from engine.targets.buffer_uses import BufferUses
from engine.targets.cpu.kernels import memory
from engine.targets.cpu.kernels.attention import attention, n_parts, scratch_size
from engine.targets.cpu.kernels.head_gates import scale_heads
from engine.targets.cpu.kernels.lanes import MOST_LANES
from engine.targets.cpu.kernels.rope import HeadLanes, rotate
from engine.targets.cpu.step_builder import StepBuilder
from engine.targets.cpu.sublayers.handler import Handler, Loading
from engine.targets.cpu.weights import Matrix


class AttentionHandler(Handler):
    """quantize · qkv · rotate · attend · quantize · o"""

    @classmethod
    def lacks(cls, part: Any) -> str:
        """As all handlers say it. The kernels also need keys and values that begin with a whole group of rows, and
        heads of a multiple of 4 elements, since they rotate half a head at once."""
        if part.head_dim % 4 or part.kv_size % MOST_LANES:
            return f"{part.kv_heads} heads of {part.head_dim} elements for its keys"
        if type(part) is Attention and not part.has_plain_values:
            return "values of another size than keys"
        if part.result_norm and part.gate:
            return "norms beside gates"
        return super().lacks(part)

    def __init__(self, part: Attention, norm: Tensor | None, is_added: bool, loading: Loading) -> None:
        weights, spec, cache = loading.weights, loading.spec, loading.cache
        heads = self.heads = HeadLanes(
            part.heads, part.kv_heads, part.head_dim, BLOCK, loading.lanes, part.scale,
            norm_eps=spec.eps, query_norm=part.q_norm is not None, key_norm=part.k_norm is not None,
            temperature=spec.temperature is not None and part.tempered,
            window=cache.window(part.window), dtype=cache.dtype,
            norms_over_heads=part.has_norms_over_heads, sinks=part.sinks is not None,
            stored="keys and values" if part.v else "keys" if part.k else "nothing", value_norm=part.has_normed_values,
            softcap=part.softcap, rotates_first=part.rotates_first,
            turns_tokens=bool(loading.pictures and spec.ropes[part.rope].sections),
            ahead=loading.pictures.whole if loading.pictures and part.looks_ahead else 0,
            both_ways=part.both_ways,
            own_norms=part.own_norms, layer_norms=part.layer_norms, limit=part.limit, slopes=bool(part.slopes),
            chunked=part.chunked and cache.window(part.window) > 0,
        )  # fmt: skip
        self.cached, self._tables = cache.add(heads, part.cache_of)
        self._entries = cache.entries
        self._norm, self._rope = norm, part.rope
        self._head_norms = [weights.vector(norm) for norm in (part.q_norm, part.k_norm) if norm]
        self._o = weights.matrix(part.o, added=is_added)
        self._o_bias = part.o_bias and weights.vector(part.o_bias)
        self._result_norm = part.result_norm and weights.vector(part.result_norm)
        self._sinks = [weights.vector(part.sinks)] if part.sinks else []
        slopes = np.array(part.slopes, np.float32)
        self._slopes = [memory.array(slopes, dtypes.float32)] if part.slopes else []
        self._bias: Tensor | None = None
        self._load(part, loading)

    def _load(self, part: Any, loading: Loading) -> None:
        """Loads what makes queries, keys and values."""
        weights = loading.weights
        qkv = [weight for weight in (part.q, part.k, part.v) if weight]
        *firsts, rows = accumulate((weight.rows for weight in qkv), initial=0)
        biases = part.q_bias, part.k_bias, part.v_bias
        self._qkv = [weights.matrix(w, first, rows) for w, first in zip(qkv, firsts, strict=True)]
        self._gate = weights.matrix(part.gate) if part.gate else None
        self._scales = part.gating if part.scales_heads else ""
        self._bias = weights.joined([(bias, w.rows) for bias, w in zip(biases, qkv, strict=False)])

    def add_kernels(self, step: StepBuilder) -> None:
        gates = step.rows("gate", self.heads.query * self.heads.dim) if self._gate else None
        attended = self._attend(step, self._rotate(step, gates))
        if gates is not None and self._gate and self._scales:
            self._scale_heads(step, attended, gates, self._gate, self.heads.query * self.heads.dim)
        if gates is not None and not self._scales:
            inputs = step.quantize(gates, [self._o], gate=("sigmoid", attended))
        else:
            eps = step.buffers.spec.eps
            inputs = step.quantize(attended, [self._o], norm=self._result_norm, eps=eps)
        step.add_result(self._o, inputs, self._o_bias)

    def keep(self, step: StepBuilder) -> None:
        self._rotate(step)

    def _scale_heads(
        self, step: StepBuilder, attended: Tensor, gates: Tensor, gate: Matrix, width: int
    ) -> None:
        """Adds the kernel of gates that are no sigmoids of each of `width` elements."""
        lanes, each = step.buffers.lanes, width // gate.rows
        stride = gate.layout.groups(gate.rows) * lanes
        kernel = scale_heads(gate.rows, each, stride, self._scales == "softplus", lanes, step.tile)
        step.add(kernel, attended, *step.state, gates, parts=step.parts)

    def _attend(self, step: StepBuilder, queries: Tensor) -> Tensor:
        """Adds the kernel of attention; returns what the queries attend to."""
        heads, tile, threads, rows = self.heads, step.tile, step.buffers.pool.count, step.n_rows
        attended = step.rows("attended", heads.query * heads.dim)
        size = scratch_size(heads, self._entries, threads, tile, rows)
        scores = step.scratch("scores", size, dtypes.float32)
        kernel, parts = attention(heads, threads, tile, rows), n_parts(heads, threads, tile, rows)
        of_step = self._tables, *([] if rows else step.state), step.buffers.places
        seen = [step.buffers.seen] if heads.ahead and not rows else []
        reads = *self.cached, *of_step, queries, step.buffers.mask, *self._sinks, *self._slopes, *seen
        step.add(kernel, attended, scores, *reads, parts=parts)
        return attended

    def _rotate(self, step: StepBuilder, gates: Tensor | None = None) -> Tensor:
        """Adds the kernels that store keys and values; returns the queries. The result's gate fills `gates`."""
        rows = step.rows("rows", self.heads.rows)
        gate = [(gates, self._gate)] if gates is not None and self._gate else []
        inputs = step.quantize(step.x, [*self._qkv, *(matrix for _, matrix in gate)], norm=self._norm)
        products = [*((rows, matrix, self._bias) for matrix in self._qkv), *((*of, None) for of in gate)]
        for i, (out, matrix, added) in enumerate(products):
            step.multiply(out, matrix, inputs, added=added, concurrent=i > 0)
        return self._turn(step, rows)

    def _turn(self, step: StepBuilder, rows: Tensor) -> Tensor:
        """Adds the kernel that rotates the products' rows and stores keys and values; returns the queries."""
        buffers, heads = step.buffers, self.heads
        queries = step.rows("queries", heads.query * heads.dim)
        cached = [*self.cached, self._tables] if heads.stored != "nothing" else []
        temperatures = buffers.temperatures if heads.temperature else []
        tables = [*buffers.ropes[self._rope], *self._head_norms, *temperatures]
        step.add(rotate(heads, step.tile), queries, *cached, *step.state, buffers.places, rows, *tables)
        return queries

    @property
    def _inputs(self) -> list[Matrix]:
        return [*self._qkv, *([self._gate] if self._gate else [])]

    def add_uses(self, uses: BufferUses) -> None:
        window, slots = self.heads.window, self.cached[0].numel() // (self.heads.kv * self.heads.dim)
        uses.add(BufferUse("QKV projection"), self._bias, *(matrix.stream for matrix in self._inputs))
        uses.add(BufferUse("attention", "context", slots, window), *self.cached)
        uses.add(BufferUse("attention", "context", self._tables.numel() * BLOCK, window), self._tables)
        uses.add(BufferUse("attention output"), self._o.stream)
        uses.add(BufferUse("attention"), *self._sinks, *self._slopes)
        uses.add(BufferUse("norm"), self._o_bias, self._result_norm, *self._head_norms)
