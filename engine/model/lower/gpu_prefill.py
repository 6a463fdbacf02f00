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
from engine.kernels.gpu.device_memory import device_zeros
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
from engine.kernels.gpu.matmul import expert_tiles, fragments_size, matmul, tiles_for
from engine.kernels.gpu.prefill import Order, Runs, activate_prompt, norm_prompt, rotate_prompt, wide_norms
from engine.kernels.gpu.prefill_attention import attend_prompt, combine_prompt, prompt_tiling
from engine.kernels.gpu.prefill_experts import (
    add_shared,
    choose_experts,
    count_assignments,
    router_logits,
    sort_assignments,
)
from engine.kernels.gpu.uops import Activation
from engine.model.lower.gpu_weights import (
    Attention,
    DeltaNet,
    FeedForward,
    GPUModel,
    Layer,
    Matrix,
    Mixture,
    given,
)
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
        """The kernels for up to `tokens` tokens. Of the last attention or delta net they compute only what it keeps,
        and nothing after it."""
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
    """A product that the next norm adds to the residual stream: `parts` partial sums, with a bias, or normed first."""

    sums: Tensor
    parts: int
    bias: Tensor | None
    post_norm: Tensor | None


class PromptStep:
    """Builds the kernels of one step."""

    def __init__(self, owner: PrefillKernels, model: GPUModel, prescales: Prescales, tokens: int) -> None:
        self._owner, self._model, self._prescales, self._tokens = owner, model, prescales, tokens
        self._sequence, self._prompt = KernelSequence(), owner.prompt
        self._h = owner.buffer("h", tokens * model.spec.dim)
        self._order: Order = "columns" if tokens <= MAX_TOKENS else "fragments"
        self._pending: Pending | None = None

    def kernels(self) -> KernelSequence:
        model = self._model
        self._embed(self._owner.ids)
        last = model.last_cached
        for layer in model.layers:
            self._norm(layer.norm, "rows" if isinstance(layer.mix, Mixture) else self._order)
            match layer.mix:
                case Attention() as a:
                    queries = self._store_tokens(a)
                    if a is last:
                        break
                    self._attend(layer, a, queries)
                case DeltaNet() as d:
                    self._remember(layer, d)
                    if d is last:
                        break
                case FeedForward() as f:
                    self._feed_forward(layer, f)
                case Mixture() as m:
                    self._experts(layer, m)
        return self._sequence

    def _embed(self, ids: Tensor) -> None:
        """Starts the residual stream with the rows of `ids`."""
        model, spec = self._model, self._model.spec
        layout = model.embedding.single_matrix.layout
        kernel = embed_prompt(layout, self._tokens, spec.vocab, spec.dim, spec.embedding_scale)
        self._sequence.add(kernel, self._h, ids, *model.embedding.planes)

    def _norm(self, weight: NDArray[np.float32], order: Order) -> None:
        """Adds the pending product to the residual stream, and norms the stream for products with activations in an
        order."""
        self._x = self._activations("x", self._model.spec.dim, order)
        spec, pending = self._model.spec, self._pending
        extra = given(pending.sums, pending.bias, pending.post_norm) if pending else []
        kernel = norm_prompt(
            self._tokens, spec.dim, pending.parts if pending else 0, spec.stream_eps,
            post_norm=pending is not None and pending.post_norm is not None,
            bias=pending is not None and pending.bias is not None, order=order,
        )  # fmt: skip
        self._sequence.add(kernel, self._x, self._h, *extra, self._prescales.norm_weight(weight, 0))
        self._pending = None

    def _store_tokens(self, a: Attention) -> Tensor:
        """Rotates queries and keys, and stores keys and values in the cache; returns the queries."""
        heads = a.heads
        queries = self._owner.buffer("queries", self._tokens * heads.query * heads.dim, dtypes.float16)
        runs = [self._product(part, self._x, f"qkv{i}") for i, part in enumerate(a.qkv.matrices)]
        sizes, counts = tuple(part.rows for part in a.qkv.matrices), tuple(n for _, n in runs)
        sums, bias = [t for t, _ in runs], given(a.bias)
        factors: list[Tensor] = []
        if a.wide:
            factors = [self._owner.buffer("factors", 2 * self._tokens)]
            rows = (heads.query + heads.kv) * heads.dim
            # A run of values alone is not read.
            n = sum(start < rows for start in accumulate(sizes[:-1], initial=0))
            kernel = wide_norms(heads, self._tokens, counts[:n], sizes[:n], bool(bias))
            self._sequence.add(kernel, *factors, *sums[:n], *bias)
        extra = [*bias, *given(a.norms), *factors, *self._model.temperatures]
        kernel = rotate_prompt(heads, self._tokens, counts, sizes, bool(bias), a.wide, self._order)
        ropes, tables = self._model.ropes[a.rope], given(a.tables)
        gates = [self._attended(a)] * heads.gated
        self._sequence.add(kernel, queries, *gates, *a.cache, *sums, *ropes, *tables, self._prompt, *extra)
        return queries

    def _attend(self, layer: Layer, a: Attention, queries: Tensor) -> None:
        heads, tokens, sinks = a.heads, self._tokens, given(a.sinks)
        attended = self._attended(a)
        tiling, columns = (
            prompt_tiling(heads, tokens, multiprocessors(), shared_limit()),
            self._order == "columns",
        )
        ins = [queries, *a.cache, *given(a.tables), self._prompt]
        if tiling.splits == 1:
            kernel = attend_prompt(heads, tokens, tiling, bool(sinks), columns)
            self._sequence.add(kernel, attended, *ins, *sinks)
        else:
            sums = self._owner.buffer("attention", tiling.sums_size(heads, tokens))
            self._sequence.add(attend_prompt(heads, tokens, tiling), sums, *ins)
            combine = combine_prompt(heads, tokens, tiling.splits, bool(sinks), columns)
            self._sequence.add(combine, attended, sums, self._prompt, *sinks)
        sums, parts = self._product(a.o.single_matrix, attended, "o")
        self._pending = Pending(sums, parts, a.o_bias, layer.post_norm)

    def _attended(self, a: Attention) -> Tensor:
        """The result of attention; before that the factors of its elements, if heads are gated."""
        return self._activations("attended", a.heads.query * a.heads.dim, self._order)

    def _remember(self, layer: Layer, d: DeltaNet) -> None:
        """Adds a gated delta net, whose last product is pending."""
        heads, tokens, buffer = d.heads, self._tokens, self._owner.buffer
        made = [self._product(part, self._x, f"delta{i}") for i, part in enumerate(d.inputs.matrices)]
        sums = [t for t, _ in made]
        runs = Runs(tokens, tuple(n for _, n in made), tuple(part.rows for part in d.inputs.matrices))
        of_channels, channels = runs.within(0, heads.channels)
        of_gate, gate = runs.within(heads.channels, heads.channels + heads.width)
        vectors = buffer("delta vectors", vectors_size(heads, tokens))
        coefficients = buffer("delta coefficients", coefficients_size(heads, tokens))
        products, (conv, *scalars, norm) = buffer("delta products", tokens * heads.width), d.vectors
        add, made_of_inputs, prompt = self._sequence.add, (vectors, coefficients), self._prompt
        add(delta_inputs(heads, runs), *made_of_inputs, d.memory, *sums, prompt, conv, *scalars)
        scan = delta_scan(heads, of_channels)
        add(scan, products, d.memory, *made_of_inputs, *sums[channels], prompt, conv)
        remembered = self._activations("remembered", heads.width, self._order)
        add(gated_norm(heads, of_gate, self._order), remembered, products, norm, *sums[gate])
        out, parts = self._product(d.out.single_matrix, remembered, "delta_out")
        self._pending = Pending(out, parts, None, layer.post_norm)

    def _feed_forward(self, layer: Layer, f: FeedForward) -> None:
        out = self._activations("activated", f.width, self._order)
        if len(f.gate_up.matrices) == 1:
            self._gate(f.gate_up.single_matrix, f.activation, out)
        else:
            runs = [self._product(p, self._x, f"gate_up{i}") for i, p in enumerate(f.gate_up.matrices)]
            (gate, a), (up, b) = runs
            kernel = activate_prompt(self._tokens, f.width, (a, b), f.activation, self._order)
            self._sequence.add(kernel, out, gate, up)
        sums, parts = self._product(f.down.single_matrix, out, "down")
        self._pending = Pending(sums, parts, None, layer.post_norm)

    def _gate(self, part: Matrix, activation: Activation, out: Tensor) -> None:
        """Adds the product with a matrix whose rows alternate between gate and up."""
        if self._order == "columns":
            self._multiply(part, self._x, self._tiles(part), activated(activation), "gate_up", [out])
            return
        tiles = tiles_for(self._tokens, part.rows, part.cols, multiprocessors(), True)
        kernel = matmul(part.layout, self._tokens, part.rows, part.cols, tiles, True, "gate_up", activation)
        self._sequence.add(kernel, out, self._x, self._prompt, *part.planes)

    def _experts(self, layer: Layer, m: Mixture) -> None:
        """The tokens are sorted by expert, and each tile of them is multiplied by its expert's matrices. The products
        of a token's experts are the partial sums of its result."""
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
        activated = self._owner.buffer("activated", fragments_size(tiles.size, width), dtypes.float16)
        sums = self._owner.buffer("experts", used * tokens * dim)
        router = router_logits(tokens, dim, n_rows, self._model.spec.stream_eps, m.router_bias is not None)
        norm = self._prescales.norm_weight(layer.norm, 0)
        add = self._sequence.add
        add(router, logits, self._h, norm, self._prompt, m.router_rows, *given(m.router_bias))
        stride = n_rows if part.shared else 0
        add(choose_experts(tokens, used, n, m.part.least_sum, stride), chosen, probabilities, logits)
        add(count_assignments(tiles), counts, m.choices, chosen, self._prompt)
        add(sort_assignments(tiles), assignments, tile_experts, counts, chosen, self._prompt)
        matrix, bias = m.gate_up.single_matrix, m.gate_up_bias
        kernel = matmul(
            matrix.layout, tokens, 2 * width, dim, tiles.tiles, True, "experts_gate_up", part.activation,
            tiles, bias is not None,
        )  # fmt: skip
        add(kernel, activated, self._x, assignments, tile_experts, *given(bias), *matrix.planes)
        (matrix,), bias = m.down.matrices, m.down_bias
        kernel = matmul(
            matrix.layout, tokens, dim, width, tiles.tiles, False, "experts_down", experts=tiles,
            bias=bias is not None,
        )  # fmt: skip
        add(kernel, sums, activated, assignments, tile_experts, probabilities, *given(bias), *matrix.planes)
        if part.shared and m.down.shared:
            self._norm(layer.norm, self._order)
            out = self._activations("shared expert", part.shared.width, self._order)
            self._gate(m.router.matrices[1], part.shared.activation, out)
            result, parts = self._product(m.down.shared, out, "shared down")
            add(add_shared(tokens, dim, parts, n_rows), self._h, result, logits)
        self._pending = Pending(sums, used, None, layer.post_norm)

    def _product(self, part: Matrix, x: Tensor, name: str, order: Order | None = None) -> tuple[Tensor, int]:
        """Adds a product of activations in an order; returns its partial sums, and their number."""
        tokens = self._tokens
        if (order or self._order) == "columns":
            few = self._tiles(part, divided=True)
            out = self._owner.buffer(name, few.splits * tokens * part.rows)
            self._multiply(part, x, few, stored(part.rows), name, [out])
            return out, few.splits
        tiles = tiles_for(tokens, part.rows, part.cols, multiprocessors(), False)
        out = self._owner.buffer(name, tiles.parts * tokens * part.rows)
        kernel = matmul(part.layout, tokens, part.rows, part.cols, tiles, False, name)
        self._sequence.add(kernel, out, x, self._prompt, *part.planes)
        return out, tiles.parts

    def _tiles(self, part: Matrix, divided: bool = False) -> FewTiles:
        """How a product of few tokens is divided."""
        return few_tiles(part.layout, self._tokens, part.rows, part.cols, multiprocessors(), divided)

    def _multiply(
        self, part: Matrix, x: Tensor, tiles: FewTiles, epilogue: Epilogue, name: str, outs: Sequence[Tensor],
        ins: Sequence[Tensor] = (),
    ) -> None:  # fmt: skip
        """Adds a product of few tokens."""
        kernel = few_columns(part.layout, self._tokens, part.rows, part.cols, tiles, epilogue, name)
        self._sequence.add(kernel, *outs, x, *ins, *part.planes)

    def _activations(self, name: str, cols: int, order: Order) -> Tensor:
        """Scratch activations, float16, in an order. Those of an order are not of another: what is no activation is
        zero."""
        size = columns_size if order == "columns" else fragments_size
        return self._owner.buffer(f"{name} in {order}", size(self._tokens, cols), dtypes.float16)
