"""A model as the CPU's kernels, which all cores share.

    embed · for attention: quantize · qkv · rotate · attend · quantize · o
            for a feed-forward layer: quantize · gate+up · quantize · down        · quantize · head

"quantize" (`quantize_activations`) norms the activations and rounds them to the integers that products take. All that
changes from step to step (tokens, position, number of tokens) is in memory, so a step is one job of the thread pool.
Prefill is the same with tiles of tokens instead of one token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np
from numpy.typing import NDArray
from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType

from engine.formats.kv_format import KVFormat
from engine.kernels.cpu import memory
from engine.kernels.cpu.activations import (
    Quantization,
    add_normed,
    buffer_names,
    buffer_type,
    quantize_activations,
)
from engine.kernels.cpu.attention import attention, mask, n_parts, scratch_size
from engine.kernels.cpu.embedding import embed
from engine.kernels.cpu.experts import (
    add_experts,
    choose_experts,
    expert_product,
    group_experts,
    max_tiles,
)
from engine.kernels.cpu.kernel_sequence import KernelSequence
from engine.kernels.cpu.product import MAX_TILES, product, span_of
from engine.kernels.cpu.rope import Heads, rotate
from engine.kernels.cpu.step_state import SIZE
from engine.kernels.cpu.thread_pool import ThreadPool
from engine.kernels.cpu.weight_layout import UNIT
from engine.measure.kernel_roles import BufferUse
from engine.model.buffer_uses import BufferUses
from engine.model.kv_blocks import BLOCK
from engine.model.lower.cpu_cache import BlockCache, ContiguousCache
from engine.model.lower.cpu_weights import CPUWeights, Matrix
from engine.model.mixes import Activation, Attend, Dense, Experts
from engine.model.spec import Sublayer
from engine.model.weights import Weights

PART_BYTES = 256 << 10  # of a matrix, in each part of its product


@dataclass
class Attention:
    """The weights and the cache (`Heads.cached`) of a layer's attention. `norms`: those of queries and of keys, if
    there are any."""

    heads: Heads
    rope: int
    qkv: list[Matrix]
    bias: Tensor | None
    norms: list[Tensor]
    o: Matrix
    o_bias: Tensor | None
    sinks: list[Tensor]
    cached: list[Tensor]


@dataclass
class FeedForward:
    """The weights of a feed-forward layer."""

    gate: Matrix
    up: Matrix
    down: Matrix
    activation: Activation


@dataclass
class Mixture:
    """The weights of a mixture of experts. `biases`: those of gate, up and down; zeros where there are none. `choices`:
    how often each expert was chosen, int32 (experts,)."""

    spec: Experts
    router: Matrix
    router_bias: Tensor | None
    gate: Matrix
    up: Matrix
    down: Matrix
    biases: list[Tensor]
    choices: Tensor


@dataclass
class Tiles:
    """The tiles of experts that a step has (see `engine.kernels.cpu.experts`): `tokens` in all at most, a state with
    the number of tiles, and their experts. `lists`: the token at each place and the place of each pair; none in
    decode."""

    tokens: int
    state: Tensor
    experts: Tensor
    lists: list[Tensor]


@dataclass
class Layer:
    """A sublayer with the weights of its norms."""

    norm: Tensor | None
    mix: Attention | FeedForward | Mixture
    post_norm: Tensor | None


class CPUModel:
    """A model's weights and KV cache, and the kernels of its steps. A step reads `state` (see `step_state`) and
    `tokens`, int32 (max_chunk,), and decode writes `logits`, float32 (rows, vocab or a little more), of one row or of
    as many as there are conversations."""

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
        """With `parallel` above 1, the cache is a `BlockCache` for as many conversations. `kv`: its format. Raises
        ModelFileError."""
        spec = self.spec = weights.spec
        self._pool, self._lanes, self.max_chunk = pool, lanes, MAX_TILES * lanes
        self.state, self.tokens = (memory.zeros(n, dtypes.int32) for n in (SIZE, self.max_chunk))
        floats = dtypes.float32 if spec.is_float32 else dtypes.float16
        self._cache_type = dtypes.int8 if kv.is_quantized else floats
        self.cache: ContiguousCache | BlockCache
        if parallel == 1:
            self.cache = ContiguousCache(context, self.max_chunk, lanes, self.state)
        else:
            self.cache = BlockCache(spec, context, self.max_chunk, lanes, parallel, self.state, kv)
        loader = CPUWeights(weights, pool, lanes, keep_packed)
        self._sizes = loader.sizes
        # The largest matrices first, because repacking needs memory for both forms.
        self._embedding = loader.matrix(spec.embedding)
        self._head = self._embedding if spec.is_tied else loader.matrix(spec.head)
        self._layers = [self._layer(loader, sublayer) for sublayer in spec.sublayers]
        self._output_norm = loader.vector(spec.output_norm)
        loader.finish()
        self._ropes = [
            [memory.array(table, dtypes.float32) for table in rope.tables(self.cache.positions, context)]
            for rope in spec.ropes
        ]
        self._temperatures = []
        if spec.temperature:
            self._temperatures = [
                memory.array(spec.temperature.factors(self.cache.positions), dtypes.float32)
            ]
        self._mask = memory.array(mask(lanes), dtypes.float32)
        rows = self.max_rows(parallel)
        self.logits = memory.zeros(rows * self._head.layout.groups(spec.vocab) * lanes, dtypes.float32)
        widest = max(
            self._head.rows + lanes,
            spec.dim,
            *(dense.width for dense in spec.feed_forward),
            *(experts.up.rows for experts in spec.experts),
            *(a.query_size + 2 * a.kv_size for a in spec.attention),
        )
        self._zeros = memory.zeros(widest, dtypes.float32)
        self._scratch: dict[tuple[str, int, int], Tensor] = {}

    def _layer(self, loader: CPUWeights, sublayer: Sublayer) -> Layer:
        norm, post_norm = (v and loader.vector(v) for v in (sublayer.norm, sublayer.post_norm))
        part = sublayer.mix
        added = (
            post_norm is None
        )  # the last product adds the residual stream, unless its result is normed first
        mix: Attention | FeedForward | Mixture
        match part:
            case Attend():
                mix = self._attention(loader, part, added)
            case Experts():
                mix = self._mixture(loader, part)
            case Dense():
                mix = FeedForward(
                    gate=loader.matrix(part.gate),
                    up=loader.matrix(part.up),
                    down=loader.matrix(part.down, added=added),
                    activation=part.activation,
                )
        return Layer(norm, mix, post_norm)

    def _mixture(self, loader: CPUWeights, part: Experts) -> Mixture:
        matrices = [(part.gate, part.gate_bias), (part.up, part.up_bias), (part.down, part.down_bias)]
        gate, up, down = (loader.matrix(weight, added=bias is not None) for weight, bias in matrices)
        return Mixture(
            spec=part,
            router=loader.matrix(part.router),
            router_bias=part.router_bias and loader.vector(part.router_bias),
            gate=gate,
            up=up,
            down=down,
            biases=[
                loader.vector(bias) if bias else memory.zeros(weight.rows, dtypes.float32)
                for weight, bias in matrices
            ],
            choices=memory.zeros(part.count, dtypes.int32),
        )

    def _attention(self, loader: CPUWeights, part: Attend, added: bool) -> Attention:
        rows, firsts = (
            part.query_size + 2 * part.kv_size,
            (0, part.query_size, part.query_size + part.kv_size),
        )
        assert part.k and part.v
        qkv = part.q, part.k, part.v
        length, window, table = self.cache.slots(part.window)
        heads = Heads(
            part.heads, part.kv_heads, part.head_dim, length, self._lanes, part.scale,
            norm_eps=self.spec.eps, query_norm=part.q_norm is not None, key_norm=part.k_norm is not None,
            temperature=self.spec.temperature is not None,
            window=window, table=table, block=BLOCK,
            dtype=self._cache_type,
            wide_norms=part.has_wide_norms, sinks=part.sinks is not None,
        )  # fmt: skip
        biases = part.q_bias, part.k_bias, part.v_bias
        return Attention(
            heads=heads,
            rope=part.rope,
            qkv=[loader.matrix(w, first, rows) for w, first in zip(qkv, firsts, strict=True)],
            bias=loader.joined([(bias, w.rows) for bias, w in zip(biases, qkv, strict=True)]),
            norms=[loader.vector(norm) for norm in (part.q_norm, part.k_norm) if norm],
            o=loader.matrix(part.o, added=added),
            o_bias=part.o_bias and loader.vector(part.o_bias),
            sinks=[loader.vector(part.sinks)] if part.sinks else [],
            cached=self.cache.add(heads),
        )

    def max_rows(self, parallel: int) -> int:
        """The rows of the largest decode step for `parallel` conversations: of some, in whole tiles."""
        tile = self.tile_of(parallel)
        return ceil(parallel / tile) * tile

    def tile_of(self, rows: int) -> int:
        """The tile for a decode step of so many rows."""
        return min(1 << (rows - 1).bit_length(), self._lanes)

    # --- a step ----------------------------------------------------------------------------------------

    def step(self, tile: int, rows: int = 0) -> KernelSequence:
        """The kernels of a step: if `tile` is 1, decode of one token, with logits; else prefill of as many tiles of
        tokens as the state says. With `rows`, decode of as many tokens at most, each of another sequence."""
        return _Step(self, tile, rows).kernels()

    def scratch(self, name: str, tile: int, n: int, dtype: DType) -> Tensor:
        """Memory (n,) that all layers share."""
        if (name, tile, n) not in self._scratch:
            self._scratch[name, tile, n] = memory.zeros(n, dtype)
        return self._scratch[name, tile, n]

    def expert_choices(self) -> list[NDArray[np.int32]]:
        """See `ModelRunner.expert_choices`."""
        return [
            memory.view(layer.mix.choices).copy() for layer in self._layers if isinstance(layer.mix, Mixture)
        ]

    def uses(self) -> BufferUses:
        """The uses of the weights, the cache and the scratch buffers."""
        uses, length = BufferUses(), self.cache.positions
        uses.add(BufferUse("output head"), self._head.stream)
        uses.add(BufferUse("embedding", "token", self.spec.vocab), self._embedding.stream)
        uses.add(BufferUse("attention", "token", length), *(t for tables in self._ropes for t in tables))
        uses.add(BufferUse("attention", "token", length), *self._temperatures)
        uses.add(BufferUse("norm"), self._output_norm)
        # A kernel touches only as much of these two as its product, or the context, is long.
        uses.add(BufferUse("norm", "token", self._zeros.numel()), self._zeros)
        scores = [buffer for (name, *_), buffer in self._scratch.items() if name == "scores"]
        uses.add(BufferUse("attention", "context", length), *scores)
        for layer in self._layers:
            uses.add(BufferUse("norm"), layer.norm, layer.post_norm)
            match layer.mix:
                case Attention() as a:
                    uses.add(BufferUse("QKV projection"), a.bias, *(matrix.stream for matrix in a.qkv))
                    cache = BufferUse("attention", "context", a.heads.length, a.heads.window)
                    uses.add(cache, *a.cached)
                    uses.add(BufferUse("attention output"), a.o.stream)
                    uses.add(BufferUse("attention"), *a.sinks)
                    uses.add(BufferUse("norm"), a.o_bias, *a.norms)
                case FeedForward() as f:
                    uses.add(BufferUse("FFN gate+up"), f.gate.stream, f.up.stream)
                    uses.add(BufferUse("FFN down"), f.down.stream)
                case Mixture() as m:
                    uses.add(BufferUse("router"), m.router_bias, m.router.stream, m.choices)
                    gate_up, down = [*m.biases[:2], m.gate.stream, m.up.stream], [m.biases[2], m.down.stream]
                    uses.add_experts(m.spec, m.spec.used, gate_up, down)
        return uses


class _Step:
    """Builds the kernels of one step."""

    def __init__(self, model: CPUModel, tile: int, rows: int) -> None:
        self._model, self._tile, self._n_rows = model, tile, rows
        self._tokens = rows or (1 if tile == 1 else model.max_chunk)
        self._state = [] if tile == 1 else [model.state]
        self._sequence = KernelSequence(model._pool)

    def kernels(self) -> KernelSequence:
        model, spec, tile = self._model, self._model.spec, self._tile
        x, y = (self._rows(name, spec.dim) for name in "xy")
        embedding = model._embedding
        self._sequence.add(
            embed(embedding.layout, tile, spec.embedding_scale),
            x,
            model._sizes(embedding.rows, embedding.cols // embedding.layout.block),
            *self._state,
            model.tokens,
            embedding.stream,
        )
        for layer in model._layers:
            mix, post_norm = layer.mix, layer.post_norm
            mixed, shape = self._rows("mixed", spec.dim), model._sizes(spec.dim // UNIT)
            if isinstance(mix, Mixture):
                self._mix(mix, x, layer.norm, mixed if post_norm else x)
            else:
                bias = None
                if isinstance(mix, Attention):
                    (matrix, inputs), bias = self._attend(mix, x, layer.norm), mix.o_bias
                else:
                    matrix, inputs = self._gate(mix, x, layer.norm)
                if post_norm is None:
                    self._multiply(y, matrix, inputs, added=x, bias=bias)
                    x, y = y, x
                else:
                    self._multiply(mixed, matrix, inputs, added=bias)
            if post_norm is not None:
                kernel, parts = add_normed(spec.eps, model._lanes, tile), 1 if tile == 1 else 0
                self._sequence.add(kernel, x, shape, *self._state, mixed, post_norm, parts=parts)
        if tile == 1 or self._n_rows:
            head = model._head
            self._multiply(model.logits, head, self._quantize(x, [head], norm=model._output_norm))
        return self._sequence

    def _attend(self, a: Attention, x: Tensor, norm: Tensor | None) -> tuple[Matrix, dict[str, Tensor]]:
        """Adds the kernels of attention but its last product; returns that one's matrix and its activations."""
        model, heads, tile, threads = self._model, a.heads, self._tile, self._model._pool.count
        width = heads.query * heads.dim
        rows, queries, attended = (
            self._rows(name, n) for name, n in (("rows", heads.rows), ("queries", width), ("attended", width))
        )
        inputs = self._quantize(x, a.qkv, norm=norm)
        for i, matrix in enumerate(a.qkv):
            self._multiply(rows, matrix, inputs, added=a.bias, concurrent=i > 0)
        cached = [*a.cached, *model.cache.rotating(heads, tile)]
        tables = [*model._ropes[a.rope], *a.norms, *model._temperatures]
        self._sequence.add(rotate(heads, tile), queries, *cached, rows, *tables)
        rows_n = self._n_rows
        scores = model.scratch("scores", tile, scratch_size(heads, threads, tile, rows_n), dtypes.float32)
        kernel, parts = attention(heads, threads, tile, rows_n), n_parts(heads, threads, tile, rows_n)
        state = self._state if heads.table and not rows_n else []
        reads = *a.cached, *state, *model.cache.attending(heads), queries, model._mask, *a.sinks
        self._sequence.add(kernel, attended, scores, *reads, parts=parts)
        return a.o, self._quantize(attended, [a.o])

    def _gate(self, f: FeedForward, x: Tensor, norm: Tensor | None) -> tuple[Matrix, dict[str, Tensor]]:
        """As `_attend`, for a feed-forward layer."""
        gate, up = self._rows("gate", f.gate.rows), self._rows("up", f.up.rows)
        inputs = self._quantize(x, [f.gate, f.up], norm=norm)
        self._multiply(gate, f.gate, inputs)
        self._multiply(up, f.up, inputs, concurrent=True)
        return f.down, self._quantize(gate, [f.down], gate=(f.activation, up))

    def _mix(self, m: Mixture, x: Tensor, norm: Tensor | None, out: Tensor) -> None:
        """Adds the kernels of a mixture of experts: to x if that is `out`, else the result is in `out`."""
        model, tile, spec, dim, state = self._model, self._tile, m.spec, m.down.rows, self._state
        parts = 1 if tile == 1 else 0
        logits = self._rows("router", m.router.layout.groups(spec.count) * model._lanes)
        inputs = self._quantize(x, [m.router, m.gate, m.up] if tile == 1 else [m.router], norm=norm)
        self._multiply(logits, m.router, inputs, added=m.router_bias)
        chosen, probabilities = (
            model.scratch(name, tile, self._tokens * spec.used, dtype)
            for name, dtype in (("chosen", dtypes.int32), ("probabilities", dtypes.float32))
        )
        kernel = choose_experts(spec.count, spec.used, spec.least_sum, model._lanes, tile)
        read = m.choices if tile == 1 else model.state
        self._sequence.add(kernel, chosen, probabilities, read, logits, parts=parts)
        if tile == 1:
            tiles = Tiles(spec.used, model._sizes(0, 0, spec.used, 0), chosen, [])
        else:
            n = max_tiles(self._tokens, spec.used, spec.count, tile)
            experts, sources, places, count = (
                model.scratch(name, tile, size, dtypes.int32)
                for name, size in (
                    ("experts", n), ("sources", n * tile), ("places", chosen.numel()), ("tiles", SIZE)
                )
            )  # fmt: skip
            tiles = Tiles(n * tile, count, experts, [sources, places])
            kernel = group_experts(spec.count, spec.used, tile)
            outs = experts, sources, places, count, m.choices
            self._sequence.add(kernel, *outs, model.state, chosen, parts=1)
            inputs = self._quantize(x, [m.gate, m.up], norm=norm, tiles=tiles, gathered=True)
        rows = [
            model.scratch(name, tile, tiles.tokens * matrix.rows, dtypes.float32)
            for name, matrix in (("expert gate", m.gate), ("expert up", m.up), ("results", m.down))
        ]
        self._multiply_experts(rows[0], m.gate, inputs, tiles, m.biases[0])
        self._multiply_experts(rows[1], m.up, inputs, tiles, m.biases[1], concurrent=True)
        inputs = self._quantize(rows[0], [m.down], gate=(spec.activation, rows[1]), tiles=tiles)
        self._multiply_experts(rows[2], m.down, inputs, tiles, m.biases[2], shared=False)
        kernel = add_experts(spec.used, out is x, model._lanes, tile)
        lists = [*state, tiles.lists[1]] if tiles.lists else []
        self._sequence.add(kernel, out, model._sizes(dim // UNIT), *lists, probabilities, rows[2])

    def _rows(self, name: str, n: int) -> Tensor:
        """Scratch rows of n elements, one for each token: float32 (tokens * n,)."""
        return self._model.scratch(name, self._tile, self._tokens * n, dtypes.float32)

    def _quantize(
        self,
        rows: Tensor,
        matrices: Sequence[Matrix],
        norm: Tensor | None = None,
        gate: tuple[Activation, Tensor] | None = None,
        tiles: Tiles | None = None,
        gathered: bool = False,
    ) -> dict[str, Tensor]:
        """Adds the kernel that quantizes rows for the products with `matrices`: normed, or gated and multiplied by
        other rows; with `tiles` those of experts, `gathered` from the tokens. Returns its outputs by name."""
        model, tile, cols = self._model, self._tile, matrices[0].cols
        names = buffer_names([matrix.layout for matrix in matrices], tile)
        outs = {}
        for name in names:
            dtype, columns = buffer_type(name)
            tokens = tiles.tokens if tiles else self._tokens
            outs[name] = model.scratch(f"{name}{cols}", tile, tokens * cols // columns, dtype)
        eps = None if norm is None else model.spec.stream_eps
        quantization = Quantization(names, eps, gate[0] if gate else "", tiles is not None, gathered)
        state = self._state if tiles is None else [tiles.state, *(tiles.lists[:1] if gathered else [])]
        others = [t for t in (norm, gate and gate[1]) if t is not None]
        self._sequence.add(
            quantize_activations(quantization, model._lanes, tile),
            *outs.values(),
            model._sizes(cols // UNIT),
            *state,
            rows,
            *others,
            parts=1 if tile == 1 else 0,
        )
        return outs

    def _multiply(
        self,
        out: Tensor,
        matrix: Matrix,
        inputs: dict[str, Tensor],
        added: Tensor | None = None,
        bias: Tensor | None = None,
        concurrent: bool = False,
    ) -> None:
        """Adds a product, in parts that are as many for each thread, and so small that a slow core delays the others
        little."""
        tile, threads = self._tile, self._model._pool.count
        read = [inputs[name] for name in buffer_names([matrix.layout], tile)]
        added = self._model._zeros if added is None else added  # the kernel always reads one
        kernel = product(matrix.layout, tile, span_of(matrix.cols) if tile > 1 else 1, bias is not None)
        parts = threads * ceil(memory.view(matrix.stream).nbytes / threads / PART_BYTES)
        buffers = matrix.shape, *self._state, *read, added, *([] if bias is None else [bias]), matrix.stream
        self._sequence.add(kernel, out, *buffers, parts=parts, concurrent=concurrent)

    def _multiply_experts(
        self,
        out: Tensor,
        matrix: Matrix,
        inputs: dict[str, Tensor],
        tiles: Tiles,
        bias: Tensor,
        shared: bool = True,
        concurrent: bool = False,
    ) -> None:
        """As `_multiply`, with the experts of the tiles. `shared`: in decode, all experts have the same input."""
        tile, threads = self._tile, self._model._pool.count
        read = [inputs[name] for name in buffer_names([matrix.layout], tile)]
        span = span_of(matrix.cols) if tile > 1 else 1
        kernel = expert_product(matrix.layout, tile, span, shared and tile == 1)
        expert = matrix.layout.size(matrix.rows, matrix.cols) * matrix.layout.dtype.itemsize
        n_bytes = min(expert * tiles.tokens, memory.view(matrix.stream).nbytes)
        parts = threads * ceil(n_bytes / threads / PART_BYTES)
        buffers = matrix.shape, tiles.state, tiles.experts, *read, bias, matrix.stream
        self._sequence.add(kernel, out, *buffers, parts=parts, concurrent=concurrent)
