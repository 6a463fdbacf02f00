"""The weights of a model's file in float32, and the products and norms with them, for `reference`.

Rows keep the order of the file, so that a wrong order of the engine shows.
"""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import gguf
import numpy as np
from numpy.typing import NDArray

from engine.description.spec import ModelSpec
from engine.description.sublayers import Vector, Weight

Floats = NDArray[np.float32]


def read_gguf(path: Path) -> gguf.GGUFReader:
    """The gguf package's reader, of bytes that are in memory: of a memory map, it takes twice as long over each of a
    vocabulary's strings."""
    with mock.patch.object(np, "memmap", lambda path, mode: np.fromfile(path, np.uint8)):
        return gguf.GGUFReader(path)


def read_tensors(path: Path) -> dict[str, Floats]:
    """The tensors of a file by name, dequantized, in the file's shapes."""
    return {
        t.name: np.asarray(gguf.dequantize(t.data, t.tensor_type), np.float32).reshape(t.shape[::-1])
        for t in read_gguf(path).tensors
    }


class ReferenceWeights:
    """The weights of the GGUF file that `spec` describes."""

    def __init__(self, path: Path, spec: ModelSpec) -> None:
        self.spec, self._tensors = spec, read_tensors(path)

    def _matrix(self, weight: Weight) -> Floats:
        width = weight.rows if weight.transposed else weight.of_cols or weight.cols
        rows = self._tensors[weight.tensor].reshape(-1, width)[weight.first :]
        if weight.transposed:
            of_heads = self._tensors[weight.tensor].reshape(weight.experts, weight.every, -1)
            return of_heads[:, weight.first :][:, : weight.cols].transpose(0, 2, 1)
        rows = rows[:, weight.first_col : weight.first_col + weight.cols]
        if weight.every:
            rows = np.concatenate([rows[i : i + weight.run] for i in range(0, len(rows), weight.every)])
        rows = rows[: weight.experts * weight.rows]
        if weight.blank:
            rows = np.zeros_like(rows)
        if weight.scale:
            rows = rows * np.repeat(self._tensors[weight.scale], weight.rows)[:, None]
        return rows

    def _vector(self, vector: Vector) -> Floats:
        if not vector.tensor:
            return np.full(vector.size, vector.factor, np.float32)
        values = self._tensors[vector.tensor].reshape(-1)[vector.first :][: vector.size // vector.each]
        return np.repeat(values, vector.each) * np.float32(vector.factor)

    def _product(self, x: Floats, weight: Weight, bias: Vector | None = None) -> Floats:
        y = x @ self._matrix(weight).T
        return y if bias is None else y + self._vector(bias)

    def _normed(self, x: Floats, norm: Vector | None, eps: float, bias: Vector | None = None) -> Floats:
        """RMS norm over the last axis; x itself if there is none."""
        if norm is None:
            return x
        y = x / np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(eps)) * self._vector(norm)
        return y if bias is None else y + self._vector(bias)
