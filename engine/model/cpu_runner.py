"""Decode and prefill of a model on a CPU: kernels of our own, all cores on each.

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
from tinygrad import Tensor, UOp, dtypes
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
from engine.measure.profile import Replay, Use
from engine.model import packed_weights_cache
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
    """The norms' weights are attention's and the feed-forward's; `head_norms` those of queries and keys."""

    norms: tuple[Tensor, Tensor]
    qkv: list[Matrix]
    bias: Tensor | None
    head_norms: list[Tensor]
    o: Matrix
    gate: Matrix
    up: Matrix
    down: Matrix
    keys: Tensor = field(init=False)
    values: Tensor = field(init=False)


class CPURunner:
    """The protocol `ModelRunner` on a CPU."""

    precompiled = False

    def __init__(self, weights: Weights, context_length: int, keep_packed: bool = False) -> None:
        """`keep_packed`: reads packed weights from the cache on disk, or writes them there (`packed_weights_cache`)."""
        self._config = config = weights.config
        self._lanes = register_lanes()
        self.max_chunk = MAX_TILES * self._lanes
        self.chunk_sizes: tuple[int, ...] = (1,)  # one step serves every length
        self.decode_depths: tuple[int, ...] = (0,)
        self._known_sizes: dict[tuple[int, ...], Tensor] = {}
        self._pool = default_pool()
        self._layers, self._embedding, self._head, self._output_norm = self._load(weights, keep_packed)
        length = ceil((context_length + self.max_chunk) / self._lanes) * self._lanes
        eps = config.norm_eps if self._layers[0].head_norms else None
        self._heads = Heads(config.heads, config.kv_heads, config.head_dim, length, self._lanes, eps)
        for layer in self._layers:
            layer.keys, layer.values = (
                memory.zeros(self._heads.cache_size, dtypes.float16, sparse=True) for _ in range(2)
            )
        angles = np.arange(length)[:, None] * config.rope_frequencies
        self._cos, self._sin = (memory.array(f(angles), dtypes.float32) for f in (np.cos, np.sin))
        self._mask = memory.array(mask(self._lanes), dtypes.float32)
        self._state, self._tokens = (
            memory.zeros(SIZE, dtypes.int32),
            memory.zeros(self.max_chunk, dtypes.int32),
        )
        self._state_view, self._tokens_view = memory.view(self._state), memory.view(self._tokens)
        self._scratch: dict[tuple[str, int], Tensor] = {}
        self._nothing = memory.zeros(
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
        return Replay(sequence.calls, self._uses(), tokens, sequence, time=sequence.call_s)

    def _set_state(self, position: int, tokens: int) -> None:
        self._state_view[POSITION], self._state_view[TILES] = position, ceil(tokens / self._lanes)

    def _uses(self) -> dict[UOp, Use]:
        """What the buffers of the weights and the cache are for."""
        uses: dict[UOp, Use] = {}

        def note(use: Use, *tensors: Tensor | None) -> None:
            uses.update((tensor.uop.base, use) for tensor in tensors if tensor is not None)

        note(Use("output head"), self._head.stream)
        note(Use("embedding", "token", self._config.vocab), self._embedding.stream)
        note(Use("attention", "token", self._heads.length), self._cos, self._sin)
        note(Use("norm"), self._output_norm)
        # Longer than any one product, or any context but the whole, makes use of:
        note(Use("norm", "token", self._nothing.numel()), self._nothing)
        scores = [buffer for (name, _), buffer in self._scratch.items() if name == "scores"]
        note(Use("attention", "context", self._heads.length), *scores)
        for layer in self._layers:
            note(Use("QKV projection"), layer.bias, *(matrix.stream for matrix in layer.qkv))
            note(Use("attention", "context", self._heads.length), layer.keys, layer.values)
            note(Use("attention output"), layer.o.stream)
            note(Use("FFN gate+up"), layer.gate.stream, layer.up.stream)
            note(Use("FFN down"), layer.down.stream)
            note(Use("norm"), *layer.norms, *layer.head_norms)
        return uses

    # --- weights ---------------------------------------------------------------------------------------

    def _load(self, weights: Weights, keep_packed: bool) -> tuple[list[Layer], Matrix, Matrix, Tensor]:
        config = self._config
        kept = PackedReader(weights.file, self._lanes) if keep_packed else None
        streams: dict[str, Tensor] = {}
        packed_here = False
        dim, ffn = config.dim, config.ffn
        q_rows, kv_rows = config.heads * config.head_dim, config.kv_heads * config.head_dim

        def matrix(
            name: str, rows: int, cols: int, first: int = 0, out_rows: int = 0, added: bool = False
        ) -> Matrix:
            raw, ggml_type, interleaved = weights.stored_bytes(f"{name}.weight", rows, cols)
            source_rows = np.arange(rows, dtype=np.int32)
            if interleaved:
                source_rows = half_split(source_rows, config.head_dim)
            layout = WeightLayout(ggml_type, self._lanes)
            shape = self._sizes(*shape_of(rows, cols, layout, added, first, out_rows))
            stream = memory.zeros(layout.size(rows, cols), layout.dtype)
            if not (kept and kept.read(name, memory.view(stream).view(np.uint8))):
                nonlocal packed_here
                packed_here = True
                repack(self._pool, raw, layout, source_rows, cols, stream)
                weights.file.tensors[f"{name}.weight"].release()
            streams[name] = stream
            return Matrix(layout, rows, cols, shape, stream)

        def vector(name: str, n: int) -> Tensor:
            return memory.array(weights.floats(name, n), dtypes.float32)

        def has(name: str) -> bool:
            return name in weights.file.tensors

        def bias(parts: list[tuple[str, int]]) -> Tensor:
            values = [weights.floats(name, n) if has(name) else np.zeros(n, np.float32) for name, n in parts]
            return memory.array(np.concatenate(values), dtypes.float32)

        # The largest first, while there is nothing else in memory but what it is made of.
        embedding = matrix("token_embd", config.vocab, dim)
        head = matrix("output", config.vocab, dim) if has("output.weight") else embedding
        layers = []
        for i in range(config.layers):
            prefix = f"blk.{i}."
            sizes = {"q": q_rows, "k": kv_rows, "v": kv_rows}
            firsts = {"q": 0, "k": q_rows, "v": q_rows + kv_rows}
            biases = [(f"{prefix}attn_{x}.bias", n) for x, n in sizes.items()]
            norms = [f"{prefix}attn_{x}_norm.weight" for x in "qk"]
            layers.append(
                Layer(
                    norms=(
                        vector(f"{prefix}attn_norm.weight", dim),
                        vector(f"{prefix}ffn_norm.weight", dim),
                    ),
                    qkv=[
                        matrix(f"{prefix}attn_{x}", n, dim, firsts[x], q_rows + 2 * kv_rows)
                        for x, n in sizes.items()
                    ],
                    bias=bias(biases) if any(has(name) for name, _ in biases) else None,
                    head_norms=[vector(name, config.head_dim) for name in norms if has(name)],
                    o=matrix(f"{prefix}attn_output", dim, q_rows, added=True),
                    gate=matrix(f"{prefix}ffn_gate", ffn, dim),
                    up=matrix(f"{prefix}ffn_up", ffn, dim),
                    down=matrix(f"{prefix}ffn_down", dim, ffn, added=True),
                )
            )
        if kept is not None:
            kept.close()
        if keep_packed and packed_here:
            packed_weights_cache.write(
                weights.file,
                self._lanes,
                {name: memory.view(s).view(np.uint8) for name, s in streams.items()},
            )
        return layers, embedding, head, vector("output_norm.weight", dim)

    # --- a step ----------------------------------------------------------------------------------------

    def _step(self, tile: int) -> KernelSequence:
        """Decode of one token, with its logits, if `tile` is 1; otherwise prefill of as many tiles as the state
        says."""
        config, heads, threads, lanes = self._config, self._heads, self._pool.count, self._lanes
        dim, ffn, q_rows = config.dim, config.ffn, config.heads * config.head_dim
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
            quantization = Quantization(
                names, config.norm_eps if norm is not None else None, gated_by is not None
            )
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
            added = self._nothing if added is None else added
            kernel = product(matrix.layout, tile, span_of(matrix.cols) if tile > 1 else 1)
            parts = self._n_parts(matrix)
            buffers = matrix.shape, *state, *read, added, matrix.stream
            add(kernel, out, *buffers, parts=parts, concurrent=concurrent)

        x, y = buffer("x", tokens * dim), buffer("y", tokens * dim)
        rows, queries, attended = (
            buffer(name, tokens * n)
            for name, n in (("rows", heads.rows), ("queries", q_rows), ("attended", q_rows))
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
            add(rotate(heads, tile), queries, *cached, rows, self._cos, self._sin, *layer.head_norms)
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
