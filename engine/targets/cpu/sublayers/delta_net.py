"""A gated delta net on a CPU."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
from tinygrad import Tensor, dtypes

from engine.description.recurrent import DeltaNet, KeyedDeltaNet
from engine.measure.kernel_roles import BufferUse
from engine.targets.buffer_uses import BufferUses
from engine.targets.cpu.kernels import memory
from engine.targets.cpu.kernels.activations import Gate
from engine.targets.cpu.kernels.delta_net import DeltaHeads, convolve, delta_net
from engine.targets.cpu.kernels.lanes import MOST_LANES
from engine.targets.cpu.step_builder import StepBuilder
from engine.targets.cpu.sublayers.handler import Handler, Loading
from engine.targets.cpu.weights import Matrix


class DeltaNetHandler(Handler):
    """quantize · qkv, gate, beta, alpha · convolve · delta net · quantize · out. `_tables`: what `convolve` reads
    beside the tokens. `_states`, `_inputs`: those of all sequences (`DeltaHeads`)."""

    _gating: Gate = "silu"

    @classmethod
    def lacks(cls, part: DeltaNet | KeyedDeltaNet) -> str:
        if part.size % MOST_LANES:
            return f"delta nets of heads of {part.size} elements"
        return super().lacks(part)

    def __init__(self, part: DeltaNet, norm: Tensor | None, is_added: bool, loading: Loading) -> None:
        weights, heads = loading.weights, (part.key_heads, part.value_heads, part.size, part.taps)
        net = DeltaHeads(*heads, loading.spec.eps, loading.lanes, part.shares_in_turn)
        self._keep_states(net, norm, loading)
        *firsts, rows = accumulate((weight.rows for weight in part.qkv), initial=0)
        self._qkv = [weights.matrix(w, first, rows) for w, first in zip(part.qkv, firsts, strict=True)]
        self._gate = weights.matrix(part.gate)
        self._beta = weights.matrix(part.beta, 0, net.gates + net.decays)
        self._alpha = weights.matrix(part.alpha, net.gates, net.gates + net.decays)
        self._out = weights.matrix(part.out, added=is_added)
        decays = (weights.vector(vector) for vector in (part.decay, part.decay_bias))
        self._tables = [weights.transposed(part.conv, net.taps), *decays]
        self._head_norm = weights.vector(part.norm)

    def _keep_states(self, net: DeltaHeads, norm: Tensor | None, loading: Loading) -> None:
        self._net, self._norm, self._sequences = net, norm, loading.states.parallel
        self._states, self._inputs = loading.states.add(net)
        self._slots = loading.states.slots

    @property
    def _reads(self) -> list[Matrix]:
        """What multiplies the stream."""
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
                ("rows", net.channels), ("gate", width), ("gates", net.gates + net.decays), ("attended", width)
            )
        )  # fmt: skip
        self._multiply(step, rows, gate, gates)
        of_step = *step.state, self._slots
        step.add(convolve(net, tile, by_row), rows, gates, self._inputs, *of_step, *self._tables)
        reads = *of_step, rows, gates, self._head_norm
        step.add(delta_net(net, tile, by_row), out, self._states, *reads, parts=net.values)
        return step.quantize(gate, [self._out], gate=(self._gating, out))

    def _multiply(self, step: StepBuilder, rows: Tensor, gate: Tensor, gates: Tensor) -> None:
        """Adds the products: rows of `qkv`, the gate, and beta and alpha in `gates`."""
        outs = *(rows for _ in self._qkv), gate, gates, gates
        step.multiply_stream(outs, self._reads, self._norm)

    def add_uses(self, uses: BufferUses) -> None:
        uses.add(BufferUse("QKV projection"), *(matrix.stream for matrix in self._reads))
        uses.add(BufferUse("delta net", "token", self._sequences), self._states, self._inputs)
        uses.add(BufferUse("delta net"), self._head_norm, *self._tables, self._slots)
        uses.add(BufferUse("attention output"), self._out.stream)


class KeyedDeltaNetHandler(DeltaNetHandler):
    """quantize · qkv, gates, beta, alphas · [quantize · the second ones of gates and alphas] · convolve · delta net ·
    quantize · out. See `DeltaNetHandler`."""

    _gating: Gate = "sigmoid"

    def __init__(self, part: KeyedDeltaNet, norm: Tensor | None, is_added: bool, loading: Loading) -> None:
        weights, heads = loading.weights, (part.heads, part.heads, part.size, part.taps)
        net = DeltaHeads(*heads, loading.spec.eps, loading.lanes, keyed=True, bound=part.bound)
        self._keep_states(net, norm, loading)
        firsts, stride = accumulate((weight.rows for weight in part.qkv), initial=0), net.gates + net.decays
        self._qkv = [
            weights.matrix(w, first, net.channels) for w, first in zip(part.qkv, firsts, strict=False)
        ]
        self._beta = weights.matrix(part.beta, 0, stride)
        *narrow, gate = part.gates
        self._gates = [*map(weights.matrix, narrow), weights.matrix(gate)]
        *narrow, alpha = part.alphas
        self._alphas = [*map(weights.matrix, narrow), weights.matrix(alpha, net.gates, stride)]
        self._out = weights.matrix(part.out, added=is_added)
        convs = memory.view(weights.joined([(conv, conv.size) for conv in part.convs]))
        taps = memory.array(convs.reshape(-1, net.taps).T, dtypes.float32)
        decay = memory.array(np.repeat(memory.view(weights.vector(part.decay)), part.size), dtypes.float32)
        self._tables = [taps, decay, weights.vector(part.decay_bias)]
        self._head_norm = weights.vector(part.norm)

    def _multiply(self, step: StepBuilder, rows: Tensor, gate: Tensor, gates: Tensor) -> None:
        """See `DeltaNetHandler`."""
        pairs = [("narrow gates", gate, self._gates), ("narrow alphas", gates, self._alphas)]
        firsts = [step.rows(name, of[0].rows) if len(of) > 1 else wide for name, wide, of in pairs]
        outs = *(rows for _ in self._qkv), firsts[0], gates, firsts[1]
        step.multiply_stream(outs, self._reads, self._norm)
        for narrow, (name, wide, of) in zip(firsts, pairs, strict=True):
            if len(of) > 1:
                step.multiply(wide, of[1], step.quantize(narrow, [of[1]], name=f"{name} "))

    @property
    def _reads(self) -> list[Matrix]:
        return [*self._qkv, self._gates[0], self._beta, self._alphas[0]]

    def add_uses(self, uses: BufferUses) -> None:
        super().add_uses(uses)
        others = *self._gates[1:], *self._alphas[1:]
        uses.add(BufferUse("QKV projection"), *(matrix.stream for matrix in others))
