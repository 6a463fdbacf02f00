"""Matrices as the GPU's kernels read them: packed on the device, with those of the same input in one product."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np
from numpy.typing import NDArray
from tinygrad import Tensor

from engine.description.sublayers import Weight
from engine.formats.dequantize import HOST_TYPES, dequantized
from engine.formats.ggml_types import TYPES
from engine.kernels.quantized_matrix import QuantizedMatrix
from engine.loading.weights import Weights, pieces
from engine.targets.nvidia.kernels.products.chosen_experts import ChosenExperts
from engine.targets.nvidia.kernels.products.schedules import Place, best_schedule, in_digits
from engine.targets.nvidia.kernels.products.stacked_matrices import SharedExpert, StackedMatrices
from engine.targets.nvidia.kernels.weights.weight_layout import WeightLayout
from engine.targets.nvidia.kernels.weights.weight_repacking import MatrixSpec, TensorRows

_PIECE_ROWS = 32  # so that a plane of a piece begins where kernels may load several numbers at once


@dataclass(frozen=True)
class Piece:
    """Rows of a matrix, from `first` on, that are repacked at once. `sources`: rows of each of its weights."""

    spec: MatrixSpec
    first: int
    sources: tuple[tuple[Weight, range], ...]


@dataclass
class Matrix:
    """A repacked matrix. Its rows come from `weights`."""

    weights: Sequence[Weight]
    spec: MatrixSpec

    def __post_init__(self) -> None:
        self.planes = self.spec.allocate()

    @property
    def layout(self) -> WeightLayout:
        return self.spec.layout

    @property
    def rows(self) -> int:
        return self.spec.rows

    @property
    def cols(self) -> int:
        return self.spec.cols

    @property
    def pieces(self) -> list[Piece]:
        """All rows, in pieces that need little memory beside the planes."""
        together = len(self.weights)
        runs = [pieces(weight, _PIECE_ROWS, together) for weight in self.weights]
        if self.spec.alternating or all(len(rows) == 1 for rows in runs):
            sources = [tuple(zip(self.weights, rows, strict=True)) for rows in zip(*runs, strict=True)]
        else:
            sources = [((weight, rows),) for weight in self.weights for rows in pieces(weight, _PIECE_ROWS)]
        found, first = [], 0
        for part in sources:
            spec = replace(self.spec, tensors=tuple(TensorRows(len(rows), w.order) for w, rows in part))
            found.append(Piece(spec, first, part))
            first += spec.rows
        return found


@dataclass
class Product:
    """Matrices that multiply the same input, and the schedule of the kernel that decode multiplies them with. `name`:
    that of the first tensor, without the layer. With `experts`, one matrix that holds those of all experts; `shared` is
    that of an expert whose result is added to theirs, if it is `gated` times a factor. `beside`: a product of another
    input in the same kernel. `place`: where it stands, if that matters to its schedule."""

    matrices: Sequence[Matrix]
    experts: ChosenExperts | None = None
    shared: Matrix | None = None
    beside: Product | None = None
    gated: bool = True
    place: Place = ""

    def __post_init__(self) -> None:
        first, n = self.matrices[0], self.experts.n if self.experts else 1
        self.name = first.weights[0].name
        shapes = tuple((m.layout, m.rows // n) for m in self.matrices)
        shared = SharedExpert(self.shared.layout, self.shared.cols, self.gated) if self.shared else None
        beside: StackedMatrices | None = self.beside.stack if self.beside else None
        self.stack: StackedMatrices = in_digits(
            StackedMatrices(
                shapes, first.cols, self.experts, shared, beside and replace(beside, digits=False)
            ),
            self.place,
        )
        self.planes = [plane for matrix in self.all_matrices for plane in matrix.planes]
        self.schedule = best_schedule(self.stack, self.place)

    @property
    def all_matrices(self) -> list[Matrix]:
        others = self.beside.all_matrices if self.beside else []
        return [*self.matrices, *([self.shared] if self.shared else []), *others]

    @property
    def single_matrix(self) -> Matrix:
        """The matrix of a product that has one."""
        (matrix,) = self.matrices
        return matrix

    @property
    def n_blocks(self) -> int:
        """Thread blocks of the kernel."""
        return self.stack.n_blocks(self.schedule)


def matrices_of(weights: Sequence[Weight], alternate: bool = False) -> list[Matrix]:
    """Neighbours of the same type become one matrix; with `alternate` their rows alternate."""
    matrices = []
    for type, group in groupby(weights, lambda weight: weight.type):
        same_type = list(group)
        rows = tuple(TensorRows(weight.experts * weight.rows, weight.order) for weight in same_type)
        spec = MatrixSpec(WeightLayout(type), rows, same_type[0].cols, alternate)
        matrices.append(Matrix(same_type, spec))
    return matrices


def product_of(weight: Weight) -> Product:
    """The product of a matrix of its own."""
    return Product(matrices_of([weight]))


def floats_of(weights: Weights, weight: Weight) -> NDArray[np.float32]:
    """A small matrix as float32, (rows * cols,). Raises ModelFileError."""
    raw = weights.read(weight, range(weight.rows))
    if TYPES[weight.type].name in HOST_TYPES:
        return dequantized(raw, weight.type)
    matrix = QuantizedMatrix(weight.type, weight.rows, weight.cols)
    values: NDArray[np.float32] = matrix.dequantize_rows(Tensor(raw.copy()), weight.rows).flatten().numpy()
    return values
