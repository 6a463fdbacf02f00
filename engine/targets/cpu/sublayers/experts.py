"""A mixture of experts on a CPU."""

from __future__ import annotations

from tinygrad import Tensor, dtypes

from engine.description.feed_forward import Experts
from engine.measure.kernel_roles import BufferUse
from engine.targets.buffer_uses import BufferUses
from engine.targets.cpu.kernels import memory
from engine.targets.cpu.kernels.activations import buffer_names
from engine.targets.cpu.kernels.expert_choice import Choice, choose_experts, choose_scored_experts
from engine.targets.cpu.kernels.experts import (
    add_experts,
    expert_product,
    group_experts,
    max_tiles,
    tile_of_experts,
)
from engine.targets.cpu.kernels.product import span_of
from engine.targets.cpu.kernels.stream_size import UNIT
from engine.targets.cpu.step_builder import StepBuilder, Tiles
from engine.targets.cpu.sublayers.dense import DenseHandler
from engine.targets.cpu.sublayers.handler import Handler, Loading
from engine.targets.cpu.weights import Matrix


class ExpertsHandler(Handler):
    """quantize · router, shared gate+up · shared down · choose · group · quantize · gate+up · quantize · down · add.
    In decode all experts read what the router reads, and nothing is grouped. `_narrow`: products before and after the
    experts, which are narrower than the stream."""

    @classmethod
    def lacks(cls, part: Experts) -> str:
        if part.narrow and part.shared_gate:
            return "a gate of a shared expert beside narrow ones"
        if part.routes_before and (part.shared or part.router_bias):
            return "a shared expert or a router's bias where the router reads the stream before attention"
        return super().lacks(part)

    def __init__(
        self,
        part: Experts,
        norm: Tensor | None,
        is_added: bool,
        loading: Loading,
        router_norm: Tensor | None = None,
    ) -> None:
        """`router_norm`: a norm of its own for the router."""
        weights = loading.weights
        self._part, self._norm, self._router_norm = part, norm, router_norm
        matrices = [*part.firsts, (part.down, part.down_bias)]
        *self._firsts, self._down = (
            weights.matrix(weight, added=bias is not None) for weight, bias in matrices
        )
        self._narrow = [weights.matrix(weight) for weight in part.narrow or ()]
        self._shared = DenseHandler(part.shared, None, False, loading) if part.shared else None
        self._shared_gates = [weights.matrix(part.shared_gate)] if part.shared_gate else []
        self._router = weights.matrix(part.router)
        self._router_bias = part.router_bias and weights.vector(part.router_bias)
        self._biases = [  # the kernels always read some
            weights.vector(bias) if bias else memory.zeros(weight.rows, dtypes.float32)
            for weight, bias in matrices
        ]
        self._choices = memory.zeros(part.count, dtypes.int32)
        loading.choices.append(self._choices)
        added, scales = ([weights.vector(v)] if v else [] for v in (part.choice_bias, part.scales))
        self._factors = [*added, *scales]  # what the choice reads beside the logits

    def add_kernels(self, step: StepBuilder) -> None:
        self.add_to(step.out, step)

    def add_to(self, out: Tensor, step: StepBuilder) -> None:
        """Adds the kernels; the result is added to `out` if that is the residual stream, else it is in `out`."""
        buffers, part, tile = step.buffers, self._part, step.tile
        logits = step.rows("router", self._router.layout.groups(part.count) * buffers.lanes)
        shared_reads = [*self._shared.reads, *self._shared_gates] if self._shared else []
        weighed = part.weighed_inputs
        reads = self._narrow[:1] or (self._firsts if tile == 1 and not weighed else [])
        if self._router_norm is not None or part.routes_before:
            read = step.before if part.routes_before else step.x
            of_router = step.quantize(read, [self._router], norm=self._router_norm)
            step.multiply(logits, self._router, of_router)
            inputs = step.quantize(step.x, reads, norm=self._norm) if reads else {}
        else:
            inputs = step.quantize(step.x, [self._router, *shared_reads, *reads], norm=self._norm)
            step.multiply(logits, self._router, inputs, added=self._router_bias)
        read, norm = step.x, self._norm
        if self._narrow:
            read, norm = step.rows("narrow", self._narrow[0].rows), None
            step.multiply(read, self._narrow[0], inputs)
        shared = self._share(step, inputs)
        chosen = step.scratch("chosen", step.tokens * part.used, dtypes.int32)
        probabilities = step.scratch("probabilities", step.tokens * part.used, dtypes.float32)
        if part.is_plain:
            scaled = part.scales is not None
            kernel = choose_experts(part.count, part.used, part.least_sum, buffers.lanes, tile, scaled)
        else:
            kernel = choose_scored_experts(_choice_of(part), buffers.lanes, tile)
        counted = self._choices if tile == 1 else buffers.state
        step.add(
            kernel, chosen, probabilities, counted, logits, *self._factors,
            parts=step.parts, concurrent=bool(shared),
        )  # fmt: skip
        if tile == 1:
            tiles = Tiles(1, part.used, buffers.sizes(part.used), chosen, [])
            if weighed or self._narrow:
                weights = probabilities if weighed else None
                inputs = step.quantize(read, self._firsts, norm=norm, weights=weights, name="experts ")
        else:
            tiles = self._group(step, chosen)
            reads = self._firsts
            weights = probabilities if weighed else None
            inputs = step.quantize(read, reads, norm=norm, tiles=tiles, gathered=True, weights=weights)
        first, *others, results = (
            step.scratch(name, tiles.tokens * matrix.rows, dtypes.float32)
            for name, matrix in (
                *zip(("expert gate", "expert up"), self._firsts, strict=False),
                ("results", self._down),
            )
        )
        *of_firsts, of_down = self._biases
        for i, (rows, matrix, bias) in enumerate(zip((first, *others), self._firsts, of_firsts, strict=True)):
            multiply_tiles(step, rows, matrix, inputs, tiles, bias, concurrent=i > 0)
        gate = part.activation, others[0] if others else None
        inputs = step.quantize(first, [self._down], gate=gate, tiles=tiles)
        multiply_tiles(step, results, self._down, inputs, tiles, of_down, shared=False)
        of_results = buffers.ones(step.tokens * part.used) if weighed else probabilities
        self._sum(step, out, tiles, of_results, results, shared)

    def _sum(
        self,
        step: StepBuilder,
        out: Tensor,
        tiles: Tiles,
        weights: Tensor,
        results: Tensor,
        shared: list[Tensor],
    ) -> None:
        """Adds the kernels that sum the results of a token's experts, times `weights`, and what all tokens share."""
        buffers = step.buffers
        total = step.rows("narrow sum", self._down.rows) if self._narrow else out
        beside = [] if self._narrow else shared
        lists = [*step.state, tiles.lists[1]] if tiles.lists else []
        step.add(
            add_experts(
                self._part.used, total is step.x, buffers.lanes, step.tile, bool(beside), bool(self._shared_gates)
            ),
            total, buffers.sizes(self._down.rows // UNIT), *lists, weights, results, *beside,
        )  # fmt: skip
        if self._narrow:
            wide = step.rows("wide", buffers.spec.dim)
            step.multiply(wide, self._narrow[1], step.quantize(total, self._narrow[1:], name="narrow "))
            step.add_rows([wide, *shared])

    def _share(self, step: StepBuilder, inputs: dict[str, Tensor]) -> list[Tensor]:
        """Adds the kernels of the layer that all tokens share; returns its gate, if it has one, and its results."""
        if not self._shared:
            return []
        factors = [step.rows("shared factors", step.buffers.lanes) for _ in self._shared_gates]
        results = step.rows("shared", step.buffers.spec.dim)
        for factor, gate in zip(factors, self._shared_gates, strict=True):
            step.multiply(factor, gate, inputs, concurrent=True)
        step.multiply(results, *self._shared.hidden(step, inputs, "shared "))
        return [*factors, results]

    def _group(self, step: StepBuilder, chosen: Tensor) -> Tiles:
        """Adds the kernel that puts the tokens of each expert into tiles."""
        part = self._part
        tile = tile_of_experts(step.tokens, part.used, part.count, step.tile)
        n = max_tiles(step.tokens, part.used, part.count, tile)
        experts, sources, places, count = (
            step.scratch(name, size, dtypes.int32)
            for name, size in (
                ("experts", n), ("sources", n * tile), ("places", chosen.numel()), ("tiles", 1)
            )
        )  # fmt: skip
        outs = experts, sources, places, count, self._choices
        step.add(group_experts(part.count, part.used, tile), *outs, step.buffers.state, chosen, parts=1)
        return Tiles(tile, n * tile, count, experts, [sources, places])

    def add_uses(self, uses: BufferUses) -> None:
        *of_firsts, of_down = self._biases
        uses.add(BufferUse("router"), self._router_bias, self._router.stream, self._choices, *self._factors)
        gate_up = [*of_firsts, *(matrix.stream for matrix in self._firsts)]
        down = [of_down, self._down.stream]
        uses.add_experts(self._part, self._part.used, gate_up, down)
        for use, matrix in zip((BufferUse("FFN gate+up"), BufferUse("FFN down")), self._narrow, strict=False):
            uses.add(use, matrix.stream)
        if self._shared:
            self._shared.add_uses(uses)
            uses.add(BufferUse("router"), *(gate.stream for gate in self._shared_gates))


def _choice_of(part: Experts) -> Choice:
    biased, scaled = part.choice_bias is not None, part.scales is not None
    groups = part.groups, part.used_groups
    return Choice(part.count, part.used, part.least_sum, part.scoring, biased, part.factor, *groups, scaled)


def multiply_tiles(
    step: StepBuilder,
    out: Tensor,
    matrix: Matrix,
    inputs: dict[str, Tensor],
    tiles: Tiles,
    bias: Tensor,
    shared: bool = True,
    concurrent: bool = False,
) -> None:
    """As `StepBuilder.multiply`, with the experts of the tiles. `shared`: in decode, all experts have the same
    input."""
    tile = tiles.tile
    read = [inputs[name] for name in buffer_names([matrix.layout], tile)]
    span = span_of(matrix.cols) if tile > 1 else 1
    kernel = expert_product(matrix.layout, tile, span, shared and tile == 1)
    expert = matrix.layout.size(matrix.rows, matrix.cols) * matrix.layout.dtype.itemsize
    n_bytes = min(expert * tiles.tokens, memory.view(matrix.stream).nbytes)
    buffers = matrix.shape, tiles.state, tiles.experts, *read, bias, matrix.stream
    step.add(kernel, out, *buffers, parts=step.parts_of(n_bytes), concurrent=concurrent)
