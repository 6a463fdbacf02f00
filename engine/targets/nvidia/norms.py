"""Norms of the residual stream, and what the products after them read."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.targets.nvidia.matrices import Product


@dataclass(frozen=True, eq=False)
class Norm:
    """A norm of the stream, with its weight and its bias, if it has one. Without a norm (`is_normed` is false), the
    weight is of ones."""

    weight: NDArray[np.float32]
    is_normed: bool = True
    bias: NDArray[np.float32] | None = None


@dataclass(frozen=True)
class Input:
    """What a product reads: the stream times the weight of a norm and times a input_scale
    (`StackedMatrices.input_scale_bits`); of models with LayerNorms, the normed stream times that."""

    norm: Norm
    bits: int

    @property
    def key(self) -> tuple[int, int]:
        return id(self.norm.weight), self.bits


def inputs_of(norm: Norm, *products: Product) -> list[Input]:
    """The inputs of products after a norm."""
    bits = {bits for product in products for bits in product.stack.input_scale_bits}
    return [Input(norm, b) for b in sorted(bits)]


@functools.cache
def no_norm(n: int) -> Norm:
    """Stands for a norm where a stream of n elements is not normed."""
    return Norm(np.ones(n, np.float32), is_normed=False)
