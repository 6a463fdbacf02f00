"""What the handlers of a decode step on a GPU share: the residual stream, scratch memory, products of the stream.

The last product of a sublayer adds to the residual stream and prepares it for the next product: what the next sublayer
is decides which vectors it writes. If the result is to be normed first, another kernel adds it (`post_norm`). A
LayerNorm needs the mean of the whole stream, so it is a kernel of its own (`layer_norm`).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tinygrad import Tensor, dtypes

from engine.description.spec import ModelSpec
from engine.fixes.async_copies import COPIED_BYTES
from engine.kernels.device_memory import device_zeros
from engine.targets.nvidia.input_scales import InputScales
from engine.targets.nvidia.kernels.products import digit_rows
from engine.targets.nvidia.kernels.products.epilogues import (
    STORE_SQUARES,
    Epilogue,
    add_residual,
    add_to_stream,
    makes_digits,
)
from engine.targets.nvidia.kernels.products.head_norm import HeadNorm
from engine.targets.nvidia.kernels.products.matvec import Brought, matvec
from engine.targets.nvidia.kernels.residual_stream.layer_norm import layer_norm
from engine.targets.nvidia.kernels.residual_stream.post_norm import add_normed, add_normed_blocks
from engine.targets.nvidia.kernels.weights.weight_layout import WeightLayout, permuted_size
from engine.targets.nvidia.matrices import Matrix, Product
from engine.targets.nvidia.norms import Input, Norm, inputs_of
from engine.targets.nvidia.step import Step, StepMemory

# What the end of a product that is added to the stream reads.
_OF_END = "stream", "norms", "bias", "digits_norm"


@dataclass
class ResidualStream:
    """The residual stream as the kernel before leaves it (`epilogues.add_residual`): partial sums of its squares, and
    the inputs of the next products, by `Input.key`: a vector, or its digits and their factors if that kernel made them.
    After a LayerNorm there are no sums: these inputs are normed."""

    parts: Tensor | None
    n_parts: int
    inputs: dict[tuple[int, int, bool], list[Tensor]]


class Division(NamedTuple):
    """What another kernel makes beside its product: digits and factors of a vector of the stream, which is scaled for
    a layout (`digit_rows`)."""

    layout: WeightLayout
    vector: Tensor
    made: list[Tensor]


class Normed(NamedTuple):
    """A product that is to be normed and added to the stream: its rows, partial sums of their squares, how many, and
    the norm's weight."""

    rows: Tensor
    squares: Tensor
    n_squares: int
    norm: Tensor


class DecodeMemory(StepMemory):
    """The memory of decode steps, which all share. A step reads `state`, int32 (token, position, sequence), and writes
    `logits`. `h` is the residual stream; `angles`: of each rope those of the step's position."""

    attention_parts: tuple[Tensor, Tensor]
    """What attention that is split leaves for another kernel: sums and tops (`flash_attention`)."""

    def __init__(self, spec: ModelSpec, input_scales: InputScales) -> None:
        super().__init__(spec, input_scales)
        self.state = device_zeros(3, dtypes.int32)
        self.logits = device_zeros(spec.vocab)
        self.h = device_zeros(spec.dim)
        self.angles = [device_zeros(2 * rope.pairs) for rope in spec.ropes]
        self._parts: dict[int, tuple[Tensor, Tensor]] = {}
        self._inputs: tuple[list[Tensor], list[Tensor]] = [], []

    def stream(
        self, n_parts: int, inputs: Sequence[Input], parity: int, digits: Sequence[Tensor] = ()
    ) -> ResidualStream:
        """The buffers of the residual stream. Kernels alternate (`parity`) between two arrays of partial sums and of
        inputs, because a kernel may read one while it writes the other. Without any sums, the inputs are normed.
        `digits`: those of the input that is to come in digits."""
        while len(self._inputs[parity]) < len(inputs):
            self._inputs[parity].append(device_zeros(permuted_size(self.spec.dim)))
        if n_parts and n_parts not in self._parts:
            self._parts[n_parts] = device_zeros(n_parts), device_zeros(n_parts)
        buffers = {i.key: [buffer] for i, buffer in zip(inputs, self._inputs[parity], strict=False)}
        buffers |= {i.key: [*digits] for i in inputs if digits and i.in_digits}
        return ResidualStream(self._parts[n_parts][parity] if n_parts else None, n_parts, buffers)


class DecodeStep(Step):
    """A decode step after fewer than `limit` tokens, to which handlers add their kernels. `products`: its products in
    their order. Whoever walks over the layers sets the following: `inputs` are those of the products after the
    sublayer; `post_norm`, `scale`, `factor` and `is_followed_beside` are of the sublayer (`Layer`). `own`: a norm of
    the stream, which is added to it with the results."""

    inputs: Sequence[Input]
    post_norm: Tensor | None = None
    scale: Tensor | None = None
    factor = 1.0
    is_followed_beside = False
    own: Norm | None = None

    def __init__(self, memory: DecodeMemory, limit: int, products: Sequence[Product] = ()) -> None:
        super().__init__(memory)
        self.memory, self.limit, self._products = memory, limit, products
        self._n_streams = 0
        self._waiting: list[Normed] = []

    def input_scale(self, matrix: Matrix) -> Tensor:
        """What the input of a product with a matrix is multiplied by."""
        return self.input_scales.of(matrix.layout)

    def multiply(
        self,
        product: Product,
        norm: Norm | tuple[Norm, Norm],
        epilogue: Epilogue,
        buffers: Mapping[str, Tensor | None],
        name: str,
        starts_next: bool = False,
        division: Division | None = None,
        digits: list[Tensor] | None = None,
    ) -> None:
        """Adds a product of the residual stream after a norm, or with one beside it after two norms. `buffers`: the
        kernel's others (`matvec`). `division`: what it makes beside; `digits`: those of its vector, if a kernel has
        made them."""
        norms, stream = norm if isinstance(norm, tuple) else (norm,), self.stream
        x, beside_x = (
            [x for i in inputs_of(norm_of, part) for x in stream.inputs[i.key]] if part else []
            for norm_of, part in ((norms[0], product), (norms[-1], product.beside))
        )
        x = digits or self.input_of(product, x)
        others = {**buffers}
        if division:
            others |= {"other": division.vector}
            others |= zip(("other_digits", "other_factors"), division.made, strict=True)
        n_parts, eps = stream.n_parts if norms[0].is_normed else 0, self.spec.stream_eps
        brings, brought = self._brought(product)
        kernel = matvec(
            product.stack, product.schedule, epilogue, name, n_parts, eps, None, starts_next,
            division and division.layout, brings=brings,
        )  # fmt: skip
        sums = stream.parts if n_parts else None
        ins = {"x": x, "beside_x": beside_x, "planes": product.planes, "brought": brought}
        self.add(kernel, norm_sums=sums, **ins, **others)

    def _brought(self, product: Product) -> tuple[Brought | None, list[Tensor]]:
        """What a product brings to the L2 cache: the beginning of the next product's planes, of the experts that it
        chooses; or, before experts that are not chosen yet, of the product after these, whose weights are read
        meanwhile."""
        behind = itertools.dropwhile(lambda other: other is not product, self._products)
        following, chosen = [*behind][1:], product.experts
        known = next((other for other in following if not other.experts), None)
        used, count, n_blocks = 1, 0, product.n_blocks * product.stack.slots
        if chosen and chosen.chooses and following and following[0].experts:
            known, used, count, n_blocks = following[0], chosen.used, chosen.n, product.n_blocks
        if not (product.schedule.brings and known):
            return None, []
        planes = [(plane, plane.nbytes() // max(count, 1)) for plane in known.planes]
        share = min(1.0, product.schedule.brings * 1e6 / (used * sum(n for _, n in planes))) / n_blocks
        parts = [(plane, int(n * share) // COPIED_BYTES * COPIED_BYTES) for plane, n in planes]
        parts = [(plane, n) for plane, n in parts if n]
        brought = Brought(tuple(n for _, n in parts), known is not following[0], count)
        return brought, [plane for plane, _ in parts]

    def input_of(self, product: Product, x: list[Tensor]) -> list[Tensor]:
        """The vector of a product, or its digits; a kernel makes these if they are not `x` already."""
        if not product.stack.digits or len(x) > 1:
            return x
        (vector,), (layout, _), cols = x, product.stack.matrices[0], product.stack.cols
        n = product.experts.vectors if product.experts else 1
        made = self.digits("x", layout.input_scale_bits, cols, n)
        self.add(digit_rows.divide(layout, cols, n), digits=made[0], factors=made[1], x=vector)
        return made

    def division(self, product: Product, norm: Norm, beside: Product) -> Division | None:
        """How the vector of a product is divided: that of the stream after a norm, if it comes in digits, and the
        kernel of another product can make them: beside several rows of floats of a thread, registers spill."""
        if not product.stack.digits or beside.schedule.rows > 1:
            return None
        (matrix,), (form,) = product.matrices, inputs_of(norm, product)
        vector, *factors = self.stream.inputs[form.key]
        return (
            None if factors else Division(matrix.layout, vector, self.digits("x", form.bits, matrix.cols, 1))
        )

    def digits(self, name: str, bits: int, cols: int, vectors: int) -> list[Tensor]:
        """Scratch memory for the digits of vectors, for a layout of these `input_scale_bits`, and their factors
        (`digit_rows`)."""
        words, factors = digit_rows.form_of(bits).sizes(cols)
        digits = self.buffer(f"{name} in {bits} digits", vectors * words, dtypes.uint32)
        return [digits, self.buffer(f"{name}, {bits} factors", vectors * factors)]

    def beside_stream(self, i: int) -> Tensor:
        return self.buffer(f"stream {i}", self.spec.dim)

    def begin_stream(self, n_parts: int, divides: int = 0) -> dict[str, Tensor | list[Tensor]]:
        """Begins the stream that the next kernel leaves, which has so many blocks: its buffers for that. `divides`: the
        `input_scale_bits` of the input that is to come in digits, if the kernel makes these; 0 if not."""
        parity, weight = self._n_streams % 2, self.input_scales.norm_weight
        buffers: dict[str, Tensor | list[Tensor]]
        digits = self.digits(f"stream {parity}", divides, self.spec.dim, 1) if divides else []
        self.stream = self.memory.stream(n_parts, self.inputs, parity, digits)
        self._n_streams += 1
        whole = [i for i in self.inputs if not (divides and i.in_digits)]
        buffers = {
            "stream": self.memory.h,
            "squares": self.stream.parts,
            "copies": [self.stream.inputs[i.key][0] for i in whole],
            "norms": [weight(i.norm.weight, i.bits) for i in whole],
        }
        if divides:
            (norm,) = (i.norm for i in self.inputs if i.in_digits)
            buffers |= {"digits": digits[0], "factors": digits[1], "digits_norm": weight(norm.weight, 0)}
        return buffers

    def begin_normed(self, rows: Tensor, squares: Tensor, n_squares: int, norm: Norm) -> None:
        """Adds the kernel that begins the stream with rows after a norm. `squares`: so many partial sums of theirs."""
        spec, vector = self.spec, self.input_scales.norm_weight
        if spec.centred:
            biases = [] if norm.bias is None else [vector(norm.bias, 0)]
            kernel = layer_norm(spec.dim, (bool(biases),), spec.stream_eps, permutes=False)
            weight = vector(norm.weight, 0)
            self.add(kernel, copies=[self.memory.h], stream=rows, norms=[weight], biases=biases)
            return
        self.add(
            add_normed(spec.dim, (n_squares,), len(self.inputs), spec.stream_eps, begins=True),
            **self.begin_stream(add_normed_blocks(spec.dim)),
            rows=[rows],
            row_squares=[squares],
            post_norms=[vector(norm.weight, 0)],
        )

    def layer_norm(self) -> None:
        """Adds the kernel that makes the inputs of the next products of a stream that is whole, with LayerNorms."""
        self.stream, vector = self.memory.stream(0, self.inputs, 0), self.input_scales.norm_weight
        biases = [(i.norm.bias, i.bits) for i in self.inputs]
        self.add(
            layer_norm(self.spec.dim, tuple(bias is not None for bias, _ in biases), self.spec.stream_eps),
            copies=[vector for (vector,) in self.stream.inputs.values()],
            stream=self.memory.h,
            norms=[vector(i.norm.weight, i.bits) for i in self.inputs],
            biases=[vector(bias, bits) for bias, bits in biases if bias is not None],
        )

    def finish(
        self,
        product: Product,
        x: Tensor | list[Tensor],
        name: str,
        heads: HeadNorm | None = None,
        **others: Tensor | None,
    ) -> None:
        """Adds the last product of a sublayer, of `x`, whose result is added to the residual stream. `heads`: the norm
        of heads that it has to do; `others`: the buffers that only such products have."""
        dim = self.spec.dim
        brings, brought = self._brought(product)
        vector = self.input_of(product, x if isinstance(x, list) else [x])
        ins = {"x": vector, "planes": product.planes, "brought": brought}
        # Its end is loaded before the kernel waits, so the kernel before must not be one that writes the stream.
        is_older = self.memory.h.uop.base not in self.sequence.calls[-1].src
        loads_first = _OF_END if product.schedule.early_end and is_older else ()
        of = functools.partial(
            matvec,
            product.stack,
            product.schedule,
            name=name,
            heads=heads,
            loads_first=loads_first,
            brings=brings,
        )
        has_bias = others.get("bias") is not None
        assert self.scale is None or self.post_norm is not None
        if (self.is_followed_beside and self.post_norm is None) or self.spec.centred:
            assert self.post_norm is None
            self.add(of(epilogue=add_to_stream(has_bias)), stream=self.memory.h, **ins, **others)
            if not self.is_followed_beside:
                self.layer_norm()
            return
        if self.post_norm is None:
            bits = [i.bits for i in self.inputs if i.in_digits]
            can_divide = len(bits) == 1 and makes_digits(bits[0], product.schedule.block_rows, dim)
            divides = bits[0] if can_divide else 0
            epilogue = add_residual(len(self.inputs) - bool(divides), has_bias, divides)
            self.add(of(epilogue=epilogue), **self.begin_stream(product.n_blocks, divides), **ins, **others)
            return
        rows = self.buffer(f"{name}_rows", dim)
        squares = self.buffer(f"{name}_squares", product.n_blocks)
        self.add(of(epilogue=STORE_SQUARES), out=rows, squares=squares, **ins, **others)
        self._waiting.append(Normed(rows, squares, product.n_blocks, self.post_norm))
        if not self.is_followed_beside:
            self._add_waiting()

    def _add_waiting(self) -> None:
        """Adds the kernel that adds what is to be normed to the stream."""
        spec, normed, own, before = self.spec, self._waiting, self.own, self.stream
        n_parts = tuple(of.n_squares for of in normed)
        kernel = add_normed(
            spec.dim, n_parts, len(self.inputs), spec.post_eps or spec.eps, self.scale is not None,
            factor=self.factor, own=(before.n_parts, spec.stream_eps) if own else None,
        )  # fmt: skip
        self.add(
            kernel,
            **self.begin_stream(add_normed_blocks(spec.dim)),
            rows=[of.rows for of in normed],
            row_squares=[of.squares for of in normed],
            post_norms=[of.norm for of in normed],
            own_squares=before.parts if own else None,
            own_norm=self.input_scales.norm_weight(own.weight, 0) if own else None,
            scale=self.scale,
        )
        self._waiting, self.own = [], None
