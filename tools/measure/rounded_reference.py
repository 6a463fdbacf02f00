"""The float32 reference with the roundings of the kernels for NVIDIA GPUs, so that their effect is seen without one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import numpy as np
from numpy.typing import NDArray

from engine.description.attention import Attention
from engine.description.feed_forward import Activation, Experts
from engine.description.sublayers import Vector, Weight
from tests import reference
from tests.reference import Floats, Reference

_stock_gated = reference.gated


def as_half(x: Floats) -> Floats:
    """Numbers as float16 holds them, float32."""
    return np.asarray(x.clip(-65504, 65504).astype(np.float16), np.float32)


class RoundedReference(Reference):  # type: ignore[misc]
    """Products of the tokens of a prompt take activations and weights as float16, but routers. Those of other tokens
    take them as float32. Queries, keys and values are float16 in any case. `of_prompt`: which tokens are a prompt's,
    bool (tokens,)."""

    def __init__(self, path: Path, context: int, of_prompt: NDArray[np.bool_]) -> None:
        super().__init__(path, context)
        self._of_prompt: NDArray[np.bool_] | None = of_prompt
        self._exact = {*(part.router for part in self.spec.experts), self.spec.head}
        self._rounds = False

    def _matrix(self, weight: Weight) -> Floats:
        matrix = super()._matrix(weight)
        return as_half(matrix) if self._rounds and weight not in self._exact else matrix

    def _product(self, x: Floats, weight: Weight, bias: Vector | None = None) -> Floats:
        rows, exact = self._of_prompt, weight in self._exact
        if exact or self._rounds or rows is None or len(rows) != len(x):
            return super()._product(as_half(x) if self._rounds and not exact else x, weight, bias)
        y = super()._product(x, weight, bias)
        with self._rounding():
            return np.where(rows[:, None], super()._product(as_half(x), weight, bias), y)

    def _experts(self, part: Experts, h: Floats, of_router: Floats) -> Floats:
        y, rows = np.empty_like(h), self._of_prompt
        assert rows is not None
        self._of_prompt = None
        y[~rows] = super()._experts(part, h[~rows], of_router[~rows])
        with self._rounding():
            y[rows] = super()._experts(part, as_half(h[rows]), of_router[rows])
        self._of_prompt = rows
        return y

    def _turned(self, part: Attention, x: Floats, norm: Vector | None) -> Floats:
        return as_half(super()._turned(part, x, norm))

    def _heads(self, part: Attention, x: Floats, norm: Vector | None) -> Floats:
        values = super()._heads(part, x, norm)
        return values if norm else as_half(values)

    @contextmanager
    def _rounding(self) -> Iterator[None]:
        """Rounds weights meanwhile, and what experts activate."""

        def gated(gate: Floats, up: Floats, activation: Activation) -> Floats:
            return as_half(_stock_gated(gate, up, activation))

        self._rounds = True
        with mock.patch.object(reference, "gated", gated):
            yield
        self._rounds = False
