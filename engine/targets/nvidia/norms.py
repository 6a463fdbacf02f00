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
    (`StackedMatrices.input_scale_bits`); of models with LayerNorms, the normed stream times that. `in_digits`: whether
    the product takes the digits of it (`digit_rows`), which the kernel before may make."""

    norm: Norm
    bits: int
    in_digits: bool

    @property
    def key(self) -> tuple[int, int, bool]:
        return id(self.norm.weight), self.bits, self.in_digits


def inputs_of(norm: Norm, *products: Product) -> list[Input]:
    """The inputs of products after a norm."""
    forms = {(bits, p.stack.digits) for p in products for bits in p.stack.input_scale_bits}
    return [Input(norm, *form) for form in sorted(forms)]


@functools.cache
def no_norm(n: int) -> Norm:
    """Stands for a norm where a stream of n elements is not normed."""
    return Norm(np.ones(n, np.float32), is_normed=False)
