"""A short convolution on a CPU."""

from __future__ import annotations

from tinygrad import Tensor

from engine.description.recurrent import ShortConv
from engine.measure.kernel_roles import BufferUse
from engine.targets.buffer_uses import BufferUses
from engine.targets.cpu.kernels.short_conv import ConvChannels, short_conv
from engine.targets.cpu.step_builder import StepBuilder
from engine.targets.cpu.sublayers.handler import Handler, Loading


class ShortConvHandler(Handler):
    """quantize · inputs · convolution · quantize · out. `_kept`: the inputs of all sequences (`ConvChannels`)."""

    def __init__(self, part: ShortConv, norm: Tensor | None, is_added: bool, loading: Loading) -> None:
        weights = loading.weights
        self._conv, self._norm = ConvChannels(part.channels, part.taps, loading.lanes), norm
        [self._kept] = loading.states.add(self._conv)
        self._slots, self._sequences = loading.states.slots, loading.states.parallel
        self._inputs, self._out = weights.matrix(part.inputs), weights.matrix(part.out, added=is_added)
        self._taps = weights.transposed(part.conv, part.taps)

    def add_kernels(self, step: StepBuilder) -> None:
        step.add_result(self._out, step.quantize(self._convolve(step), [self._out]))

    def keep(self, step: StepBuilder) -> None:
        self._convolve(step)

    def _convolve(self, step: StepBuilder) -> Tensor:
        """Adds all kernels but those of the last product; returns its input."""
        rows, out = step.rows("rows", self._inputs.rows), step.rows("attended", self._conv.channels)
        step.multiply(rows, self._inputs, step.quantize(step.x, [self._inputs], norm=self._norm))
        kernel = short_conv(self._conv, step.tile, bool(step.n_rows))
        step.add(kernel, out, self._kept, *step.state, self._slots, rows, self._taps)
        return out

    def add_uses(self, uses: BufferUses) -> None:
        uses.add(BufferUse("QKV projection"), self._inputs.stream)
        uses.add(BufferUse("delta net", "token", self._sequences), self._kept)
        uses.add(BufferUse("delta net"), self._taps, self._slots)
        uses.add(BufferUse("attention output"), self._out.stream)
