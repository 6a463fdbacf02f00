"""The kernels of a step on a CPU while sublayers add theirs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType

from engine.targets.cpu.kernels import memory
from engine.targets.cpu.kernels.activations import (
    Gate,
    Quantization,
    add_centred,
    add_normed,
    buffer_names,
    buffer_type,
    quantize_activations,
)
from engine.targets.cpu.kernels.kernel_sequence import KernelSequence
from engine.targets.cpu.kernels.product import product, span_of
from engine.targets.cpu.kernels.stream_size import UNIT
from engine.targets.cpu.step_buffers import StepBuffers
from engine.targets.cpu.weights import Matrix

PART_BYTES = 256 << 10  # of a matrix, in each part of its product


@dataclass
class Tiles:
    """The tiles of experts that a step has (see `kernels.experts`), of `tile` tokens each: `tokens` in all at most, a
    state with the number of tiles, and their experts. `lists`: the token at each place and the place of each pair; none
    in decode."""

    tile: int
    tokens: int
    state: Tensor
    experts: Tensor
    lists: list[Tensor]


class StepBuilder:
    """`x`: the residual stream. `mixed`: the result of the sublayer at hand, if it is normed before it is added.
    `streams`: those beside it, and what a layer predicted of `x` (`kernels.streams`). `state`: the buffer that says how
    many tokens there are, if kernels read it. `parts`: of kernels whose threads share the tokens. `of_layers`: of the
    embeddings of layers the products, the weight of their norm, and the rows of the table."""

    def __init__(self, buffers: StepBuffers, tile: int, n_rows: int, most: int = 0) -> None:
        """`n_rows`: of a decode step; 0 in prefill, of at `most` so many tokens."""
        self.buffers, self.tile, self.n_rows = buffers, tile, n_rows
        self.tokens = n_rows or most or buffers.max_chunk
        self.state = [] if tile == 1 else [buffers.state]
        self.parts = 1 if tile == 1 else 0
        self.sequence = KernelSequence(buffers.pool)
        self.add = self.sequence.add
        self.x, self._y = (self.rows(name, buffers.spec.dim) for name in "xy")
        self.mixed: Tensor | None = None
        self.of_layers: list[Tensor] = []
        self.streams: list[Tensor] = []
        self.embeddings: Tensor | None = None  # of the tokens, if layers add them

    @property
    def out(self) -> Tensor:
        """Where the result of the sublayer goes: it is added to `x`, or it is `mixed`."""
        return self.x if self.mixed is None else self.mixed

    @property
    def before(self) -> Tensor:
        """The residual stream as the sublayer before this one read it, if that one's last product made the sum: it is
        in another array then."""
        return self._y

    def scratch(self, name: str, n: int, dtype: DType) -> Tensor:
        return self.buffers.scratch(name, self.tile, n, dtype)

    def rows(self, name: str, n: int) -> Tensor:
        """Scratch rows of n elements, one for each token: float32 (tokens * n,)."""
        return self.scratch(name, self.tokens * n, dtypes.float32)

    def quantize(
        self,
        rows: Tensor,
        matrices: Sequence[Matrix],
        norm: Tensor | None = None,
        gate: tuple[Gate, Tensor | None] | None = None,
        tiles: Tiles | None = None,
        gathered: bool = False,
        name: str = "",
        eps: float | None = None,
        weights: Tensor | None = None,
        curve: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Adds the kernel that quantizes rows for the products with `matrices`: normed, with the bias that may follow
        the weights of the `norm`, or gated and multiplied by other rows, if there are any; with `tiles` those of
        experts, `gathered` from the tokens. Each is multiplied by its token's one of the `weights`, if there are any.
        `curve`: of a gate xielu. Returns its outputs by name. `name` tells them from those of another call that are
        still needed."""
        buffers, cols = self.buffers, matrices[0].cols
        tile = tiles.tile if tiles else self.tile
        names = buffer_names([matrix.layout for matrix in matrices], tile)
        outs = {}
        for kind in names:
            dtype, columns = buffer_type(kind)
            tokens = tiles.tokens if tiles else self.tokens
            outs[kind] = self.scratch(f"{name}{kind}{cols}", tokens * cols // columns, dtype)
        eps = None if norm is None else buffers.spec.stream_eps if eps is None else eps
        quantization = Quantization(
            names,
            eps,
            gate[0] if gate else "",
            tiles is not None,
            gathered,
            alone=bool(gate and gate[1] is None),
            biased=norm is not None and memory.view(norm).size >= 2 * cols,
            weighed=weights is not None,
        )
        state = self.state if tiles is None else [tiles.state, *(tiles.lists[:1] if gathered else [])]
        others = [t for t in (norm, gate and gate[1], curve, weights) if t is not None]
        kernel, shape = quantize_activations(quantization, buffers.lanes, tile), buffers.sizes(cols // UNIT)
        self.add(kernel, *outs.values(), shape, *state, rows, *others, parts=self.parts)
        return outs

    def multiply(
        self,
        out: Tensor,
        matrix: Matrix,
        inputs: dict[str, Tensor],
        added: Tensor | None = None,
        bias: Tensor | None = None,
        concurrent: bool = False,
    ) -> None:
        """Adds a product."""
        read = [inputs[name] for name in buffer_names([matrix.layout], self.tile)]
        added = self.buffers.zeros if added is None else added  # the kernel always reads one
        span = span_of(matrix.cols) if self.tile > 1 else 1
        kernel = product(matrix.layout, self.tile, span, bias is not None, most=self.buffers.most_tiles)
        buffers = matrix.shape, *self.state, *read, added, *([] if bias is None else [bias]), matrix.stream
        parts = self.parts_of(memory.view(matrix.stream).nbytes)
        self.add(kernel, out, *buffers, parts=parts, concurrent=concurrent)

    def multiply_stream(
        self, outs: Sequence[Tensor], matrices: Sequence[Matrix], norm: Tensor | None
    ) -> None:
        """Adds the products of the normed stream with several matrices, beside each other."""
        inputs = self.quantize(self.x, matrices, norm=norm)
        for i, (out, matrix) in enumerate(zip(outs, matrices, strict=True)):
            self.multiply(out, matrix, inputs, concurrent=i > 0)

    def parts_of(self, n_bytes: int) -> int:
        """The parts of a product with a matrix: as many for each thread, and so small that a slow core delays the
        others little."""
        threads = self.buffers.pool.count
        return threads * ceil(n_bytes / threads / PART_BYTES)

    def add_result(self, matrix: Matrix, inputs: dict[str, Tensor], bias: Tensor | None = None) -> None:
        """Adds the last product of a sublayer."""
        if self.mixed is not None:
            self.multiply(self.mixed, matrix, inputs, added=bias)
        else:
            self.multiply(self._y, matrix, inputs, added=self.x, bias=bias)
            self.x, self._y = self._y, self.x

    def add_rows(self, rows: Sequence[Tensor], begins: bool = False, factor: float = 1.0) -> None:
        """Adds the kernel `add_centred` of rows to the residual stream, or it `begins` with them."""
        buffers, spec = self.buffers, self.buffers.spec
        kernel = add_centred(len(rows), buffers.lanes, self.tile, spec.centred, begins, factor)
        self.add(kernel, self.x, buffers.sizes(spec.dim // UNIT), *self.state, *rows, parts=self.parts)

    def add_normed(
        self,
        out: Tensor,
        rows: Tensor,
        norm: Tensor,
        scale: Sequence[Tensor] = (),
        added: bool = True,
        eps: float | None = None,
    ) -> None:
        """Adds the kernel `add_normed` of rows of the residual stream's size. A bias may follow the weights of the
        `norm`. `scale`: its number, if any."""
        spec, lanes = self.buffers.spec, self.buffers.lanes
        biased = memory.view(norm).size >= 2 * spec.dim
        eps = spec.eps if eps is None else eps
        kernel = add_normed(eps, lanes, self.tile, added, bool(scale), biased)
        shape = self.buffers.sizes(spec.dim // UNIT)
        self.add(kernel, out, shape, *self.state, rows, norm, *scale, parts=self.parts)
