"""A model's weights as the CPU's kernels read them: matrices repacked, vectors as they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from tinygrad import Tensor, dtypes

from engine.description.spec import ModelSpec
from engine.description.sublayers import Vector, Weight
from engine.loading import packed_weights_cache
from engine.loading.packed_weights_cache import PackedReader
from engine.loading.weights import Weights, pieces
from engine.targets.cpu.kernels import memory
from engine.targets.cpu.kernels.experts import expert_shape
from engine.targets.cpu.kernels.product import shape_of
from engine.targets.cpu.kernels.thread_pool import ThreadPool
from engine.targets.cpu.kernels.weight_layout import LaneLayout
from engine.targets.cpu.kernels.weight_repacking import repack


@dataclass
class Matrix:
    """A repacked matrix, or those of all experts, of `rows` each. `shape` holds the sizes that its product reads
    (`shape_of`, `expert_shape`)."""

    layout: LaneLayout
    rows: int
    cols: int
    shape: Tensor
    stream: Tensor


@dataclass
class Table:
    """A matrix as the file holds it, of which rows are read: its ggml type, the sizes that `embed_from_file` reads, and
    its bytes in the file or its floats."""

    type: int
    cols: int
    shape: Tensor
    data: Tensor


@dataclass
class LayerTables:
    """The weights of the embeddings of `layers` layers, of `size` elements each
    (`engine.description.spec.LayerEmbeddings`)."""

    table: Table
    projection: Matrix
    norm: Tensor
    size: int
    layers: int


class CPUWeights:
    """Loads matrices and vectors to memory. `keep_packed`: reads packed weights from the cache on disk, or writes them
    there (`packed_weights_cache`)."""

    def __init__(self, weights: Weights, pool: ThreadPool, lanes: int, keep_packed: bool) -> None:
        self._weights, self._pool, self._lanes, self._keep_packed = weights, pool, lanes, keep_packed
        self._cache = PackedReader(weights.file, lanes) if keep_packed else None
        self._streams: dict[str, Tensor] = {}
        self._sizes: dict[tuple[int, ...], Tensor] = {}
        self._repacked = False

    def matrix(self, weight: Weight, first: int = 0, out_rows: int = 0, added: bool = False) -> Matrix:
        """`first`, `out_rows` and `added` as in `shape_of`; of experts, `added` says whether they have biases."""
        layout, n_rows = LaneLayout(weight.type, self._lanes), weight.experts * weight.rows
        if weight.experts > 1:
            shape = self.sizes(*expert_shape(weight.rows, weight.cols, layout, added))
        else:
            shape = self.sizes(*shape_of(weight.rows, weight.cols, layout, added, first, out_rows))
        if (known := self._streams.get(weight.key)) is not None:  # layers may run several times
            return Matrix(layout, weight.rows, weight.cols, shape, known)
        stream = memory.zeros(layout.size(n_rows, weight.cols), layout.dtype)
        is_cached = self._cache and self._cache.read(weight.key, memory.view(stream).view(np.uint8))
        self._repacked = self._repacked or not is_cached
        for piece in pieces(weight, self._lanes):
            if not is_cached:
                rows = np.arange(len(piece), dtype=np.int32)
                if weight.order:
                    rows = weight.order.apply(rows)
                raw = self._weights.read(weight, piece)
                repack(self._pool, raw, layout, rows, weight.cols, stream, piece.start)
            self._weights.release(weight, piece)
        self._streams[weight.key] = stream
        return Matrix(layout, weight.rows, weight.cols, shape, stream)

    def vector(self, vector: Vector) -> Tensor:
        """float32 (vector.size,), and zeros up to whole vectors of the machine. Raises ModelFileError."""
        values = self._weights.vector(vector)
        return memory.array(np.pad(values, (0, -values.size % self._lanes)), dtypes.float32)

    def transposed(self, vector: Vector, cols: int) -> Tensor:
        """A vector of rows of `cols` elements, column by column: float32 (vector.size,). Raises ModelFileError."""
        return memory.array(self._weights.vector(vector).reshape(-1, cols).T, dtypes.float32)

    def joined(self, parts: Sequence[tuple[Vector | None, int]]) -> Tensor | None:
        """Vectors of these sizes one after another, zeros for those that are None; None if all are. Raises
        ModelFileError."""
        values = self._weights.joined_vectors(parts, 0.0)
        return None if values is None else memory.array(values, dtypes.float32)

    def layer_tables(self, spec: ModelSpec) -> LayerTables | None:
        """What the embeddings of layers are made of. Raises ModelFileError."""
        if not (e := spec.layer_embeddings):
            return None
        table = self._table(e.table)
        return LayerTables(table, self.matrix(e.projection), self.vector(e.norm), e.size, e.layers)

    def _table(self, weight: Weight) -> Table:
        layout = LaneLayout(weight.type, self._lanes)
        data = memory.mapped(self._weights.mapped(weight), dtypes.uint8 if layout.format else layout.dtype)
        return Table(weight.type, weight.cols, self.sizes(weight.rows, weight.cols // layout.block), data)

    def sizes(self, *values: int) -> Tensor:
        """The values as an int32 tensor; the same values give the same tensor."""
        if values not in self._sizes:
            self._sizes[values] = memory.array(np.array(values), dtypes.int32)
        return self._sizes[values]

    def finish(self) -> None:
        """Writes the cache on disk if it has to be, after all matrices were loaded."""
        if self._cache is not None:
            self._cache.close()
        if self._keep_packed and self._repacked:
            streams = {key: memory.view(stream).view(np.uint8) for key, stream in self._streams.items()}
            packed_weights_cache.write(self._weights.file, self._lanes, streams)
        self._streams.clear()
