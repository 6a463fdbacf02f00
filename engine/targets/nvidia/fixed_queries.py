"""What attention of fixed queries (`QueryAttention` of `engine.description.vision`) reads in all pictures."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tinygrad import Tensor, dtypes

from engine.description.encoder_input import Grid, normed, waves
from engine.description.picture_size import MAX_RATIO
from engine.description.vision import QueryAttention, VisionSpec
from engine.kernels.device_memory import to_device
from engine.loading.fixed_rows import host_matrix
from engine.loading.weights import FileWeights


@dataclass(frozen=True)
class FixedQueries:
    """`queries`: what heads are made of, float32 (count, heads * head_dim). `waves`, float32 (2 * side, cols): those of
    each column, and below those of each row, of pictures with up to `side`. `count`: of queries, as kernels read it."""

    queries: Tensor
    waves: Tensor
    side: int
    count: Tensor

    @classmethod
    def of(cls, weights: FileWeights, spec: VisionSpec) -> FixedQueries | None:
        """Those of an encoder, None if it has none. Raises ModelFileError."""
        step = next((step for step in spec.projector_steps if isinstance(step, QueryAttention)), None)
        if step is None:
            return None
        x = normed(weights.vector(step.queries).reshape(step.count, -1), step.norm, weights.vector)
        queries = x @ host_matrix(weights, step.q.weight).T
        if step.q.bias:
            queries = queries + weights.vector(step.q.bias)
        side, cols = math.isqrt(spec.most_patches * MAX_RATIO) + 1, step.k.weight.cols
        line = waves(Grid(1, side), cols)[:, : cols // 2]
        of_columns, of_rows = np.pad(line, ((0, 0), (0, cols // 2))), np.pad(line, ((0, 0), (cols // 2, 0)))
        table = np.concatenate([of_columns, of_rows])
        count = np.array([step.count, 0, 0, 0], np.int32)
        return cls(
            to_device(queries.reshape(-1)), to_device(table.reshape(-1)), side, to_device(count, dtypes.int32)
        )

    def places_of(self, grid: Grid) -> NDArray[np.int32]:
        """The two rows of `waves` whose sum is that of each patch, (patches, 2)."""
        rows, columns = np.mgrid[: grid.rows, : grid.columns].reshape(2, -1)
        return np.stack([columns, self.side + rows], axis=1).astype(np.int32)
