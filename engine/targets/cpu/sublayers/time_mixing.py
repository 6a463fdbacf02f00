"""RWKV 7's sublayers on a CPU."""

from __future__ import annotations

from tinygrad import Tensor

from engine.description.time_mixing import ChannelMix, LowRank, TimeMix
from engine.measure.kernel_roles import BufferUse
from engine.targets.buffer_uses import BufferUses
from engine.targets.cpu.kernels.activations import Gate
from engine.targets.cpu.kernels.lanes import MOST_LANES
from engine.targets.cpu.kernels.time_mixing import MixHeads, shift, time_mix
from engine.targets.cpu.step_builder import StepBuilder
from engine.targets.cpu.sublayers.handler import Handler, Loading
from engine.targets.cpu.weights import Matrix

_FIRST = "first values"
"""The rows of the first layer's values, which all others read."""


def _shifted(
    step: StepBuilder, norm: Tensor | None, net: MixHeads, kept: Tensor, slots: Tensor, shares: Tensor, n: int
) -> list[Tensor]:
    """Adds the kernels that mix the normed stream with that of the token before, with so many shares."""
    x = step.rows("normed", net.width)
    assert norm is not None
    step.add_normed(x, step.x, norm, added=False, eps=step.buffers.spec.stream_eps)
    outs = [step.rows(f"shifted{i}", net.width) for i in range(n)]
    kernel = shift(net.width, n, net.lanes, step.tile, bool(step.n_rows))
    step.add(kernel, *outs, kept, *step.state, slots, x, shares)
    return outs


class TimeMixHandler(Handler):
    """norm · shift · products · time_mix · quantize · out. `_states`, `_kept`: those of all sequences (`MixHeads`)."""

    @classmethod
    def lacks(cls, part: TimeMix) -> str:
        """As all handlers say it. The kernels also need heads of whole vectors."""
        if part.size % MOST_LANES:
            return f"time mixing in heads of {part.size} elements"
        return super().lacks(part)

    def __init__(self, part: TimeMix, norm: Tensor | None, is_added: bool, loading: Loading) -> None:
        weights, self._norm = loading.weights, norm
        self._net = MixHeads(part.heads, part.size, loading.lanes, part.NORM_EPS)
        self._states, self._kept = loading.states.add(self._net)
        self._slots, self._sequences = loading.states.slots, loading.states.parallel

        def both(of: LowRank | None) -> list[Matrix]:
            return [weights.matrix(weight) for weight in of or ()]

        self._straight = [weights.matrix(weight) for weight in (part.receptance, part.key, part.value)]
        self._decay, self._rate, self._mix, self._gate = map(
            both, (part.decay, part.rate, part.mix, part.gate)
        )
        biases = part.decay_bias, part.rate_bias, part.mix_bias
        self._biases = [bias and weights.vector(bias) for bias in biases]
        self._out = weights.matrix(part.out, added=is_added)
        self._shares = weights.vector(part.lerp)
        tables = part.removed, part.replaced, part.bonus, part.norm, part.norm_bias
        self._tables = [weights.vector(table) for table in tables if table]

    def add_kernels(self, step: StepBuilder) -> None:
        step.add_result(self._out, step.quantize(self._mixed(step), [self._out]))

    def keep(self, step: StepBuilder) -> None:
        self._mixed(step)

    def _mixed(self, step: StepBuilder) -> Tensor:
        """Adds all kernels but those of the last product; returns its input."""
        net, has_mix, has_gate = self._net, bool(self._mix), bool(self._gate)
        of_step = step, self._norm, net, self._kept, self._slots, self._shares
        x_r, x_w, x_k, x_v, x_a, *x_g = _shifted(*of_step, 6 if has_gate else 5)
        value = step.rows("value" if has_mix else _FIRST, net.width)
        r, key = step.rows("receptance", net.width), step.rows("key", net.width)
        for out, matrix, x in zip((r, key, value), self._straight, (x_r, x_k, x_v), strict=True):
            step.multiply(out, matrix, step.quantize(x, [matrix]))
        of_decay, of_rate, of_mix = self._biases
        products = [
            r, key, value,
            self._low(step, "decay", self._decay, x_w, of_decay, "tanh"),
            self._low(step, "rate", self._rate, x_a, of_rate),
        ]  # fmt: skip
        if has_mix:
            products.append(self._low(step, "mix", self._mix, x_v, of_mix))
            products.append(step.rows(_FIRST, net.width))
        if has_gate:
            products.append(self._low(step, "gate", self._gate, x_g[0], None, "sigmoid"))
        kernel = time_mix(net, has_mix, has_gate, len(self._tables) > 3, step.tile, bool(step.n_rows))
        out = step.rows("attended", net.width)
        buffers = *step.state, self._slots, *products, *self._tables
        step.add(kernel, out, self._states, *buffers, parts=net.heads)
        return out

    def _low(
        self,
        step: StepBuilder,
        name: str,
        matrices: list[Matrix],
        x: Tensor,
        bias: Tensor | None,
        gate: Gate | None = None,
    ) -> Tensor:
        """Adds two products, one after the other, with what is between them; returns their rows."""
        down, up = matrices
        low, rows = step.rows(f"low {name}", down.rows), step.rows(name, up.rows)
        step.multiply(low, down, step.quantize(x, [down]))
        step.multiply(rows, up, step.quantize(low, [up], gate=(gate, None) if gate else None), added=bias)
        return rows

    def add_uses(self, uses: BufferUses) -> None:
        matrices = *self._straight, *self._decay, *self._rate, *self._mix, *self._gate
        uses.add(BufferUse("QKV projection"), *(matrix.stream for matrix in matrices))
        uses.add(BufferUse("delta net", "token", self._sequences), self._states, self._kept)
        uses.add(BufferUse("delta net"), self._slots, self._shares, *self._biases, *self._tables)
        uses.add(BufferUse("attention output"), self._out.stream)


class ChannelMixHandler(Handler):
    """norm · shift · quantize · up · quantize · down. `_kept`: the last rows of all sequences."""

    @classmethod
    def lacks(cls, part: ChannelMix) -> str:
        return "channel mixing with a receptance" if part.receptance else super().lacks(part)

    def __init__(self, part: ChannelMix, norm: Tensor | None, is_added: bool, loading: Loading) -> None:
        weights, self._norm = loading.weights, norm
        self._net = MixHeads(0, part.down.rows, loading.lanes)
        [self._kept] = loading.states.add(self._net)
        self._slots, self._sequences = loading.states.slots, loading.states.parallel
        self._up, self._down = weights.matrix(part.up), weights.matrix(part.down, added=is_added)
        self._shares = weights.vector(part.lerp)

    def add_kernels(self, step: StepBuilder) -> None:
        rows = step.rows("gate", self._up.rows)
        step.multiply(rows, self._up, step.quantize(self._read(step), [self._up]))
        step.add_result(self._down, step.quantize(rows, [self._down], gate=("relu2", None)))

    def keep(self, step: StepBuilder) -> None:
        self._read(step)

    def _read(self, step: StepBuilder) -> Tensor:
        [read] = _shifted(step, self._norm, self._net, self._kept, self._slots, self._shares, 1)
        return read

    def add_uses(self, uses: BufferUses) -> None:
        uses.add(BufferUse("FFN gate+up"), self._up.stream)
        uses.add(BufferUse("FFN down"), self._down.stream)
        uses.add(BufferUse("delta net", "token", self._sequences), self._kept)
        uses.add(BufferUse("delta net"), self._slots, self._shares)
