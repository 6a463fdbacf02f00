"""Convolutions of images: what comes before their products, and those of a single channel.

An image has a row of channels for each of its places, line by line, as pictures have one for each patch (`patches`):
whole units of columns, zeros after its own. Beyond its edges are zeros.
"""

from __future__ import annotations

import functools

from tinygrad import UOp

from engine.kernels.compilation import KernelFunction
from engine.targets.cpu.kernels.kernel_builder import F32, KernelBuilder, even_share
from engine.targets.cpu.kernels.patches import FIRST, Activation, RowNorm, RowNorms, activated
from engine.targets.cpu.kernels.step_state import TILES
from engine.targets.cpu.kernels.stream_size import UNIT

SHAPE = 6
"""Numbers of the shape of a convolution, int32: the sides of the image and of the result, the places between two of
its kernels, those before the first one's middle that are beyond the edge, the units of a row, and its channels."""


class _Window:
    """The places of an image around one of the result: `kernel` x `kernel` of them, with those beyond its edges."""

    def __init__(self, k: KernelBuilder, shape: UOp, kernel: int, place: UOp) -> None:
        self._side, out_side, stride, before = (k.index(shape, i) for i in range(4))
        self._kernel = kernel
        self._row = place // out_side * stride - before
        self._column = place % out_side * stride - before

    def place(self, tap: UOp) -> tuple[UOp, UOp]:
        """The place in the image of a tap, whose number counts row by row, and whether there is one: beyond the edges
        it is another place, so that it can be read."""
        row, column = self._row + tap // self._kernel, self._column + tap % self._kernel
        last = self._side - 1
        is_in = (row >= 0) & (row <= last) & (column >= 0) & (column <= last)
        return row.maximum(0).minimum(last) * self._side + column.maximum(0).minimum(last), is_in


@functools.cache
def gather(kernel: int, lanes: int) -> KernelFunction:
    """The rows of a chunk: the channels of all places around each one's, place by place. Buffers: out, float32 (rows,
    kernel² * stride); the shape (`SHAPE`); the state; the image, float32 (places, stride)."""

    def gather_kernel(part: UOp, parts: UOp, out: UOp, shape: UOp, state: UOp, image: UOp) -> UOp:
        k, taps = KernelBuilder(lanes), kernel * kernel
        stride = k.index(shape, 4) * UNIT
        first, count = even_share(k.index(state, TILES), part, parts)
        with k.loop(count) as i, k.loop(lanes) as token:
            row = (first + i) * lanes + token
            window = _Window(k, shape, kernel, k.index(state, FIRST) + row)
            with k.loop(taps) as tap:
                place, is_in = window.place(tap)
                share = is_in.where(UOp.const(1.0, F32), UOp.const(0.0, F32))
                with k.loop(stride // lanes) as j:
                    value = k.vector(image, place * stride + j * lanes)
                    k.store(out, (row * taps + tap) * stride + j * lanes, value * share)
        return k.finish(f"gather_{kernel}")

    return gather_kernel


@functools.cache
def convolve_channels(
    kernel: int, norm: RowNorm | None, activation: Activation | None, lanes: int
) -> KernelFunction:
    """A convolution of each channel by itself, then a norm of all channels and an activation. The threads share the
    places. Buffers: out, float32 (places, stride); the shape (`SHAPE`); the image, float32 (places, stride); the
    weights, float32 (kernel², stride), the bias, float32 (stride,); the norm's weight and bias if there are any."""

    def convolve(
        part: UOp, parts: UOp, out: UOp, shape: UOp, image: UOp, weights: UOp, bias: UOp, *buffers: UOp
    ) -> UOp:
        k, taps, rest = KernelBuilder(lanes), kernel * kernel, list(buffers)
        k.scratch(out)
        measured = RowNorms(k, norm, rest) if norm else None
        out_side, stride, cols = k.index(shape, 1), k.index(shape, 4) * UNIT, k.index(shape, 5)
        first, count = even_share(out_side * out_side, part, parts)
        together = UNIT // lanes
        with k.loop(count) as i:
            window, at = _Window(k, shape, kernel, first + i), (first + i) * stride
            with k.loop(stride // UNIT) as unit:
                sums = [k.registers(lanes) for _ in range(together)]
                for j, s in enumerate(sums):
                    k.store(s, 0, k.vector(bias, unit * UNIT + j * lanes))
                with k.loop(taps) as tap:
                    place, is_in = window.place(tap)
                    share = is_in.where(UOp.const(1.0, F32), UOp.const(0.0, F32))
                    for j, s in enumerate(sums):
                        column = unit * UNIT + j * lanes
                        value = k.vector(image, place * stride + column) * share
                        k.store(s, 0, k.vector(s, 0) + value * k.vector(weights, tap * stride + column))
                for j, s in enumerate(sums):
                    k.store(out, at + unit * UNIT + j * lanes, k.vector(s, 0))
            if measured:
                measured.measure(lambda n: k.vector(out, at + n), stride, cols)
            if measured or activation:
                with k.loop(stride // lanes) as j:
                    value = k.vector(out, at + j * lanes)
                    value = measured.normed(value, j * lanes) if measured else value
                    value = activated(k, activation, value) if activation else value
                    k.store(out, at + j * lanes, value)
        return k.finish(f"convolve_channels_{kernel}")

    return convolve
