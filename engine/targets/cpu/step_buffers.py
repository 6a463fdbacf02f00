"""The buffers that all steps of a model on a CPU share."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType

from engine.description.spec import ModelSpec
from engine.measure.kernel_roles import BufferUse
from engine.runtime.pictures import PictureRoom
from engine.targets.buffer_uses import BufferUses
from engine.targets.cpu.kernels import memory
from engine.targets.cpu.kernels.attention import mask
from engine.targets.cpu.kernels.lanes import MOST_TILES, max_chunk
from engine.targets.cpu.kernels.step_state import SIZE
from engine.targets.cpu.kernels.thread_pool import ThreadPool
from engine.targets.cpu.weights import CPUWeights


class StepBuffers:
    """A step reads `state` and `places` (see `step_state`) and `tokens`, int32 (max_chunk,). The other tables are by
    position, of which there are `positions`."""

    def __init__(
        self,
        spec: ModelSpec,
        context: int,
        positions: int,
        pool: ThreadPool,
        weights: CPUWeights,
        lanes: int,
        pictures: PictureRoom | None,
    ) -> None:
        self.spec, self.pool, self.lanes, self.sizes = spec, pool, lanes, weights.sizes
        self.positions, self.max_chunk = positions, max_chunk(lanes, pictures.whole if pictures else 0)
        self.most_tiles = max(MOST_TILES, self.max_chunk // lanes)
        sizes = SIZE, 2 * self.max_chunk, self.max_chunk
        self.state, self.places, self.tokens = (memory.zeros(n, dtypes.int32) for n in sizes)
        tables = [rope.tables(positions, context) for rope in spec.ropes]
        # Where positions are three, kernels read tables of the step's tokens, which are made of those by position.
        self.turned = {i: tables[i] for i, rope in enumerate(spec.ropes) if pictures and rope.sections}
        self.ropes = [
            [
                memory.array(_rows(table, self.max_chunk) if i in self.turned else table, dtypes.float32)
                for table in both
            ]
            for i, both in enumerate(tables)
        ]
        self.seen = memory.zeros(self.max_chunk, dtypes.int32)
        parts = spec.picture_parts if pictures else 0
        self.of_pictures = [memory.zeros(self.max_chunk * spec.dim, dtypes.float32) for _ in range(parts)]
        """The parts of the embeddings of pictures, of all but the first one zeros where a token is none."""
        factors = [spec.temperature.factors(positions)] if spec.temperature else []
        self.temperatures = [memory.array(of, dtypes.float32) for of in factors]
        self.mask = memory.array(mask(lanes), dtypes.float32)
        joined = [a.query_size + 2 * a.kv_size for a in spec.attention]
        widest = max(*joined, *(weight.rows for weight in spec.weights())) + lanes
        self.zeros = memory.zeros(widest, dtypes.float32)
        self._scratch: dict[tuple[str, int, int], Tensor] = {}

    def scratch(self, name: str, tile: int, n: int, dtype: DType) -> Tensor:
        """Memory (n,) that all layers share."""
        if (name, tile, n) not in self._scratch:
            self._scratch[name, tile, n] = memory.zeros(n, dtype)
        return self._scratch[name, tile, n]

    def ones(self, n: int) -> Tensor:
        """float32 (n,), which all layers share."""
        ones = self.scratch("ones", 1, n, dtypes.float32)
        memory.view(ones)[:] = 1
        return ones

    def add_uses(self, uses: BufferUses) -> None:
        tables = *(t for tables in self.ropes for t in tables), *self.temperatures
        uses.add(BufferUse("attention", "token", self.positions), *tables)
        uses.add(BufferUse("attention", "token", self.max_chunk), self.places, self.seen)
        uses.add(BufferUse("embedding", "token", self.max_chunk), *self.of_pictures)
        # A kernel touches only as much of these two as its product, or the context, is long.
        uses.add(BufferUse("norm", "token", self.zeros.numel()), self.zeros)
        scores = [buffer for (name, *_), buffer in self._scratch.items() if name == "scores"]
        uses.add(BufferUse("attention", "context", self.positions), *scores)


def _rows(table: NDArray[np.float32], n: int) -> NDArray[np.float32]:
    """Zeros for `n` rows of such a table."""
    return np.zeros((n, table.shape[1]), np.float32)
