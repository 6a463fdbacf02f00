"""An encoder of convolutions (`engine.description.vision.ConvolutionNet`) as tensor graphs. Images are float32
(rows, columns, channels)."""

from __future__ import annotations

from collections.abc import Generator

import numpy as np
from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType

from engine.description.vision import ConvolutionNet, ImageAttention, ImageBlock, ImageStep
from engine.runtime.pictures import Floats, Progress
from engine.targets.graph.picture_parts import Parameters, Parts, shape_of
from engine.targets.graph.stem import Captured


class NetSteps:
    """The steps of a net. `count`: of its blocks."""

    def __init__(self, net: ConvolutionNet, parameters: Parameters, input: DType) -> None:
        self._net, self._all, self._input = net, parameters, input
        self.count = len(net.blocks)

    def run(
        self, rows: int, patches: Floats, total: int, captured: Captured
    ) -> Generator[Progress, None, Tensor]:
        """What the net makes of a picture of so many rows and columns of patches, float32 (n, 3 patch²): (side * side,
        dim). `total`: of the work's parts."""
        n, size = int((patches.shape[1] // 3) ** 0.5), -rows
        squares = patches.reshape(rows, rows, 3, n, n).transpose(0, 3, 1, 4, 2)
        x, read = (
            Tensor(np.ascontiguousarray(squares).reshape(rows * n, rows * n, 3)).realize(),
            list[Tensor](),
        )
        for done, block in enumerate(self._net.blocks):
            yield Progress(done, total)

            def run(x: Tensor, *own: Tensor, of: ImageBlock = block) -> Tensor:
                return _block(Parts(self._all.replaced(of, own), self._input), of, x).realize()

            x = captured(size, (shape_of(block), x.shape), run)(x, *self._all.of(block))
            if done in self._net.read:
                read.append(x.clone().realize())  # the next step of this shape writes there
        yield Progress(self.count, total)
        return captured(size, "end", self._end)(*read)

    def _end(self, first: Tensor, *others: Tensor) -> Tensor:
        net, parts, side = self._net, Parts(self._all, self._input), int(first.shape[0])
        enlarged = (
            x.repeat_interleave(side // int(x.shape[0]), 0).repeat_interleave(side // int(x.shape[1]), 1)
            for x in others
        )
        x = _block(parts, net.last, first.cat(*enlarged, dim=-1).contiguous())
        k = side // net.side
        x = x.reshape(net.side, k, net.side, k, -1).mean((1, 3)).contiguous()
        x = parts.norm(x, net.norm) if net.norm else x
        return x.reshape(net.side**2, -1).contiguous().realize()


def _block(parts: Parts, block: ImageBlock, x: Tensor) -> Tensor:
    y = x
    for step in block.steps:
        y = _attended(parts, step, y) if isinstance(step, ImageAttention) else _convolved(parts, step, y)
    y = y * parts.floats(block.scale) if block.scale else y
    return (x + y if block.adds else y).contiguous()


def _convolved(parts: Parts, step: ImageStep, x: Tensor) -> Tensor:
    rows, columns, channels = (int(n) for n in x.shape)
    down, across = (-(-n // step.stride) for n in (rows, columns))
    k = step.kernel
    if k > 1:
        room = [max((count - 1) * step.stride + k - n, 0) for count, n in ((down, rows), (across, columns))]
        x = x.pad((*((n // 2, n - n // 2) for n in room), (0, 0))).contiguous()
    taps = [
        x[
            i : i + (down - 1) * step.stride + 1 : step.stride,
            j : j + (across - 1) * step.stride + 1 : step.stride,
        ]
        for i in range(k)
        for j in range(k)
    ]
    if step.deep:
        weights = (
            parts.matrix(step.weight)
            .cast(dtypes.float32)
            .reshape(channels, k * k)
            .transpose(0, 1)
            .contiguous()
        )
        first, *others = (tap * weights[i] for i, tap in enumerate(taps))
        y = sum(others, start=first).contiguous()
    else:
        around = taps[0] if k == 1 else taps[0].stack(*taps[1:], dim=-1)
        y = parts.product(step.weight, around.reshape(down * across, channels * k * k)).reshape(
            down, across, -1
        )
    y = y + parts.floats(step.bias) if step.bias else y
    y = parts.norm(y, step.norm) if step.norm else y
    return (y.gelu() if step.activates else y).contiguous()


def _attended(parts: Parts, of: ImageAttention, x: Tensor) -> Tensor:
    rows, columns = (int(n) for n in x.shape[:2])
    x = parts.norm(x, of.norm).contiguous()

    def made(steps: tuple[ImageStep, ...]) -> Tensor:
        y = x
        for step in steps:
            y = _convolved(parts, step, y)
        return y.reshape(-1, y.shape[-1])

    k, v = made(of.k), made(of.v)
    q = _convolved(parts, of.q, x).reshape(rows * columns, -1, k.shape[-1]).transpose(0, 1).contiguous()
    scores = (q.matmul(k.transpose(0, 1)) * int(k.shape[-1]) ** -0.5).contiguous()
    y = scores.softmax(-1).contiguous().matmul(v).transpose(0, 1).reshape(rows, columns, -1).contiguous()
    return _convolved(parts, of.o, y)
