"""The kernels of a decode step:

    embed . (qkv . attention . o . gate+up . down) for each layer . head . next token

Everything that changes from step to step (the token, its position, keys and values) is in device memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tinygrad import Tensor, dtypes

from engine.kernels.gpu.decode_attention import Split, attention, combine, split_for
from engine.kernels.gpu.device import has_tensor_cores, multiprocessors
from engine.kernels.gpu.device_memory import device_zeros
from engine.kernels.gpu.embedding import embed
from engine.kernels.gpu.flash_attention import FlashSplit, flash_attention, flash_split
from engine.kernels.gpu.kernel_sequence import KernelSequence
from engine.kernels.gpu.kv_cache import Heads
from engine.kernels.gpu.matvec import (
    ARGMAX,
    STORE,
    STORE_BIASED,
    Epilogue,
    activate,
    activated,
    add_residual,
    matvec,
)
from engine.kernels.gpu.sampling import next_token
from engine.kernels.gpu.weight_layout import QUARTER, UNIT, permuted_size
from engine.model.fused.device_sampler import DeviceSampler
from engine.model.fused.packed_model import Layer, PackedModel, Product
from engine.model.fused.prescales import Prescales

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
    """Builds the kernels of decode steps. A step reads `state`, int32 (token, position), and writes `logits`."""

    def __init__(
        self,
        model: PackedModel,
        heads: Heads,
        prescales: Prescales,
        rope_tables: tuple[Tensor, Tensor],
        context: int,
    ) -> None:
        config = model.config
        self._model, self._heads, self._prescales = model, heads, prescales
        self._rope_tables, self._context = rope_tables, context
        self.uses_tensor_cores = has_tensor_cores() and config.head_dim % 16 == 0
        self.state = device_zeros(2, dtypes.int32)
        self.logits = device_zeros(config.vocab)
        self._h = device_zeros(config.dim)
        self._qkv = device_zeros(config.query_size + 2 * config.kv_size)
        self._angles = device_zeros(config.head_dim)
        self._attended = device_zeros(permuted_size(config.query_size))
        self._activated = device_zeros(permuted_size(config.ffn))
        self._gate_up = device_zeros(2 * config.ffn)
        self._parts: dict[int, tuple[Tensor, Tensor]] = {}
        self._inputs: dict[int, Tensor] = {}
        self.context_limits = [_SHORT]
        while (limit := self.context_limits[-1]) < context:
            self.context_limits.append(max(_MEDIUM, limit * 4))
        splits = max(self.split(limit).splits for limit in self.context_limits)
        self.attention_parts = (
            device_zeros(splits * config.query_size),
            device_zeros(splits * config.heads * 2),
        )

    def split(self, limit: int) -> Split | FlashSplit:
        """How attention over up to `limit` tokens is split into thread blocks."""
        choose = flash_split if self.uses_tensor_cores else split_for
        return choose(self._heads, limit, _SHORT, multiprocessors())

    def step(
        self,
        split: Split | FlashSplit,
        history: Tensor,
        sampler: DeviceSampler | None = None,
        penalizes: bool = False,
    ) -> KernelSequence:
        """The kernels of a step whose attention is split by `split`. It writes the next token to `state`, and to
        `history` at the position: the most probable token, or the one that `sampler` chooses."""
        model, step = self._model, KernelSequence()
        stream = self._embed(step)
        for i, layer in enumerate(model.layers):
            bias = [] if layer.bias is None else [layer.bias]
            self._multiply_normed(
                step, layer.qkv, stream, (STORE_BIASED if bias else STORE), [self._qkv], bias, "qkv"
            )
            self._attention(step, layer, split)
            stream = self._add_to_residual(
                step, layer.o, self._attended, layer.gate_up, layer.norms[1], 1, "o"
            )
            self._gate_and_up(step, layer, stream)
            last = i + 1 == len(model.layers)
            following = model.head if last else model.layers[i + 1].qkv
            norm = model.output_norm if last else model.layers[i + 1].norms[0]
            stream = self._add_to_residual(step, layer.down, self._activated, following, norm, 0, "down")
        blocks = model.head.n_blocks
        best = device_zeros(blocks), device_zeros(blocks, dtypes.int32)
        self._multiply_normed(step, model.head, stream, ARGMAX, [self.logits, *best], [], "head")
        if sampler is None:
            step.add(next_token(blocks, self._context), self.state, history, *best)
        else:
            sampler.add_to(step, self.logits, self.state, history, penalizes)
        return step

    def _embed(self, step: KernelSequence) -> ResidualStream:
        model, config = self._model, self._model.config
        first = model.layers[0]
        stream = self._stream(max(first.down.n_blocks, UNIT // QUARTER), first.qkv, 0)
        kernel = embed(
            model.embedding.single_matrix.layout,
            config.vocab,
            config.dim,
            stream.n_parts,
            len(stream.inputs),
            self._context,
            config.head_dim // 2,
        )
        norms = [self._prescales.norm_weight(first.norms[0], bits) for bits in stream.inputs]
        outs = stream.h, stream.parts, *stream.inputs.values(), self._angles
        step.add(kernel, *outs, self.state, *self._rope_tables, *norms, *model.embedding.planes)
        return stream

    def _gate_and_up(self, step: KernelSequence, layer: Layer, stream: ResidualStream) -> None:
        prescale = self._prescales.of(layer.down.single_matrix.layout)
        if len(layer.gate_up.matrices) == 1:
            self._multiply_normed(
                step, layer.gate_up, stream, activated("silu"), [self._activated], [prescale], "gate_up"
            )
            return
        self._multiply_normed(step, layer.gate_up, stream, STORE, [self._gate_up], [], "gate_up")
        step.add(activate(self._model.config.ffn), self._activated, self._gate_up, prescale)

    def _attention(self, step: KernelSequence, layer: Layer, split: Split | FlashSplit) -> None:
        norms = [] if layer.head_norms is None else [layer.head_norms]
        prescale = self._prescales.of(layer.o.single_matrix.layout)
        ins = [layer.keys, layer.values, self._qkv, self._angles, self.state, *norms]
        flash = isinstance(split, FlashSplit)
        kernel = flash_attention(self._heads, split) if flash else attention(self._heads, split)
        if split.splits == 1:
            step.add(kernel, self._attended, *ins, prescale)
            return
        step.add(kernel, *self.attention_parts, *ins)
        step.add(combine(self._heads, split.splits), self._attended, *self.attention_parts, prescale)

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
        eps = self._model.config.norm_eps
        kernel = matvec(product.stack, product.schedule, epilogue, name, stream.n_parts, eps)
        step.add(kernel, *outs, *stream.inputs.values(), stream.parts, *ins, *product.planes)

    def _add_to_residual(
        self,
        step: KernelSequence,
        product: Product,
        x: Tensor,
        following: Product,
        norm: NDArray[np.float32],
        parity: int,
        name: str,
    ) -> ResidualStream:
        """Adds a product of `x` that is added to the residual stream, before `norm` and the product `following`."""
        stream = self._stream(product.n_blocks, following, parity)
        kernel = matvec(product.stack, product.schedule, add_residual(len(stream.inputs)), name)
        norms = [self._prescales.norm_weight(norm, bits) for bits in stream.inputs]
        step.add(kernel, stream.h, stream.parts, *stream.inputs.values(), x, *norms, *product.planes)
        return stream

    def _stream(self, n_parts: int, following: Product, parity: int) -> ResidualStream:
        """The buffers of the residual stream. Kernels alternate (`parity`) between two arrays of partial sums, because
        a kernel may read one while it writes the other."""
        prescales = following.stack.prescale_bits
        for bits in prescales:
            if bits not in self._inputs:
                self._inputs[bits] = device_zeros(permuted_size(self._model.config.dim))
        if n_parts not in self._parts:
            self._parts[n_parts] = device_zeros(n_parts), device_zeros(n_parts)
        return ResidualStream(
            self._h, self._parts[n_parts][parity], n_parts, {bits: self._inputs[bits] for bits in prescales}
        )
