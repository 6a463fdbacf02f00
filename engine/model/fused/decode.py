"""A decode step as kernels:

    embed . (qkv . attention . o . gate+up . down) for each layer . head . next token

All that changes from token to token (the token, its position, keys and values) lies in device memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from tinygrad import Tensor, dtypes

from engine.kernels.gpu.attention import Heads, Split, attention, combine, split_for
from engine.kernels.gpu.device import multiprocessors, tensor_cores
from engine.kernels.gpu.flash_attention import FlashSplit, flash_attention, flash_split
from engine.kernels.gpu.kernel_sequence import KernelSequence
from engine.kernels.gpu.mailbox import zeros
from engine.kernels.gpu.matvec import Best, Epilogue, GateUp, Residual, Store, activate, matvec
from engine.kernels.gpu.packing import QUARTER, UNIT, permuted_size
from engine.kernels.gpu.token import embed, next_token
from engine.model.fused.device_sampler import DeviceSampler
from engine.model.fused.packed_model import Layer, PackedModel, Product
from engine.model.fused.prescales import Floats, Prescales

_SHORT, _MEDIUM = 256, 8192  # tokens that a block takes all of, and that are cut first


@dataclass
class Stream:
    """The residual stream as a producer leaves it: see `Residual`. `inputs` are by the scaling they are for, as
    `Stack.scalings`."""

    h: Tensor
    parts: Tensor
    n_parts: int
    inputs: dict[int, Tensor]


class Decode:
    """`step` gives the kernels of a step. It runs the token and position of `state`, int32, and leaves `logits`."""

    def __init__(
        self, model: PackedModel, heads: Heads, scales: Prescales, tables: tuple[Tensor, Tensor], context: int
    ) -> None:
        config = model.config
        self._model, self._heads, self._scales = model, heads, scales
        self._tables, self._context = tables, context
        self._tensor_cores = tensor_cores() and config.head_dim % 16 == 0
        q_rows = config.heads * config.head_dim
        self.state = zeros(2, dtypes.int32)
        self.logits = zeros(config.vocab)
        self._h = zeros(config.dim)
        self._rows = zeros(q_rows + 2 * config.kv_heads * config.head_dim)
        self._angles = zeros(config.head_dim)
        self._attended, self._activated = zeros(permuted_size(q_rows)), zeros(permuted_size(config.ffn))
        self._gate_up = zeros(2 * config.ffn)
        self._parts: dict[int, tuple[Tensor, Tensor]] = {}
        self._inputs: dict[int, Tensor] = {}
        self.limits = [_SHORT]
        while self.limits[-1] < context:
            self.limits.append(_MEDIUM if self.limits[-1] < _MEDIUM else self.limits[-1] * 4)
        most = max(self.split(limit).splits for limit in self.limits)
        self.partial = zeros(most * q_rows), zeros(most * config.heads * 2)

    def split(self, limit: int) -> Split | FlashSplit:
        """How attention to up to `limit` tokens is cut."""
        rule = flash_split if self._tensor_cores else split_for
        return rule(self._heads, limit, _SHORT, multiprocessors())

    def step(
        self,
        split: Split | FlashSplit,
        history: Tensor,
        drawing: DeviceSampler | None = None,
        penalizes: bool = False,
    ) -> KernelSequence:
        """The kernels of a step whose attention is cut as `split` says. It leaves the next token in `state`, and in
        `history` at the position: the most probable one, or one that `drawing` draws."""
        model, step = self._model, KernelSequence()
        stream = self._embed(step)
        for i, layer in enumerate(model.layers):
            bias = [] if layer.bias is None else [layer.bias]
            self._normed(step, layer.qkv, stream, Store(bool(bias)), [self._rows], bias, "qkv")
            self._attention(step, layer, split)
            stream = self._residual(step, layer.o, self._attended, layer.gate_up, layer.norms[1], 1, "o")
            self._gate_and_up(step, layer, stream)
            last = i + 1 == len(model.layers)
            following = model.head if last else model.layers[i + 1].qkv
            norm = model.output_norm if last else model.layers[i + 1].norms[0]
            stream = self._residual(step, layer.down, self._activated, following, norm, 0, "down")
        blocks = model.head.n_blocks
        best = zeros(blocks), zeros(blocks, dtypes.int32)
        self._normed(step, model.head, stream, Best(), [self.logits, *best], [], "head")
        if drawing is None:
            step.add(next_token(blocks, self._context), self.state, history, *best)
        else:
            drawing.add_to(step, self.logits, self.state, history, penalizes)
        return step

    def _embed(self, step: KernelSequence) -> Stream:
        model, config = self._model, self._model.config
        first = model.layers[0]
        stream = self._stream(max(first.down.n_blocks, UNIT // QUARTER), first.qkv, 0)
        kernel = embed(
            model.embedding.only.packing,
            config.vocab,
            config.dim,
            stream.n_parts,
            len(stream.inputs),
            self._context,
            config.head_dim // 2,
        )
        norms = [self._scales.norm(first.norms[0], scaling) for scaling in stream.inputs]
        outs = stream.h, stream.parts, *stream.inputs.values(), self._angles
        step.add(kernel, *outs, self.state, *self._tables, *norms, *model.embedding.planes)
        return stream

    def _gate_and_up(self, step: KernelSequence, layer: Layer, stream: Stream) -> None:
        prescale = self._scales.of(layer.down.only.packing)
        if len(layer.gate_up.matrices) == 1:
            self._normed(step, layer.gate_up, stream, GateUp(), [self._activated], [prescale], "gate_up")
            return
        self._normed(step, layer.gate_up, stream, Store(), [self._gate_up], [], "gate_up")
        step.add(activate(self._model.config.ffn), self._activated, self._gate_up, prescale)

    def _attention(self, step: KernelSequence, layer: Layer, split: Split | FlashSplit) -> None:
        norms = [] if layer.head_norms is None else [layer.head_norms]
        prescale = self._scales.of(layer.o.only.packing)
        ins = [layer.keys, layer.values, self._rows, self._angles, self.state, *norms]
        flash = isinstance(split, FlashSplit)
        kernel = flash_attention(self._heads, split) if flash else attention(self._heads, split)
        if split.splits == 1:
            step.add(kernel, self._attended, *ins, prescale)
            return
        step.add(kernel, *self.partial, *ins)
        step.add(combine(self._heads, split.splits), self._attended, *self.partial, prescale)

    def _normed(
        self,
        step: KernelSequence,
        product: Product,
        stream: Stream,
        epilogue: Epilogue,
        outs: list[Tensor],
        ins: list[Tensor],
        name: str,
    ) -> None:
        """A product with the normed stream."""
        eps = self._model.config.norm_eps
        kernel = matvec(product.stack, product.schedule, epilogue, name, stream.n_parts, eps)
        step.add(kernel, *outs, *stream.inputs.values(), stream.parts, *ins, *product.planes)

    def _residual(
        self,
        step: KernelSequence,
        product: Product,
        x: Tensor,
        following: Product,
        norm: Floats,
        which: int,
        name: str,
    ) -> Stream:
        """A product that the residual stream takes up, before `norm` and the product `following`."""
        stream = self._stream(product.n_blocks, following, which)
        kernel = matvec(product.stack, product.schedule, Residual(len(stream.inputs)), name)
        norms = [self._scales.norm(norm, scaling) for scaling in stream.inputs]
        step.add(kernel, stream.h, stream.parts, *stream.inputs.values(), x, *norms, *product.planes)
        return stream

    def _stream(self, n_parts: int, following: Product, which: int) -> Stream:
        """Producers take turns with two arrays of parts, since a kernel may read one while it fills the other."""
        scalings = following.stack.scalings
        for s in scalings:
            if s not in self._inputs:
                self._inputs[s] = zeros(permuted_size(self._model.config.dim))
        if n_parts not in self._parts:
            self._parts[n_parts] = zeros(n_parts), zeros(n_parts)
        return Stream(self._h, self._parts[n_parts][which], n_parts, {s: self._inputs[s] for s in scalings})
