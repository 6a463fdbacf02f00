"""Prefill and decode of a model on a CPU, with kernels that all cores share.

    embed · (quantize · qkv · rotate · attend · quantize · o · quantize · gate+up · quantize · down) for each layer ·
    quantize · head

"quantize" (`quantize_activations`) norms the activations and rounds them to the integers that products take. All that
changes from step to step (tokens, position, number of tokens) is in memory, so a step is one job of the thread pool.
Prefill is the same with tiles of tokens instead of one token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil

import numpy as np
from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType

from engine.events import Step
from engine.formats.rope_order import half_split
from engine.kernels.cpu import memory
from engine.kernels.cpu.activations import Quantization, buffer_names, buffer_type, quantize_activations
from engine.kernels.cpu.attention import attention, mask, n_parts, scratch_size
from engine.kernels.cpu.embedding import embed
from engine.kernels.cpu.kernel_builder import register_lanes
from engine.kernels.cpu.kernel_sequence import KernelSequence
from engine.kernels.cpu.product import MAX_TILES, product, shape_of, span_of
from engine.kernels.cpu.rope import Heads, rotate
from engine.kernels.cpu.step_state import POSITION, SIZE, TILES
from engine.kernels.cpu.thread_pool import default_pool
from engine.kernels.cpu.weight_layout import UNIT, WeightLayout
from engine.kernels.cpu.weight_repacking import repack
from engine.measure.kernel_roles import BufferUse
from engine.measure.profile import Replay
from engine.model import packed_weights_cache
from engine.model.buffer_uses import BufferUses
from engine.model.packed_weights_cache import PackedReader
from engine.model.sampling import Logits
from engine.model.weights import Weights

PART_BYTES = 256 << 10  # of a matrix, in each part of its product


@dataclass
class Matrix:
    """A repacked matrix. `shape` holds the sizes that its product reads (`shape_of`)."""

    layout: WeightLayout
    rows: int
    cols: int
    shape: Tensor
    stream: Tensor


@dataclass
class Layer:
    """The weights and the cache of a layer. `norms`: those before attention and before the feed-forward layer;
    `head_norms`: those of queries and keys, if there are any."""

    norms: tuple[Tensor, Tensor]
    qkv: list[Matrix]
    bias: Tensor | None
    head_norms: list[Tensor | None]
    o: Matrix
    gate: Matrix
    up: Matrix
    down: Matrix
    keys: Tensor = field(init=False)
    values: Tensor = field(init=False)


class CPURunner:
    """Implements `ModelRunner`. One captured step serves chunks of any length."""

    precompiled = False

    def __init__(self, weights: Weights, context_length: int, keep_packed: bool = False) -> None:
        """`keep_packed`: reads packed weights from the cache on disk, or writes them there (`packed_weights_cache`)."""
        self._config = config = weights.config
        self._lanes = register_lanes()
        self.max_chunk = MAX_TILES * self._lanes
        self.chunk_sizes: tuple[int, ...] = (1,)
        self.decode_depths: tuple[int, ...] = (0,)
        self._known_sizes: dict[tuple[int, ...], Tensor] = {}
        self._pool = default_pool()
        self._layers, self._embedding, self._head, self._output_norm = self._load(weights, keep_packed)
        length = ceil((context_length + self.max_chunk) / self._lanes) * self._lanes
        normed = [norm is not None for norm in self._layers[0].head_norms]
        scale = config.head_dim**-0.5
        self._heads = Heads(
            config.heads,
            config.kv_heads,
            config.head_dim,
            length,
            self._lanes,
            scale,
            config.norm_eps,
            *normed,
        )
        for layer in self._layers:
            layer.keys, layer.values = (
                memory.zeros(self._heads.cache_size, dtypes.float16, sparse=True) for _ in range(2)
            )
        self._cos, self._sin = (memory.array(table, dtypes.float32) for table in config.rope_tables(length))
        self._mask = memory.array(mask(self._lanes), dtypes.float32)
        self._state, self._tokens = (
            memory.zeros(SIZE, dtypes.int32),
            memory.zeros(self.max_chunk, dtypes.int32),
        )
        self._state_view, self._tokens_view = memory.view(self._state), memory.view(self._tokens)
        self._scratch: dict[tuple[str, int], Tensor] = {}
        self._zeros = memory.zeros(
            max(self._head.rows + self._lanes, config.ffn, self._heads.rows), dtypes.float32
        )
        self._logits = memory.zeros(self._head.layout.groups(config.vocab) * self._lanes, dtypes.float32)
        self._logits_view = memory.view(self._logits)[: config.vocab]
        decode, prefill = self._step(1), self._step(self._lanes)
        self._pool.compile([*prefill.kernels, *decode.kernels])  # all at once, for several compiler processes
        self._decode, self._prefill = decode.compile(), prefill.compile()

    def prefill(self, tokens: Sequence[int], position: int) -> None:
        self._tokens_view[: len(tokens)] = tokens
        self._set_state(position, len(tokens))
        self._prefill()

    def decode(self, token: int, position: int, run_ahead: bool = False) -> int:
        self._tokens_view[0] = token
        self._set_state(position, 1)
        self._decode()
        return int(self._logits_view.argmax())

    def logits(self) -> Logits:
        return self._logits_view

    def replay(self, step: Step, position: int) -> Replay:
        sequence, tokens = (self._decode, 1) if step == "decode" else (self._prefill, self.max_chunk)
        self._tokens_view[:] = 0
        self._set_state(position, tokens)
        return Replay(sequence.calls, self._uses(), tokens, sequence, call_s=sequence.call_s)

    def _set_state(self, position: int, tokens: int) -> None:
        self._state_view[POSITION], self._state_view[TILES] = position, ceil(tokens / self._lanes)

    def _uses(self) -> BufferUses:
        """The uses of the weights, the cache and the scratch buffers."""
        uses, length = BufferUses(), self._heads.length
        uses.add(BufferUse("output head"), self._head.stream)
        uses.add(BufferUse("embedding", "token", self._config.vocab), self._embedding.stream)
        uses.add(BufferUse("attention", "token", length), self._cos, self._sin)
        uses.add(BufferUse("norm"), self._output_norm)
        # A kernel touches only as much of these two as its product, or the context, is long.
        uses.add(BufferUse("norm", "token", self._zeros.numel()), self._zeros)
        scores = [buffer for (name, _), buffer in self._scratch.items() if name == "scores"]
        uses.add(BufferUse("attention", "context", length), *scores)
        for layer in self._layers:
            uses.add(BufferUse("QKV projection"), layer.bias, *(matrix.stream for matrix in layer.qkv))
            uses.add(BufferUse("attention", "context", length), layer.keys, layer.values)
            uses.add(BufferUse("attention output"), layer.o.stream)
            uses.add(BufferUse("FFN gate+up"), layer.gate.stream, layer.up.stream)
            uses.add(BufferUse("FFN down"), layer.down.stream)
            uses.add(BufferUse("norm"), *layer.norms, *layer.head_norms)
        return uses

    # --- weights ---------------------------------------------------------------------------------------

    def _load(self, weights: Weights, keep_packed: bool) -> tuple[list[Layer], Matrix, Matrix, Tensor]:
        """The layers, the embedding, the output head (the same matrix if it is tied), and the output norm's weight.
        Raises ModelFileError."""
        config = self._config
        cache = PackedReader(weights.file, self._lanes) if keep_packed else None
        streams: dict[str, Tensor] = {}
        repacked = False
        dim, ffn = config.dim, config.ffn
        query_size, kv_size = config.query_size, config.kv_size

        def matrix(
            name: str, rows: int, cols: int, first: int = 0, out_rows: int = 0, added: bool = False
        ) -> Matrix:
            """`first`, `out_rows` and `added` as in `shape_of`."""
            ggml_type, interleaved = weights.matrix_type(f"{name}.weight", rows, cols)
            raw = weights.matrix_bytes(f"{name}.weight", rows, cols)
            source_rows = np.arange(rows, dtype=np.int32)
            if interleaved:
                source_rows = half_split(source_rows, config.head_dim)
            layout = WeightLayout(ggml_type, self._lanes)
            shape = self._sizes(*shape_of(rows, cols, layout, added, first, out_rows))
            stream = memory.zeros(layout.size(rows, cols), layout.dtype)
            if not (cache and cache.read(name, memory.view(stream).view(np.uint8))):
                nonlocal repacked
                repacked = True
                repack(self._pool, raw, layout, source_rows, cols, stream)
                weights.release(f"{name}.weight")
            streams[name] = stream
            return Matrix(layout, rows, cols, shape, stream)

        def vector(name: str, n: int) -> Tensor:
            return memory.array(weights.vector(name, n), dtypes.float32)

        # The largest matrices first, because repacking needs memory for both forms.
        embedding = matrix("token_embd", config.vocab, dim)
        head = matrix("output", config.vocab, dim) if "output.weight" in weights else embedding
        layers = []
        for i in range(config.layers):
            prefix = f"blk.{i}."
            sizes = {"q": query_size, "k": kv_size, "v": kv_size}
            firsts = {"q": 0, "k": query_size, "v": query_size + kv_size}
            bias = weights.joined_vectors([(f"{prefix}attn_{x}.bias", n) for x, n in sizes.items()], 0.0)
            head_norms = [f"{prefix}attn_{x}_norm.weight" for x in "qk"]
            layers.append(
                Layer(
                    norms=(
                        vector(f"{prefix}attn_norm.weight", dim),
                        vector(f"{prefix}ffn_norm.weight", dim),
                    ),
                    qkv=[
                        matrix(f"{prefix}attn_{x}", n, dim, firsts[x], query_size + 2 * kv_size)
                        for x, n in sizes.items()
                    ],
                    bias=None if bias is None else memory.array(bias, dtypes.float32),
                    head_norms=[
                        vector(name, config.head_dim) if name in weights else None for name in head_norms
                    ],
                    o=matrix(f"{prefix}attn_output", dim, query_size, added=True),
                    gate=matrix(f"{prefix}ffn_gate", ffn, dim),
                    up=matrix(f"{prefix}ffn_up", ffn, dim),
                    down=matrix(f"{prefix}ffn_down", dim, ffn, added=True),
                )
            )
        if cache is not None:
            cache.close()
        if keep_packed and repacked:
            packed_weights_cache.write(
                weights.file,
                self._lanes,
                {name: memory.view(s).view(np.uint8) for name, s in streams.items()},
            )
        return layers, embedding, head, vector("output_norm.weight", dim)

    # --- a step ----------------------------------------------------------------------------------------

    def _step(self, tile: int) -> KernelSequence:
        """The kernels of a step: if `tile` is 1, decode of one token, with logits; else prefill of as many tiles of
        tokens as the state says."""
        config, heads, threads, lanes = self._config, self._heads, self._pool.count, self._lanes
        dim, ffn, query_size = config.dim, config.ffn, config.query_size
        tokens = 1 if tile == 1 else self.max_chunk
        step = KernelSequence(self._pool)
        add = step.add
        state = [] if tile == 1 else [self._state]

        def buffer(name: str, n: int, dtype: DType = dtypes.float32) -> Tensor:
            if (name, tile) not in self._scratch:
                self._scratch[name, tile] = memory.zeros(n, dtype)
            return self._scratch[name, tile]

        def quantize(
            rows: Tensor, matrices: list[Matrix], norm: Tensor | None = None, gated_by: Tensor | None = None
        ) -> dict[str, Tensor]:
            """Adds the kernel that quantizes rows for the products with `matrices`; returns its outputs by name."""
            cols = matrices[0].cols
            names = buffer_names([m.layout for m in matrices], tile)
            outs = {}
            for name in names:
                dtype, columns = buffer_type(name)
                outs[name] = buffer(f"{name}{cols}", tokens * cols // columns, dtype)
            eps = config.norm_eps if norm is not None else None
            quantization = Quantization(names, eps, "silu" if gated_by is not None else "")
            other = [t for t in (norm, gated_by) if t is not None]
            add(
                quantize_activations(quantization, lanes, tile),
                *outs.values(),
                self._sizes(cols // UNIT),
                *state,
                rows,
                *other,
                parts=1 if tile == 1 else 0,
            )
            return outs

        def multiply(
            out: Tensor,
            matrix: Matrix,
            inputs: dict[str, Tensor],
            added: Tensor | None = None,
            concurrent: bool = False,
        ) -> None:
            read = [inputs[name] for name in buffer_names([matrix.layout], tile)]
            added = self._zeros if added is None else added  # the kernel always reads one
            kernel = product(matrix.layout, tile, span_of(matrix.cols) if tile > 1 else 1)
            parts = self._n_parts(matrix)
            buffers = matrix.shape, *state, *read, added, matrix.stream
            add(kernel, out, *buffers, parts=parts, concurrent=concurrent)

        x, y = buffer("x", tokens * dim), buffer("y", tokens * dim)
        rows, queries, attended = (
            buffer(name, tokens * n)
            for name, n in (("rows", heads.rows), ("queries", query_size), ("attended", query_size))
        )
        gate, up = buffer("gate", tokens * ffn), buffer("up", tokens * ffn)
        scores = buffer("scores", scratch_size(heads, threads, tile))
        embedding = self._embedding
        add(
            embed(embedding.layout, tile),
            x,
            self._sizes(embedding.rows, embedding.cols // embedding.layout.block),
            *state,
            self._tokens,
            embedding.stream,
        )
        for layer in self._layers:
            inputs = quantize(x, layer.qkv, layer.norms[0])
            for i, matrix in enumerate(layer.qkv):
                multiply(rows, matrix, inputs, added=layer.bias, concurrent=i > 0)
            cached = [layer.keys, layer.values, self._state]
            norms = [norm for norm in layer.head_norms if norm is not None]
            add(rotate(heads, tile), queries, *cached, rows, self._cos, self._sin, *norms)
            parts = n_parts(heads, threads, tile)
            add(attention(heads, threads, tile), attended, scores, *cached, queries, self._mask, parts=parts)
            multiply(y, layer.o, quantize(attended, [layer.o]), added=x)
            inputs = quantize(y, [layer.gate, layer.up], layer.norms[1])
            multiply(gate, layer.gate, inputs)
            multiply(up, layer.up, inputs, concurrent=True)
            multiply(x, layer.down, quantize(gate, [layer.down], gated_by=up), added=y)
        if tile == 1:
            multiply(self._logits, self._head, quantize(x, [self._head], self._output_norm))
        return step

    def _n_parts(self, matrix: Matrix) -> int:
        """Parts of a product: as many for each thread, and small enough that a slow core delays the others little."""
        n_bytes = memory.view(matrix.stream).nbytes
        return self._pool.count * ceil(n_bytes / self._pool.count / PART_BYTES)

    def _sizes(self, *values: int) -> Tensor:
        """The values as an int32 tensor; the same values give the same tensor."""
        if values not in self._known_sizes:
            self._known_sizes[values] = memory.array(np.array(values), dtypes.int32)
        return self._known_sizes[values]
