"""Repacks matrices from a file's bytes to the GPU's layout, on the device, with kernels that tinygrad schedules.

tinygrad schedules and compiles the kernels once for all matrices of the same type, shape and origin. Scheduling takes
longer than repacking a matrix, so the disk cache holds the kernels' programs and which buffers each one works on.
"""

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
from engine.formats.rope_order import HeadOrder
from engine.kernels.compilation import call_of, compile_calls, fingerprint, program_or_graph
from engine.kernels.gpu.device_memory import free_cached_memory
from engine.kernels.gpu.weight_layout import WeightLayout


@dataclass(frozen=True)
class TensorRows:
    """Rows of one tensor of the file. `order`: they are the rows of heads, to be reordered."""

    count: int
    order: HeadOrder | None = None


@dataclass(frozen=True)
class MatrixSpec:
    """A matrix on the device, made of one or more tensors of the file with the same type: their rows one tensor after
    the other, or, if `alternating`, a row of each in turn."""

    layout: WeightLayout
    tensors: tuple[TensorRows, ...]
    cols: int
    alternating: bool = False

    @property
    def rows(self) -> int:
        return sum(tensor.count for tensor in self.tensors)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row in the file."""
        format = self.layout.format
        return self.cols // format.block * format.block_bytes if format else self.cols * self.layout.bits // 8

    @property
    def plane_shapes(self) -> list[tuple[int, DType]]:
        """(elements, type) of each plane."""
        return self.layout.shapes(self.rows, self.cols)

    def allocate(self) -> list[Tensor]:
        """Planes for `repack` to fill."""
        return [
            Tensor(UOp.from_buffer(Buffer(Device.DEFAULT, n, dtype).allocate()))
            for n, dtype in self.plane_shapes
        ]


def repacking_kernels(spec: MatrixSpec) -> UOp:
    """The kernels of `repack`, a LINEAR, to be compiled with others before they are used."""
    return _plan(spec).linear


def repack(
    spec: MatrixSpec, sources: Sequence[NDArray[np.uint8]], planes: Sequence[Tensor], first: int = 0
) -> None:
    """Fills the planes of a matrix from the bytes of its tensors, which must be writable arrays; or, of a larger matrix
    of which `spec` describes a piece, the rows from `first` on."""
    plan, before = _plan(spec), spec.layout.shapes(first, spec.cols)
    for source, buffer in zip(sources, plan.sources, strict=True):
        buffer.ensure_allocated().copy_from(Buffer("PYTHON", source.size, dtypes.uint8, opaque=source.data))
    rows = [
        plane.uop.base.buffer.view(n, dtype, skipped * dtype.itemsize).ensure_allocated()
        for plane, (n, dtype), (skipped, _) in zip(planes, spec.plane_shapes, before, strict=True)
    ]
    plan.run([UOp.from_buffer(buffer) for buffer in rows])


def free_repacking_memory() -> None:
    """Frees the memory of `repack`, on the device and on the host."""
    for plan in _plans.values():
        plan.free()
    free_cached_memory()


@dataclass(frozen=True)
class _Wiring:
    """The buffers of each kernel, as indices in the list of a matrix's planes, its tensors' bytes and intermediate
    buffers, and (elements, type) of each intermediate buffer."""

    buffers: tuple[tuple[int, ...], ...]
    intermediates: tuple[tuple[int, DType], ...]


class _Plan:
    """The kernels that repack matrices of one kind, with the memory that they need beside the planes."""

    def __init__(self, spec: MatrixSpec) -> None:
        sizes = [tensor.count * spec.row_bytes for tensor in spec.tensors]
        self.sources = [Buffer(Device.DEFAULT, n, dtypes.uint8) for n in sizes]
        schedule = functools.cache(lambda: _Schedule(spec))
        key = source_digest(), fingerprint(spec)
        wiring: _Wiring | None = disk_cache().get("repacking", key)
        if wiring is None:
            wiring = schedule().wiring
            disk_cache().put("repacking", key, wiring)
        self._spec = spec
        self._intermediates = [Tensor.empty(n, dtype=dtype).uop.base for n, dtype in wiring.intermediates]
        self._kernels = [
            (program_or_graph(("repack", spec, i), lambda i=i: schedule().graphs[i]), indices)  # type: ignore[misc]
            for i, indices in enumerate(wiring.buffers)
        ]

    @property
    def linear(self) -> UOp:
        return self._calls([Tensor.empty(n, dtype=dtype).uop.base for n, dtype in self._spec.plane_shapes])

    def run(self, planes: Sequence[UOp]) -> None:
        run_linear(compile_calls(self._calls(planes)), jit=True)

    def free(self) -> None:
        """Frees its memory. The next run takes some again."""
        for buffer in (*self.sources, *(uop.buffer for uop in self._intermediates)):
            if isinstance(buffer, Buffer) and buffer.is_allocated():
                buffer.deallocate()

    def _calls(self, planes: Sequence[UOp]) -> UOp:
        buffers = [*planes, *map(UOp.from_buffer, self.sources), *self._intermediates]
        calls = (call_of(kernel, [buffers[i] for i in indices]) for kernel, indices in self._kernels)
        return UOp(Ops.LINEAR, src=tuple(calls))


class _Schedule:
    """tinygrad's schedule for repacking a matrix: the kernels' graphs, and their buffers."""

    def __init__(self, spec: MatrixSpec) -> None:
        sources = [Tensor.empty(tensor.count * spec.row_bytes, dtype=dtypes.uint8) for tensor in spec.tensors]
        parts = []
        for source, tensor in zip(sources, spec.tensors, strict=True):
            part = source.reshape(tensor.count, spec.row_bytes)
            parts.append(tensor.order.apply(part) if tensor.order else part)
        raw = Tensor.stack(*parts, dim=1) if spec.alternating else parts[0].cat(*parts[1:])
        planes = spec.layout.planes_of(raw.flatten(), spec.rows, spec.cols)
        linear, _ = Tensor.linear_with_vars(*planes)
        buffers = [tensor.uop.base for tensor in (*planes, *sources)]
        known = len(buffers)
        for call in linear.src:
            buffers += [buffer for buffer in call.src[1:] if buffer not in buffers]
        self.graphs = [call.src[0] for call in linear.src]
        self.wiring = _Wiring(
            buffers=tuple(tuple(map(buffers.index, call.src[1:])) for call in linear.src),
            intermediates=tuple((int(buffer.max_numel()), buffer.dtype) for buffer in buffers[known:]),
        )


_plans: dict[MatrixSpec, _Plan] = {}


def _plan(spec: MatrixSpec) -> _Plan:
    if spec not in _plans:
        _plans[spec] = _Plan(spec)
    return _plans[spec]
