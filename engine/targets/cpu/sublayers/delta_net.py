"""A gated delta net on a CPU."""

from __future__ import annotations

from itertools import accumulate

from tinygrad import Tensor

from engine.description.recurrent import DeltaNet
from engine.measure.kernel_roles import BufferUse
from engine.targets.buffer_uses import BufferUses
from engine.targets.cpu.kernels.delta_net import DeltaHeads, convolve, delta_net
from engine.targets.cpu.step_builder import StepBuilder
from engine.targets.cpu.sublayers.handler import Handler, Loading
from engine.targets.cpu.weights import Matrix


class DeltaNetHandler(Handler):
    """quantize · qkv, gate, beta, alpha · convolve · delta net · quantize · out. `_tables`: what `convolve` reads
    beside the tokens. `_states`, `_inputs`: those of all sequences (`DeltaHeads`)."""

    def __init__(self, part: DeltaNet, norm: Tensor | None, is_added: bool, loading: Loading) -> None:
        weights, heads = loading.weights, (part.key_heads, part.value_heads, part.size, part.taps)
        net = DeltaHeads(*heads, loading.spec.eps, loading.lanes, part.shares_in_turn)
        self._net, self._norm, self._sequences = net, norm, loading.states.parallel
        self._states, self._inputs = loading.states.add(net)
        self._slots = loading.states.slots
        *firsts, rows = accumulate((weight.rows for weight in part.qkv), initial=0)
        self._qkv = [weights.matrix(w, first, rows) for w, first in zip(part.qkv, firsts, strict=True)]
        self._gate = weights.matrix(part.gate)
        self._beta = weights.matrix(part.beta, 0, 2 * net.gates)
        self._alpha = weights.matrix(part.alpha, net.gates, 2 * net.gates)
        self._out = weights.matrix(part.out, added=is_added)
        decays = (weights.vector(vector) for vector in (part.decay, part.decay_bias))
        self._tables = [weights.transposed(part.conv, net.taps), *decays]
        self._head_norm = weights.vector(part.norm)

    @property
    def _reads(self) -> list[Matrix]:
        return [*self._qkv, self._gate, self._beta, self._alpha]

    def add_kernels(self, step: StepBuilder) -> None:
        step.add_result(self._out, self._recur(step))

    def keep(self, step: StepBuilder) -> None:
        self._recur(step)

    def _recur(self, step: StepBuilder) -> dict[str, Tensor]:
        """Adds all kernels but the last product; returns its activations."""
        net, tile, by_row = self._net, step.tile, bool(step.n_rows)
        width = net.values * net.size
        rows, gate, gates, out = (
            step.rows(name, n)
            for name, n in (
                ("rows", net.channels), ("gate", width), ("gates", 2 * net.gates), ("attended", width)
            )
        )  # fmt: skip
        inputs = step.quantize(step.x, self._reads, norm=self._norm)
        outs = *(rows for _ in self._qkv), gate, gates, gates
        for i, (products, matrix) in enumerate(zip(outs, self._reads, strict=True)):
            step.multiply(products, matrix, inputs, concurrent=i > 0)
        of_step = *step.state, self._slots
        step.add(convolve(net, tile, by_row), rows, gates, self._inputs, *of_step, *self._tables)
        reads = *of_step, rows, gates, self._head_norm
        step.add(delta_net(net, tile, by_row), out, self._states, *reads, parts=net.values)
        return step.quantize(gate, [self._out], gate=("silu", out))

    def add_uses(self, uses: BufferUses) -> None:
        uses.add(BufferUse("QKV projection"), *(matrix.stream for matrix in self._reads))
        uses.add(BufferUse("delta net", "token", self._sequences), self._states, self._inputs)
        uses.add(BufferUse("delta net"), self._head_norm, *self._tables, self._slots)
        uses.add(BufferUse("attention output"), self._out.stream)
