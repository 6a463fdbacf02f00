"""Attention on a GPU: qkv . attention . o"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np
from tinygrad import Tensor, dtypes

from engine.description.attention import Attention
from engine.kernels.device_memory import device_zeros, to_device
from engine.loading.weights import Weights
from engine.measure.kernel_roles import BufferUse
from engine.runtime.kv_blocks import BLOCK
from engine.targets.buffer_uses import BufferUses
from engine.targets.nvidia.decode_step import DecodeStep
from engine.targets.nvidia.kernels.attention.decode_block import combine, result_size
from engine.targets.nvidia.kernels.attention.flash_attention import (
    FlashSplit,
    flash_attention,
    flash_split,
    rows_split,
)
from engine.targets.nvidia.kernels.attention.kv_cache import LENGTH_UNIT, Heads, Stored
from engine.targets.nvidia.kernels.attention.prefill_attention import attend_prompt, combine_prompt
from engine.targets.nvidia.kernels.attention.prompt_rotation import (
    norms_over_heads,
    rotate_prompt,
)
from engine.targets.nvidia.kernels.attention.prompt_tiling import PromptTiling, prompt_tiling
from engine.targets.nvidia.kernels.attention.store_rows import store_rows
from engine.targets.nvidia.kernels.device import multiprocessors, shared_limit
from engine.targets.nvidia.kernels.products.activation_order import Order
from engine.targets.nvidia.kernels.products.epilogues import stored
from engine.targets.nvidia.matrices import Product
from engine.targets.nvidia.norms import Norm
from engine.targets.nvidia.prompt_step import MixedStep, PromptStep, RowsStep
from engine.targets.nvidia.step import Sums
from engine.targets.nvidia.sublayers.handler import Handler, Loading

_CHUNK = 16  # elements of a head that tensor cores take at a time
SHORT = 256
"""Tokens up to which one thread block does the attention of a head in decode."""


class AttentionHandler(Handler):
    """The weights and the cache of attention. `norms`: those of queries and of keys, one after the other;
    `is_over_heads`:
    they are over all heads together. `cache`: keys and values (`Heads.cache_planes`), those of another layer if this
    one stores nothing. `tables`: those of blocks, int32 (sequences, `Heads.table_size`), which all layers of a window
    share."""

    @classmethod
    def lacks(cls, part: Any) -> str:
        if not part.has_plain_values:
            return "values of another size than keys"
        if part.limit and part.gate:
            return "limits beside gates"
        if part.own_norms and not part.layer_norms:
            return "norms of heads with weights of their own"
        if part.result_norm:
            return "a norm of what heads give together"
        return f"heads of {part.head_dim} elements" if part.head_dim % _CHUNK else ""

    def __init__(self, part: Attention, loading: Loading) -> None:
        weights = loading.weights
        norms = _norms_of(part, weights)
        window = part.window if part.window < loading.context else 0
        stored: Stored = "keys and values" if part.v else "keys" if part.k else "nothing"
        lent = loading.lent[part.cache_of] if loading.lent and part.cache_of is not None else None
        self.heads = heads = Heads(
            query=part.heads,
            kv=part.kv_heads,
            dim=part.head_dim,
            length=-(-loading.context // LENGTH_UNIT) * LENGTH_UNIT,
            norm_eps=None if norms is None else weights.spec.eps,
            scale=part.scale,
            window=window,
            temperature=weights.spec.temperature is not None and part.tempered,
            block=BLOCK,
            pool=lent.pool if lent else loading.pool(window),
            kv_format=loading.kv,
            stored=stored,
            normed_values=part.has_normed_values and stored != "nothing",
            gates=part.gate.rows // part.heads if part.gate else 0,
            gating=part.gating,
            limit=part.limit,
            chunked=part.chunked and window > 0,
            sloped=bool(part.slopes),
            centred=part.layer_norms,
            ahead=loading.looks_ahead and part.sees_pictures,
            softcap=part.softcap,
            rotates_first=part.rotates_first,
        )
        self.is_storing = stored != "nothing"
        self.is_over_heads = part.has_norms_over_heads
        is_before_dense = not weights.spec.experts
        self.o = Product(loading.matrices(part.o), place="attention's output" if is_before_dense else "")
        self.o_bias = loading.vector(part.o_bias)
        self.products = self._load(part, loading)
        self.norms, self.sinks = norms, loading.vector(part.sinks)
        self.slopes = to_device(np.asarray(part.slopes, np.float32)) if part.slopes else None
        self.rope, self.temperature = part.rope, loading.temperature if part.tempered else None
        self.cos, self.sin = loading.ropes[part.rope]
        if lent:
            self.tables, self.cache = lent.tables, lent.planes
            return
        if window not in loading.tables:
            loading.tables[window] = device_zeros(loading.parallel * heads.table_size, dtypes.int32)
        self.tables = loading.tables[window]
        if part.cache_of is None:
            self.cache = [device_zeros(n, dtype) for n, dtype in heads.cache_planes]
        else:
            self.cache = loading.caches[part.cache_of]
        loading.caches.append(self.cache)

    def _load(self, part: Any, loading: Loading) -> tuple[Product, ...]:
        """Loads what makes queries, keys and values; returns all products."""
        self.qkv = loading.product(*(weight for weight in (part.gate, part.q, part.k, part.v) if weight))
        self.bias = _bias_of(part, loading.weights)
        return self.qkv, self.o

    def split(self, limit: int) -> FlashSplit:
        """How attention over up to `limit` tokens is split into thread blocks in decode."""
        return flash_split(self.heads, limit, SHORT, multiprocessors())

    def decode(self, step: DecodeStep, norm: Norm) -> None:
        qkv = step.buffer("qkv", self.heads.rows)
        epilogue = stored(self.bias is not None, self.heads.limit)
        step.multiply(self.qkv, norm, epilogue, {"out": qkv, "bias": self.bias}, "qkv", starts_next=True)
        attended = self._attend_token(step, qkv, step.input_scale(self.o.single_matrix))
        step.finish(self.o, attended, "o", bias=self.o_bias)

    def _attend_token(self, step: DecodeStep, qkv: Tensor, input_scale: Tensor) -> Tensor:
        """Adds attention of a token's queries, keys and values; returns the result, times the `input_scale` of the next
        product."""
        heads, split, has_sinks = self.heads, self.split(step.limit), self.sinks is not None
        attended = step.buffer("attended", result_size(heads))
        parts = dict(zip(("sums", "tops"), step.memory.attention_parts, strict=True))
        last = {"input_scale": input_scale, "sinks": self.sinks}
        step.add(
            flash_attention(heads, split, has_sinks, self.is_over_heads),
            **({"out": attended, **last} if split.splits == 1 else parts),
            cache=self.cache,
            rows=qkv,
            angles=step.memory.angles[self.rope],
            tables=self.tables,
            state=step.memory.state,
            norms=self.norms,
            temperature=self.temperature,
            slopes=self.slopes,
        )
        if split.splits > 1:
            kernel = combine(heads, split.splits, has_sinks)
            step.add(kernel, out=attended, **parts, **last, rows=qkv if heads.gated else None)
        return attended

    def rows(self, step: RowsStep, norm: Norm) -> Sums:
        step.norm(norm)
        attended = self._attended(step)
        self._attend_rows(step, self._stacked(step), attended)
        return self._output(step, attended)

    def _attend_rows(
        self, step: RowsStep, rows: Tensor, attended: Tensor, order: Order = "columns", out_row: int = 0
    ) -> None:
        """Adds attention of rows of queries, keys and values, whose result are the rows of `attended` from `out_row`
        on, in an order."""
        heads, tokens, has_sinks = self.heads, step.tokens, self.sinks is not None
        ins = {"cos": self.cos, "sin": self.sin, "tables": self.tables, "state": step.state}
        ins |= {"rows": rows, "norms": self.norms}
        if step.checks:
            if heads.has_new:
                step.add(store_rows(heads, tokens, self.is_over_heads), cache=self.cache, **ins)
            heads = replace(heads, is_stored=True)
        split = rows_split(heads, step.limit, tokens, multiprocessors())
        parts = {
            name: step.buffer(name, split.splits * tokens * n)
            for name, n in (("sums", heads.query * heads.dim), ("tops", heads.query * 2))
            if split.splits > 1
        }
        place: tuple[Order, int] = ("columns", 0) if parts else (order, out_row)
        step.add(
            flash_attention(heads, split, has_sinks, self.is_over_heads, tokens, *place),
            **(parts or {"out": attended, "sinks": self.sinks}),
            cache=self.cache,
            **ins,
            temperature=self.temperature,
            slopes=self.slopes,
        )
        if parts:
            kernel = combine(heads, split.splits, has_sinks, tokens, order, out_row)
            step.add(kernel, out=attended, **parts, sinks=self.sinks, rows=rows if heads.gated else None)

    def prefill(self, step: PromptStep, norm: Norm) -> Sums:
        step.norm(norm)
        queries = self._store_tokens(step, step.products(self.qkv, "qkv"))
        return self._output(step, self._attend_prompts(step, queries))

    def mixed(self, step: MixedStep, norm: Norm) -> Sums:
        step.norm(norm)
        made = step.products(self.qkv, "qkv")
        queries = self._store_tokens(step, made)
        attended = self._attend_prompts(step, queries)
        rows = self._of_replies(step, made)
        self._attend_rows(step.replies, rows, attended, step.order, step.first_reply)
        return self._output(step, attended)

    def last_mixed(self, step: MixedStep, norm: Norm) -> Sums:
        step.norm(norm)
        made = step.products(self.qkv, "qkv")
        self._store_tokens(step, made)
        attended = self._attended(step.replies)
        self._attend_rows(step.replies, self._of_replies(step, made), attended)
        return self._output(step.replies, attended)

    def _stacked(self, step: RowsStep) -> Tensor:
        return step.stacked(self.qkv, "qkv", self.bias, self.heads.limit)

    def _of_replies(self, step: MixedStep, made: list[Sums]) -> Tensor:
        return step.of_replies(made, self.qkv, "qkv", self.bias, self.heads.limit)

    def tiling(self, tokens: int, has_any_pieces: bool = False) -> PromptTiling:
        """How the attention of a step of so many tokens is divided. `has_any_pieces`: as `PromptStep` has it."""
        return prompt_tiling(self.heads, tokens, multiprocessors(), shared_limit(), has_any_pieces)

    def _attend_prompts(self, step: PromptStep, queries: Tensor) -> Tensor:
        """Adds attention of pieces of prompts; returns the result."""
        heads, tokens, has_sinks = self.heads, step.tokens, self.sinks is not None
        attended, order = self._attended(step), step.order
        tiling = self.tiling(tokens, step.has_any_pieces)
        ins = {"queries": queries, "cache": self.cache, "tables": self.tables, "prompt": step.prompt}
        ins |= {"slopes": self.slopes, "seen": step.seen if heads.ahead else None}
        if tiling.splits == 1:
            kernel = attend_prompt(heads, tokens, tiling, has_sinks, order)
            step.add(kernel, out=attended, **ins, sinks=self.sinks)
        else:
            sums = step.buffer("attention", tiling.sums_size(heads, tokens))
            step.add(attend_prompt(heads, tokens, tiling), out=sums, **ins)
            kernel = combine_prompt(heads, tokens, tiling.splits, has_sinks, order)
            step.add(kernel, out=attended, sums=sums, prompt=step.prompt, sinks=self.sinks)
        return attended

    def store(self, step: PromptStep, norm: Norm) -> None:
        step.norm(norm)
        self._store_tokens(step, step.products(self.qkv, "qkv"))

    def roles(self, uses: BufferUses) -> None:
        uses.add(BufferUse("QKV projection"), self.bias, *self.qkv.planes)
        uses.add(BufferUse("attention", "context", self.heads.slots, self.heads.window), *self.cache)
        uses.add(BufferUse("attention"), self.tables)
        uses.add(BufferUse("attention output"), *self.o.planes)

    def _store_tokens(self, step: PromptStep, runs: list[Sums], sizes: tuple[int, ...] = ()) -> Tensor:
        """Rotates queries and keys of prompts, and stores keys and values in the cache; returns the queries. `runs`:
        the products with `qkv`, or runs of these `sizes`."""
        heads, tokens, has_bias = self.heads, step.tokens, self.bias is not None
        queries = step.buffer("queries", tokens * heads.query * heads.dim, dtypes.float16)
        sizes = sizes or tuple(part.rows for part in self.qkv.matrices)
        counts = tuple(run.parts for run in runs)
        sums, factors = [run.tensor for run in runs], None
        if self.is_over_heads:
            factors = step.buffer("factors", 2 * tokens)
            rows = (heads.query + heads.kv) * heads.dim
            # A run of values alone is not read.
            n = sum(start < rows for start in accumulate(sizes[:-1], initial=0))
            kernel = norms_over_heads(heads, tokens, counts[:n], sizes[:n], has_bias)
            step.add(kernel, factors=factors, sums=sums[:n], bias=self.bias)
        shape = heads, tokens, counts, sizes, has_bias, self.is_over_heads, step.order
        step.add(
            rotate_prompt(*shape),
            queries=queries,
            gates=self._attended(step) if heads.gated else None,
            cache=self.cache if self.is_storing else [],
            sums=sums,
            cos=self.cos,
            sin=self.sin,
            tables=self.tables if self.is_storing else None,
            prompt=step.prompt,
            bias=self.bias,
            norms=self.norms,
            factors=factors,
            temperature=self.temperature,
        )
        return queries

    def _attended(self, step: PromptStep) -> Tensor:
        """The result of attention; before that, in prefill, the factors of its elements, if heads are gated."""
        return step.activations("attended", self.heads.query * self.heads.dim)

    def _output(self, step: PromptStep, attended: Tensor) -> Sums:
        sums = step.product(self.o.single_matrix, attended, "o")
        return Sums(sums.tensor, sums.parts, self.o_bias)


def _norms_of(part: Attention, weights: Weights) -> Tensor | None:
    is_wide = part.has_norms_over_heads or part.layer_norms
    sizes = (part.query_size, part.kv_size) if is_wide else (part.head_dim, part.head_dim)
    norms = weights.joined_vectors(list(zip((part.q_norm, part.k_norm), sizes, strict=True)), 1.0)
    if norms is None and part.has_normed_values:
        norms = np.ones(sum(sizes), np.float32)
    return None if norms is None else to_device(norms)


def _bias_of(part: Attention, weights: Weights) -> Tensor | None:
    """The biases of queries, keys and values, one after the other, after zeros for the gates."""
    biases = (
        (None, part.gate.rows if part.gate else 0),
        (part.q_bias, part.query_size),
        (part.k_bias, part.kv_size if part.k else 0),
        (part.v_bias, part.kv_size if part.v else 0),
    )
    bias = weights.joined_vectors(biases, 0.0)
    return None if bias is None else to_device(bias)
