"""A step of a model as the CPU's kernels, which all cores share.

    embed · for attention: quantize · qkv · rotate · attend · quantize · o
            for a gated delta net: quantize · qkv, gate, beta, alpha · convolve · delta net · quantize · out
            for a feed-forward layer: quantize · gate+up · quantize · down        · quantize · head

"quantize" (`quantize_activations`) norms the activations and rounds them to the integers that products take. All that
changes from step to step (tokens, position, number of tokens) is in memory, so a step is one job of the thread pool.
Prefill is the same with tiles of tokens instead of one token, and it ends with the last keys and values, or the last
state, that it leaves for later tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from tinygrad import Tensor, dtypes

from engine.kernels.cpu import memory
from engine.kernels.cpu.activations import (
    Gate,
    Quantization,
    add_normed,
    buffer_names,
    buffer_type,
    cap,
    quantize_activations,
)
from engine.kernels.cpu.attention import attention, n_parts, scratch_size
from engine.kernels.cpu.delta_net import convolve, delta_net
from engine.kernels.cpu.embedding import embed, embed_from_file
from engine.kernels.cpu.experts import (
    add_experts,
    choose_experts,
    expert_product,
    group_experts,
    max_tiles,
)
from engine.kernels.cpu.kernel_sequence import KernelSequence
from engine.kernels.cpu.layer_embeddings import gate_embeddings
from engine.kernels.cpu.product import product, span_of
from engine.kernels.cpu.rope import rotate
from engine.kernels.cpu.weight_layout import UNIT
from engine.model.lower.cpu import CPUModel
from engine.model.lower.cpu_layers import (
    Attention,
    Embedded,
    FeedForward,
    Mix,
    Mixture,
    Recurrence,
    Shared,
    SideBySide,
)
from engine.model.lower.cpu_weights import Matrix

PART_BYTES = 256 << 10  # of a matrix, in each part of its product


def step_kernels(model: CPUModel, tile: int, rows: int = 0, whole: bool = False) -> KernelSequence:
    """The kernels of a step. With `rows`, decode of as many tokens at most, each of another sequence, with logits; else
    prefill of as many tiles of tokens as the state says, of the `whole` model or of what later tokens need."""
    return _Step(model, tile, rows).kernels(whole)


@dataclass
class Tiles:
    """The tiles of experts that a step has (see `engine.kernels.cpu.experts`): `tokens` in all at most, a state with
    the number of tiles, and their experts. `lists`: the token at each place and the place of each pair; none in
    decode."""

    tokens: int
    state: Tensor
    experts: Tensor
    lists: list[Tensor]


class _Step:
    """Builds the kernels of one step."""

    def __init__(self, model: CPUModel, tile: int, rows: int) -> None:
        self._model, self._tile, self._n_rows = model, tile, rows
        self._tokens = rows or model.max_chunk
        self._state = [] if tile == 1 else [model.state]
        self._sequence = KernelSequence(model.pool)
        self._parts = 1 if tile == 1 else 0  # of kernels whose threads share the tokens

    def kernels(self, whole: bool) -> KernelSequence:
        model, spec, tile = self._model, self._model.spec, self._tile
        x, y = (self._rows(name, spec.dim) for name in "xy")
        embedding = model.embedding
        self._sequence.add(
            embed(embedding.layout, tile, spec.embedding_scale),
            x,
            model.sizes(embedding.rows, embedding.cols // embedding.layout.block),
            *self._state,
            model.tokens,
            embedding.stream,
        )
        of_layers = self._embed_layers(x)
        decodes = self._n_rows > 0
        last = None if decodes or whole else model.layers[spec.last_keeping]
        for layer in model.layers:
            mix, post_norm = layer.mix, layer.post_norm
            if layer is last:
                self._keep(mix, x, layer.norm)
                break
            mixed, shape = self._rows("mixed", spec.dim), model.sizes(spec.dim // UNIT)
            if isinstance(mix, Mixture):
                self._mix(mix, x, layer.norm, mixed if post_norm else x)
            elif isinstance(mix, SideBySide):
                self._mix_both(mix, x, mixed)
            else:
                bias = None
                if isinstance(mix, Attention):
                    (matrix, inputs), bias = self._attend(mix, x, layer.norm), mix.o_bias
                elif isinstance(mix, Recurrence):
                    matrix, inputs = self._recur(mix, x, layer.norm)
                elif isinstance(mix, Embedded):
                    matrix, inputs = self._gate_embeddings(mix, x, of_layers)
                else:
                    inputs = self._quantize(x, [mix.gate, mix.up], norm=layer.norm)
                    matrix, inputs = self._gate(mix, inputs)
                if post_norm is None:
                    self._multiply(y, matrix, inputs, added=x, bias=bias)
                    x, y = y, x
                else:
                    self._multiply(mixed, matrix, inputs, added=bias)
            if post_norm is not None:
                kernel = add_normed(spec.eps, model.lanes, tile, scaled=bool(layer.scale))
                self._sequence.add(
                    kernel, x, shape, *self._state, mixed, post_norm, *layer.scale, parts=self._parts
                )
        if decodes:
            head = model.head
            self._multiply(model.logits, head, self._quantize(x, [head], norm=model.output_norm))
            if spec.softcap:
                vectors = model.sizes(memory.view(model.logits).size // model.lanes)
                self._sequence.add(cap(spec.softcap, model.lanes), model.logits, vectors)
        return self._sequence

    def _embed_layers(self, x: Tensor) -> list[Tensor]:
        """Adds the kernels of what the embeddings of layers are made of, if there are any: returns the products, the
        weight of their norm, and the rows of the table."""
        model, tables = self._model, self._model.layer_tables
        if tables is None:
            return []
        table, projected = tables.table, self._rows("layer projections", tables.projection.rows)
        rows = self._rows("layer rows", table.cols)
        kernel = embed_from_file(table.type, model.lanes, self._tile, tables.size**0.5)
        self._sequence.add(kernel, rows, table.shape, *self._state, model.tokens, table.data)
        self._multiply(projected, tables.projection, self._quantize(x, [tables.projection]))
        return [projected, tables.norm, rows]

    def _gate_embeddings(
        self, e: Embedded, x: Tensor, of_layers: list[Tensor]
    ) -> tuple[Matrix, dict[str, Tensor]]:
        """As `_attend`, for the embeddings of a layer."""
        model, tables = self._model, self._model.layer_tables
        assert tables
        gate, gated = (self._rows(name, tables.size) for name in ("gate", "layer gated"))
        self._multiply(gate, e.gate, self._quantize(x, [e.gate]))
        kernel = gate_embeddings(
            tables.size, tables.layers, model.spec.dim, model.spec.eps, model.lanes, self._tile
        )
        self._sequence.add(
            kernel, gated, model.sizes(e.layer), *self._state, gate, *of_layers, parts=self._parts
        )
        return e.proj, self._quantize(gated, [e.proj])

    def _mix_both(self, both: SideBySide, x: Tensor, out: Tensor) -> None:
        """Adds the kernels of a feed-forward layer and a mixture of experts side by side."""
        model, dim = self._model, self._model.spec.dim
        results, shape = self._rows("side result", dim), model.sizes(dim // UNIT)
        dense = both.dense
        inputs = self._quantize(x, [dense.gate, dense.up], norm=both.dense_norm)
        matrix, inputs = self._gate(dense, inputs)
        self._multiply(results, matrix, inputs)
        for added, norm in (False, both.dense_post_norm), (True, both.experts_post_norm):
            if added:
                self._mix(both.experts, x, both.experts_norm, results, both.router_norm)
            kernel = add_normed(model.spec.eps, model.lanes, self._tile, added=added)
            self._sequence.add(kernel, out, shape, *self._state, results, norm, parts=self._parts)

    def _keep(self, mix: Mix, x: Tensor, norm: Tensor | None) -> None:
        """Adds the kernels of a layer that leave something for later tokens."""
        if isinstance(mix, Attention):
            self._rotate(mix, x, norm)
        else:
            assert isinstance(mix, Recurrence)
            self._recur(mix, x, norm)

    def _rotate(self, a: Attention, x: Tensor, norm: Tensor | None, gates: Tensor | None = None) -> Tensor:
        """Adds the kernels that store keys and values; returns the queries. The result's gate fills `gates`."""
        model, heads = self._model, a.heads
        rows, queries = self._rows("rows", heads.rows), self._rows("queries", heads.query * heads.dim)
        gate = [(gates, a.gate)] if gates is not None and a.gate else []
        inputs = self._quantize(x, [*a.qkv, *(matrix for _, matrix in gate)], norm=norm)
        products = [*((rows, matrix, a.bias) for matrix in a.qkv), *((*of_gate, None) for of_gate in gate)]
        for i, (out, matrix, added) in enumerate(products):
            self._multiply(out, matrix, inputs, added=added, concurrent=i > 0)
        cached = [*a.cached, model.cache.tables(heads)] if heads.stored != "nothing" else []
        tables = [*model.ropes[a.rope], *a.norms, *model.temperatures]
        self._sequence.add(
            rotate(heads, self._tile), queries, *cached, *self._state, model.places, rows, *tables
        )
        return queries

    def _attend(self, a: Attention, x: Tensor, norm: Tensor | None) -> tuple[Matrix, dict[str, Tensor]]:
        """Adds the kernels of attention but its last product; returns that one's matrix and its activations."""
        model, heads, tile, threads = self._model, a.heads, self._tile, self._model.pool.count
        width = heads.query * heads.dim
        attended, gates = self._rows("attended", width), self._rows("gate", width) if a.gate else None
        queries = self._rotate(a, x, norm, gates)
        rows_n = self._n_rows
        scores = model.scratch("scores", tile, scratch_size(heads, threads, tile, rows_n), dtypes.float32)
        kernel, parts = attention(heads, threads, tile, rows_n), n_parts(heads, threads, tile, rows_n)
        state = [] if rows_n else self._state
        of_step = model.cache.tables(heads), *state, model.places
        reads = *a.cached, *of_step, queries, model.mask, *a.sinks
        self._sequence.add(kernel, attended, scores, *reads, parts=parts)
        if gates is not None:
            return a.o, self._quantize(gates, [a.o], gate=("sigmoid", attended))
        return a.o, self._quantize(attended, [a.o])

    def _recur(self, r: Recurrence, x: Tensor, norm: Tensor | None) -> tuple[Matrix, dict[str, Tensor]]:
        """As `_attend`, for a gated delta net."""
        net, tile, by_row = r.net, self._tile, bool(self._n_rows)
        width = net.values * net.size
        rows, gate, gates, out = (
            self._rows(name, n)
            for name, n in (
                ("rows", net.channels), ("gate", width), ("gates", 2 * net.gates), ("attended", width)
            )
        )  # fmt: skip
        inputs = self._quantize(x, [r.qkv, r.gate, r.beta, r.alpha], norm=norm)
        self._multiply(rows, r.qkv, inputs)
        for products, matrix in (gate, r.gate), (gates, r.beta), (gates, r.alpha):
            self._multiply(products, matrix, inputs, concurrent=True)
        of_step = *self._state, self._model.places
        self._sequence.add(convolve(net, tile, by_row), rows, gates, r.inputs, *of_step, *r.tables)
        self._sequence.add(
            delta_net(net, tile, by_row), out, r.states, *of_step, rows, gates, r.norm, parts=net.values
        )
        return r.out, self._quantize(gate, [r.out], gate=("silu", out))

    def _gate(
        self, f: FeedForward, inputs: dict[str, Tensor], shared: str = ""
    ) -> tuple[Matrix, dict[str, Tensor]]:
        """As `_attend`, for a feed-forward layer. With `shared`, the name of the layer that all tokens share beside
        experts, it begins together with the router."""
        gate, up = (self._rows(shared + name, m.rows) for name, m in (("gate", f.gate), ("up", f.up)))
        self._multiply(gate, f.gate, inputs, concurrent=bool(shared))
        self._multiply(up, f.up, inputs, concurrent=True)
        return f.down, self._quantize(gate, [f.down], gate=(f.activation, up), name=shared)

    def _share(self, s: Shared, inputs: dict[str, Tensor]) -> list[Tensor]:
        """Adds the kernels of the layer that all tokens share; returns its gate and its results."""
        factors, results = (
            self._rows("shared factors", self._model.lanes),
            self._rows("shared", s.layer.down.rows),
        )
        self._multiply(factors, s.gate, inputs, concurrent=True)
        down, inputs = self._gate(s.layer, inputs, "shared ")
        self._multiply(results, down, inputs)
        return [factors, results]

    def _mix(
        self, m: Mixture, x: Tensor, norm: Tensor | None, out: Tensor, of_router: Tensor | None = None
    ) -> None:
        """Adds the kernels of a mixture of experts: to x if that is `out`, else the result is in `out`. `of_router`: a
        norm of its own for the router."""
        model, tile, spec, dim, state = self._model, self._tile, m.spec, m.down.rows, self._state
        parts = self._parts
        logits = self._rows("router", m.router.layout.groups(spec.count) * model.lanes)
        first = [m.router, *(m.shared.reads if m.shared else [])]
        if of_router is not None:
            self._multiply(logits, m.router, self._quantize(x, [m.router], norm=of_router))
            inputs = self._quantize(x, [m.gate, m.up], norm=norm) if tile == 1 else {}
        else:
            inputs = self._quantize(x, [*first, m.gate, m.up] if tile == 1 else first, norm=norm)
            self._multiply(logits, m.router, inputs, added=m.router_bias)
        shared = self._share(m.shared, inputs) if m.shared else []
        chosen, probabilities = (
            model.scratch(name, tile, self._tokens * spec.used, dtype)
            for name, dtype in (("chosen", dtypes.int32), ("probabilities", dtypes.float32))
        )
        kernel = choose_experts(spec.count, spec.used, spec.least_sum, model.lanes, tile, bool(m.scales))
        read = m.choices if tile == 1 else model.state
        reads = read, logits, *m.scales
        self._sequence.add(kernel, chosen, probabilities, *reads, parts=parts, concurrent=bool(shared))
        if tile == 1:
            tiles = Tiles(spec.used, model.sizes(spec.used), chosen, [])
        else:
            n = max_tiles(self._tokens, spec.used, spec.count, tile)
            experts, sources, places, count = (
                model.scratch(name, tile, size, dtypes.int32)
                for name, size in (
                    ("experts", n), ("sources", n * tile), ("places", chosen.numel()), ("tiles", 1)
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
        kernel = add_experts(spec.used, out is x, model.lanes, tile, shared=bool(shared))
        lists = [*state, tiles.lists[1]] if tiles.lists else []
        self._sequence.add(kernel, out, model.sizes(dim // UNIT), *lists, probabilities, rows[2], *shared)

    def _rows(self, name: str, n: int) -> Tensor:
        """Scratch rows of n elements, one for each token: float32 (tokens * n,)."""
        return self._model.scratch(name, self._tile, self._tokens * n, dtypes.float32)

    def _quantize(
        self,
        rows: Tensor,
        matrices: Sequence[Matrix],
        norm: Tensor | None = None,
        gate: tuple[Gate, Tensor] | None = None,
        tiles: Tiles | None = None,
        gathered: bool = False,
        name: str = "",
    ) -> dict[str, Tensor]:
        """Adds the kernel that quantizes rows for the products with `matrices`: normed, or gated and multiplied by
        other rows; with `tiles` those of experts, `gathered` from the tokens. Returns its outputs by name. `name` tells
        them from those of another call that are still needed."""
        model, tile, cols = self._model, self._tile, matrices[0].cols
        names = buffer_names([matrix.layout for matrix in matrices], tile)
        outs = {}
        for kind in names:
            dtype, columns = buffer_type(kind)
            tokens = tiles.tokens if tiles else self._tokens
            outs[kind] = model.scratch(f"{name}{kind}{cols}", tile, tokens * cols // columns, dtype)
        eps = None if norm is None else model.spec.stream_eps
        quantization = Quantization(names, eps, gate[0] if gate else "", tiles is not None, gathered)
        state = self._state if tiles is None else [tiles.state, *(tiles.lists[:1] if gathered else [])]
        others = [t for t in (norm, gate and gate[1]) if t is not None]
        self._sequence.add(
            quantize_activations(quantization, model.lanes, tile),
            *outs.values(),
            model.sizes(cols // UNIT),
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
        tile, threads = self._tile, self._model.pool.count
        read = [inputs[name] for name in buffer_names([matrix.layout], tile)]
        added = self._model.zeros if added is None else added  # the kernel always reads one
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
        tile, threads = self._tile, self._model.pool.count
        read = [inputs[name] for name in buffer_names([matrix.layout], tile)]
        span = span_of(matrix.cols) if tile > 1 else 1
        kernel = expert_product(matrix.layout, tile, span, shared and tile == 1)
        expert = matrix.layout.size(matrix.rows, matrix.cols) * matrix.layout.dtype.itemsize
        n_bytes = min(expert * tiles.tokens, memory.view(matrix.stream).nbytes)
        parts = threads * ceil(n_bytes / threads / PART_BYTES)
        buffers = matrix.shape, tiles.state, tiles.experts, *read, bias, matrix.stream
        self._sequence.add(kernel, out, *buffers, parts=parts, concurrent=concurrent)
