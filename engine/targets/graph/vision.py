"""An encoder of pictures as tensor graphs (`engine.description.vision`): every device that tinygrad supports.

A picture's patches fill a step of some more, one of few sizes, so that the steps are captured once. What fills it is
hidden from attention. A sublayer is a captured step of its own: other work can be done between two of them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Generator
from typing import cast

import numpy as np
from numpy.typing import NDArray
from tinygrad import Device, Tensor, TinyJit, dtypes

from engine.description.sublayers import Weight
from engine.description.vision import (
    Activation,
    Affine,
    Bend,
    Linear,
    Merge,
    Norm,
    PatchAttention,
    PatchFeedForward,
    PatchSublayer,
    ProjectorStep,
    VisionSpec,
)
from engine.kernels.quantized_matrix import QuantizedMatrix
from engine.loading.weights import FileWeights, pieces
from engine.pictures import Grid, encoder_input, with_line_ends

_SCORES = 1 << 28  # of attention, at a time: more queries are done one part after the other
_CAPTURED = 3  # sizes whose captured steps are kept
Floats = NDArray[np.float32]


class GraphEncoder:
    """Holds the weights, quantized as in the file. Activations are float32, and products of GPUs have float16 inputs,
    unless the weights are float32."""

    def __init__(self, weights: FileWeights, spec: VisionSpec) -> None:
        """Raises ModelFileError."""
        self.spec = spec
        self._matrices = {weight: _load(weights, weight) for weight in spec.weights()}
        self._host = {vector: weights.vector(vector) for vector in spec.vectors()}
        on_host = {spec.line_end, spec.positions and spec.positions.table}
        self._vectors = {v: Tensor(data).realize() for v, data in self._host.items() if v not in on_host}
        is_gpu = not Device.DEFAULT.startswith("CPU")
        self._input = dtypes.float16 if is_gpu and not spec.is_float32 else dtypes.float32
        self._steps: OrderedDict[int, list[Callable[..., Tensor]]] = OrderedDict()

    def encode(self, rgb: NDArray[np.uint8]) -> Generator[tuple[int, int], None, Floats]:
        """Computes the embeddings of a picture that `pictures.resized` gave, float32 (tokens, out). Gives (done, total)
        after each part of the work."""
        spec = self.spec
        side = spec.patch * spec.merge
        grid = Grid(rgb.shape[0] // side, rgb.shape[1] // side)
        table = self._host[spec.positions.table].reshape(-1, spec.dim) if spec.positions else None
        of = encoder_input(spec, rgb, table)
        n = len(of.patches)
        size = _size_of(n, spec.merge**2)
        steps, total = self._captured(size), len(spec.sublayers) + 2
        others = [_filled(a, size) for a in (of.cos, of.sin) if a is not None]
        hidden = np.where(np.arange(size) < n, 0, -np.inf).astype(np.float32)
        others.append(Tensor(hidden).realize())
        first = [_filled(a, size) for a in (of.patches, of.added) if a is not None]
        x = steps[0](*first)
        for done, step in enumerate(steps[1:-1], 1):
            yield done, total
            x = step(x, *others)
        yield total - 1, total
        tokens = grid.rows * grid.columns
        embeddings = steps[-1](x).numpy()[:tokens]
        return with_line_ends(embeddings, grid, self._host[spec.line_end] if spec.line_end else None)

    def _captured(self, size: int) -> list[Callable[..., Tensor]]:
        """The steps for so many patches: the first product, the sublayers, and the projector."""
        if size not in self._steps:
            runs = [
                self._embed,
                *(self._sublayer(sublayer) for sublayer in self.spec.sublayers),
                self._project,
            ]
            steps = [TinyJit(run) for run in runs]
            for step in steps:
                step.cnt = 1  # capture at the first call, not at the second
            self._steps[size] = cast(list[Callable[..., Tensor]], steps)
            while len(self._steps) > _CAPTURED:
                self._steps.popitem(last=False)
        self._steps.move_to_end(size)
        return self._steps[size]

    # --- steps: activations are float32 (patches, dim) ---------------------------------------------------

    def _embed(self, patches: Tensor, added: Tensor | None = None) -> Tensor:
        spec = self.spec
        first, *more = (self._product(kernel, patches) for kernel in spec.kernels)
        x = sum(more, start=first)
        if spec.bias:
            x = x + self._vectors[spec.bias]
        if added is not None:
            x = x + added
        x = self._norm(x, spec.norm) if spec.norm else x
        return x.contiguous().realize()

    def _sublayer(self, sublayer: PatchSublayer) -> Callable[..., Tensor]:
        def run(x: Tensor, *others: Tensor) -> Tensor:
            h, operator = self._norm(x, sublayer.norm), sublayer.operator
            if isinstance(operator, PatchAttention):
                y = self._attention(operator, h, *others)
            else:
                y = self._feed_forward(operator, h)
            y = self._norm(y, sublayer.post_norm) if sublayer.post_norm else y
            return (x + y).contiguous().realize()

        return run

    def _project(self, x: Tensor) -> Tensor:
        for step in self.spec.projector:
            x = self._projected(step, x)
        return x.contiguous().realize()

    # --- parts -------------------------------------------------------------------------------------------

    def _attention(self, a: PatchAttention, x: Tensor, *others: Tensor) -> Tensor:
        *turns, hidden = others
        n = cast(int, x.shape[0])

        def heads(linear: Linear, norm: Norm | None, is_turned: bool) -> Tensor:
            """(heads, n, head_dim)"""
            y = self._linear(linear, x).reshape(n, a.heads, a.head_dim).transpose(0, 1)
            y = self._norm(y, norm) if norm else y
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
            shares = scores.softmax(-1).cast(self._input)
            parts.append(shares.contiguous().matmul(v, dtype=dtypes.float32).contiguous())
        y = parts[0] if len(parts) == 1 else parts[0].cat(*parts[1:], dim=1)
        return self._linear(a.o, y.transpose(0, 1).reshape(n, -1))

    def _feed_forward(self, of: PatchFeedForward, x: Tensor) -> Tensor:
        up = self._linear(of.up, x)
        hidden = _bent(self._linear(of.gate, x), of.activation) * up if of.gate else _bent(up, of.activation)
        return self._linear(of.down, hidden)

    def _projected(self, step: ProjectorStep, x: Tensor) -> Tensor:
        match step:
            case Norm():
                return self._norm(x, step)
            case Linear():
                return self._linear(step, x)
            case Bend(activation=activation):
                return _bent(x, activation)
            case Affine(factor=factor, minus=minus, times=times):
                x = x * factor
                x = x - self._vectors[minus] if minus else x
                return x * self._vectors[times] if times else x
            case Merge(how=how):
                x = x.reshape(-1, self.spec.merge**2, self.spec.dim)
                if how == "mean":
                    return x.mean(1).contiguous()
                x = x.transpose(1, 2) if how == "channels" else x
                return x.reshape(int(x.shape[0]), -1).contiguous()
        raise AssertionError(step)

    def _linear(self, linear: Linear, x: Tensor) -> Tensor:
        if linear.inputs:
            x = x.clamp(*linear.inputs)
        y = self._product(linear.weight, x, linear.transposed)
        if linear.bias:
            y = y + self._vectors[linear.bias]
        return y.clamp(*linear.outputs) if linear.outputs else y

    def _product(self, weight: Weight, x: Tensor, transposed: bool = False) -> Tensor:
        """A product of x (n, cols). Its inputs are in memory, so that its kernel only multiplies: weights of another
        type than products take are so for the time of the product."""
        matrix = self._matrices[weight]
        w = matrix.planes["w"] if matrix.format is None else matrix.dequantize()
        w = w if w.dtype == self._input else matrix.dequantize().cast(self._input).contiguous()
        w = w if transposed else w.transpose()
        return x.cast(self._input).contiguous().matmul(w, dtype=dtypes.float32).contiguous()

    def _norm(self, x: Tensor, norm: Norm) -> Tensor:
        x = x - x.mean(-1, keepdim=True) if norm.centred else x
        x = x * ((x * x).mean(-1, keepdim=True) + norm.eps).rsqrt()
        x = x * self._vectors[norm.weight] if norm.weight else x
        return x + self._vectors[norm.bias] if norm.bias else x


def _bent(x: Tensor, activation: Activation) -> Tensor:
    if activation == "silu":
        return x.silu()
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


def _load(weights: FileWeights, weight: Weight) -> QuantizedMatrix:
    matrix = QuantizedMatrix(weight.type, weight.rows, weight.cols)
    for rows in pieces(weight):
        raw = Tensor(weights.read(weight, rows))
        if weight.order:
            raw = weight.order.apply(raw.reshape(len(rows), -1)).flatten()
        matrix.store(raw, rows)
        Device[Device.DEFAULT].synchronize()  # frees the host's copies
        weights.release(weight, rows)
    return matrix
