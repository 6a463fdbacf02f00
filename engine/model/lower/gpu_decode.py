"""The kernels of a decode step on a GPU:

    embed . for attention: qkv . attention . o
            for a delta net: inputs . delta net . out
            for a feed-forward layer: gate+up . down
            for experts: router . choice, gate+up . down     . head . next token

A feed-forward layer and experts side by side share kernels: the router and the layer's gate+up, and both downs. Another
kernel adds their results.

The last product of a sublayer adds to the residual stream and prepares it for the next product: what the next sublayer
is decides which vectors it writes. If the result is to be normed first, another kernel adds it (`post_norm`).
Everything that changes from step to step (the token, its position, keys and values) is in device memory.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from tinygrad import Tensor, dtypes

from engine.kernels.gpu.decode_block import combine
from engine.kernels.gpu.delta_decode import delta_decode, parts_of
from engine.kernels.gpu.delta_net import HeadNorm
from engine.kernels.gpu.device import multiprocessors
from engine.kernels.gpu.device_memory import device_zeros, part_of
from engine.kernels.gpu.embedding import embed
from engine.kernels.gpu.epilogues import (
    EMBED,
    STORE,
    STORE_BIASED,
    STORE_SQUARES,
    Epilogue,
    activate,
    activated,
    add_residual,
    as_logits,
    routed,
)
from engine.kernels.gpu.flash_attention import FlashSplit, flash_attention, flash_split
from engine.kernels.gpu.kernel_sequence import KernelSequence
from engine.kernels.gpu.kv_cache import Heads
from engine.kernels.gpu.layer_embeddings import layer_embeddings, stride
from engine.kernels.gpu.matvec import matvec
from engine.kernels.gpu.post_norm import add_both, add_both_blocks, add_normed, add_normed_blocks
from engine.kernels.gpu.sampling import next_token
from engine.kernels.gpu.weight_layout import QUARTER, UNIT, permuted_size
from engine.model.lower.device_sampler import DeviceSampler
from engine.model.lower.gpu_layers import (
    Attention,
    DeltaNet,
    Embedded,
    FeedForward,
    Input,
    Layer,
    Mix,
    Mixture,
    SideBySide,
    inputs_of,
)
from engine.model.lower.gpu_matrices import Product
from engine.model.lower.gpu_weights import GPUModel
from engine.model.lower.prescales import Prescales

# Tokens: up to the first number one thread block does the attention of a head; to the second, one captured step serves.
_SHORT, _MEDIUM = 256, 8192


@dataclass
class ResidualStream:
    """The residual stream as the kernel before leaves it (`epilogues.add_residual`): `h`, partial sums of its squares,
    and the inputs of the next products, by `Input.key`. `is_normed`: whether the products norm them."""

    h: Tensor
    parts: Tensor
    n_parts: int
    inputs: dict[tuple[int, int], Tensor]
    is_normed: bool

    @property
    def outs(self) -> dict[str, Tensor | list[Tensor]]:
        """The buffers of a kernel that writes it."""
        return {"stream": self.h, "squares": self.parts, "copies": [*self.inputs.values()]}


class DecodeKernels:
    """Builds the kernels of decode steps. A step reads `state`, int32 (token, position), with a cache in blocks
    also the sequence, and writes `logits`."""

    def __init__(self, model: GPUModel, prescales: Prescales, context: int) -> None:
        spec = model.spec
        self._model, self._prescales, self._context = model, prescales, context
        self.state = device_zeros(2 if model.attention[0].tables is None else 3, dtypes.int32)
        self.logits = device_zeros(spec.vocab)
        self._h = device_zeros(spec.dim)
        self._angles = [device_zeros(2 * rope.pairs) for rope in spec.ropes]
        self._parts: dict[int, tuple[Tensor, Tensor]] = {}
        self._inputs: list[Tensor] = []
        self._scratch: dict[tuple[str, int], Tensor] = {}
        self._experts: dict[int, dict[str, Tensor | None]] = {}
        self.context_limits = [_SHORT]
        while (limit := self.context_limits[-1]) < context:
            self.context_limits.append(max(_MEDIUM, limit * 4))
        splits = max(
            self._split(a.heads, limit).splits for a in model.attention for limit in self.context_limits
        )
        self.attention_parts = (
            device_zeros(splits * max(a.query_size for a in spec.attention)),
            device_zeros(splits * max(a.heads for a in spec.attention) * 2),
        )

    def step(
        self, limit: int, history: Tensor, sampler: DeviceSampler | None = None, penalizes: bool = False
    ) -> KernelSequence:
        """The kernels of a step after fewer than `limit` tokens, one of `context_limits`. It writes the next token to
        `state`, and to `history` at the position: the most probable token, or the one that `sampler` chooses."""
        model, step = self._model, KernelSequence()
        stream = self._embed(step)
        for i, layer in enumerate(model.layers):
            following = model.layers[i + 1] if i + 1 < len(model.layers) else None
            inputs = following.inputs if following else inputs_of(model.output_norm, model.head)
            is_normed, norm = following is None or following.is_normed, layer.norm
            match layer.mix:
                case Attention() as a:
                    x = self._attend(step, a, stream, norm, limit)
                case DeltaNet() as d:
                    x = self._remember(step, d, stream, norm)
                case FeedForward() as f:
                    x = self._gate(step, f, stream, norm)
                case Mixture() as m:
                    self._route(step, m, stream, norm)
                    x = self._choose(step, m, stream, norm)
                case Embedded() as e:
                    x = self._take_embeddings(step, e, stream, norm)
                case SideBySide() as both:
                    stream = self._add_both(step, layer, both, stream, inputs, is_normed, (i + 1) % 2)
                    continue
            stream = self._add(step, layer, x, inputs, is_normed, (i + 1) % 2)
        blocks = model.head.n_blocks
        best = {"largest": device_zeros(blocks), "largest_rows": device_zeros(blocks, dtypes.int32)}
        buffers = {"logits": self.logits, **best}
        epilogue = as_logits(model.spec.softcap)
        self._multiply(step, model.head, stream, model.output_norm, epilogue, buffers, "head")
        if sampler is None:
            step.add(next_token(blocks, self._context), state=self.state, tokens=history, **best)
        else:
            sampler.add_to(step, self.logits, self.state, history, penalizes)
        return step

    def _embed(self, step: KernelSequence) -> ResidualStream:
        model, spec = self._model, self._model.spec
        first = model.layers[0]
        last = model.layers[-1].mix.products[-1]
        tables = model.layer_tables
        inputs = [*first.inputs, *(tables.inputs if tables else [])]
        stream = self._stream(max(last.n_blocks, UNIT // QUARTER), inputs, first.is_normed, 0)
        kernel = embed(
            model.embedding.single_matrix.layout, spec.vocab, spec.dim, stream.n_parts, len(stream.inputs),
            self._context, tuple(rope.pairs for rope in spec.ropes), spec.embedding_scale,
        )  # fmt: skip
        step.add(
            kernel,
            **stream.outs,
            angles=self._angles,
            state=self.state,
            tables=[table for of_rope in model.ropes for table in of_rope],
            norms=self._norms(inputs),
            planes=model.embedding.planes,
        )
        self._embed_layers(step, stream)
        return stream

    def _embed_layers(self, step: KernelSequence, stream: ResidualStream) -> None:
        """Adds the embeddings of layers, if there are any."""
        spec, tables = self._model.spec, self._model.layer_tables
        if tables is None:
            return
        plain = replace(stream, is_normed=False)
        rows = self._buffer("projection", tables.layers * tables.size)
        self._multiply(step, tables.projection, plain, tables.plain, STORE, {"out": rows}, "projection")
        kernel = layer_embeddings(
            tables.table.single_matrix.layout, 1, spec.vocab, spec.dim, tables.size, tables.layers, 1, spec.eps,
            tables.layers, False,
        )  # fmt: skip
        out, planes = self._layer_embeddings, tables.table.planes
        step.add(kernel, out=out, ids=self.state, sums=rows, norm=tables.norm, planes=planes)

    @functools.cached_property
    def _layer_embeddings(self) -> Tensor:
        tables = self._model.layer_tables
        assert tables
        return device_zeros(tables.layers * stride(1, tables.size))

    def _take_embeddings(
        self, step: KernelSequence, e: Embedded, stream: ResidualStream, norm: NDArray[np.float32]
    ) -> Tensor:
        """As `_attend`, for what a layer makes of its embeddings."""
        size = e.gate.stack.rows
        own = part_of(self._layer_embeddings, e.layer * stride(1, size), size)
        out = self._buffer("embedded", permuted_size(size))
        prescale = self._prescales.of(e.proj.single_matrix.layout)
        buffers = {"out": out, "embedding": own, "prescale": prescale}
        self._multiply(step, e.gate, stream, norm, EMBED, buffers, "gate")
        return out

    def _attend(
        self,
        step: KernelSequence,
        a: Attention,
        stream: ResidualStream,
        norm: NDArray[np.float32],
        limit: int,
    ) -> Tensor:
        """Adds attention without its last product; returns that product's input."""
        heads, split = a.heads, self._split(a.heads, limit)
        qkv = self._buffer("qkv", heads.rows)
        attended = self._buffer("attended", permuted_size(heads.query * heads.dim))
        epilogue = STORE if a.bias is None else STORE_BIASED
        buffers = {"out": qkv, "bias": a.bias}
        self._multiply(step, a.qkv, stream, norm, epilogue, buffers, "qkv", split.begins_early)
        kernel = flash_attention(heads, split, a.sinks is not None, a.wide)
        parts = dict(zip(("sums", "tops"), self.attention_parts, strict=True))
        last = {"prescale": self._prescales.of(a.o.single_matrix.layout), "sinks": a.sinks}
        step.add(
            kernel,
            **({"out": attended, **last} if split.splits == 1 else parts),
            cache=a.cache,
            rows=qkv,
            angles=self._angles[a.rope],
            tables=a.tables,
            state=self.state,
            norms=a.norms,
            temperature=self._model.temperature,
        )
        if split.splits > 1:
            kernel = combine(heads, split.splits, a.sinks is not None)
            step.add(kernel, out=attended, **parts, **last, rows=qkv if heads.gated else None)
        return attended

    def _remember(
        self, step: KernelSequence, d: DeltaNet, stream: ResidualStream, norm: NDArray[np.float32]
    ) -> Tensor:
        """As `_attend`, for a gated delta net."""
        rows, out = (
            self._buffer("delta", d.heads.rows),
            self._buffer("remembered", permuted_size(d.heads.width)),
        )
        self._multiply(step, d.inputs, stream, norm, STORE, {"out": rows}, "delta_inputs")
        step.add(
            delta_decode(d.heads, 0, parts_of(d.heads, multiprocessors())),
            out=out,
            squares=self._squares_of(d),
            memory=d.memory,
            rows=rows,
            **d.vectors,
            state=self.state,
            prescale=self._prescales.of(d.out.single_matrix.layout),
        )
        return out

    def _squares_of(self, d: DeltaNet) -> Tensor | None:
        """The partial sums of the squares of heads, if several blocks have a head."""
        parts = parts_of(d.heads, multiprocessors())
        return self._buffer("head_squares", d.heads.value * parts) if parts > 1 else None

    def _head_norm(self, mix: Mix) -> HeadNorm | None:
        """The norm of heads that the last product of a layer is left to do."""
        if not isinstance(mix, DeltaNet) or (parts := parts_of(mix.heads, multiprocessors())) == 1:
            return None
        return HeadNorm(mix.heads.size, parts, mix.heads.eps)

    def _gate(
        self, step: KernelSequence, f: FeedForward, stream: ResidualStream, norm: NDArray[np.float32]
    ) -> Tensor:
        """As `_attend`, for a feed-forward layer."""
        prescale = self._prescales.of(f.down.single_matrix.layout)
        out = self._buffer("activated", permuted_size(f.width))
        if len(f.gate_up.matrices) == 1:
            epilogue = activated(f.activation)
            buffers = {"out": out, "prescale": prescale}
            self._multiply(step, f.gate_up, stream, norm, epilogue, buffers, "gate_up")
        else:
            rows = self._buffer("gate_up", 2 * f.width)
            self._multiply(step, f.gate_up, stream, norm, STORE, {"out": rows}, "gate_up")
            step.add(activate(f.width, f.activation), out=out, rows=rows, prescale=prescale)
        return out

    def _route(
        self, step: KernelSequence, m: Mixture, stream: ResidualStream, norm: NDArray[np.float32]
    ) -> None:
        """Adds the router of a mixture of experts, with the gate and up of a shared expert."""
        logits, shared_x = self._routed(m)
        if m.part.shared and m.down.shared:
            assert m.router_bias is None
            epilogue = routed(m.part.count + 1, m.part.shared.activation)
            prescale = self._prescales.of(m.down.shared.layout)
            buffers = {"logits": logits, "out": shared_x, "prescale": prescale}
        else:
            epilogue = STORE if m.router_bias is None else STORE_BIASED
            buffers = {"out": logits, "bias": m.router_bias}
        self._multiply(step, m.router, stream, norm, epilogue, buffers, "router")

    def _choose(
        self,
        step: KernelSequence,
        m: Mixture,
        stream: ResidualStream,
        norm: NDArray[np.float32],
    ) -> Tensor:
        """As `_attend`, for the experts that the router chooses: their gate and up."""
        part, (logits, _) = m.part, self._routed(m)
        out = self._buffer("experts_activated", part.used * permuted_size(m.width))
        (down,) = m.down.matrices
        buffers = {"out": out, "prescale": self._prescales.of(down.layout), **self._chosen(part.used)}
        buffers |= {"counts": m.choices, "router": logits, "scales": m.scales, "biases": m.gate_up_bias}
        epilogue = activated(part.activation)
        self._multiply(step, m.gate_up, stream, norm, epilogue, buffers, "experts_gate_up")
        return out

    def _routed(self, m: Mixture) -> tuple[Tensor, Tensor | None]:
        """The router's logits, and with a shared expert the input of its last product."""
        if not m.part.shared:
            return self._buffer("router", m.part.count), None
        width = permuted_size(m.part.shared.width)
        return self._buffer("router", m.part.count + 1), self._buffer("shared expert", width)

    def _chosen(self, used: int) -> dict[str, Tensor | None]:
        """The chosen experts, int32 (used,), and their probabilities, float32 (used,)."""
        if used not in self._experts:
            chosen = {"experts": device_zeros(used, dtypes.int32), "probabilities": device_zeros(used)}
            self._experts[used] = {**chosen}
        return self._experts[used]

    def _multiply(
        self,
        step: KernelSequence,
        product: Product,
        stream: ResidualStream,
        norm: NDArray[np.float32] | tuple[NDArray[np.float32], NDArray[np.float32]],
        epilogue: Epilogue,
        buffers: Mapping[str, Tensor | None],
        name: str,
        starts_next: bool = False,
    ) -> None:
        """Adds a product of the residual stream after a norm, or with one beside it after two norms. `buffers`: the
        kernel's others (`matvec`)."""
        norms = norm if isinstance(norm, tuple) else (norm,)
        x, beside_x = (
            [stream.inputs[i.key] for i in inputs_of(norm_of, part)] if part else []
            for norm_of, part in ((norms[0], product), (norms[-1], product.beside))
        )
        n_parts, eps = stream.n_parts if stream.is_normed else 0, self._model.spec.stream_eps
        kernel = matvec(
            product.stack, product.schedule, epilogue, name, n_parts, eps, starts_next=starts_next
        )
        sums = stream.parts if n_parts else None
        step.add(kernel, x=x, beside_x=beside_x, norm_sums=sums, planes=product.planes, **buffers)

    def _add(
        self,
        step: KernelSequence,
        layer: Layer,
        x: Tensor,
        inputs: Sequence[Input],
        is_normed: bool,
        parity: int,
    ) -> ResidualStream:
        """Adds the last product of a sublayer, of `x`, whose result is added to the residual stream, before products
        with these inputs."""
        dim, product = self._model.spec.dim, layer.mix.products[-1]
        if layer.post_norm is not None:
            rows, squares = self._product_to_norm(step, layer.mix, x)
            stream = self._stream(add_normed_blocks(dim), inputs, is_normed, parity)
            step.add(
                add_normed(dim, product.n_blocks, len(inputs), self._model.spec.eps, layer.scale is not None),
                **stream.outs,
                rows=rows,
                row_squares=squares,
                post_norm=layer.post_norm,
                scale=layer.scale,
                norms=self._norms(inputs),
            )
            return stream
        assert layer.scale is None
        name, others = self._last_of(layer.mix)
        stream = self._stream(product.n_blocks, inputs, is_normed, parity)
        epilogue, heads = (
            add_residual(len(inputs), others.get("bias") is not None),
            self._head_norm(layer.mix),
        )
        kernel = matvec(product.stack, product.schedule, epilogue, name, heads=heads)
        norms, planes = self._norms(inputs), product.planes
        step.add(kernel, **stream.outs, x=[x], norms=norms, planes=planes, **others)
        return stream

    def _add_both(
        self, step: KernelSequence, layer: Layer, both: SideBySide, stream: ResidualStream, inputs: Sequence[Input],
        is_normed: bool, parity: int,
    ) -> ResidualStream:  # fmt: skip
        """Adds a feed-forward layer and a mixture of experts, and the sum of their results to the residual stream."""
        dim, eps = self._model.spec.dim, self._model.spec.eps
        stream, experts, dense = replace(stream, is_normed=True), both.experts, both.dense
        if both.first:
            x, (logits, _) = self._buffer("activated", permuted_size(dense.width)), self._routed(experts)
            prescale = self._prescales.of(dense.down.single_matrix.layout)
            buffers = {"logits": logits, "out": x, "prescale": prescale}
            epilogue = routed(experts.part.count, dense.activation)
            norms = both.router_norm, both.dense_norm
            self._multiply(step, both.first, stream, norms, epilogue, buffers, "router_gate_up")
        else:
            self._route(step, experts, stream, both.router_norm)
            x = self._gate(step, dense, stream, both.dense_norm)
        of_experts = self._choose(step, experts, stream, both.experts_norm)
        product, schedule = both.down, both.down.schedule
        rows, squares = self._buffer("both_rows", 2 * dim), self._buffer("both_squares", product.n_blocks)
        kernel = matvec(product.stack, schedule, STORE_SQUARES, "both_down")
        step.add(
            kernel,
            out=rows,
            squares=squares,
            **self._chosen(experts.part.used),
            x=[of_experts],
            beside_x=[x],
            planes=product.planes,
        )
        counts = experts.down.stack.n_blocks(schedule), dense.down.stack.n_blocks(schedule)
        stream = self._stream(add_both_blocks(dim), inputs, is_normed, parity)
        step.add(
            add_both(dim, counts, len(inputs), eps, layer.scale is not None),
            **stream.outs,
            rows=rows,
            row_squares=squares,
            first_norm=both.experts_post_norm,
            second_norm=both.dense_post_norm,
            post_norm=layer.post_norm,
            scale=layer.scale,
            norms=self._norms(inputs),
        )
        return stream

    def _product_to_norm(self, step: KernelSequence, mix: Mix, x: Tensor) -> tuple[Tensor, Tensor]:
        """Adds the last product of a layer, of `x`; returns its result, and partial sums of its squares."""
        product = mix.products[-1]
        name, others = self._last_of(mix)
        rows = self._buffer(f"{name}_rows", self._model.spec.dim)
        squares = self._buffer(f"{name}_squares", product.n_blocks)
        kernel = matvec(product.stack, product.schedule, STORE_SQUARES, name, heads=self._head_norm(mix))
        step.add(kernel, out=rows, squares=squares, x=[x], planes=product.planes, **others)
        return rows, squares

    def _last_of(self, mix: Mix) -> tuple[str, dict[str, Tensor | None]]:
        """The last product of a layer: its name, and the buffers that only such products have."""
        match mix:
            case Attention() as a:
                return "o", {"bias": a.o_bias}
            case Mixture() as m:
                logits, shared_x = self._routed(m)
                shared = {"shared_x": shared_x, "router": None if shared_x is None else logits}
                return "experts_down", {**self._chosen(m.part.used), **shared, "biases": m.down_bias}
            case DeltaNet() as d:
                return "delta_out", {"head_sums": self._squares_of(d)}
        return "down" if isinstance(mix, FeedForward) else "proj", {}

    def _norms(self, inputs: Sequence[Input]) -> list[Tensor]:
        """What the stream is multiplied by for each input."""
        return [self._prescales.norm_weight(i.norm, i.bits) for i in inputs]

    def _split(self, heads: Heads, limit: int) -> FlashSplit:
        """How attention over up to `limit` tokens is split into thread blocks."""
        return flash_split(heads, limit, _SHORT, multiprocessors())

    def _buffer(self, name: str, n: int) -> Tensor:
        """Scratch memory that all layers share, float32 (n,)."""
        if (name, n) not in self._scratch:
            self._scratch[name, n] = device_zeros(n)
        return self._scratch[name, n]

    def _stream(self, n_parts: int, inputs: Sequence[Input], is_normed: bool, parity: int) -> ResidualStream:
        """The buffers of the residual stream. Kernels alternate (`parity`) between two arrays of partial sums, because
        a kernel may read one while it writes the other."""
        while len(self._inputs) < len(inputs):
            self._inputs.append(device_zeros(permuted_size(self._model.spec.dim)))
        if n_parts not in self._parts:
            self._parts[n_parts] = device_zeros(n_parts), device_zeros(n_parts)
        buffers = {i.key: buffer for i, buffer in zip(inputs, self._inputs, strict=False)}
        return ResidualStream(self._h, self._parts[n_parts][parity], n_parts, buffers, is_normed)
