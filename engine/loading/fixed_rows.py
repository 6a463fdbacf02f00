"""Embeddings that are the same in all pictures (`FixedRow`), computed on the host when an encoder is opened."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from engine.description.encoder_input import normed
from engine.description.sublayers import Weight
from engine.description.vision import FixedRow, Linear, VisionSpec
from engine.formats.dequantize import dequantized
from engine.loading.weights import FileWeights

Floats = NDArray[np.float32]


def fixed_rows(weights: FileWeights, spec: VisionSpec) -> dict[FixedRow, Floats]:
    """The fixed rows of an encoder, float32 (out,) each. The matrices that they read are of `HOST_TYPES`."""
    return {row: _computed(weights, row) for row in spec.ends.rows} if spec.ends else {}


def host_matrix(weights: FileWeights, weight: Weight) -> Floats:
    """A matrix of one of `HOST_TYPES` as float32 (rows, cols)."""
    every = range(weight.rows)
    values = dequantized(weights.read(weight, every), weight.type).reshape(weight.rows, weight.cols)
    weights.release(weight, every)
    return values


def _computed(weights: FileWeights, row: FixedRow) -> Floats:
    x = weights.vector(row.vector)
    for step in row.steps:
        if isinstance(step, Linear):
            x = host_matrix(weights, step.weight) @ x
            x = x + weights.vector(step.bias) if step.bias else x
        else:
            x = normed(x, step, weights.vector)
    return x
