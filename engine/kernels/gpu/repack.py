"""From a file's bytes to a packed matrix, on the device: scheduled and compiled once for all matrices of a shape."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tinygrad import Device, Tensor, UOp, dtypes
from tinygrad.device import Buffer
from tinygrad.dtype import DType
from tinygrad.engine.realize import run_linear
from tinygrad.uop.ops import Ops

from engine.disk_cache import disk_cache, source_digest
from engine.formats.rope_order import half_split
from engine.kernels.compilation import call_of, compile_calls, fingerprint, program_or_graph
from engine.kernels.gpu.packing import Packing


@dataclass(frozen=True)
class Rows:
    """Rows of one tensor of the file. `pairs` > 0: rows of heads of that many elements, to be put in the order of
    `engine.formats.rope_order`."""

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

    @property
    def row_bytes(self) -> int:
        """Of a row in the file."""
        format = self.packing.format
        return (
            self.cols // format.block * format.block_bytes if format else self.cols * self.packing.bits // 8
        )

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
    """The kernels that pack matrices of a layout. To have tinygrad schedule them takes longer than to pack a matrix,
    so which buffers they work on is kept beside the programs."""

    def __init__(self, layout: Layout) -> None:
        sizes = [rows.count * layout.row_bytes for rows in layout.rows]
        self.sources = [Buffer(Device.DEFAULT, n, dtypes.uint8).allocate() for n in sizes]
        scheduled = functools.cache(lambda: _Scheduled(layout))
        key = source_digest(), fingerprint(layout)
        wiring: _Wiring | None = disk_cache().get("repacking", key)
        if wiring is None:
            wiring = scheduled().wiring
            disk_cache().put("repacking", key, wiring)
        self._planes = layout.packing.shapes(layout.n_rows, layout.cols)
        self._between = [Tensor.empty(n, dtype=dtype).uop.base for n, dtype in wiring.between]
        self._kernels = [
            (program_or_graph(("repack", layout, i), lambda i=i: scheduled().graphs[i]), places)  # type: ignore[misc]
            for i, places in enumerate(wiring.places)
        ]

    @property
    def linear(self) -> UOp:
        return self._calls([Tensor.empty(n, dtype=dtype).uop.base for n, dtype in self._planes])

    def run(self, planes: Sequence[UOp]) -> None:
        run_linear(compile_calls(self._calls(planes)), jit=True)

    def _calls(self, planes: Sequence[UOp]) -> UOp:
        buffers = [*planes, *map(UOp.from_buffer, self.sources), *self._between]
        return UOp(
            Ops.LINEAR, src=tuple(call_of(k, [buffers[i] for i in places]) for k, places in self._kernels)
        )


@dataclass(frozen=True)
class _Wiring:
    """The buffers of each kernel by their places among a matrix's planes, its tensors' bytes and what lies
    `between`: (elements, type)."""

    places: tuple[tuple[int, ...], ...]
    between: tuple[tuple[int, DType], ...]


class _Scheduled:
    """What tinygrad makes of a layout: graphs, and what they work on."""

    def __init__(self, layout: Layout) -> None:
        sources = [Tensor.empty(rows.count * layout.row_bytes, dtype=dtypes.uint8) for rows in layout.rows]
        raws = []
        for raw, r in zip(sources, layout.rows, strict=True):
            raw = raw.reshape(r.count, layout.row_bytes)
            raws.append(half_split(raw, r.pairs) if r.pairs else raw)
        raw = Tensor.stack(*raws, dim=1) if layout.in_turn else raws[0].cat(*raws[1:])
        planes = layout.packing.planes_of(raw.flatten(), layout.n_rows, layout.cols)
        linear, _ = Tensor.linear_with_vars(*planes)
        buffers = [tensor.uop.base for tensor in (*planes, *sources)]
        known = len(buffers)
        for call in linear.src:
            buffers += [buffer for buffer in call.src[1:] if buffer not in buffers]
        self.graphs = [call.src[0] for call in linear.src]
        self.wiring = _Wiring(
            places=tuple(tuple(map(buffers.index, call.src[1:])) for call in linear.src),
            between=tuple((int(buffer.max_numel()), buffer.dtype) for buffer in buffers[known:]),
        )


@functools.cache
def _plan(layout: Layout) -> _Plan:
    return _Plan(layout)


def forget_plans() -> None:
    """Frees the memory that packing took."""
    _plan.cache_clear()
