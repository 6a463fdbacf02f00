"""An encoder of pictures as tensor graphs (`engine.description.vision`): every device that tinygrad supports.

A picture's patches fill a step of some more, one of few sizes, so that the steps are captured once. What fills it is
hidden from attention. A sublayer is a captured step of its own: other work can be done between two of them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Generator, Sequence
from copy import copy
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray
from tinygrad import Device, Tensor, TinyJit, dtypes
from tinygrad.dtype import DType

from engine.description.encoder_input import Grid, as_read, encoder_input, waves
from engine.description.sublayers import Vector, Weight
from engine.description.vision import (
    Activate,
    Activation,
    Affine,
    Limits,
    Linear,
    Merge,
    Norm,
    PatchAttention,
    PatchFeedForward,
    PatchSublayer,
    Projector,
    ProjectorStep,
    QueryAttention,
    VisionSpec,
    parts_of,
)
from engine.kernels.quantized_matrix import QuantizedMatrix
from engine.loading.fixed_rows import fixed_rows
from engine.loading.weights import FileWeights
from engine.runtime.pictures import Pixels, Progress, part_by_part
from engine.targets.graph.parts import load_matrix

_SCORES = 1 << 26  # of attention, at a time: more queries are done one part after the other
_CAPTURED = 3  # sizes whose captured steps are kept
_APART = 128
Ends = Literal["inputs", "outputs"]
Floats = NDArray[np.float32]


class GraphEncoder:
    """Holds the weights, quantized as in the file. Activations are float32, and products of GPUs have float16 inputs,
    unless the weights are float32. Sublayers of the same shape share a captured step, which gets their weights."""

    def __init__(self, weights: FileWeights, spec: VisionSpec) -> None:
        """Raises ModelFileError."""
        self.spec = spec
        matrices = {weight: load_matrix(weights, weight) for weight in spec.weights()}
        self._host = {vector: weights.vector(vector) for vector in spec.vectors()}
        self._fixed = fixed_rows(weights, spec)
        on_host = {
            spec.summary,
            spec.positions and spec.positions.table,
            *(row.vector for row in self._fixed),
        }
        vectors = {v: Tensor(data).realize() for v, data in self._host.items() if v not in on_host}
        self._limits = {
            key: Tensor(np.array(limits, np.float32)).realize()
            for key, limits in _limits((spec.sublayers, spec.projector_steps))
        }
        is_gpu = not Device.DEFAULT.startswith("CPU")
        self._input = dtypes.float16 if is_gpu and not spec.is_float32 else dtypes.float32
        self._all = Parameters(matrices, vectors, self._limits)
        self._steps: OrderedDict[int, dict[PatchSublayer | Projector | str, Callable[..., Tensor]]] = (
            OrderedDict()
        )

    def encode(self, rgbs: Sequence[Pixels]) -> Generator[Progress, None, Floats]:
        """See `PictureEncoder`."""
        return part_by_part(rgbs, self._encode)

    def _encode(self, rgb: NDArray[np.uint8]) -> Generator[Progress, None, Floats]:
        spec = self.spec
        grid = Grid.of(spec, rgb.shape[1], rgb.shape[0])
        of = encoder_input(spec, rgb, self._host.__getitem__)
        n, total = len(of.patches), len(spec.sublayers) + 1
        size = _size_of(n, spec.merge**2)
        others = [_filled(a, size) for a in (of.cos, of.sin) if a is not None]
        hidden = np.where(np.arange(size) < n, 0, -np.inf).astype(np.float32)
        others.append(Tensor(hidden).realize())
        if of.windows is not None:
            others.append(Tensor(np.pad(of.windows[:, 0], (0, size - n), "edge")).realize())
        first = [_filled(a, size) for a in (of.patches, of.added) if a is not None]
        x = self._captured(size, "embed", self._embed)(*first)
        tokens, parts = spec.queries or grid.rows * grid.columns, dict[Projector, Floats]()
        of_keys = [Tensor(hidden).realize(), _filled(waves(grid, spec.out), size)] if spec.queries else []
        earlier = dict[int, Tensor]()
        for done, sublayer in enumerate((None, *spec.sublayers)):
            if sublayer:
                yield Progress(done, total)
                shape = _without_layer(sublayer)
                step = self._captured(size, shape, partial(self._sublayer, sublayer, len(others)))
                x = step(x, *others, *self._all.of(sublayer))
            if any(done in projector.earlier for projector in spec.projectors):
                earlier[done] = x.clone().realize()  # the next step of this shape writes there
            for projector in spec.projectors_after(done):
                project = self._captured(size, projector, partial(self._project, projector))
                parts[projector] = project(x, *(earlier[i] for i in projector.earlier), *of_keys).numpy()[
                    :tokens
                ]
        embeddings = np.concatenate([parts[projector] for projector in spec.projectors], axis=1)
        return as_read(spec, embeddings, grid, self._fixed.__getitem__)

    def preparations(self) -> Sequence[Callable[[], None]]:
        """None: steps are compiled when a picture needs them."""
        return ()

    def _captured(
        self, size: int, key: PatchSublayer | Projector | str, run: Callable[..., Tensor]
    ) -> Callable[..., Tensor]:
        """A step for so many patches."""
        steps = self._steps.setdefault(size, {})
        self._steps.move_to_end(size)
        while len(self._steps) > _CAPTURED:
            self._steps.popitem(last=False)
        if key not in steps:
            jit = TinyJit(run)
            jit.cnt = 1  # capture at the first call, not at the second
            steps[key] = cast(Callable[..., Tensor], jit)
        return steps[key]

    # --- steps: activations are float32 (patches, dim) ---------------------------------------------------

    def _embed(self, patches: Tensor, added: Tensor | None = None) -> Tensor:
        spec, parts = self.spec, Parts(self._all, self._input)
        first, *more = (parts.product(kernel, patches) for kernel in spec.kernels)
        x = sum(more, start=first)
        if spec.bias:
            x = x + self._all.vectors[spec.bias]
        is_later = spec.positions is not None and spec.positions.after_norm
        if added is not None and not is_later:
            x = x + added
        x = parts.norm(x, spec.norm) if spec.norm else x
        if added is not None and is_later:
            x = x + added
        return x.contiguous().realize()

    def _sublayer(self, sublayer: PatchSublayer, n_others: int, x: Tensor, *inputs: Tensor) -> Tensor:
        """`inputs`: what all sublayers read, and the weights of the one that is computed in the shape of this."""
        others, own = inputs[:n_others], inputs[n_others:]
        parts, operator = Parts(self._all.replaced(sublayer, own), self._input), sublayer.operator
        h = parts.norm(x, sublayer.norm)
        if isinstance(operator, PatchAttention):
            *turns, hidden = others[:-1] if self.spec.window else others
            y = parts.attention(operator, h, turns, hidden, others[-1] if operator.windowed else None)
        else:
            y = parts.feed_forward(operator, h)
        y = parts.norm(y, sublayer.post_norm) if sublayer.post_norm else y
        return (x + y).contiguous().realize()

    def _project(self, projector: Projector, x: Tensor, *others: Tensor) -> Tensor:
        """`others`: x after earlier sublayers; for fixed queries, what is added to the scores of patches, and the waves
        of their places."""
        parts, count = Parts(self._all, self._input), len(projector.earlier)
        earlier, of_keys = others[:count], others[count:]
        x = earlier[0].cat(*earlier[1:], x, dim=-1) if earlier else x
        for step in projector.steps:
            if isinstance(step, QueryAttention):
                x = parts.queried(step, x, *of_keys)
            else:
                x = parts.projected(step, x, self.spec)
        return x.contiguous().realize()


@dataclass(frozen=True)
class Parameters:
    """The weights of an encoder on the device. `limits`: those of the inputs and the outputs of products,
    float32 (2,)."""

    matrices: dict[Weight, QuantizedMatrix]
    vectors: dict[Vector, Tensor]
    limits: dict[tuple[Weight, Ends], Tensor]

    def of(self, sublayer: PatchSublayer) -> list[Tensor]:
        """All of a sublayer, in an order that follows from its shape."""
        weights, vectors = _weights_of(sublayer)
        planes = [plane for weight in weights for plane in self.matrices[weight].planes.values()]
        return [
            *planes,
            *(self.vectors[v] for v in vectors),
            *(self.limits[key] for key, _ in _limits(sublayer)),
        ]

    def replaced(self, sublayer: PatchSublayer, own: Sequence[Tensor]) -> Parameters:
        """The parameters of a sublayer, with `own` tensors in place of what `of` gives."""
        left, (weights, vectors) = iter(own), _weights_of(sublayer)
        matrices = {}
        for weight in weights:
            matrices[weight] = matrix = copy(self.matrices[weight])
            matrix.planes = {name: next(left) for name in matrix.planes}
        of_vectors = {vector: next(left) for vector in vectors}
        return Parameters(matrices, of_vectors, {key: next(left) for key, _ in _limits(sublayer)})


class Parts:
    """What steps consist of. `input`: the type of what products read."""

    def __init__(self, parameters: Parameters, input: DType) -> None:
        self._matrices, self._vectors = parameters.matrices, parameters.vectors
        self._limits, self._input = parameters.limits, input

    def attention(
        self, a: PatchAttention, x: Tensor, turns: Sequence[Tensor], hidden: Tensor, windows: Tensor | None
    ) -> Tensor:
        """`turns`: cosines and sines. `hidden`: added to the scores of keys (patches,). `windows`: their numbers."""
        n: int = x.shape[0]

        def heads(linear: Linear, norm: Norm | None, is_turned: bool) -> Tensor:
            """(heads, n, head_dim)"""
            y = self._linear(linear, x)
            y = self.norm(y, norm) if norm and a.norms_all_heads else y
            y = y.reshape(n, a.heads, a.head_dim).transpose(0, 1)
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
        while a.heads * at_once * n > _SCORES and at_once % 2 == 0:
            at_once //= 2
        parts = []
        for i in range(0, n, at_once):
            scores = q[:, i : i + at_once].matmul(k.transpose(1, 2), dtype=dtypes.float32) * a.scale + hidden
            if windows is not None:
                apart = windows[i : i + at_once].reshape(-1, 1) != windows.reshape(1, -1)
                scores = apart.where(-np.inf, scores)
            parts.append(_shares(scores, self._input).matmul(v, dtype=dtypes.float32).contiguous())
        y = parts[0] if len(parts) == 1 else parts[0].cat(*parts[1:], dim=1)
        return self._linear(a.o, y.transpose(0, 1).reshape(n, -1))

    def feed_forward(self, of: PatchFeedForward, x: Tensor) -> Tensor:
        up = self._linear(of.up, x)
        hidden = (
            _activated(self._linear(of.gate, x), of.activation) * up
            if of.gate
            else _activated(up, of.activation)
        )
        return self._linear(of.down, hidden)

    def queried(self, of: QueryAttention, x: Tensor, hidden: Tensor, places: Tensor) -> Tensor:
        """See `QueryAttention`."""
        queries = self.norm(self._vectors[of.queries].reshape(of.count, -1), of.norm)
        q, k, v = (
            self._linear(linear, rows).reshape(-1, of.heads, of.head_dim).transpose(0, 1).contiguous()
            for linear, rows in ((of.q, queries), (of.k, x + places), (of.v, x))
        )
        scores = q.matmul(k.transpose(1, 2)) * of.head_dim**-0.5 + hidden
        y = scores.softmax(-1).matmul(v).transpose(0, 1).reshape(of.count, -1)
        return self._linear(of.o, y.contiguous())

    def projected(self, step: ProjectorStep, x: Tensor, spec: VisionSpec) -> Tensor:
        match step:
            case Norm():
                return self.norm(x, step)
            case Linear():
                return self._linear(step, x)
            case PatchFeedForward():
                return self.feed_forward(step, x)
            case Activate(activation=activation):
                return _activated(x, activation)
            case Affine(factor=factor, minus=minus, times=times):
                x = x * factor
                x = x - self._vectors[minus] if minus else x
                return x * self._vectors[times] if times else x
            case Merge(how=how):
                x = x.reshape(-1, spec.merge**2, x.shape[-1])
                if how == "mean":
                    return x.mean(1).contiguous()
                x = x.transpose(1, 2) if how == "channels" else x
                return x.reshape(int(x.shape[0]), -1).contiguous()
        raise AssertionError(step)

    def _linear(self, linear: Linear, x: Tensor) -> Tensor:
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
        matrix = self._matrices[weight]
        w = matrix.planes["w"] if matrix.format is None else matrix.dequantize()
        w = w if w.dtype == self._input else matrix.dequantize().cast(self._input).contiguous()
        w = w if transposed else w.transpose()
        return x.cast(self._input).contiguous().matmul(w, dtype=dtypes.float32).contiguous()

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        x = x - x.mean(-1, keepdim=True) if norm.centred else x
        x = x * ((x * x).mean(-1, keepdim=True) + norm.eps).rsqrt() if norm.eps is not None else x
        x = x * self._vectors[norm.weight] if norm.weight else x
        return x + self._vectors[norm.bias] if norm.bias else x


def _shares(scores: Tensor, type: DType) -> Tensor:
    """The softmax of scores (heads, queries, keys). Maxima and sums are taken of keys that lie `_APART` apart first:
    so threads that run together read neighbouring numbers."""
    heads, queries, keys = (int(n) for n in scores.shape)
    apart = next(n for n in (_APART, 64, 32, 16, 8, 4, 2, 1) if keys % n == 0)
    rows = scores.contiguous().reshape(heads, queries, keys // apart, apart)
    top = rows.max(2).contiguous().max(-1).reshape(heads, queries, 1, 1)
    powers = (rows - top).exp()
    totals = powers.sum(2).contiguous().sum(-1).reshape(heads, queries, 1, 1).contiguous()
    return (powers / totals).cast(type).reshape(heads, queries, keys).contiguous()


def _without_layer(sublayer: PatchSublayer) -> PatchSublayer:
    """What sublayers of the same shape share: without the names of their tensors, and the limits of products."""
    return cast(PatchSublayer, _renamed(sublayer))


def _renamed(value: Any) -> Any:
    if isinstance(value, Weight | Vector):
        return replace(value, tensor=value.tensor.split(".", 3)[-1])
    if isinstance(value, Linear):
        own = {name: _renamed(getattr(value, name)) for name in ("weight", "bias")}
        for end in ("inputs", "outputs"):
            own[end] = getattr(value, end) and Limits(0, 0)
        return replace(value, **own)
    if is_dataclass(value):
        return replace(value, **{f.name: _renamed(getattr(value, f.name)) for f in fields(value)})  # type: ignore[type-var]
    return value


def _weights_of(sublayer: PatchSublayer) -> tuple[list[Weight], list[Vector]]:
    found = list(parts_of(sublayer))
    weights = [part for part in found if isinstance(part, Weight)]
    return weights, [part for part in found if isinstance(part, Vector)]


def _limits(value: Any) -> list[tuple[tuple[Weight, Ends], Limits]]:
    """The limits of all products in a description."""
    if isinstance(value, Linear):
        ends: list[tuple[Ends, Limits | None]] = [("inputs", value.inputs), ("outputs", value.outputs)]
        return [((value.weight, end), limits) for end, limits in ends if limits]
    if isinstance(value, tuple):
        return [found for item in value for found in _limits(item)]
    if is_dataclass(value):
        return [found for field in fields(value) for found in _limits(getattr(value, field.name))]
    return []


def _activated(x: Tensor, activation: Activation) -> Tensor:
    if activation == "silu":
        return x.silu()
    if activation == "relu2":
        return x.relu().square()
    if activation == "quick gelu":
        return x.quick_gelu()
    if activation == "gelu":
        return x.gelu()  # tinygrad's is the form with tanh
    return 0.5 * x * (1 + (x * 0.5**0.5).erf())


def _size_of(n: int, multiple: int) -> int:
    """The patches of the step for n: at most an eighth more, and whole tokens."""
    unit = max(64, 1 << max(0, n.bit_length() - 4))
    while unit % multiple and multiple % unit:  # a mean of 3 x 3 patches
        unit *= multiple
    return -(-n // unit) * unit


def _filled(a: Floats, size: int) -> Tensor:
    return Tensor(np.pad(a, ((0, size - len(a)), (0, 0)))).realize()
