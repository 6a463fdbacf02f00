"""The kernels of a prefill step on a GPU: products on tensor cores, and norms, rotation and attention between them.

A product whose result is added to the residual stream leaves partial sums. The norm before the next product adds them.
Chunks of a few tokens take the products of `engine.kernels.gpu.few_columns`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray
from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType

from engine.kernels.gpu.delta_prefill import (
    coefficients_size,
    delta_inputs,
    delta_scan,
    gated_norm,
    vectors_size,
)
from engine.kernels.gpu.device import multiprocessors, shared_limit
from engine.kernels.gpu.device_memory import device_zeros, part_of
from engine.kernels.gpu.embedding import embed_prompt
from engine.kernels.gpu.few_columns import (
    MAX_TOKENS,
    Epilogue,
    FewTiles,
    activated,
    columns_size,
    few_columns,
    few_tiles,
    stored,
)
from engine.kernels.gpu.kernel_sequence import KernelSequence
from engine.kernels.gpu.layer_embeddings import gate_embeddings, layer_embeddings, stride
from engine.kernels.gpu.matmul import expert_tiles, fragments_size, matmul, tiles_for
from engine.kernels.gpu.prefill import (
    Order,
    Runs,
    activate_prompt,
    add_normed_sums,
    norm_prompt,
    rotate_prompt,
    wide_norms,
)
from engine.kernels.gpu.prefill_attention import attend_prompt, combine_prompt, prompt_tiling
from engine.kernels.gpu.prefill_experts import (
    add_shared,
    choose_experts,
    count_assignments,
    router_logits,
    sort_assignments,
)
from engine.kernels.gpu.uops import Activation
from engine.model.lower.gpu_layers import (
    Attention,
    DeltaNet,
    Embedded,
    FeedForward,
    Layer,
    Mixture,
    SideBySide,
)
from engine.model.lower.gpu_matrices import Matrix
from engine.model.lower.gpu_weights import GPUModel
from engine.model.lower.prescales import Prescales


class PrefillKernels:
    """Builds the kernels of prefill steps. A step reads its chunk of the prompt from `prompt`, int32 (position, number
    of tokens), with a cache in blocks also its sequence, and `ids`, int32 (chunk,)."""

    def __init__(self, model: GPUModel, prescales: Prescales, chunk: int) -> None:
        self._model, self._prescales = model, prescales
        size = 2 if model.attention[0].tables is None else 3
        self.prompt, self.ids = device_zeros(size, dtypes.int32), device_zeros(chunk, dtypes.int32)
        self._scratch: dict[tuple[str, int], Tensor] = {}

    def step(self, tokens: int) -> KernelSequence:
        """The kernels for up to `tokens` tokens. Of the last attention or delta net that keeps something they compute
        only that, and nothing after it."""
        return PromptStep(self, self._model, self._prescales, tokens).kernels()

    @property
    def attention_parts(self) -> list[Tensor]:
        """What the attention of the steps so far leaves for another kernel."""
        return [buffer for (name, _), buffer in self._scratch.items() if name == "attention"]

    def buffer(self, name: str, n: int, dtype: DType = dtypes.float32) -> Tensor:
        """Scratch memory that all layers share."""
        if (name, n) not in self._scratch:
            self._scratch[name, n] = device_zeros(n, dtype)
        return self._scratch[name, n]


@dataclass(frozen=True)
class Pending:
    """A product that the next norm adds to the residual stream: `parts` partial sums, with a bias, or normed first. The
    stream is multiplied by `scale` then."""

    sums: Tensor
    parts: int
    bias: Tensor | None
    post_norm: Tensor | None
    scale: Tensor | None


class PromptStep:
    """Builds the kernels of one step."""

    def __init__(self, owner: PrefillKernels, model: GPUModel, prescales: Prescales, tokens: int) -> None:
        self._owner, self._model, self._prescales, self._tokens = owner, model, prescales, tokens
        self._sequence, self._prompt = KernelSequence(), owner.prompt
        self._h = owner.buffer("h", tokens * model.spec.dim)
        self._order: Order = "columns" if tokens <= MAX_TOKENS else "fragments"
        self._pending: Pending | None = None

    def kernels(self) -> KernelSequence:
        layers, last = self._model.layers, self._model.last_cached
        n = next(i for i, layer in enumerate(layers) if layer.mix is last)
        self._embed(self._owner.ids, layers[:n])
        for layer in layers[:n]:
            self._add(layer)
        self._norm(layers[n].norm, self._order, layers[n].is_normed)
        if isinstance(last, Attention):
            self._store_tokens(last)
        else:
            self._remember(last)
        return self._sequence

    def _add(self, layer: Layer) -> None:
        """Adds a sublayer, whose last product is pending."""
        bias = None
        match layer.mix:
            case SideBySide() as both:
                sums, parts = self._side_by_side(both), 1
            case Embedded() as e:
                sums, parts = self._take_embeddings(e, layer.norm)
            case Mixture() as m:
                self._norm(layer.norm, "rows", layer.is_normed)
                sums, parts = self._experts(m, layer.norm)
            case Attention() as a:
                self._norm(layer.norm, self._order, layer.is_normed)
                (sums, parts), bias = self._attend(a), a.o_bias
            case DeltaNet() as d:
                self._norm(layer.norm, self._order, layer.is_normed)
                sums, parts = self._remember(d)
            case FeedForward() as f:
                self._norm(layer.norm, self._order, layer.is_normed)
                sums, parts = self._feed_forward(f)
        self._pending = Pending(sums, parts, bias, layer.post_norm, layer.scale)

    def _embed(self, ids: Tensor, layers: Sequence[Layer]) -> None:
        """Starts the residual stream with the rows of `ids`, and computes the embeddings of `layers`, as far as they
        have any."""
        model, spec, tokens, tables = self._model, self._model.spec, self._tokens, self._model.layer_tables
        layout = model.embedding.single_matrix.layout
        kernel = embed_prompt(layout, tokens, spec.vocab, spec.dim, spec.embedding_scale)
        self._sequence.add(kernel, stream=self._h, ids=ids, planes=model.embedding.planes)
        used = max((layer.mix.layer + 1 for layer in layers if isinstance(layer.mix, Embedded)), default=0)
        if not used:
            return
        assert tables
        self._norm(tables.plain, self._order, keeps_sizes=True)
        sums, parts = self._product(
            tables.projection.single_matrix, self._x, "projection", used * tables.size
        )
        kernel = layer_embeddings(
            tables.table.single_matrix.layout, tokens, spec.vocab, spec.dim, tables.size, tables.layers, parts,
            spec.eps, used, True,
        )  # fmt: skip
        self._embeddings = self._owner.buffer("layer embeddings", used * stride(tokens, tables.size))
        planes = tables.table.planes
        self._sequence.add(
            kernel,
            out=self._embeddings,
            ids=ids,
            sums=sums,
            sizes=self._sizes,
            norm=tables.norm,
            planes=planes,
        )

    def _take_embeddings(self, e: Embedded, plain: NDArray[np.float32]) -> tuple[Tensor, int]:
        """Adds what a layer makes of its embeddings. Its input is not normed; but it is divided by its size, because
        float16 may not hold it."""
        self._norm(plain, self._order, keeps_sizes=True)
        size = e.gate.stack.rows
        gate, parts = self._product(e.gate.single_matrix, self._x, "embedding_gate")
        of_layer = stride(self._tokens, size)
        own = part_of(self._embeddings, e.layer * of_layer, of_layer)
        out = self._activations("embedded", size, self._order)
        kernel = gate_embeddings(self._tokens, size, parts, self._order)
        self._sequence.add(kernel, out=out, sums=gate, sizes=self._sizes, embedding=own)
        return self._product(e.proj.single_matrix, out, "embedding_proj")

    @property
    def _sizes(self) -> Tensor:
        """What tokens were divided by."""
        return self._owner.buffer("sizes", self._tokens)

    def _side_by_side(self, both: SideBySide) -> Tensor:
        """Adds a feed-forward layer and a mixture of experts; returns the sum of their normed results."""
        tokens, spec = self._tokens, self._model.spec
        self._norm(both.dense_norm, self._order)
        dense, dense_parts = self._feed_forward(both.dense)
        self._norm(both.experts_norm, "rows")
        experts, experts_parts = self._experts(both.experts, both.router_norm)
        result = self._owner.buffer("both", tokens * spec.dim)
        kernel = add_normed_sums(tokens, spec.dim, (dense_parts, experts_parts), spec.eps)
        norms = {"first_norm": both.dense_post_norm, "second_norm": both.experts_post_norm}
        self._sequence.add(kernel, out=result, first=dense, second=experts, **norms)
        return result

    def _norm(
        self, weight: NDArray[np.float32], order: Order, is_normed: bool = True, keeps_sizes: bool = False
    ) -> None:
        """Adds the pending product to the residual stream, and norms the stream for products with activations in an
        order."""
        self._x = self._activations("x", self._model.spec.dim, order)
        spec, pending = self._model.spec, self._pending or Pending(self._h, 0, None, None, None)
        kernel = norm_prompt(
            self._tokens, spec.dim, pending.parts, spec.stream_eps,
            post_eps=None if pending.post_norm is None else spec.eps, has_bias=pending.bias is not None, order=order,
            scaled=pending.scale is not None, is_normed=is_normed, keeps_sizes=keeps_sizes,
        )  # fmt: skip
        self._sequence.add(
            kernel,
            x=self._x,
            sizes=self._sizes if keeps_sizes else None,
            stream=self._h,
            sums=pending.sums if pending.parts else None,
            bias=pending.bias,
            post_norm=pending.post_norm,
            scale=pending.scale,
            norm=self._prescales.norm_weight(weight, 0),
        )
        self._pending = None

    def _store_tokens(self, a: Attention) -> Tensor:
        """Rotates queries and keys, and stores keys and values in the cache; returns the queries."""
        heads = a.heads
        queries = self._owner.buffer("queries", self._tokens * heads.query * heads.dim, dtypes.float16)
        runs = [self._product(part, self._x, f"qkv{i}") for i, part in enumerate(a.qkv.matrices)]
        sizes, counts = tuple(part.rows for part in a.qkv.matrices), tuple(n for _, n in runs)
        sums, factors = [t for t, _ in runs], None
        if a.wide:
            factors = self._owner.buffer("factors", 2 * self._tokens)
            rows = (heads.query + heads.kv) * heads.dim
            # A run of values alone is not read.
            n = sum(start < rows for start in accumulate(sizes[:-1], initial=0))
            kernel = wide_norms(heads, self._tokens, counts[:n], sizes[:n], a.bias is not None)
            self._sequence.add(kernel, factors=factors, sums=sums[:n], bias=a.bias)
        cos, sin = self._model.ropes[a.rope]
        self._sequence.add(
            rotate_prompt(heads, self._tokens, counts, sizes, a.bias is not None, a.wide, self._order),
            queries=queries,
            gates=self._attended(a) if heads.gated else None,
            cache=a.cache if a.is_storing else [],
            sums=sums,
            cos=cos,
            sin=sin,
            tables=a.tables if a.is_storing else None,
            prompt=self._prompt,
            bias=a.bias,
            norms=a.norms,
            factors=factors,
            temperature=self._model.temperature,
        )
        return queries

    def _attend(self, a: Attention) -> tuple[Tensor, int]:
        """Adds attention; returns the partial sums of its last product, and their number."""
        queries = self._store_tokens(a)
        heads, tokens, has_sinks = a.heads, self._tokens, a.sinks is not None
        attended = self._attended(a)
        tiling, columns = (
            prompt_tiling(heads, tokens, multiprocessors(), shared_limit()),
            self._order == "columns",
        )
        add, prompt = self._sequence.add, self._prompt
        ins = {"queries": queries, "cache": a.cache, "tables": a.tables, "prompt": prompt}
        if tiling.splits == 1:
            kernel = attend_prompt(heads, tokens, tiling, has_sinks, columns)
            add(kernel, out=attended, **ins, sinks=a.sinks)
        else:
            sums = self._owner.buffer("attention", tiling.sums_size(heads, tokens))
            add(attend_prompt(heads, tokens, tiling), out=sums, **ins)
            combine = combine_prompt(heads, tokens, tiling.splits, has_sinks, columns)
            add(combine, out=attended, sums=sums, prompt=prompt, sinks=a.sinks)
        return self._product(a.o.single_matrix, attended, "o")

    def _attended(self, a: Attention) -> Tensor:
        """The result of attention; before that the factors of its elements, if heads are gated."""
        return self._activations("attended", a.heads.query * a.heads.dim, self._order)

    def _remember(self, d: DeltaNet) -> tuple[Tensor, int]:
        """As `_attend`, a gated delta net."""
        heads, tokens, buffer = d.heads, self._tokens, self._owner.buffer
        made = [self._product(part, self._x, f"delta{i}") for i, part in enumerate(d.inputs.matrices)]
        sums = [t for t, _ in made]
        runs = Runs(tokens, tuple(n for _, n in made), tuple(part.rows for part in d.inputs.matrices))
        of_channels, channels = runs.within(0, heads.channels)
        of_gate, gate = runs.within(heads.channels, heads.channels + heads.width)
        vectors = buffer("delta vectors", vectors_size(heads, tokens))
        coefficients = buffer("delta coefficients", coefficients_size(heads, tokens))
        products, own = buffer("delta products", tokens * heads.width), {**d.vectors}
        norm, add = own.pop("norm"), self._sequence.add
        shared = {
            "memory": d.memory,
            "vectors": vectors,
            "coefficients": coefficients,
            "prompt": self._prompt,
        }
        add(delta_inputs(heads, runs), **shared, sums=sums, **own)
        scan = delta_scan(heads, of_channels)
        add(scan, products=products, **shared, sums=sums[channels], conv=own["conv"])
        remembered = self._activations("remembered", heads.width, self._order)
        kernel = gated_norm(heads, of_gate, self._order)
        add(kernel, out=remembered, products=products, norm=norm, sums=sums[gate])
        return self._product(d.out.single_matrix, remembered, "delta_out")

    def _feed_forward(self, f: FeedForward) -> tuple[Tensor, int]:
        """As `_attend`, a feed-forward layer."""
        out = self._activations("activated", f.width, self._order)
        if len(f.gate_up.matrices) == 1:
            self._gate(f.gate_up.single_matrix, f.activation, out)
        else:
            runs = [self._product(p, self._x, f"gate_up{i}") for i, p in enumerate(f.gate_up.matrices)]
            (gate, a), (up, b) = runs
            kernel = activate_prompt(self._tokens, f.width, (a, b), f.activation, self._order)
            self._sequence.add(kernel, out=out, gate=gate, up=up)
        return self._product(f.down.single_matrix, out, "down")

    def _gate(self, part: Matrix, activation: Activation, out: Tensor) -> None:
        """Adds the product with a matrix whose rows alternate between gate and up."""
        if self._order == "columns":
            self._multiply(part, self._x, self._tiles(part), activated(activation), "gate_up", out=out)
            return
        tiles = tiles_for(self._tokens, part.rows, part.cols, multiprocessors(), True)
        kernel = matmul(part.layout, self._tokens, part.rows, part.cols, tiles, True, "gate_up", activation)
        self._sequence.add(kernel, out=out, x=self._x, prompt=self._prompt, planes=part.planes)

    def _experts(self, m: Mixture, router_norm: NDArray[np.float32]) -> tuple[Tensor, int]:
        """As `_attend`, a mixture of experts. The tokens are sorted by expert, and each tile of them is multiplied by
        its expert's matrices. The products of a token's experts are the partial sums of its result."""
        tokens, dim, width, part = self._tokens, self._model.spec.dim, m.width, m.part
        used, n = part.used, part.count
        tiles = expert_tiles(tokens, used, n)
        n_rows = n + (part.shared is not None)
        logits = self._owner.buffer("router", tokens * n_rows)
        chosen = self._owner.buffer("chosen", tokens * used, dtypes.int32)
        probabilities = self._owner.buffer("probabilities", tokens * used)
        counts = self._owner.buffer("counts", n, dtypes.int32)
        assignments = self._owner.buffer("assignments", tiles.size, dtypes.int32)
        tile_experts = self._owner.buffer("tile_experts", tiles.count, dtypes.int32)
        activated = self._owner.buffer("experts activated", fragments_size(tiles.size, width), dtypes.float16)
        sums = self._owner.buffer("experts", used * tokens * dim)
        router = router_logits(tokens, dim, n_rows, self._model.spec.stream_eps, m.router_bias is not None)
        norm, add, prompt = self._prescales.norm_weight(router_norm, 0), self._sequence.add, self._prompt
        ins = {"norm": norm, "prompt": prompt, "router": m.router_rows, "bias": m.router_bias}
        add(router, logits=logits, stream=self._h, **ins)
        stride = n_rows if part.shared else 0
        choose = choose_experts(tokens, used, n, part.least_sum, stride, m.scales is not None)
        add(choose, chosen=chosen, probabilities=probabilities, logits=logits, scales=m.scales)
        add(count_assignments(tiles), counts=counts, choices=m.choices, chosen=chosen, prompt=prompt)
        lists = {"assignments": assignments, "tile_experts": tile_experts}
        add(sort_assignments(tiles), **lists, counts=counts, chosen=chosen, prompt=prompt)
        matrix, bias = m.gate_up.single_matrix, m.gate_up_bias
        kernel = matmul(
            matrix.layout, tokens, 2 * width, dim, tiles.tiles, True, "experts_gate_up", part.activation,
            tiles, bias is not None,
        )  # fmt: skip
        add(kernel, out=activated, x=self._x, **lists, bias=bias, planes=matrix.planes)
        (matrix,), bias = m.down.matrices, m.down_bias
        kernel = matmul(
            matrix.layout, tokens, dim, width, tiles.tiles, False, "experts_down", experts=tiles,
            has_bias=bias is not None,
        )  # fmt: skip
        add(kernel, out=sums, x=activated, **lists, factors=probabilities, bias=bias, planes=matrix.planes)
        if part.shared and m.down.shared:
            self._norm(router_norm, self._order)
            out = self._activations("shared expert", part.shared.width, self._order)
            self._gate(m.router.matrices[1], part.shared.activation, out)
            result, parts = self._product(m.down.shared, out, "shared down")
            add(add_shared(tokens, dim, parts, n_rows), stream=self._h, sums=result, logits=logits)
        return sums, used

    def _product(self, part: Matrix, x: Tensor, name: str, rows: int = 0) -> tuple[Tensor, int]:
        """Adds a product of activations with the first `rows` rows of a matrix (0: all); returns its partial sums, and
        their number."""
        tokens, rows = self._tokens, rows or part.rows
        if self._order == "columns":
            few = few_tiles(part.layout, tokens, rows, part.cols, multiprocessors(), True)
            out = self._owner.buffer(name, few.splits * tokens * rows)
            kernel = few_columns(part.layout, tokens, rows, part.cols, few, stored(rows), name)
            self._sequence.add(kernel, out=out, x=x, planes=part.planes)
            return out, few.splits
        tiles = tiles_for(tokens, rows, part.cols, multiprocessors(), False)
        out = self._owner.buffer(name, tiles.parts * tokens * rows)
        kernel = matmul(part.layout, tokens, rows, part.cols, tiles, False, name)
        self._sequence.add(kernel, out=out, x=x, prompt=self._prompt, planes=part.planes)
        return out, tiles.parts

    def _tiles(self, part: Matrix) -> FewTiles:
        """How a product of few tokens is divided that leaves one sum."""
        return few_tiles(part.layout, self._tokens, part.rows, part.cols, multiprocessors())

    def _multiply(
        self, part: Matrix, x: Tensor, tiles: FewTiles, epilogue: Epilogue, name: str, **others: Tensor | None
    ) -> None:
        """Adds a product of few tokens. `others`: the buffers of its epilogue."""
        kernel = few_columns(part.layout, self._tokens, part.rows, part.cols, tiles, epilogue, name)
        self._sequence.add(kernel, x=x, planes=part.planes, **others)

    def _activations(self, name: str, cols: int, order: Order) -> Tensor:
        """Scratch activations, float16, in an order. Those of an order or a width are not of another: what is no
        activation is zero."""
        size = columns_size if order == "columns" else fragments_size
        return self._owner.buffer(f"{name} of {cols} in {order}", size(self._tokens, cols), dtypes.float16)
