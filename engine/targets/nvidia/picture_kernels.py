"""What the steps of an encoder of pictures on our kernels consist of: norms, activations and products of rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType

from engine.description.sublayers import Vector
from engine.description.vision import (
    Activation,
    Limits,
    Linear,
    Norm,
    VisionSpec,
)
from engine.kernels.device_memory import to_device
from engine.targets.nvidia.fixed_queries import FixedQueries
from engine.targets.nvidia.kernels.device import chip
from engine.targets.nvidia.kernels.kernel_sequence import KernelSequence
from engine.targets.nvidia.kernels.pictures.patches import (
    Form,
    NormShape,
    Terms,
    activate_rows,
    norm_patches,
)
from engine.targets.nvidia.kernels.products.matmul import fragments_size, matmul, tiles_for
from engine.targets.nvidia.matrices import Matrix

_UNLIMITED = 3e38


@dataclass(frozen=True)
class Rows:
    """Rows of patches or tokens on the device: partial sums of a product, and what is to be added; then `activation`,
    if there is one."""

    cols: int
    tensor: Tensor
    parts: int = 1
    bias: Tensor | None = None
    limits: Tensor | None = None
    activation: Activation | None = None

    @property
    def terms(self) -> Terms:
        return Terms(self.parts, self.bias is not None, self.limits is not None)


@dataclass(frozen=True)
class Stacked:
    """A product of some linears whose inputs have the same limits, `clamp`: a matrix with the rows of all. If they are
    `paired`, rows of gate and up alternate."""

    matrix: Matrix
    clamp: Tensor | None
    paired: bool = False


class Parameters(Protocol):
    """What the steps read of an encoder: its vectors, the matrices of its first product, and those of linears that read
    the same."""

    spec: VisionSpec
    vectors: dict[Vector, Tensor]
    kernels: list[Matrix]
    products: dict[tuple[Linear, ...], list[Stacked]]
    fixed_queries: FixedQueries | None


class PictureKernels:
    """Adds kernels to the sequence that was begun last, for rows of patches or tokens: up to `rows`, of which `count`
    has the number."""

    _rows: int
    _count: Tensor
    _stream: Tensor

    def __init__(self, encoder: Parameters, allocate: Callable[[int, DType], Tensor]) -> None:
        self._allocate, self._encoder, self._spec = allocate, encoder, encoder.spec
        self._buffers: dict[tuple[str, int], Tensor] = {}
        self._pending: tuple[Rows, Norm | None] | None = None

    def _begun(self) -> KernelSequence:
        sequence = KernelSequence()
        self._add = sequence.add
        return sequence

    def _buffer(self, name: str, n: int, dtype: DType = dtypes.float32) -> Tensor:
        if (name, n) not in self._buffers:
            self._buffers[name, n] = self._allocate(n, dtype)
        return self._buffers[name, n]

    def _fragments(self, name: str, cols: int) -> Tensor:
        """Scratch activations. Those of a width are not of another: what is no activation is zero."""
        n = fragments_size(self._rows, cols)
        return self._buffer(f"{name} of {cols} in {self._rows}", n, dtypes.float16)

    def _flush(self) -> None:
        """Adds the pending result to the stream."""
        if self._pending:
            self._norm(None, None, None)

    def _norm(self, norm: Norm | None, x: Tensor | None, clamp: Tensor | None) -> None:
        """Adds the pending result to the stream, and norms it to fragments."""
        rows, post = self._pending or (None, None)
        shape = rows.terms if rows else None, norm_shape(post), norm_shape(norm), clamp is not None
        added = {"sums": rows.tensor, "bias": rows.bias, "limits": rows.limits} if rows else {}
        if post:
            added |= {"post_weight": self._vector(post.weight), "post_bias": self._vector(post.bias)}
        if norm:
            added |= {"weight": self._vector(norm.weight), "norm_bias": self._vector(norm.bias)}
        kernel = norm_patches(self._rows, self._spec.dim, *shape)
        self._add(kernel, x=x, stream=self._stream, clamp=clamp, count=self._count, **added)
        self._pending = None

    def _normed(self, x: Rows, norm: Norm, name: str) -> Rows:
        """Plain rows after a norm."""
        out = self._buffer(name, self._rows * x.cols)
        kernel = norm_patches(self._rows, x.cols, norm=norm_shape(norm), form="rows")
        vectors = {"weight": self._vector(norm.weight), "norm_bias": self._vector(norm.bias)}
        self._add(kernel, x=out, stream=x.tensor, count=self._count, **vectors)
        return Rows(x.cols, out)

    def _plain(self, x: Rows, name: str) -> Rows:
        """Rows with nothing to be added."""
        if x.terms == Terms() and not x.activation:
            return x
        return Rows(
            x.cols,
            self._activate(x, self._buffer(name, self._rows * x.cols), "rows", None, None, x.activation),
        )

    def _activated(
        self,
        x: Rows,
        name: str,
        gate: Rows | None,
        clamp: Tensor | None,
        activation: Activation | None = None,
    ) -> Tensor:
        """Fragments of rows, after their activation."""
        out = self._fragments(name, x.cols)
        return self._activate(x, out, "fragments", gate, clamp, activation or x.activation)

    def _activate(
        self,
        x: Rows,
        out: Tensor,
        form: Form,
        gate: Rows | None,
        clamp: Tensor | None,
        activation: Activation | None,
    ) -> Tensor:
        kernel = activate_rows(
            self._rows, x.cols, x.terms, gate.terms if gate else None, activation, clamp is not None, form
        )
        gates = {"gate_sums": gate.tensor, "gate_bias": gate.bias, "gate_limits": gate.limits} if gate else {}
        self._add(
            kernel, out=out, up_sums=x.tensor, up_bias=x.bias, up_limits=x.limits, clamp=clamp, count=self._count,
            **gates,
        )  # fmt: skip
        return out

    def _products(self, linears: tuple[Linear, ...], norm: Norm) -> list[Rows]:
        """The normed stream times the matrices of some linears: the sums of each product."""
        made, x, known = [], None, None
        for i, product in enumerate(self._encoder.products[linears]):
            if x is None or product.clamp is not known:
                x, known = self._fragments("x", self._spec.dim), product.clamp
                self._norm(norm, x, known)
            made.append(self._product(product.matrix, x, f"sums{i}"))
        return made

    def _parts_of(self, linears: tuple[Linear, ...], sums: Sequence[Rows]) -> list[Rows]:
        """The products of linears whose sums are each of one of them."""
        limits = [self._limits((linear,)) for linear in linears]
        return [
            replace(s, bias=self._vector(linear.bias), limits=own)
            for s, linear, own in zip(sums, linears, limits, strict=True)
        ]

    def _linear(self, linear: Linear, x: Tensor, name: str) -> Rows:
        (product,) = self._encoder.products[linear,]
        made = self._product(product.matrix, x, name)
        return replace(made, bias=self._vector(linear.bias), limits=self._limits((linear,)))

    def _product(self, matrix: Matrix, x: Tensor, name: str) -> Rows:
        rows, cols = matrix.rows, matrix.cols
        tiles = tiles_for(matrix.layout, self._rows, rows, cols, chip(), False)
        out = self._buffer(name, tiles.parts * self._rows * rows)
        kernel = matmul(matrix.layout, self._rows, rows, cols, tiles, False, "patches")
        self._add(kernel, out=out, x=x, prompt=self._count, planes=matrix.planes)
        return Rows(rows, out, tiles.parts)

    # --- parameters -------------------------------------------------------------------------------------

    def _vector(self, vector: Vector | None) -> Tensor | None:
        return self._encoder.vectors[vector] if vector else None

    def _joined(self, vectors: Sequence[Vector]) -> Tensor:
        return to_device(np.concatenate([self._encoder.vectors[v].numpy() for v in vectors]))

    def _biases(self, linears: Sequence[Linear]) -> Tensor | None:
        if not any(linear.bias for linear in linears):
            return None
        vectors = [
            self._encoder.vectors[linear.bias].numpy()
            if linear.bias
            else np.zeros(linear.weight.rows, np.float32)
            for linear in linears
        ]
        return to_device(np.concatenate(vectors))

    def _limits(self, linears: Sequence[Linear]) -> Tensor | None:
        return limits_of([linear.outputs for linear in linears])

    def _clamp(self, linear: Linear) -> Tensor | None:
        return limits_of([linear.inputs])


def limits_of(limits: Sequence[Limits | None]) -> Tensor | None:
    """float32 (count, 2), None if there are none."""
    if not any(limits):
        return None
    bounded = [own or (-_UNLIMITED, _UNLIMITED) for own in limits]
    return to_device(np.clip(np.array(bounded, np.float32), -_UNLIMITED, _UNLIMITED))


def norm_shape(norm: Norm | None) -> NormShape | None:
    if norm is None:
        return None
    return NormShape(norm.eps, norm.weight is not None, norm.bias is not None, norm.centred)
