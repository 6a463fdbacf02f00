"""Latent attention on a GPU: q, k . heads' product . attention . heads' product . o"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from tinygrad import Tensor, dtypes

from engine.description.attention import LatentAttention
from engine.kernels.device_memory import part_of, to_device
from engine.measure.kernel_roles import BufferUse
from engine.targets.buffer_uses import BufferUses
from engine.targets.nvidia.decode_step import DecodeStep
from engine.targets.nvidia.kernels.latent_attention.decode import as_input, latent_key, placed, queries_apart
from engine.targets.nvidia.kernels.latent_attention.heads import LatentHeads
from engine.targets.nvidia.kernels.latent_attention.prompt import (
    head_lists,
    head_rows,
    head_tiles,
    join,
    narrow_rows,
    order_heads,
    take_rows,
)
from engine.targets.nvidia.kernels.products.chosen_experts import ChosenExperts
from engine.targets.nvidia.kernels.products.epilogues import STORE
from engine.targets.nvidia.kernels.products.matmul import fragments_size, matmul
from engine.targets.nvidia.kernels.products.matvec import matvec
from engine.targets.nvidia.kernels.products.runs import Runs
from engine.targets.nvidia.kernels.weights.weight_layout import permuted_size
from engine.targets.nvidia.matrices import Product
from engine.targets.nvidia.norms import Input, Norm, inputs_of
from engine.targets.nvidia.prompt_step import MixedStep, PromptStep, RowsStep
from engine.targets.nvidia.step import Sums
from engine.targets.nvidia.sublayers.attention import AttentionHandler
from engine.targets.nvidia.sublayers.handler import Loading


class LatentAttentionHandler(AttentionHandler):
    """The weights and the cache of latent attention. `qkv` is the product of the stream: queries, the latent elements
    of a key, and its rotated ones. With a matrix before that of `queries`, what that gives comes first in it, `width`
    elements, which `narrow_norm` norms. `of_keys` and `of_values` have a matrix of each head."""

    @classmethod
    def lacks(cls, part: LatentAttention) -> str:
        fits = part.heads > 1 and part.head_dim % (32 if part.head_dim > 128 else 16) == 0
        if not fits:
            return f"latent attention of {part.heads} heads of {part.head_dim} elements"
        return "gates of latent attention" if part.gate else ""

    def _load(self, part: LatentAttention, loading: Loading) -> tuple[Product, ...]:
        weights, self.bias = loading.weights, None
        sizes = part.heads, part.latent, part.rotated, part.plain, part.values
        self.latent = LatentHeads(*sizes, weights.spec.eps)
        self.heads = replace(self.heads, latent=part.latent)
        of_queries, of_keys = [part.q, part.q_rotated], [part.k, part.k_rotated]
        self.queries, self.narrow_norm = None, None
        if part.q_down and part.q_down_norm:
            self.queries = loading.product(*of_queries)
            self.narrow_norm = Norm(weights.vector(part.q_down_norm))
            of_queries = [part.q_down]
        self.qkv = loading.product(*of_queries, *of_keys)
        each = ChosenExperts(part.heads, part.heads, added=False, all_of_them=True)
        self.of_keys, self.of_values = (
            loading.product(weight, experts=each) for weight in (part.of_keys, part.of_values)
        )
        self.latent_norm = loading.vector(part.latent_norm)
        self._lists = loading.head_lists
        between = [self.queries] if self.queries else []
        return self.qkv, *between, self.of_keys, self.of_values, self.o

    def inputs(self, norm: Norm) -> list[Input]:
        return inputs_of(norm, self.qkv)

    @property
    def _first_key(self) -> int:
        """The row of `qkv` with which the key begins."""
        return self.qkv.stack.rows - self.latent.dim

    def decode(self, step: DecodeStep, norm: Norm) -> None:
        h, scale = self.latent, step.input_scale(self.of_keys.single_matrix)
        vectors = step.buffer("vectors", h.rows)
        plain = step.buffer("plain queries", h.heads * permuted_size(h.plain))
        outs = {"plain": plain, "vectors": vectors, "input_scale": scale}
        if self.queries and self.narrow_norm:
            product, width = self.queries, self._first_key
            key = step.buffer("qkv", self.qkv.stack.rows)
            step.multiply(self.qkv, norm, STORE, {"out": key}, "qkv")
            bits = product.stack.input_scale_bits
            x = [step.buffer(f"narrow query {b}", permuted_size(width)) for b in bits]
            norms = [step.input_scales.norm_weight(self.narrow_norm.weight, b) for b in bits]
            of_key = {"vectors": vectors, "key": key, "norm": self.latent_norm}
            step.add(latent_key(h, width, len(bits)), out=x, norms=norms, **of_key)
            kernel = matvec(product.stack, product.schedule, queries_apart(h, False), "queries")
            step.add(kernel, x=step.input_of(product, x), planes=product.planes, **outs)
        else:
            key = step.buffer("key", h.dim)
            step.multiply(self.qkv, norm, queries_apart(h, True), {**outs, "key": key}, "qkv")
            step.add(latent_key(h), vectors=vectors, key=key, norm=self.latent_norm)
        product = self.of_keys
        kernel = matvec(product.stack, product.schedule, placed(h), "head_queries")
        step.add(kernel, vectors=vectors, x=[plain], planes=product.planes)
        product = self.of_values
        attended = self._attend_token(step, vectors, step.input_scale(product.single_matrix))
        out = step.buffer("head results", permuted_size(h.heads * h.values))
        kernel = matvec(product.stack, product.schedule, as_input(h), "head_results")
        scale = step.input_scale(self.o.single_matrix)
        step.add(kernel, out=out, x=[attended], planes=product.planes, input_scale=scale)
        step.finish(self.o, out, "o", bias=self.o_bias)

    def rows(self, step: RowsStep, norm: Norm) -> Sums:
        step.norm(norm)
        vectors, attended = self._vectors(step), self._attended(step)
        self._attend_rows(step, vectors, attended)
        return self._result(step, attended)

    def prefill(self, step: PromptStep, norm: Norm) -> Sums:
        step.norm(norm)
        return self._result(step, self._attend_prompts(step, self._store_vectors(step, self._vectors(step))))

    def mixed(self, step: MixedStep, norm: Norm) -> Sums:
        step.norm(norm)
        vectors = self._vectors(step)
        attended = self._attend_prompts(step, self._store_vectors(step, vectors))
        rows = self._of_replies(step, vectors)
        self._attend_rows(step.replies, rows, attended, step.order, step.first_reply)
        return self._result(step, attended)

    def last_mixed(self, step: MixedStep, norm: Norm) -> Sums:
        step.norm(norm)
        vectors = self._vectors(step)
        self._store_vectors(step, vectors)
        attended = self._attended(step.replies)
        self._attend_rows(step.replies, self._of_replies(step, vectors), attended)
        return self._result(step.replies, attended)

    def store(self, step: PromptStep, norm: Norm) -> None:
        step.norm(norm)
        self._store_vectors(step, self._vectors(step))

    def roles(self, uses: BufferUses) -> None:
        super().roles(uses)
        queries = self.queries.planes if self.queries else []
        uses.add(BufferUse("QKV projection"), *queries, *self.of_keys.planes)
        uses.add(BufferUse("attention output"), *self.of_values.planes)
        uses.add(BufferUse("norm"), self.latent_norm)

    def _vectors(self, step: PromptStep) -> Tensor:
        """Adds the kernels of the queries and the key of each token, before their rotation: float32 (tokens, rows)."""
        h, tokens = self.latent, step.tokens
        made, first_key = step.products(self.qkv, "qkv"), self._first_key
        runs = queries = _runs(step, made, self.qkv)
        of_queries = made
        if self.queries and self.narrow_norm:
            own, sums = _within(runs, made, range(first_key))
            x = step.activations("narrow", first_key)
            weight = step.input_scales.norm_weight(self.narrow_norm.weight, 0)
            kernel = narrow_rows(own, first_key, step.spec.eps, step.order)
            step.add(kernel, out=x, sums=sums, norm=weight)
            of_queries = [
                step.product(part, x, f"queries{i}") for i, part in enumerate(self.queries.matrices)
            ]
            queries = _runs(step, of_queries, self.queries)
        n_plain, n_rotated = h.heads * h.plain, h.heads * h.rotated
        tiles = head_tiles(tokens, h.heads)
        rows = step.buffer("head rows", fragments_size(tiles.size, h.plain), dtypes.float16)
        own, sums = _within(queries, of_queries, range(n_plain))
        step.add(head_rows(h, own, tiles), out=rows, sums=sums)
        latent = self._multiply_heads(step, rows, self.of_keys, "head_queries")
        vectors = step.buffer("vectors", tokens * h.rows)
        rotated, of_rotated = _within(queries, of_queries, range(n_plain, n_plain + n_rotated))
        keys, of_keys = _within(runs, made, range(first_key, first_key + h.dim))
        ins = {"of_queries": of_rotated, "of_keys": of_keys, "norm": self.latent_norm}
        step.add(join(h, rotated, keys, first_key), vectors=vectors, latent=latent, **ins)
        return vectors

    def _store_vectors(self, step: PromptStep, vectors: Tensor) -> Tensor:
        """As `_store_tokens`."""
        return self._store_tokens(step, [Sums(vectors, 1)], (self.latent.rows,))

    def _of_replies(self, step: MixedStep, vectors: Tensor) -> Tensor:
        rows = self.latent.rows
        return part_of(vectors, step.first_reply * rows, step.replies.tokens * rows)

    def _multiply_heads(self, step: PromptStep, x: Tensor, product: Product, name: str) -> Tensor:
        """Adds the product of each head's matrix and activations in places: float32 (heads, tokens, rows)."""
        tokens, heads, matrix = step.tokens, self.latent.heads, product.single_matrix
        tiles, rows = head_tiles(tokens, heads), matrix.rows // heads
        if (tokens, heads) not in self._lists:
            of_tiles = [to_device(array, dtypes.int32) for array in head_lists(tiles)]
            self._lists[tokens, heads] = [*of_tiles, to_device(np.ones(tiles.assignments, np.float32))]
        assignments, owners, factors = self._lists[tokens, heads]
        out = step.buffer(name, heads * tokens * rows)
        kernel = matmul(matrix.layout, tokens, rows, matrix.cols, tiles.tiles, False, name, experts=tiles)
        lists = {"assignments": assignments, "tile_experts": owners, "factors": factors}
        step.add(kernel, out=out, x=x, **lists, planes=matrix.planes)
        return out

    def _result(self, step: PromptStep, attended: Tensor) -> Sums:
        """Adds the products of what heads attend to."""
        h, tiles = self.latent, head_tiles(step.tokens, self.latent.heads)
        taken = step.buffer("taken", fragments_size(tiles.size, h.latent), dtypes.float16)
        step.add(take_rows(h, step.tokens, tiles, step.order), out=taken, attended=attended)
        results = self._multiply_heads(step, taken, self.of_values, "head_results")
        x = step.activations("head results", h.heads * h.values)
        step.add(order_heads(h, step.tokens, step.order), out=x, results=results)
        return self._output(step, x)


def _runs(step: PromptStep, made: Sequence[Sums], product: Product) -> Runs:
    return Runs(step.tokens, tuple(m.parts for m in made), tuple(part.rows for part in product.matrices))


def _within(runs: Runs, made: Sequence[Sums], rows: range) -> tuple[Runs, list[Tensor]]:
    """The runs that have some of the rows, and their sums."""
    own, which = runs.within(rows)
    return own, [made[i].tensor for i in which]
