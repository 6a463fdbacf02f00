"""What the steps of an encoder of pictures consist of, as tensor graphs: products, attention, norms, activations.
Activations are float32 (patches, dim)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Literal

import numpy as np
from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType

from engine.description.encoder_input import Grid
from engine.description.sublayers import Vector, Weight, parts_of
from engine.description.vision import (
    Activate,
    Activation,
    Affine,
    CrossAttention,
    Limits,
    Linear,
    Merge,
    Neighbours,
    Norm,
    PatchAttention,
    PatchFeedForward,
    ProjectorStep,
    QueryAttention,
    Reduction,
    VisionSpec,
    WindowQueries,
)
from engine.kernels.quantized_matrix import QuantizedMatrix

SCORES = 1 << 26  # of attention, at a time: more queries are done one part after the other
_APART = 128
Ends = Literal["inputs", "outputs"]


@dataclass(frozen=True)
class Parameters:
    """The weights of an encoder on the device. `limits`: those of the inputs and the outputs of products,
    float32 (2,)."""

    matrices: dict[Weight, QuantizedMatrix]
    vectors: dict[Vector, Tensor]
    limits: dict[tuple[Weight, Ends], Tensor]

    def of(self, sublayer: Any) -> list[Tensor]:
        """All of a sublayer, or another part, in an order that follows from its shape."""
        weights, vectors = weights_of(sublayer)
        planes = [plane for weight in weights for plane in self.matrices[weight].planes.values()]
        return [
            *planes,
            *(self.vectors[v] for v in vectors),
            *(self.limits[key] for key, _ in limits_of(sublayer)),
        ]

    def replaced(self, sublayer: Any, own: Sequence[Tensor]) -> Parameters:
        """The parameters of a sublayer, with `own` tensors in place of what `of` gives."""
        left, (weights, vectors) = iter(own), weights_of(sublayer)
        matrices = {}
        for weight in weights:
            matrices[weight] = matrix = copy(self.matrices[weight])
            matrix.planes = {name: next(left) for name in matrix.planes}
        of_vectors = {vector: next(left) for vector in vectors}
        return Parameters(matrices, of_vectors, {key: next(left) for key, _ in limits_of(sublayer)})


class Parts:
    """What steps consist of. `input`: the type of what products read."""

    def __init__(self, parameters: Parameters, input: DType) -> None:
        self._matrices, self._vectors = parameters.matrices, parameters.vectors
        self._limits, self._input = parameters.limits, input

    def attention(
        self, a: PatchAttention, x: Tensor, turns: Sequence[Tensor], hidden: Tensor, windows: Tensor | None
    ) -> Tensor:
        """`turns`: cosines and sines. `hidden`: added to the scores of keys (patches,), or of queries and keys.
        `windows`: their numbers."""
        n: int = x.shape[0]

        def heads(linear: Linear, norm: Norm | None, is_turned: bool) -> Tensor:
            """(heads, n, head_dim)"""
            y = self.linear(linear, x)
            y = self.norm(y, norm) if norm and a.norms_all_heads else y
            y = y.reshape(n, -1, a.head_dim).transpose(0, 1)
            y = y.repeat_interleave(a.heads // int(y.shape[0]), dim=0)
            y = self.norm(y, norm) if norm and not a.norms_all_heads else y
            if is_turned and turns:
                cos, sin = turns
                first, second = y.chunk(2, dim=-1)
                y = (first * cos - second * sin).cat(second * cos + first * sin, dim=-1)
            return y

        q, k = (
            heads(linear, norm, True).cast(self._input).contiguous()
            for linear, norm in ((a.q, a.q_norm), (a.k, a.k_norm))
        )
        v = heads(a.v, a.v_norm, False).cast(self._input).contiguous()
        at_once = n
        while a.heads * at_once * n > SCORES and at_once % 2 == 0:
            at_once //= 2
        parts = []
        for i in range(0, n, at_once):
            own = hidden if hidden.ndim == 1 else hidden[i : i + at_once]
            scores = q[:, i : i + at_once].matmul(k.transpose(1, 2), dtype=dtypes.float32) * a.scale + own
            if windows is not None:
                apart = windows[i : i + at_once].reshape(-1, 1) != windows.reshape(1, -1)
                scores = apart.where(-np.inf, scores)
            parts.append(shares(scores, self._input).matmul(v, dtype=dtypes.float32).contiguous())
        y = parts[0] if len(parts) == 1 else parts[0].cat(*parts[1:], dim=1)
        return self.linear(a.o, y.transpose(0, 1).reshape(n, -1))

    def feed_forward(self, of: PatchFeedForward, x: Tensor) -> Tensor:
        up = self.linear(of.up, x)
        hidden = (
            activated(self.linear(of.gate, x), of.activation) * up
            if of.gate
            else activated(up, of.activation)
        )
        return self.linear(of.down, hidden)

    def queried(self, of: QueryAttention, x: Tensor, hidden: Tensor, places: Tensor) -> Tensor:
        """See `QueryAttention`."""
        queries = self.norm(self._vectors[of.queries].reshape(of.count, -1), of.norm)
        q, k, v = (
            self.linear(linear, rows).reshape(-1, of.heads, of.head_dim).transpose(0, 1).contiguous()
            for linear, rows in ((of.q, queries), (of.k, x + places), (of.v, x))
        )
        scores = q.matmul(k.transpose(1, 2)) * of.head_dim**-0.5 + hidden
        y = scores.softmax(-1).matmul(v).transpose(0, 1).reshape(of.count, -1)
        return self.linear(of.o, y.contiguous())

    def asked_by_windows(self, of: WindowQueries, x: Tensor, spec: VisionSpec) -> Tensor:
        """See `WindowQueries`. What fills the rows are windows of their own."""
        n, m, dim = spec.window, spec.merge, int(x.shape[-1])
        x = self.norm(x, of.norm).contiguous()
        tokens = x.reshape(-1, n * n, m * m, dim)
        queries = tokens.mean(2) if of.patch is None else tokens[:, :, of.patch]
        queries = queries + self._vectors[of.queries].reshape(-1, dim)
        patches = x.reshape(-1, n, n, m, m, dim).permute(0, 1, 3, 2, 4, 5).reshape(-1, n * n * m * m, dim)
        patches = (patches + self._vectors[of.places].reshape(-1, dim)).contiguous()
        y = self.norm(queries.contiguous(), of.query_norm).contiguous()
        y = self._attended(of.cross, self._attended(of.own, y, y), patches)
        y = self.norm(
            y + self.feed_forward(of.feed_forward, y.reshape(-1, dim)).reshape(y.shape), of.last_norm
        )
        return y.reshape(-1, dim).contiguous()

    def _attended(self, of: CrossAttention, x: Tensor, to: Tensor) -> Tensor:
        """Attention of rows (windows, n, dim) to others of the same window."""
        dim = int(x.shape[-1])
        q, k, v = (
            self.linear(linear, rows.reshape(-1, dim))
            .reshape(*rows.shape[:2], of.heads, of.head_dim)
            .transpose(1, 2)
            .contiguous()
            for linear, rows in ((of.q, x), (of.k, to), (of.v, to))
        )
        scores = (q.matmul(k.transpose(2, 3)) * of.head_dim**-0.5).contiguous()
        y = scores.softmax(-1).contiguous().matmul(v).transpose(1, 2).reshape(-1, dim).contiguous()
        return self.norm(x + self.linear(of.o, y).reshape(x.shape), of.norm).contiguous()

    def projected(self, step: ProjectorStep, x: Tensor, spec: VisionSpec, grid: Grid) -> Tensor:
        match step:
            case Neighbours():
                return neighbours(step, x, spec, grid)
            case Norm():
                return self.norm(x, step)
            case Linear():
                return self.linear(step, x)
            case PatchFeedForward():
                return self.feed_forward(step, x)
            case Activate(activation=activation):
                return activated(x, activation)
            case Affine(factor=factor, minus=minus, times=times):
                x = x * factor
                x = x - self._vectors[minus] if minus else x
                return x * self._vectors[times] if times else x
            case Merge(how=how):
                x = x.reshape(-1, spec.last_merge**2, x.shape[-1])
                if how == "mean":
                    return x.mean(1).contiguous()
                x = x.transpose(1, 2) if how == "channels" else x
                return x.reshape(int(x.shape[0]), -1).contiguous()
        raise AssertionError(step)

    def reduced(self, of: Reduction, x: Tensor) -> Tensor:
        """See `Reduction`."""
        squares = x.reshape(-1, of.side**2, x.shape[-1])
        joined = self.norm(squares.reshape(squares.shape[0], -1), of.norm)
        return (squares.mean(1) + self.feed_forward(of.feed_forward, joined)).contiguous()

    def linear(self, linear: Linear, x: Tensor) -> Tensor:
        if linear.inputs:
            x = self._clamped(x, linear, "inputs")
        y = self.product(linear.weight, x, linear.transposed)
        if linear.bias:
            y = y + self._vectors[linear.bias]
        return self._clamped(y, linear, "outputs") if linear.outputs else y

    def _clamped(self, x: Tensor, linear: Linear, ends: Ends) -> Tensor:
        low, high = self._limits[linear.weight, ends].chunk(2)
        return x.maximum(low).minimum(high)

    def product(self, weight: Weight, x: Tensor, transposed: bool = False) -> Tensor:
        """A product of x (n, cols). Its inputs are in memory, so that its kernel only multiplies: weights of another
        type than products take are so for the time of the product."""
        matrix, w = self._matrices[weight], self.matrix(weight)
        w = w if w.dtype == self._input else matrix.dequantize().cast(self._input).contiguous()
        w = w if transposed else w.transpose()
        return x.cast(self._input).contiguous().matmul(w, dtype=dtypes.float32).contiguous()

    def matrix(self, weight: Weight) -> Tensor:
        """(rows, cols)."""
        matrix = self._matrices[weight]
        return matrix.planes["w"] if matrix.format is None else matrix.dequantize()

    def floats(self, vector: Vector | None) -> Tensor:
        """float32 (size,)."""
        assert vector
        return self._vectors[vector]

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        x = x - x.mean(-1, keepdim=True) if norm.centred else x
        x = x * ((x * x).mean(-1, keepdim=True) + norm.eps).rsqrt() if norm.eps is not None else x
        x = x * self._vectors[norm.weight] if norm.weight else x
        return x + self._vectors[norm.bias] if norm.bias else x


def neighbours(of: Neighbours, x: Tensor, spec: VisionSpec, grid: Grid) -> Tensor:
    """See `Neighbours`."""
    rows, columns, m, dim = grid.rows * of.side, grid.columns * of.side, of.side, int(x.shape[-1])
    x = x[: rows * columns]
    if m == spec.merge:  # the patches of a token follow each other
        x = x.reshape(grid.rows, grid.columns, m, m, dim).permute(0, 2, 1, 3, 4)
    edge = of.kernel // 2
    x = x.reshape(rows, columns, dim).pad(((edge, edge), (edge, edge), (0, 0))).contiguous()
    every = [
        x[i : i + rows : of.stride, j : j + columns : of.stride]
        for i in range(of.kernel)
        for j in range(of.kernel)
    ]
    around = every[0].stack(*every[1:], dim=-1)
    return around.reshape(-1, dim * of.kernel**2).contiguous()


def shares(scores: Tensor, type: DType) -> Tensor:
    """The softmax of scores (heads, queries, keys). Maxima and sums are taken of keys that lie `_APART` apart first:
    so threads that run together read neighbouring numbers."""
    heads, queries, keys = (int(n) for n in scores.shape)
    apart = next(n for n in (_APART, 64, 32, 16, 8, 4, 2, 1) if keys % n == 0)
    rows = scores.contiguous().reshape(heads, queries, keys // apart, apart)
    top = rows.max(2).contiguous().max(-1).reshape(heads, queries, 1, 1)
    powers = (rows - top).exp()
    totals = powers.sum(2).contiguous().sum(-1).reshape(heads, queries, 1, 1).contiguous()
    return (powers / totals).cast(type).reshape(heads, queries, keys).contiguous()


def shape_of(value: Any) -> Any:
    """What parts of the same shape share: without the numbers in the names of their tensors, and the limits of
    products."""
    if isinstance(value, Weight | Vector):
        return replace(value, tensor=re.sub(r"\.\d+", "", value.tensor))
    if isinstance(value, Linear):
        own = {name: shape_of(getattr(value, name)) for name in ("weight", "bias")}
        for end in ("inputs", "outputs"):
            own[end] = getattr(value, end) and Limits(0, 0)
        return replace(value, **own)
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return tuple(map(shape_of, value))
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: shape_of(getattr(value, f.name)) for f in fields(value)})
    return value


def weights_of(sublayer: Any) -> tuple[list[Weight], list[Vector]]:
    found = list(parts_of(sublayer))
    weights = [part for part in found if isinstance(part, Weight)]
    return weights, [part for part in found if isinstance(part, Vector)]


def limits_of(value: Any) -> list[tuple[tuple[Weight, Ends], Limits]]:
    """The limits of all products in a description."""
    if isinstance(value, Linear):
        ends: list[tuple[Ends, Limits | None]] = [("inputs", value.inputs), ("outputs", value.outputs)]
        return [((value.weight, end), limits) for end, limits in ends if limits]
    if isinstance(value, tuple):
        return [found for item in value for found in limits_of(item)]
    if is_dataclass(value):
        return [found for field in fields(value) for found in limits_of(getattr(value, field.name))]
    return []


def activated(x: Tensor, activation: Activation) -> Tensor:
    if activation == "silu":
        return x.silu()
    if activation == "relu2":
        return x.relu().square()
    if activation == "quick gelu":
        return x.quick_gelu()
    if activation == "gelu":
        return x.gelu()  # tinygrad's is the form with tanh
    return 0.5 * x * (1 + (x * 0.5**0.5).erf())
