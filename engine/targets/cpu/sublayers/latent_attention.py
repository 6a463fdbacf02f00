"""Latent attention on a CPU."""

from __future__ import annotations

from tinygrad import Tensor, dtypes

from engine.description.attention import LatentAttention
from engine.measure.kernel_roles import BufferUse
from engine.targets.buffer_uses import BufferUses
from engine.targets.cpu.kernels import memory
from engine.targets.cpu.kernels.lanes import MOST_LANES
from engine.targets.cpu.kernels.latent_attention import LatentHeads, count_tiles, join, order, take
from engine.targets.cpu.step_builder import StepBuilder, Tiles
from engine.targets.cpu.sublayers.attention import AttentionHandler
from engine.targets.cpu.sublayers.experts import multiply_tiles
from engine.targets.cpu.sublayers.handler import Loading
from engine.targets.cpu.weights import Matrix


class LatentAttentionHandler(AttentionHandler):
    """quantize · q, k · quantize · heads' product · join · rotate · attend · take · quantize · heads' product · [order]
    · quantize · o. With a matrix before that of queries, they are quantized once more."""

    @classmethod
    def lacks(cls, part: LatentAttention) -> str:
        """As other attention. The products of heads need whole groups of rows."""
        rows = part.of_keys.rows, part.of_values.rows, part.k.rows, part.k_rotated.rows
        if part.heads == 1 or any(n % MOST_LANES for n in rows):
            return f"latent attention of {part.heads} heads of {part.latent} and {part.rotated} elements"
        return super().lacks(part)

    def _load(self, part: LatentAttention, loading: Loading) -> None:
        weights = loading.weights
        sizes = part.heads, part.latent, part.rotated, part.values
        self._latent = LatentHeads(*sizes, loading.spec.eps, loading.lanes)
        self._down = [weights.matrix(part.q_down)] if part.q_down else []
        self._down_norm = weights.vector(part.q_down_norm) if part.q_down_norm else None
        self._q, self._q_rotated = weights.matrix(part.q), weights.matrix(part.q_rotated)
        dim = part.head_dim
        self._keys = [weights.matrix(part.k, 0, dim), weights.matrix(part.k_rotated, part.latent, dim)]
        self._of_keys, self._of_values = weights.matrix(part.of_keys), weights.matrix(part.of_values)
        self._latent_norm = weights.vector(part.latent_norm)
        self._gate = weights.matrix(part.gate) if part.gate else None
        self._scales = part.gating if part.gate else ""
        self._no_bias = memory.zeros(max(part.latent, part.values), dtypes.float32)

    def add_kernels(self, step: StepBuilder) -> None:
        h, tile = self._latent, step.tile
        gates = step.rows("gate", h.heads * h.values) if self._gate else None
        attended = self._attend(step, self._rotate(step, gates))
        taken = step.rows("latent", h.heads * h.latent)
        step.add(take(h, tile), taken, *step.state, attended)
        results = self._multiply_heads(step, "head results", taken, self._of_values)
        if tile > 1:
            placed, results = results, step.rows("ordered results", h.heads * h.values)
            step.add(order(h, tile), results, *step.state, placed)
        if gates is not None and self._gate:
            self._scale_heads(step, results, gates, self._gate, h.heads * h.values)
        step.add_result(self._o, step.quantize(results, [self._o]), self._o_bias)

    def _rotate(self, step: StepBuilder, gates: Tensor | None = None) -> Tensor:
        h, part = self._latent, [self._q, self._q_rotated]
        plain, turned, keys, rows = (
            step.rows(name, n)
            for name, n in (
                ("plain", self._q.rows), ("turned", self._q_rotated.rows), ("latent keys", h.dim),
                ("rows", self.heads.rows),
            )
        )  # fmt: skip
        gate = [self._gate] if self._gate and gates is not None else []
        inputs = step.quantize(step.x, [*(self._down or part), *self._keys, *gate], norm=self._norm)
        for i, matrix in enumerate(self._keys):
            step.multiply(keys, matrix, inputs, concurrent=i > 0)
        if gates is not None and self._gate:
            step.multiply(gates, self._gate, inputs, concurrent=True)
        if self._down:
            (down,) = self._down
            narrow = step.rows("narrow queries", down.rows)
            step.multiply(narrow, down, inputs, concurrent=True)
            inputs = step.quantize(narrow, part, norm=self._down_norm, name="narrow ", eps=h.eps)
        step.multiply(plain, self._q, inputs, concurrent=not self._down)
        step.multiply(turned, self._q_rotated, inputs, concurrent=True)
        latent = self._multiply_heads(step, "latent queries", plain, self._of_keys)
        step.add(join(h, step.tile), rows, *step.state, latent, turned, keys, self._latent_norm)
        return self._turn(step, rows)

    def _multiply_heads(self, step: StepBuilder, name: str, rows: Tensor, matrix: Matrix) -> Tensor:
        """Adds the product of each head's matrix and its rows (tokens, heads, cols); returns the results in their
        places."""
        h, tile, sizes = self._latent, step.tile, step.buffers.sizes
        n = -(-step.tokens // tile) * h.heads
        if tile == 1:
            tiles = Tiles(1, h.heads, sizes(h.heads), sizes(*range(h.heads)), [])
        else:
            count = step.scratch("head tiles", 1, dtypes.int32)
            step.add(count_tiles(h), count, *step.state, parts=1)
            experts = sizes(*(i % h.heads for i in range(n)))
            tiles = Tiles(tile, n * tile, count, experts, [sizes(*h.sources(step.tokens, tile))])
        inputs = step.quantize(rows, [matrix], tiles=tiles, gathered=tile > 1)
        results = step.scratch(name, tiles.tokens * matrix.rows, dtypes.float32)
        multiply_tiles(step, results, matrix, inputs, tiles, self._no_bias, shared=False)
        return results

    @property
    def _inputs(self) -> list[Matrix]:
        gate = [self._gate] if self._gate else []
        return [*self._down, self._q, self._q_rotated, *self._keys, *gate, self._of_keys]

    def add_uses(self, uses: BufferUses) -> None:
        super().add_uses(uses)
        uses.add(BufferUse("attention output"), self._of_values.stream)
        uses.add(BufferUse("norm"), self._down_norm, self._latent_norm, self._no_bias)
