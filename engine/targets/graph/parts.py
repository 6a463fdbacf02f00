"""What the sublayers of tensor graphs share: a step, matrices, products and norms."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tinygrad import Device, Tensor

from engine.description.spec import ModelSpec
from engine.description.sublayers import Operator, Vector, Weight
from engine.kernels.quantized_matrix import QuantizedMatrix
from engine.loading.weights import FileWeights, pieces
from engine.targets.graph.inputs import Step
from engine.targets.graph.states import States


@dataclass
class Run:
    """What the sublayers of a step share. `masks`: by window, by whether tokens look ahead, and by whether windows are
    chunked. `of_layers`: what the tokens give each layer. `caches`, `index_caches` and `states` are those of the
    sublayers to come, and `read` is the cache that each attention so far has read. `before`: the residual stream that
    the sublayer before this one read. `stored`: the cache that was stored to last. `others`: the streams beside the
    residual one, and `predicted` all of them as a layer began. `first_values`: those of the first time mixing.
    `embeddings`: those of the tokens."""

    step: Step
    masks: dict[tuple[int, bool, bool], Tensor | None]
    of_layers: list[Tensor]
    caches: Iterator[Tensor]
    index_caches: Iterator[Tensor]
    states: Iterator[States]
    stored: Tensor
    read: list[Tensor] = field(default_factory=list)
    others: list[Tensor] = field(default_factory=list)
    predicted: list[Tensor] = field(default_factory=list)
    before: Tensor | None = None
    first_values: Tensor | None = None
    embeddings: Tensor | None = None


class Parts:
    """The weights of a model on the device."""

    spec: ModelSpec
    _ropes: list[tuple[Tensor, Tensor]]
    _matrices: dict[Weight, QuantizedMatrix]
    _vectors: dict[Vector, Tensor]

    def _computed(self, operator: Operator, x: Tensor, run: Run) -> Tensor:
        """What a sublayer, or one within another, makes of x (n, dim)."""
        raise NotImplementedError

    def _joined(self, weights: Sequence[Weight], x: Tensor) -> Tensor:
        """The products of x with several matrices, one after the other."""
        first, *others = (self._product(weight, x) for weight in weights)
        return first.cat(*others, dim=-1) if others else first

    def _product(self, weight: Weight, x: Tensor, bias: Vector | None = None) -> Tensor:
        y = self._matrices[weight].product(x)
        return y if bias is None else y + self._vectors[bias]

    def _norm(self, x: Tensor, weight: Vector, eps: float | None = None) -> Tensor:
        """RMS norm over the last axis."""
        return (normed(x, self.spec.eps if eps is None else eps) * self._vectors[weight]).contiguous()

    def _stream_norm(self, x: Tensor, weight: Vector, bias: Vector | None = None) -> Tensor:
        y = self._norm(x, weight, self.spec.stream_eps)
        return y if bias is None else (y + self._vectors[bias]).contiguous()


def load_matrix(weights: FileWeights, weight: Weight) -> QuantizedMatrix:
    """The matrices of a `weight`, those of experts one after the other, on the device."""
    matrix = QuantizedMatrix(weight.type, weight.experts * weight.rows, weight.cols)
    for rows in pieces(weight):
        raw = Tensor(weights.read(weight, rows))
        if weight.order:
            raw = weight.order.apply(raw.reshape(len(rows), -1)).flatten()
        matrix.store(raw, rows)
        Device[Device.DEFAULT].synchronize()  # frees the host's copies
        weights.release(weight, rows)
    return matrix


def normed(x: Tensor, eps: float) -> Tensor:
    """x over the root of the mean of its squares along the last axis."""
    return x * ((x * x).mean(-1, keepdim=True) + eps).rsqrt()


def centred(x: Tensor) -> Tensor:
    """x minus its mean along the last axis."""
    return x - x.mean(-1, keepdim=True)
