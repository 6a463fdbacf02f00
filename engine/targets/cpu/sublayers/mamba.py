"""A Mamba 2 layer on a CPU."""

from __future__ import annotations

from tinygrad import Tensor

from engine.description.recurrent import Mamba
from engine.measure.kernel_roles import BufferUse
from engine.targets.buffer_uses import BufferUses
from engine.targets.cpu.kernels import memory
from engine.targets.cpu.kernels.lanes import MOST_LANES
from engine.targets.cpu.kernels.mamba import MambaHeads, gated_norm, mamba, mamba_inputs
from engine.targets.cpu.step_builder import StepBuilder
from engine.targets.cpu.sublayers.handler import Handler, Loading


class MambaHandler(Handler):
    """quantize · gate, channels, steps · inputs · mamba · gated norm · quantize · out. `_states`, `_kept`: those of all
    sequences (`MambaHeads`)."""

    @classmethod
    def lacks(cls, part: Mamba) -> str:
        """As all handlers say it. The kernels also need heads and groups of whole vectors."""
        if part.head_dim % MOST_LANES or part.size % MOST_LANES:
            return f"Mamba 2 heads of {part.head_dim} elements and states of {part.size}"
        return super().lacks(part)

    def __init__(self, part: Mamba, norm: Tensor | None, is_added: bool, loading: Loading) -> None:
        weights, sizes = loading.weights, (part.heads, part.groups, part.head_dim, part.size, part.taps)
        net = self._net = MambaHeads(*sizes, loading.lanes)
        self._norm, self._eps = norm, loading.spec.eps
        self._states, self._kept = loading.states.add(net)
        self._slots, self._sequences = loading.states.slots, loading.states.parallel
        self._gate, self._channels = weights.matrix(part.gate), weights.matrix(part.channels)
        self._step, self._out = weights.matrix(part.step), weights.matrix(part.out, added=is_added)
        no_bias = memory.zeros(net.channels, self._states.dtype)
        bias = weights.vector(part.conv_bias) if part.conv_bias else no_bias
        self._tables = [weights.transposed(part.conv, net.taps), bias, weights.vector(part.step_bias)]
        self._factors = [weights.vector(vector) for vector in (part.decay, part.skip)]
        self._group_norm = weights.vector(part.norm) if part.norm else None

    def add_kernels(self, step: StepBuilder) -> None:
        net, (gate, out) = self._net, self._recur(step)
        if self._group_norm is None:
            inputs = step.quantize(gate, [self._out], gate=("silu", out))
        else:
            kernel = gated_norm(net, self._eps, step.tile)
            step.add(kernel, out, *step.state, gate, self._group_norm)
            inputs = step.quantize(out, [self._out])
        step.add_result(self._out, inputs)

    def keep(self, step: StepBuilder) -> None:
        self._recur(step)

    def _recur(self, step: StepBuilder) -> tuple[Tensor, Tensor]:
        """Adds the kernels up to the recurrence; returns the gates and its results."""
        net, tile, by_row = self._net, step.tile, bool(step.n_rows)
        names = ("gate", net.width), ("rows", net.channels), ("steps", net.steps), ("attended", net.width)
        gate, rows, dt, out = (step.rows(name, n) for name, n in names)
        step.multiply_stream((gate, rows, dt), (self._gate, self._channels, self._step), self._norm)
        of_step = *step.state, self._slots
        step.add(mamba_inputs(net, tile, by_row), rows, dt, self._kept, *of_step, *self._tables)
        reads = *of_step, rows, dt, *self._factors
        step.add(mamba(net, tile, by_row), out, self._states, *reads, parts=net.heads)
        return gate, out

    def add_uses(self, uses: BufferUses) -> None:
        uses.add(BufferUse("QKV projection"), *(m.stream for m in (self._gate, self._channels, self._step)))
        uses.add(BufferUse("delta net", "token", self._sequences), self._states, self._kept)
        uses.add(BufferUse("delta net"), self._slots, self._group_norm, *self._tables, *self._factors)
        uses.add(BufferUse("attention output"), self._out.stream)
