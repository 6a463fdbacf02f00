"""A model's matrices as kernels read them: packed on the device, with matrices of the same input in one product."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
from numpy.typing import NDArray
from tinygrad import Device, Tensor

from engine.kernels.gpu.device_memory import to_device
from engine.kernels.gpu.matvec import StackedMatrices
from engine.kernels.gpu.schedules import best_schedule
from engine.kernels.gpu.weight_layout import WeightLayout
from engine.kernels.gpu.weight_repacking import MatrixSpec, TensorRows, free_repacking_memory, repack
from engine.model.config import ModelConfig
from engine.model.weights import Weights


@dataclass
class Matrix:
    """A repacked matrix. Its rows come from `tensors`: (name, rows) of each."""

    tensors: Sequence[tuple[str, int]]
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


@dataclass
class Product:
    """Matrices that multiply the same input, and the schedule of the kernel that decode multiplies them with. `name`:
    that of the first tensor, without the layer."""

    matrices: Sequence[Matrix]

    def __post_init__(self) -> None:
        first = self.matrices[0]
        self.name = first.tensors[0][0].split(".")[-2]
        self.stack = StackedMatrices(tuple((m.layout, m.rows) for m in self.matrices), first.cols)
        self.planes = [plane for matrix in self.matrices for plane in matrix.planes]
        self.schedule = best_schedule(self.stack)

    @property
    def single_matrix(self) -> Matrix:
        """The matrix of a product that has one."""
        (matrix,) = self.matrices
        return matrix

    @property
    def n_blocks(self) -> int:
        """Thread blocks of the kernel."""
        return self.stack.n_blocks(self.schedule)


@dataclass
class Layer:
    """The weights and the cache of a layer. `gate_up` is one matrix with alternating rows if both have the same type.
    `norms`: those before attention and before the feed-forward layer; `head_norms`: those of queries and keys."""

    qkv: Product
    bias: Tensor | None
    head_norms: Tensor | None
    o: Product
    gate_up: Product
    down: Product
    norms: tuple[NDArray[np.float32], NDArray[np.float32]]
    keys: Tensor = field(init=False)
    values: Tensor = field(init=False)

    @property
    def products(self) -> list[Product]:
        return [self.qkv, self.o, self.gate_up, self.down]


@dataclass
class PackedModel:
    """All weights of a model. A tied output head is the same object as the embedding."""

    config: ModelConfig
    layers: list[Layer]
    embedding: Product
    head: Product
    output_norm: NDArray[np.float32]

    @property
    def products(self) -> list[Product]:
        heads = [self.head] if self.head is self.embedding else [self.embedding, self.head]
        return [product for layer in self.layers for product in layer.products] + heads

    @property
    def matrices(self) -> list[Matrix]:
        return [matrix for product in self.products for matrix in product.matrices]

    def fill(self, weights: Weights) -> None:
        """Copies the matrices to the device and packs them there. Raises ModelFileError."""
        for matrix in self.matrices:
            sources = [weights.matrix_bytes(name, rows, matrix.cols) for name, rows in matrix.tensors]
            repack(matrix.spec, sources, matrix.planes)
            Device[Device.DEFAULT].synchronize()  # frees the host's copies
            for name, _ in matrix.tensors:
                weights.release(name)
        free_repacking_memory()


def allocate(weights: Weights) -> PackedModel:
    """A model with device memory for its matrices, to be filled by `PackedModel.fill`. Raises ModelFileError."""
    config, dim = weights.config, weights.config.dim
    layers = [_layer(weights, f"blk.{i}.{{}}".format) for i in range(config.layers)]
    embedding = head = _product(weights, [("token_embd.weight", config.vocab)], dim)
    if "output.weight" in weights:
        head = _product(weights, [("output.weight", config.vocab)], dim)
    return PackedModel(config, layers, embedding, head, weights.vector("output_norm.weight", dim))


def _layer(weights: Weights, name: Callable[[str], str]) -> Layer:
    config = weights.config
    dim, ffn = config.dim, config.ffn
    sizes = {"q": config.query_size, "k": config.kv_size, "v": config.kv_size}
    qkv = [(name(f"attn_{x}.weight"), size) for x, size in sizes.items()]
    biases = weights.joined_vectors([(name(f"attn_{x}.bias"), size) for x, size in sizes.items()], 0.0)
    head_norms = [(name(f"attn_{x}_norm.weight"), config.head_dim) for x in "qk"]
    head_norm_weights = weights.joined_vectors(head_norms, 1.0)
    gate_up = [(name("ffn_gate.weight"), ffn), (name("ffn_up.weight"), ffn)]
    gate_type, up_type = (weights.matrix_type(tensor, rows, dim) for tensor, rows in gate_up)
    return Layer(
        qkv=_product(weights, qkv, dim),
        bias=None if biases is None else to_device(biases),
        head_norms=None if head_norm_weights is None else to_device(head_norm_weights),
        o=_product(weights, [(name("attn_output.weight"), dim)], config.query_size),
        gate_up=_product(weights, gate_up, dim, alternate=gate_type == up_type),
        down=_product(weights, [(name("ffn_down.weight"), dim)], ffn),
        norms=(weights.vector(name("attn_norm.weight"), dim), weights.vector(name("ffn_norm.weight"), dim)),
    )


def _product(
    weights: Weights, tensors: Sequence[tuple[str, int]], cols: int, alternate: bool = False
) -> Product:
    """The product of the matrices (name, rows), which follow each other. Neighbours of the same type become one
    matrix; with `alternate` their rows alternate."""
    matrices = []
    for ggml_type, group in groupby(
        tensors, lambda tensor: weights.matrix_type(tensor[0], tensor[1], cols)[0]
    ):
        same_type = list(group)
        rows = []
        for name, n in same_type:
            _, interleaved = weights.matrix_type(name, n, cols)
            rows.append(TensorRows(n, weights.config.head_dim if interleaved else 0))
        matrices.append(Matrix(same_type, MatrixSpec(WeightLayout(ggml_type), tuple(rows), cols, alternate)))
    return Product(matrices)
