"""A model's matrices as kernels read them: packed on the device, those of one input and type made one product."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
from tinygrad import Device, Tensor

from engine.kernels.mailbox import sent
from engine.kernels.packing import Packing
from engine.kernels.repack import Layout, Rows, forget_plans, repack
from engine.kernels.schedules import schedule_here
from engine.model.config import ModelConfig
from engine.model.fused.buffers import Floats
from engine.model.weights import Weights


@dataclass
class Product:
    """A packed matrix of `tensors` and the schedule of its products. `row` is its first in the projection it is
    part of; `name` that of its first tensor."""

    tensors: Sequence[tuple[str, int]]
    layout: Layout
    row: int = 0

    def __post_init__(self) -> None:
        self.name = self.tensors[0][0].split(".")[-2]
        self.planes = self.layout.empty()
        self.schedule = schedule_here(self.packing, self.rows, self.cols)

    @property
    def packing(self) -> Packing:
        return self.layout.packing

    @property
    def rows(self) -> int:
        return self.layout.n_rows

    @property
    def cols(self) -> int:
        return self.layout.cols

    @property
    def n_bytes(self) -> int:
        return self.packing.n_bytes(self.rows, self.cols)

    @property
    def n_blocks(self) -> int:
        return -(-self.rows // self.schedule.block_rows)


@dataclass
class Layer:
    qkv: list[Product]
    bias: Tensor | None
    head_norms: Tensor | None
    o: Product
    gate_up: list[Product]  # one where both have a type, rows in turn
    down: Product
    norms: tuple[Floats, Floats]  # attention's, feed-forward's
    keys: Tensor = field(init=False)
    values: Tensor = field(init=False)

    @property
    def products(self) -> list[Product]:
        return [*self.qkv, self.o, *self.gate_up, self.down]

    @property
    def values_apart(self) -> bool:
        """Whether values come from a product of their own, which then runs beside that of queries and keys."""
        return len(self.qkv) > 1 and self.qkv[-1].name == "attn_v"


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

    def fill(self, weights: Weights) -> None:
        """Packs the matrices' bytes. Raises ModelFileError."""
        for product in self.products:
            cols = product.cols
            sources = [weights.stored_bytes(name, rows, cols)[0] for name, rows in product.tensors]
            repack(product.layout, sources, product.planes)
            Device[Device.DEFAULT].synchronize()  # so that the host's copies are freed
            for name, _ in product.tensors:
                weights.file.tensors[name].release()
        forget_plans()


def laid_out(weights: Weights) -> PackedModel:
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
        qkv=_projection(weights, qkv, dim),
        bias=_joined(weights, biases, 0.0),
        head_norms=_joined(weights, head_norms, 1.0),
        o=_product(weights, [(name("attn_output"), dim)], q_rows),
        gate_up=[_product(weights, gate_up, dim, in_turn=True)]
        if same
        else _projection(weights, gate_up, dim),
        down=_product(weights, [(name("ffn_down"), dim)], ffn),
        norms=(weights.floats(name("attn_norm"), dim), weights.floats(name("ffn_norm"), dim)),
    )


def _product(
    weights: Weights, names: Sequence[tuple[str, int]], cols: int, row: int = 0, in_turn: bool = False
) -> Product:
    """One matrix of the (name, rows) of several, one after the other or their rows in turn."""
    kinds = []
    for name, rows in names:
        ggml_type, interleaved = weights.kind(name, rows, cols)
        kinds.append(Rows(rows, weights.config.head_dim if interleaved else 0))
    return Product(names, Layout(Packing(ggml_type), tuple(kinds), cols, in_turn), row)


def _projection(weights: Weights, names: Sequence[tuple[str, int]], cols: int) -> list[Product]:
    """Matrices of one input as few products: neighbours of a type become one."""
    products, row = [], 0
    for _, run in groupby(names, key=lambda item: weights.type_of(item[0])):
        products.append(_product(weights, list(run), cols, row))
        row += products[-1].rows
    return products


def _joined(weights: Weights, names: Sequence[tuple[str, int]], missing: float) -> Tensor | None:
    """Vectors one after the other; None where there is none of them."""
    there = weights.file.tensors
    if not any(name in there for name, _ in names):
        return None
    parts = [weights.floats(name, n) if name in there else np.full(n, missing) for name, n in names]
    return sent(np.concatenate(parts).astype(np.float32))
