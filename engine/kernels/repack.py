"""From a file's bytes to a packed matrix, on the device: scheduled and compiled once for all matrices of a shape."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tinygrad import Device, Tensor, UOp, dtypes
from tinygrad.device import Buffer
from tinygrad.engine.realize import run_linear
from tinygrad.uop.ops import Ops

from engine.kernels.launch import compiled
from engine.kernels.packing import Packing


@dataclass(frozen=True)
class Rows:
    """Rows of one tensor of the file. `pairs` > 0: heads of that many elements, whose rotated pairs lie side by
    side in the file and are to be halves apart (llama.cpp's convert_hf_to_gguf permutes them so; undone here)."""

    count: int
    pairs: int = 0


@dataclass(frozen=True)
class Layout:
    """A matrix whose rows come from several tensors, one after the other or `in_turn`."""

    packing: Packing
    rows: tuple[Rows, ...]
    cols: int
    in_turn: bool = False

    @property
    def n_rows(self) -> int:
        return sum(r.count for r in self.rows)

    def empty(self) -> list[Tensor]:
        """Planes for `repack` to fill."""
        shapes = self.packing.shapes(self.n_rows, self.cols)
        return [Tensor(UOp.from_buffer(Buffer(Device.DEFAULT, n, dtype).allocate())) for n, dtype in shapes]


def repacking(layout: Layout) -> UOp:
    """The kernels of `repack`, a LINEAR, to be compiled together with others ahead of their use."""
    return _plan(layout).linear


def repack(layout: Layout, sources: Sequence[NDArray[np.uint8]], planes: Sequence[Tensor]) -> None:
    """Fills the planes of a matrix from its tensors' bytes, which are writable."""
    plan = _plan(layout)
    for source, there in zip(sources, plan.sources, strict=True):
        here = Buffer("PYTHON", source.size, dtypes.uint8, opaque=source.data)
        there.copy_from(here)
    plan.run([plane.uop.base for plane in planes])


class _Plan:
    """The kernels that pack matrices of a layout, over buffers that stand in for their bytes and planes."""

    def __init__(self, layout: Layout) -> None:
        packing, cols = layout.packing, layout.cols
        row_bytes = (
            cols * packing.bits // 8
            if packing.format is None
            else cols // packing.format.block * packing.format.block_bytes
        )
        raws, self.sources = [], []
        for r in layout.rows:
            buffer = Buffer(Device.DEFAULT, r.count * row_bytes, dtypes.uint8).allocate()
            self.sources.append(buffer)
            raw = Tensor(UOp.from_buffer(buffer)).reshape(r.count, row_bytes)
            if r.pairs:
                raw = raw.reshape(-1, r.pairs // 2, 2, row_bytes).transpose(1, 2).reshape(r.count, row_bytes)
            raws.append(raw)
        raw = Tensor.stack(*raws, dim=1) if layout.in_turn else raws[0].cat(*raws[1:])
        planes = packing.planes_of(raw.flatten(), layout.n_rows, cols)
        self.linear, _ = Tensor.linear_with_vars(*planes)
        self._places = [plane.uop.base for plane in planes]

    @functools.cached_property
    def _compiled(self) -> UOp:
        return compiled(self.linear)

    def run(self, planes: Sequence[UOp]) -> None:
        there = dict(zip(self._places, planes, strict=True))
        calls = (
            c.replace(src=(c.src[0], *(s.substitute(there) for s in c.src[1:]))) for c in self._compiled.src
        )
        run_linear(UOp(Ops.LINEAR, src=tuple(calls)), jit=True)


@functools.cache
def _plan(layout: Layout) -> _Plan:
    return _Plan(layout)


def forget_plans() -> None:
    """Frees the memory that packing took."""
    _plan.cache_clear()
