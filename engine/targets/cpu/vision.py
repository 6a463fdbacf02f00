"""An encoder of pictures on a CPU, in numpy: its products are those of the library that numpy comes with (BLAS).

Weights stay as the file holds them, and become float32 some rows at a time. Threads share the rows of products and the
queries of attention. The library's own threads wait for each other by spinning, which takes many times as long where
other programs run: an engine's process has none of them (`engine.protocol.process`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from engine.description.sublayers import Vector, Weight
from engine.description.vision import (
    Activation,
    Affine,
    Bend,
    Linear,
    Merge,
    Norm,
    PatchAttention,
    PatchFeedForward,
    ProjectorStep,
    VisionSpec,
)
from engine.formats.dequantize import dequantized
from engine.loading.weights import FileWeights
from engine.pictures import Floats, Grid, encoder_input, with_line_ends

_QUERIES = 256  # of a head, whose scores are computed at a time: they stay in the cache
_CHUNK = 1 << 16  # elements of what functions are computed of at a time, likewise


class CPUEncoder:
    """Implements `PictureEncoder`. Its parts are the sublayers, and the heads of attention."""

    def __init__(self, weights: FileWeights, spec: VisionSpec) -> None:
        """Raises ModelFileError."""
        self.spec = spec
        self._raw = {weight: _copied(weights, weight) for weight in spec.weights()}
        self._vectors = {vector: weights.vector(vector) for vector in spec.vectors()}
        count = len(os.sched_getaffinity(0))
        self._threads, self._parts = ThreadPoolExecutor(count, "pictures"), 4 * count

    def encode(self, rgb: NDArray[np.uint8]) -> Generator[tuple[int, int], None, Floats]:
        """See `PictureEncoder`."""
        spec = self.spec
        side, total = spec.patch * spec.merge, len(spec.sublayers) + 1
        grid = Grid(rgb.shape[0] // side, rgb.shape[1] // side)
        table = self._vectors[spec.positions.table].reshape(-1, spec.dim) if spec.positions else None
        of = encoder_input(spec, rgb, table)
        x = self._product(spec.kernels[0], of.patches)
        for kernel in spec.kernels[1:]:
            x += self._product(kernel, of.patches)
        if spec.bias:
            x += self._vectors[spec.bias]
        if of.added is not None:
            x += of.added
        x = self._norm(x, spec.norm) if spec.norm else x
        turns = None if of.cos is None or of.sin is None else (of.cos[:, None], of.sin[:, None])
        for done, sublayer in enumerate(spec.sublayers):
            yield done, total
            h, operator = self._norm(x, sublayer.norm), sublayer.operator
            if isinstance(operator, PatchAttention):
                y = self._attention(operator, h, turns)
            else:
                y = self._feed_forward(operator, h)
            x += self._norm(y, sublayer.post_norm) if sublayer.post_norm else y
        yield total - 1, total
        for step in spec.projector:
            x = self._projected(step, x)
        return with_line_ends(x, grid, self._vectors[spec.line_end] if spec.line_end else None)

    # --- parts: activations are float32 (patches, dim) ---------------------------------------------------

    def _attention(self, a: PatchAttention, x: Floats, turns: tuple[Floats, Floats] | None) -> Floats:
        n = len(x)

        def heads(linear: Linear, norm: Norm | None, is_turned: bool) -> Floats:
            """(heads, n, head_dim)"""
            y = self._linear(linear, x).reshape(n, a.heads, a.head_dim)
            y = self._norm(y, norm) if norm else y
            if is_turned and turns:
                cos, sin = turns
                first, second = np.split(y, 2, -1)
                y = np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)
            return np.ascontiguousarray(y.transpose(1, 0, 2))

        q, k, v = heads(a.q, a.q_norm, True), heads(a.k, a.k_norm, True), heads(a.v, a.v_norm, False)
        q *= np.float32(a.scale)
        out = np.empty((n, a.heads, a.head_dim), np.float32)

        def attend(part: tuple[int, int]) -> None:
            head, first = part
            scores = q[head, first : first + _QUERIES] @ k[head].T
            scores -= scores.max(-1, keepdims=True)
            np.exp(scores, out=scores)
            result = scores @ v[head]
            out[first : first + _QUERIES, head] = result / scores.sum(-1, keepdims=True)

        parts = [(head, first) for head in range(a.heads) for first in range(0, n, _QUERIES)]
        list(self._threads.map(attend, parts))
        return self._linear(a.o, out.reshape(n, -1))

    def _feed_forward(self, of: PatchFeedForward, x: Floats) -> Floats:
        up = self._linear(of.up, x)
        if of.gate:
            hidden = self._linear(of.gate, x)
            self._bend(hidden, of.activation)
            hidden *= up
        else:
            hidden = up
            self._bend(hidden, of.activation)
        return self._linear(of.down, hidden)

    def _projected(self, step: ProjectorStep, x: Floats) -> Floats:
        match step:
            case Norm():
                return self._norm(x, step)
            case Linear():
                return self._linear(step, x)
            case Bend(activation=activation):
                self._bend(x, activation)
                return x
            case Affine(factor=factor, minus=minus, times=times):
                x = x * np.float32(factor)
                x = x - self._vectors[minus] if minus else x
                return x * self._vectors[times] if times else x
            case Merge(how=how):
                x = x.reshape(-1, self.spec.merge**2, self.spec.dim)
                if how == "mean":
                    mean: Floats = x.mean(1, dtype=np.float32)
                    return mean
                x = x.transpose(0, 2, 1) if how == "channels" else x
                return x.reshape(len(x), -1)

    def _linear(self, linear: Linear, x: Floats) -> Floats:
        if linear.inputs:
            x = _clipped(x, linear.inputs)
        y = x @ self._matrix(linear.weight) if linear.transposed else self._product(linear.weight, x)
        if linear.bias:
            y += self._vectors[linear.bias]
        return _clipped(y, linear.outputs) if linear.outputs else y

    def _product(self, weight: Weight, x: Floats) -> Floats:
        """x times the transpose of a matrix, some of its rows in each thread."""
        out = np.empty((len(x), weight.rows), np.float32)
        unit = weight.order.head_dim if weight.order else 16
        n = -(-weight.rows // (unit * self._parts)) * unit

        def multiply(first: int) -> None:
            rows = self._matrix(weight, range(first, min(first + n, weight.rows)))
            out[:, first : first + n] = x @ rows.T

        list(self._threads.map(multiply, range(0, weight.rows, n)))
        return out

    def _matrix(self, weight: Weight, rows: range | None = None) -> Floats:
        """float32 (rows, cols), by default all rows."""
        rows = rows or range(weight.rows)
        raw = self._raw[weight][rows.start * weight.row_bytes : rows.stop * weight.row_bytes]
        matrix = dequantized(raw, weight.type).reshape(len(rows), weight.cols)
        return weight.order.apply(matrix) if weight.order else matrix

    def _norm(self, x: Floats, norm: Norm) -> Floats:
        x = x - x.mean(-1, keepdims=True) if norm.centred else x
        squares = np.einsum("...i,...i->...", x, x)[..., None] / np.float32(x.shape[-1])
        x = x / np.sqrt(squares + np.float32(norm.eps))
        x = self._times(x, norm.weight)
        return x + self._vectors[norm.bias] if norm.bias else x

    def _times(self, x: Floats, vector: Vector | None) -> Floats:
        return x * self._vectors[vector] if vector else x

    def _bend(self, x: Floats, activation: Activation) -> None:
        """Changes x, in pieces that stay in the cache."""
        flat = x.reshape(-1)
        pieces = [flat[i : i + _CHUNK] for i in range(0, flat.size, _CHUNK)]
        list(self._threads.map(_FUNCTIONS[activation], pieces))


def _copied(weights: FileWeights, weight: Weight) -> NDArray[np.uint8]:
    """The bytes of a matrix in the file, which may be changed or closed later."""
    rows = range(weight.rows)
    raw = weights.read(weight, rows).copy()
    weights.release(weight, rows)
    return raw


def _clipped(x: Floats, limits: tuple[float, float]) -> Floats:
    clipped: Floats = np.clip(x, np.float32(limits[0]), np.float32(limits[1]))
    return clipped


def _silu(x: Floats) -> None:
    x /= 1 + np.exp(-x)


def _gelu(x: Floats) -> None:
    x *= 0.5 * (1 + np.tanh(np.float32(0.7978845608) * x * (1 + np.float32(0.044715) * x * x)))


def _exact_gelu(x: Floats) -> None:
    """erf with an error of 1.5e-7: Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26."""
    z = np.abs(x) * np.float32(0.5**0.5)
    t = 1 / (1 + np.float32(0.3275911) * z)
    series: Floats = np.zeros_like(x)
    for factor in (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592):
        series += np.float32(factor)
        series *= t
    x *= 0.5 * (1 + np.sign(x) * (1 - series * np.exp(-z * z)))


_FUNCTIONS: dict[Activation, Callable[[Floats], None]] = {
    "silu": _silu,
    "gelu": _gelu,
    "exact gelu": _exact_gelu,
}
