"""A model's matrices as kernels read them: packed on the device, those of one input made one product."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
from tinygrad import Device, Tensor

from engine.kernels.gpu.mailbox import sent
from engine.kernels.gpu.matvec import Stack
from engine.kernels.gpu.packing import Packing
from engine.kernels.gpu.repack import Layout, Rows, forget_plans, repack
from engine.kernels.gpu.schedules import schedule_here
from engine.model.config import ModelConfig
from engine.model.fused.prescales import Floats
from engine.model.weights import Weights


@dataclass
class Matrix:
    """A packed matrix of `tensors`."""

    tensors: Sequence[tuple[str, int]]
    layout: Layout

    def __post_init__(self) -> None:
        self.planes = self.layout.empty()

    @property
    def packing(self) -> Packing:
        return self.layout.packing

    @property
    def rows(self) -> int:
        return self.layout.n_rows

    @property
    def cols(self) -> int:
        return self.layout.cols


@dataclass
class Product:
    """Matrices of one input, and the schedule of decode's product with all of them. `name` is that of the first
    tensor."""

    matrices: Sequence[Matrix]

    def __post_init__(self) -> None:
        first = self.matrices[0]
        self.name = first.tensors[0][0].split(".")[-2]
        self.stack = Stack(tuple((m.packing, m.rows) for m in self.matrices), first.cols)
        self.planes = [plane for matrix in self.matrices for plane in matrix.planes]
        self.schedule = schedule_here(self.stack)

    @property
    def only(self) -> Matrix:
        """The matrix of a product of one."""
        (matrix,) = self.matrices
        return matrix

    @property
    def n_blocks(self) -> int:
        return self.stack.n_blocks(self.schedule)


@dataclass
class Layer:
    qkv: Product
    bias: Tensor | None
    head_norms: Tensor | None
    o: Product
    gate_up: Product  # one matrix where both have a type, rows in turn
    down: Product
    norms: tuple[Floats, Floats]  # attention's, feed-forward's
    keys: Tensor = field(init=False)
    values: Tensor = field(init=False)

    @property
    def products(self) -> list[Product]:
        return [self.qkv, self.o, self.gate_up, self.down]


@dataclass
class PackedModel:
    config: ModelConfig
    layers: list[Layer]
    embedding: Product
    head: Product
    output_norm: Floats

    @property
    def products(self) -> list[Product]:
        """Each once: a tied head is the embedding."""
        heads = [self.head] if self.head is self.embedding else [self.embedding, self.head]
        return [product for layer in self.layers for product in layer.products] + heads

    @property
    def matrices(self) -> list[Matrix]:
        return [matrix for product in self.products for matrix in product.matrices]

    def fill(self, weights: Weights) -> None:
        """Packs the matrices' bytes. Raises ModelFileError."""
        for matrix in self.matrices:
            cols = matrix.cols
            sources = [weights.stored_bytes(name, rows, cols)[0] for name, rows in matrix.tensors]
            repack(matrix.layout, sources, matrix.planes)
            Device[Device.DEFAULT].synchronize()  # so that the host's copies are freed
            for name, _ in matrix.tensors:
                weights.file.tensors[name].release()
        forget_plans()


def allocate(weights: Weights) -> PackedModel:
    """A file's matrices, with room for them on the device, still to be filled. Raises ModelFileError."""
    config, dim = weights.config, weights.config.dim
    layers = [_layer(weights, f"blk.{i}.{{}}.weight".format, i) for i in range(config.layers)]
    embedding = _product(weights, [("token_embd.weight", config.vocab)], dim)
    tied = "output.weight" not in weights.file.tensors
    head = embedding if tied else _product(weights, [("output.weight", config.vocab)], dim)
    return PackedModel(config, layers, embedding, head, weights.floats("output_norm.weight", dim))


def _layer(weights: Weights, name: Callable[[str], str], i: int) -> Layer:
    config = weights.config
    dim, ffn = config.dim, config.ffn
    q_rows, kv_rows = config.heads * config.head_dim, config.kv_heads * config.head_dim
    qkv = [(name("attn_q"), q_rows), (name("attn_k"), kv_rows), (name("attn_v"), kv_rows)]
    biases = [(f"blk.{i}.attn_{x}.bias", rows) for x, (_, rows) in zip("qkv", qkv, strict=True)]
    head_norms = [(name(f"attn_{x}_norm"), config.head_dim) for x in "qk"]
    gate_up = [(name("ffn_gate"), ffn), (name("ffn_up"), ffn)]
    same = weights.type_of(gate_up[0][0]) == weights.type_of(gate_up[1][0])
    return Layer(
        qkv=_product(weights, qkv, dim),
        bias=_joined(weights, biases, 0.0),
        head_norms=_joined(weights, head_norms, 1.0),
        o=_product(weights, [(name("attn_output"), dim)], q_rows),
        gate_up=_product(weights, gate_up, dim, in_turn=same),
        down=_product(weights, [(name("ffn_down"), dim)], ffn),
        norms=(weights.floats(name("attn_norm"), dim), weights.floats(name("ffn_norm"), dim)),
    )


def _product(weights: Weights, names: Sequence[tuple[str, int]], cols: int, in_turn: bool = False) -> Product:
    """Of the matrices (name, rows), one after the other or, those of a type, their rows in turn: neighbours of a
    type become one."""
    matrices = []
    for _, run in groupby(names, key=lambda item: weights.type_of(item[0])):
        tensors, kinds = list(run), []
        for name, rows in tensors:
            ggml_type, interleaved = weights.kind(name, rows, cols)
            kinds.append(Rows(rows, weights.config.head_dim if interleaved else 0))
        matrices.append(Matrix(tensors, Layout(Packing(ggml_type), tuple(kinds), cols, in_turn)))
    return Product(matrices)


def _joined(weights: Weights, names: Sequence[tuple[str, int]], missing: float) -> Tensor | None:
    """Vectors one after the other; None where there is none of them."""
    there = weights.file.tensors
    if not any(name in there for name, _ in names):
        return None
    parts = [weights.floats(name, n) if name in there else np.full(n, missing) for name, n in names]
    return sent(np.concatenate(parts).astype(np.float32))
