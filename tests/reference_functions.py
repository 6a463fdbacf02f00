"""Functions of numpy arrays of float32, element by element or over the last dimension, for `reference`."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from engine.description.feed_forward import Activation, SiluLimits
from tests.reference_weights import Floats


def sigmoid(x: Floats) -> Floats:
    return np.asarray(1 / (1 + np.exp(-x)), np.float32)


def gated(gate: Floats, up: Floats, activation: Activation) -> Floats:
    match activation:
        case "silu":
            return gate / (1 + np.exp(-gate)) * up
        case "gelu":  # in the form with tanh
            inner = np.float32((2 / np.pi) ** 0.5) * (gate + np.float32(0.044715) * gate**3)
            return np.float32(0.5) * gate * (1 + np.tanh(inner)) * up
        case "relu":
            return np.maximum(gate, 0) * up
        case "relu2":
            return np.maximum(gate, 0) ** 2 * up
        case "swiglu_oai":  # gpt-oss's
            gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)
            return gate / (1 + np.exp(np.float32(-1.702) * gate)) * (up + 1)
        case SiluLimits():
            return gated(
                np.minimum(gate, activation.gate), np.clip(up, -activation.up, activation.up), "silu"
            )


def xielu(x: Floats, n: float, p: float, b: float, e: float) -> Floats:
    negative = n * (np.expm1(np.minimum(x, e)) - x)
    return np.asarray(np.where(x > 0, p * x * x, negative) + b * x, np.float32)


def as_long(y: Floats, x: Floats) -> Floats:
    """y, as long as x."""
    lengths = np.linalg.norm(x, axis=-1, keepdims=True), np.linalg.norm(y, axis=-1, keepdims=True)
    return np.asarray(y * lengths[0] / lengths[1])


def centred(x: Floats) -> Floats:
    return np.asarray(x - x.mean(-1, keepdims=True))


def softmax(x: Floats) -> Floats:
    p = np.exp(x - x.max(-1, keepdims=True))
    return np.asarray(p / p.sum(-1, keepdims=True))


def log_softmax(x: ArrayLike) -> NDArray[np.float64]:
    y = np.asarray(x, np.float64)
    y = y - y.max(-1, keepdims=True)
    return np.asarray(y - np.log(np.exp(y).sum(-1, keepdims=True)))
