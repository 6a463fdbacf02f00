"""A Mamba layer on a CPU."""

from __future__ import annotations

from tinygrad import Tensor, dtypes

from engine.description.recurrent import SelectiveScan
from engine.measure.kernel_roles import BufferUse
from engine.targets.buffer_uses import BufferUses
from engine.targets.cpu.kernels import memory
from engine.targets.cpu.kernels.lanes import MOST_LANES
from engine.targets.cpu.kernels.selective_scan import ScanSizes, norm_run, scan_inputs, selective_scan
from engine.targets.cpu.step_builder import StepBuilder
from engine.targets.cpu.sublayers.handler import Handler, Loading


class SelectiveScanHandler(Handler):
    """quantize · channels, gate · inputs · quantize · low, B, C · norms · quantize · dt · scan · quantize · out.
    `_states`, `_kept`: those of all sequences (`ScanSizes`)."""

    @classmethod
    def lacks(cls, part: SelectiveScan) -> str:
        """As all handlers say it. The kernels also need states of whole vectors."""
        if part.size % MOST_LANES:
            return f"Mamba states of {part.size}"
        if part.of_head > 1 and part.of_head % MOST_LANES:
            return f"Mamba heads of {part.of_head} channels"
        return super().lacks(part)

    def __init__(self, part: SelectiveScan, norm: Tensor | None, is_added: bool, loading: Loading) -> None:
        weights = loading.weights
        net = self._net = ScanSizes(part.width, part.size, part.taps, loading.lanes, part.of_head)
        self._norm, self._eps = norm, loading.spec.eps
        self._states, self._kept = loading.states.add(net)
        self._slots, self._sequences = loading.states.slots, loading.states.parallel
        self._inputs = [weights.matrix(weight) for weight in (part.channels, part.gate)]
        self._mixed = [weights.matrix(weight) for weight in (part.low, part.b, part.c)]
        self._step, self._out = weights.matrix(part.step), weights.matrix(part.out, added=is_added)
        norms = part.low_norm, part.b_norm, part.c_norm
        self._norms = [weights.vector(vector) if vector else None for vector in norms]
        no_bias = memory.zeros(net.width, dtypes.float32)
        bias = weights.vector(part.conv_bias) if part.conv_bias else no_bias
        self._tables = [weights.transposed(part.conv, net.taps), bias]
        bias, skip = weights.vector(part.step_bias), weights.vector(part.skip)
        self._factors = [bias, weights.transposed(part.decay, net.size), skip]

    def add_kernels(self, step: StepBuilder) -> None:
        gate, out = self._recur(step)
        step.add_result(self._out, step.quantize(gate, [self._out], gate=("silu", out)))

    def keep(self, step: StepBuilder) -> None:
        self._recur(step)

    def _recur(self, step: StepBuilder) -> tuple[Tensor, Tensor]:
        """Adds the kernels up to the recurrence; returns the gates and its results."""
        net, tile, by_row = self._net, step.tile, bool(step.n_rows)
        u, gate, out = (step.rows(name, net.width) for name in ("rows", "gate", "attended"))
        dt = step.rows("steps", net.steps)
        step.multiply_stream((u, gate), self._inputs, self._norm)
        of_step = *step.state, self._slots
        step.add(scan_inputs(net, tile, by_row), u, self._kept, *of_step, *self._tables)
        inputs = step.quantize(u, self._mixed)
        low, b, c = mixed = [
            step.rows(name, matrix.rows) for name, matrix in zip(("low", "b", "c"), self._mixed, strict=True)
        ]
        for i, (products, matrix) in enumerate(zip(mixed, self._mixed, strict=True)):
            step.multiply(products, matrix, inputs, concurrent=i > 0)
        for products, matrix, norm in zip(mixed, self._mixed, self._norms, strict=True):
            if norm is not None:
                kernel = norm_run(matrix.rows, self._eps, net.lanes, tile)
                step.add(kernel, products, *step.state, norm, parts=step.parts)
        step.multiply(dt, self._step, step.quantize(low, [self._step]))
        reads = *of_step, u, dt, b, c, *self._factors
        step.add(selective_scan(net, tile, by_row), out, self._states, *reads)
        return gate, out

    def add_uses(self, uses: BufferUses) -> None:
        matrices = *self._inputs, *self._mixed, self._step
        uses.add(BufferUse("QKV projection"), *(matrix.stream for matrix in matrices))
        uses.add(BufferUse("delta net", "token", self._sequences), self._states, self._kept)
        norms = [norm for norm in self._norms if norm is not None]
        uses.add(BufferUse("delta net"), self._slots, *norms, *self._tables, *self._factors)
        uses.add(BufferUse("attention output"), self._out.stream)
