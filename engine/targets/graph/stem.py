"""The encoder before an encoder of pictures (`engine.description.vision.Stem`) as tensor graphs. Its patches are row by
row, those of the whole picture: float32 (side * side, dim). Vectors are those of `stem_of`."""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable

import numpy as np
from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType

from engine.description.stem_size import stem_of
from engine.description.sublayers import Vector
from engine.description.vision import PatchAttention, PatchSublayer, Stem
from engine.runtime.pictures import Floats, Progress
from engine.targets.graph import picture_parts
from engine.targets.graph.picture_parts import Parameters, Parts, shape_of, shares

Captured = Callable[[int, Hashable, Callable[..., Tensor]], Callable[..., Tensor]]
"""Gives the step of a size that has a key, captured once."""


class StemSteps:
    """The steps of a stem. `count`: of them, but for the first and the last one."""

    def __init__(
        self, stem: Stem, patch: int, parameters: Parameters, input: DType, vector: Callable[[Vector], Floats]
    ) -> None:
        """`patch`: pixels a side of the encoder's patches. `vector` reads one of the file's."""
        self._stem, self._patch, self._all, self._input, self._vector = stem, patch, parameters, input, vector
        self._of_rows: dict[int, Stem] = {}
        self.count = len(stem.sublayers)

    def run(
        self, rows: int, patches: Floats, total: int, captured: Captured
    ) -> Generator[Progress, None, Tensor]:
        """What the stem makes of so many rows and columns of the encoder's patches, those of its summary left out:
        (rows * rows, dim). `total`: of the work's parts."""
        stem, parts, size = self._sized(rows), Parts(self._all, self._input), -rows
        begin = captured(size, "begin", lambda x: stem_input(parts, stem, x, self._patch))
        x = begin(Tensor(np.ascontiguousarray(patches[: rows * rows])).realize())
        for done, sublayer in enumerate(stem.sublayers):
            yield Progress(done, total)

            def run(x: Tensor, *own: Tensor, of: PatchSublayer = sublayer) -> Tensor:
                return stem_sublayer(Parts(self._all.replaced(of, own), self._input), stem, of, x)

            x = captured(size, shape_of(sublayer), run)(x, *self._all.of(sublayer))
        return captured(size, "end", lambda x: convolved(parts, stem, x))(x)

    def _sized(self, rows: int) -> Stem:
        if rows not in self._of_rows:
            side = rows * self._patch // self._stem.patch
            self._of_rows[rows], made = stem_of(self._stem, side, self._vector)
            self._all.vectors.update({vector: Tensor(data).realize() for vector, data in made.items()})
        return self._of_rows[rows]


def stem_input(parts: Parts, stem: Stem, patches: Tensor, patch: int) -> Tensor:
    """The stem's patches of a picture, of `patches` float32 (n, 3 patch * patch) of the encoder."""
    p, m = stem.patch, patch // stem.patch
    n = stem.side // m
    squares = patches.reshape(n, n, 3, m, p, m, p).permute(0, 3, 1, 5, 2, 4, 6)
    x = parts.linear(stem.kernel, squares.reshape(stem.side**2, 3 * p * p))
    return (x + parts.floats(stem.positions).reshape(stem.side**2, stem.dim)).contiguous().realize()


def stem_sublayer(parts: Parts, stem: Stem, sublayer: PatchSublayer, x: Tensor) -> Tensor:
    h, operator = parts.norm(x, sublayer.norm), sublayer.operator
    y = (
        _attended(parts, stem, operator, h)
        if isinstance(operator, PatchAttention)
        else parts.feed_forward(operator, h)
    )
    return (x + y).contiguous().realize()


def convolved(parts: Parts, stem: Stem, x: Tensor) -> Tensor:
    """What the convolutions make of all patches: float32 (tokens, out)."""
    side, dim = stem.side, stem.dim
    for convolution in stem.convolutions:
        k, stride, rows = convolution.kernel, convolution.stride, convolution.weight.rows
        kernels = parts.matrix(convolution.weight).cast(dtypes.float32).reshape(rows, dim, k, k)
        image = x.reshape(1, side, side, dim).permute(0, 3, 1, 2)
        image = image.conv2d(kernels, stride=stride, padding=k // 2).permute(0, 2, 3, 1)
        side, dim = -(-side // stride), rows
        x = image.reshape(side * side, dim).contiguous()
        x = parts.norm(x, convolution.norm).contiguous() if convolution.norm else x
    return x.realize()


def _attended(parts: Parts, stem: Stem, a: PatchAttention, x: Tensor) -> Tensor:
    """Attention within windows, or of all patches to all."""
    side, size = stem.side, stem.window if a.windowed else stem.side
    count, dim, patches = -(-side // size), stem.dim, size * size
    room, windows = (0, count * size - side), count * count
    x = x.reshape(side, side, dim).pad((room, room, (0, 0))).reshape(count, size, count, size, dim)
    x = x.permute(0, 2, 1, 3, 4).reshape(windows * patches, dim).contiguous()
    q, k, v = (
        parts.linear(linear, x).reshape(windows, patches, a.heads, a.head_dim).transpose(1, 2).contiguous()
        for linear in (a.q, a.k, a.v)
    )
    q = q.reshape(windows, a.heads, size, size, a.head_dim)
    by_rows = q.matmul(parts.floats(a.by_rows)).contiguous()
    by_columns = q.transpose(2, 3).matmul(parts.floats(a.by_columns)).transpose(2, 3)
    by_columns = by_columns.contiguous()
    at_once = size
    while windows * a.heads * at_once * size * patches > picture_parts.SCORES and at_once % 2 == 0:
        at_once //= 2
    done = []
    for i in range(0, size, at_once):
        rows = slice(i, i + at_once)
        scores = q[:, :, rows].reshape(windows, a.heads, at_once * size, a.head_dim).matmul(k.transpose(2, 3))
        scores = (scores * a.scale).reshape(windows, a.heads, at_once, size, size, size)
        scores = scores + by_rows[:, :, rows].unsqueeze(-1) + by_columns[:, :, rows].unsqueeze(-2)
        flat = scores.reshape(windows * a.heads, at_once * size, patches)
        done.append(shares(flat, dtypes.float32).matmul(v.reshape(-1, patches, a.head_dim)).contiguous())
    y = done[0] if len(done) == 1 else done[0].cat(*done[1:], dim=1)
    y = y.reshape(windows, a.heads, patches, a.head_dim).transpose(1, 2).reshape(windows * patches, dim)
    y = parts.linear(a.o, y).reshape(count, count, size, size, dim).permute(0, 2, 1, 3, 4)
    return y.reshape(count * size, count * size, dim)[:side, :side].reshape(side * side, dim).contiguous()
