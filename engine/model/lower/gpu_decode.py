"""The kernels of a decode step on a GPU:

    embed . for attention: qkv . attention . o
            for a delta net: inputs . delta net . out
            for a feed-forward layer: gate+up . down
            for experts: router . choice, gate+up . down     . head . next token

The last product of a sublayer adds to the residual stream and prepares it for the next product: what the next sublayer
is decides which vectors it writes. If the result is to be normed first, another kernel adds it (`post_norm`).
Everything that changes from step to step (the token, its position, keys and values) is in device memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tinygrad import Tensor, dtypes

from engine.kernels.gpu.decode_attention import Split, attention, combine, split_for
from engine.kernels.gpu.delta_decode import delta_decode
from engine.kernels.gpu.device import has_tensor_cores, multiprocessors
from engine.kernels.gpu.device_memory import device_zeros
from engine.kernels.gpu.embedding import embed
from engine.kernels.gpu.flash_attention import FlashSplit, flash_attention, flash_split
from engine.kernels.gpu.kernel_sequence import KernelSequence
from engine.kernels.gpu.kv_cache import Heads
from engine.kernels.gpu.matvec import (
    STORE,
    STORE_BIASED,
    STORE_SQUARES,
    Epilogue,
    activate,
    activated,
    add_residual,
    as_logits,
    matvec,
    routed,
)
from engine.kernels.gpu.post_norm import add_normed, add_normed_blocks
from engine.kernels.gpu.sampling import next_token
from engine.kernels.gpu.weight_layout import QUARTER, UNIT, permuted_size
from engine.model.lower.device_sampler import DeviceSampler
from engine.model.lower.gpu_weights import (
    Attention,
    DeltaNet,
    FeedForward,
    GPUModel,
    Layer,
    Mixture,
    Product,
    given,
)
from engine.model.lower.prescales import Prescales

# Tokens: up to the first number one thread block does the attention of a head; to the second, one captured step serves.
_SHORT, _MEDIUM = 256, 8192


@dataclass
class ResidualStream:
    """The residual stream as the kernel before leaves it (`matvec.add_residual`): `h`, partial sums of its squares, and
    the normed input of the next product for each of its prescales (`StackedMatrices.prescale_bits`)."""

    h: Tensor
    parts: Tensor
    n_parts: int
    inputs: dict[int, Tensor]


class DecodeKernels:
    """Builds the kernels of decode steps. A step reads `state`, int32 (token, position), with a cache in blocks
    also the sequence, and writes `logits`."""

    def __init__(self, model: GPUModel, prescales: Prescales, context: int) -> None:
        spec = model.spec
        self._model, self._prescales, self._context = model, prescales, context
        self.uses_tensor_cores = has_tensor_cores() and all(a.head_dim % 16 == 0 for a in spec.attention)
        self.state = device_zeros(2 if model.attention[0].tables is None else 3, dtypes.int32)
        self.logits = device_zeros(spec.vocab)
        self._h = device_zeros(spec.dim)
        self._angles = [device_zeros(2 * rope.pairs) for rope in spec.ropes]
        self._parts: dict[int, tuple[Tensor, Tensor]] = {}
        self._inputs: dict[int, Tensor] = {}
        self._scratch: dict[tuple[str, int], Tensor] = {}
        self._experts: dict[int, tuple[Tensor, Tensor]] = {}
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
            match layer.mix:
                case Attention() as a:
                    x = self._attend(step, a, stream, limit)
                case DeltaNet() as d:
                    x = self._remember(step, d, stream)
                case FeedForward() as f:
                    x = self._gate(step, f, stream)
                case Mixture() as m:
                    x = self._choose(step, m, stream)
            last = i + 1 == len(model.layers)
            bits = model.head.stack.prescale_bits if last else model.layers[i + 1].input_bits
            norm = model.output_norm if last else model.layers[i + 1].norm
            stream = self._add(step, layer, x, bits, norm, (i + 1) % 2)
        blocks = model.head.n_blocks
        best = device_zeros(blocks), device_zeros(blocks, dtypes.int32)
        epilogue = as_logits(model.spec.softcap)
        self._multiply_normed(step, model.head, stream, epilogue, [self.logits, *best], [], "head")
        if sampler is None:
            step.add(next_token(blocks, self._context), self.state, history, *best)
        else:
            sampler.add_to(step, self.logits, self.state, history, penalizes)
        return step

    def _embed(self, step: KernelSequence) -> ResidualStream:
        model, spec = self._model, self._model.spec
        first = model.layers[0]
        last = model.layers[-1].mix.products[-1]
        stream = self._stream(max(last.n_blocks, UNIT // QUARTER), first.input_bits, 0)
        kernel = embed(
            model.embedding.single_matrix.layout, spec.vocab, spec.dim, stream.n_parts, len(stream.inputs),
            self._context, tuple(rope.pairs for rope in spec.ropes), spec.embedding_scale,
        )  # fmt: skip
        norms = [self._prescales.norm_weight(first.norm, bits) for bits in stream.inputs]
        outs = stream.h, stream.parts, *stream.inputs.values(), *self._angles
        tables = [table for tables in model.ropes for table in tables]
        step.add(kernel, *outs, self.state, *tables, *norms, *model.embedding.planes)
        return stream

    def _attend(self, step: KernelSequence, a: Attention, stream: ResidualStream, limit: int) -> Tensor:
        """Adds attention without its last product; returns that product's input."""
        heads, split = a.heads, self._split(a.heads, limit)
        qkv = self._buffer("qkv", heads.rows)
        attended = self._buffer("attended", permuted_size(heads.query * heads.dim))
        bias = given(a.bias)
        self._multiply_normed(step, a.qkv, stream, STORE_BIASED if bias else STORE, [qkv], bias, "qkv")
        norms = given(a.norms)
        prescale = self._prescales.of(a.o.single_matrix.layout)
        ins = [*a.cache, qkv, self._angles[a.rope], *given(a.tables), self.state]
        ins += [*norms, *self._model.temperatures]
        flash = isinstance(split, FlashSplit)
        sinks = given(a.sinks)
        options = {"sinks": bool(sinks), "wide": a.wide}
        kernel = flash_attention(heads, split, **options) if flash else attention(heads, split, **options)
        if split.splits == 1:
            step.add(kernel, attended, *ins, *sinks, prescale)
        else:
            step.add(kernel, *self.attention_parts, *ins)
            kernel = combine(heads, split.splits, bool(sinks))
            gates = [qkv] * heads.gated
            step.add(kernel, attended, *self.attention_parts, prescale, *sinks, *gates)
        return attended

    def _remember(self, step: KernelSequence, d: DeltaNet, stream: ResidualStream) -> Tensor:
        """As `_attend`, for a gated delta net."""
        rows, out = (
            self._buffer("delta", d.heads.rows),
            self._buffer("remembered", permuted_size(d.heads.width)),
        )
        self._multiply_normed(step, d.inputs, stream, STORE, [rows], [], "delta_inputs")
        prescale = self._prescales.of(d.out.single_matrix.layout)
        step.add(delta_decode(d.heads), out, d.memory, rows, *d.vectors, self.state, prescale)
        return out

    def _gate(self, step: KernelSequence, f: FeedForward, stream: ResidualStream) -> Tensor:
        """As `_attend`, for a feed-forward layer."""
        prescale = self._prescales.of(f.down.single_matrix.layout)
        out = self._buffer("activated", permuted_size(f.width))
        if len(f.gate_up.matrices) == 1:
            epilogue = activated(f.activation)
            self._multiply_normed(step, f.gate_up, stream, epilogue, [out], [prescale], "gate_up")
        else:
            rows = self._buffer("gate_up", 2 * f.width)
            self._multiply_normed(step, f.gate_up, stream, STORE, [rows], [], "gate_up")
            step.add(activate(f.width, f.activation), out, rows, prescale)
        return out

    def _choose(self, step: KernelSequence, m: Mixture, stream: ResidualStream) -> Tensor:
        """As `_attend`, for a mixture of experts: the router, and gate and up of the experts that it chooses."""
        part, bias = m.part, given(m.router_bias)
        out = self._buffer("activated", part.used * permuted_size(m.width))
        logits, *shared = self._routed(m)
        epilogue, ins = STORE_BIASED if bias else STORE, bias
        if part.shared and m.down.shared:
            assert not bias
            epilogue = routed(part.count + 1, part.shared.activation)
            ins = [self._prescales.of(m.down.shared.layout)]
        self._multiply_normed(step, m.router, stream, epilogue, [logits, *shared], ins, "router")
        outs = [out, *self._chosen(part.used), m.choices]
        ins = [logits, *given(m.gate_up_bias), self._prescales.of(m.down.single_matrix.layout)]
        self._multiply_normed(
            step, m.gate_up, stream, activated(part.activation), outs, ins, "experts_gate_up"
        )
        return out

    def _routed(self, m: Mixture) -> list[Tensor]:
        """The router's logits, and with a shared expert the input of its last product."""
        if not m.part.shared:
            return [self._buffer("router", m.part.count)]
        width = permuted_size(m.part.shared.width)
        return [self._buffer("router", m.part.count + 1), self._buffer("shared expert", width)]

    def _chosen(self, used: int) -> tuple[Tensor, Tensor]:
        """The chosen experts, int32 (used,), and their probabilities, float32 (used,)."""
        if used not in self._experts:
            self._experts[used] = device_zeros(used, dtypes.int32), device_zeros(used)
        return self._experts[used]

    def _multiply_normed(
        self,
        step: KernelSequence,
        product: Product,
        stream: ResidualStream,
        epilogue: Epilogue,
        outs: list[Tensor],
        ins: list[Tensor],
        name: str,
    ) -> None:
        """Adds a product of the normed residual stream."""
        eps = self._model.spec.stream_eps
        kernel = matvec(product.stack, product.schedule, epilogue, name, stream.n_parts, eps)
        inputs = [stream.inputs[bits] for bits in product.stack.prescale_bits]
        step.add(kernel, *outs, *inputs, stream.parts, *ins, *product.planes)

    def _add(
        self,
        step: KernelSequence,
        layer: Layer,
        x: Tensor,
        bits: Sequence[int],
        norm: NDArray[np.float32],
        parity: int,
    ) -> ResidualStream:
        """Adds the last product of a sublayer, of `x`, whose result is added to the residual stream, before `norm` and
        products with these prescales."""
        product, name = layer.mix.products[-1], "down"
        bias: list[Tensor] = []
        chosen: tuple[Tensor, ...] = ()
        biases: list[Tensor] = []  # of experts
        shared: list[Tensor] = []
        match layer.mix:
            case Attention() as a:
                name, bias = "o", given(a.o_bias)
            case DeltaNet():
                name = "delta_out"
            case Mixture() as m:
                name, chosen, biases = "experts_down", self._chosen(m.part.used), given(m.down_bias)
                logits, *shared = self._routed(m)
                shared += [logits] if shared else []
        dim, blocks = self._model.spec.dim, product.n_blocks
        n_parts = blocks if layer.post_norm is None else add_normed_blocks(dim)
        stream = self._stream(n_parts, bits, parity)
        outs = stream.h, stream.parts, *stream.inputs.values()
        norms = [self._prescales.norm_weight(norm, bits) for bits in stream.inputs]
        if layer.post_norm is None:
            epilogue = add_residual(len(stream.inputs), bool(bias))
            kernel = matvec(product.stack, product.schedule, epilogue, name)
            step.add(kernel, *outs, *chosen, x, *shared, *biases, *norms, *bias, *product.planes)
            return stream
        assert not bias
        rows, squares = self._buffer("rows", dim), self._buffer("squares", blocks)
        kernel = matvec(product.stack, product.schedule, STORE_SQUARES, name)
        step.add(kernel, rows, squares, *chosen, x, *shared, *biases, *product.planes)
        kernel = add_normed(dim, blocks, len(stream.inputs), self._model.spec.eps)
        step.add(kernel, *outs, rows, squares, layer.post_norm, *norms)
        return stream

    def _split(self, heads: Heads, limit: int) -> Split | FlashSplit:
        """How attention over up to `limit` tokens is split into thread blocks."""
        choose = flash_split if self.uses_tensor_cores else split_for
        return choose(heads, limit, _SHORT, multiprocessors())

    def _buffer(self, name: str, n: int) -> Tensor:
        """Scratch memory that all layers share, float32 (n,)."""
        if (name, n) not in self._scratch:
            self._scratch[name, n] = device_zeros(n)
        return self._scratch[name, n]

    def _stream(self, n_parts: int, prescales: Sequence[int], parity: int) -> ResidualStream:
        """The buffers of the residual stream. Kernels alternate (`parity`) between two arrays of partial sums, because
        a kernel may read one while it writes the other."""
        for bits in prescales:
            if bits not in self._inputs:
                self._inputs[bits] = device_zeros(permuted_size(self._model.spec.dim))
        if n_parts not in self._parts:
            self._parts[n_parts] = device_zeros(n_parts), device_zeros(n_parts)
        return ResidualStream(
            self._h, self._parts[n_parts][parity], n_parts, {bits: self._inputs[bits] for bits in prescales}
        )
