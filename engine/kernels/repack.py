"""From a file's bytes to a packed matrix, on the device: scheduled and compiled once for all matrices of a shape."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tinygrad import Device, Tensor, UOp, dtypes
from tinygrad.device import Buffer
from tinygrad.engine.realize import compile_linear, run_linear
from tinygrad.uop.ops import Ops

from engine.kernels.packing import Packing


@dataclass(frozen=True)
class Rows:
    """Rows of one tensor of the file. `pairs` > 0: heads of that many elements, whose rotated pairs lie side by
    side in the file and are to be halves apart (llama.cpp's convert_hf_to_gguf permutes them so; undone here)."""

    count: int
    pairs: int = 0


def repack(
    packing: Packing, sources: Sequence[NDArray[np.uint8]], rows: tuple[Rows, ...], cols: int, in_turn: bool
) -> list[Tensor]:
    """The planes of a matrix whose rows come from several tensors, one after the other or `in_turn`; `sources`
    are their bytes, writable."""
    plan = _plan(packing, rows, cols, in_turn)
    for source, there in zip(sources, plan.sources, strict=True):
        here = Buffer("PYTHON", source.size, dtypes.uint8, opaque=source.data)
        there.copy_from(here)
    return plan.run()


class _Plan:
    """The kernels that pack matrices of a shape, over buffers that stand in for their bytes and planes."""

    def __init__(self, packing: Packing, rows: tuple[Rows, ...], cols: int, in_turn: bool) -> None:
        n_rows = sum(r.count for r in rows)
        row_bytes = (
            cols * packing.bits // 8
            if packing.format is None
            else cols // packing.format.block * packing.format.block_bytes
        )
        self._shapes = packing.shapes(n_rows, cols)
        raws, self.sources = [], []
        for r in rows:
            buffer = Buffer(Device.DEFAULT, r.count * row_bytes, dtypes.uint8).allocate()
            self.sources.append(buffer)
            raw = Tensor(UOp.from_buffer(buffer)).reshape(r.count, row_bytes)
            if r.pairs:
                raw = raw.reshape(-1, r.pairs // 2, 2, row_bytes).transpose(1, 2).reshape(r.count, row_bytes)
            raws.append(raw)
        raw = Tensor.stack(*raws, dim=1) if in_turn else raws[0].cat(*raws[1:])
        planes = packing.planes_of(raw.flatten(), n_rows, cols)
        linear, _ = Tensor.linear_with_vars(*planes)
        self._places = [plane.uop.base for plane in planes]
        self._linear = compile_linear(linear)

    def run(self) -> list[Tensor]:
        buffers = [Buffer(Device.DEFAULT, n, dtype).allocate() for n, dtype in self._shapes]
        there = {place: UOp.from_buffer(b) for place, b in zip(self._places, buffers, strict=True)}
        calls = (
            c.replace(src=(c.src[0], *(s.substitute(there) for s in c.src[1:]))) for c in self._linear.src
        )
        run_linear(UOp(Ops.LINEAR, src=tuple(calls)), jit=True)
        return [Tensor(there[place]) for place in self._places]


@functools.cache
def _plan(packing: Packing, rows: tuple[Rows, ...], cols: int, in_turn: bool) -> _Plan:
    return _Plan(packing, rows, cols, in_turn)


def forget_plans() -> None:
    """Frees the memory that packing took."""
    _plan.cache_clear()
