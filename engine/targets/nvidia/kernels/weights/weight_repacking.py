"""Repacks matrices from a file's bytes to the GPU's layout, on the device, with kernels that tinygrad schedules.

tinygrad schedules and compiles the kernels once for all matrices of the same type, shape and origin. Scheduling takes
longer than repacking a matrix, so the disk cache holds the kernels' programs and which buffers each one works on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from tinygrad import Device, Tensor, UOp, dtypes
from tinygrad.device import Buffer, BufferSpec
from tinygrad.dtype import DType
from tinygrad.engine.realize import get_runtime
from tinygrad.uop.ops import Ops

from engine.cache.disk_cache import disk_cache
from engine.cache.sources import source_digest
from engine.formats.rope_order import HeadOrder
from engine.kernels.compilation import (
    Compiled,
    call_of,
    compile_calls,
    in_compiler,
    keep_program,
    program_or_graph,
)
from engine.kernels.functions import fingerprint
from engine.targets.nvidia.kernels.weights.upload import Upload
from engine.targets.nvidia.kernels.weights.weight_layout import WeightLayout


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


def repack(spec: MatrixSpec, upload: Upload, planes: Sequence[Tensor], first: int = 0) -> None:
    """Fills the planes of a matrix from the bytes of its tensors, the next parts of `upload`; or, of a larger matrix of
    which `spec` describes a piece, the rows from `first` on. Another thread may use the device meanwhile, if
    `prepare_repacking` was called before: no graph is built here."""
    plan, before = _plan(spec), spec.layout.shapes(first, spec.cols)
    for buffer in plan.sources:
        upload.next(buffer.ensure_allocated())
    rows = [
        plane.uop.base.buffer.view(n, dtype, skipped * dtype.itemsize).ensure_allocated()
        for plane, (n, dtype), (skipped, _) in zip(planes, spec.plane_shapes, before, strict=True)
    ]
    plan.run(rows)


def begin_repacking(specs: Iterable[MatrixSpec]) -> None:
    """Has compiler processes schedule and compile the kernels of `repack`, where an earlier run did not."""
    for spec in specs:
        is_known = spec in _plans or disk_cache().get("repacking", _key(spec))
        if not is_known and (making := in_compiler(_scheduled, spec)):
            _making[spec] = making


def repacking_kernels(spec: MatrixSpec) -> UOp:
    """The kernels of `repack`, a LINEAR, to be compiled with others before they are used."""
    return _plan(spec).linear


def prepare_repacking(specs: Iterable[MatrixSpec]) -> None:
    """Loads the kernels of `repack`, and compiles them if they are not."""
    for spec in specs:
        _plan(spec).prepare()


def free_repacking_memory() -> None:
    """Frees the memory of `repack`, once the device is done with it."""
    Device[Device.DEFAULT].synchronize()
    for plan in _plans.values():
        plan.free()


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
        self.sources = [_scratch(n, dtypes.uint8) for n in sizes]
        schedule = functools.cache(lambda: _Schedule(spec))
        wiring: _Wiring | None = disk_cache().get("repacking", _key(spec))
        programs: list[Compiled] = []
        if wiring is None:
            making = _making.pop(spec, None)
            wiring, programs = making() if making else (schedule().wiring, [])
            disk_cache().put("repacking", _key(spec), wiring)
        self._spec = spec
        self._intermediates = [_scratch(n, dtype) for n, dtype in wiring.intermediates]
        kernels = [keep_program(("repack", spec, i), *compiled) for i, compiled in enumerate(programs)] or [
            program_or_graph(("repack", spec, i), lambda i=i: schedule().graphs[i])
            for i in range(len(wiring.buffers))
        ]
        self._kernels = [*zip(kernels, wiring.buffers, strict=True)]

    @functools.cached_property
    def linear(self) -> UOp:
        """The kernels as a LINEAR."""
        shapes = [(buffer.size, buffer.dtype) for buffer in (*self.sources, *self._intermediates)]
        buffers = [Tensor.empty(n, dtype=dtype).uop.base for n, dtype in (*self._spec.plane_shapes, *shapes)]
        calls = (call_of(kernel, [buffers[i] for i in indices]) for kernel, indices in self._kernels)
        return UOp(Ops.LINEAR, src=tuple(calls))

    @functools.cached_property
    def _launches(self) -> list[Callable[[Sequence[Buffer]], object]]:
        """Launches each kernel, given all buffers."""
        programs = [kernel for kernel, _ in self._kernels]
        if any(program.op is not Ops.PROGRAM for program in programs):  # else no graph is needed
            programs = [call.src[0] for call in compile_calls(self.linear).src]
        kernels = zip(programs, (indices for _, indices in self._kernels), strict=True)
        return [_launch(program, [indices[i] for i in program.arg.globals]) for program, indices in kernels]

    def prepare(self) -> None:
        """Compiles and loads the kernels, so that `run` builds no graph."""
        _ = self._launches

    def run(self, planes: Sequence[Buffer]) -> None:
        buffers = [*planes, *self.sources, *(buffer.ensure_allocated() for buffer in self._intermediates)]
        for launch in self._launches:
            launch(buffers)

    def free(self) -> None:
        """Frees its memory. The next run takes some again."""
        for buffer in (*self.sources, *self._intermediates):
            if buffer.is_allocated():
                buffer.deallocate()


def _scratch(n: int, dtype: DType) -> Buffer:
    """A buffer that tinygrad does not keep for later buffers of the same size when it is freed."""
    return Buffer(Device.DEFAULT, n, dtype, options=BufferSpec(nolru=True))


def _launch(program: UOp, indices: Sequence[int]) -> Callable[[Sequence[Buffer]], object]:
    runtime = get_runtime(Device.DEFAULT, program)
    global_size, local_size = program.arg.launch_dims({})
    return lambda buffers: runtime(
        *(buffers[i].get_buf(Device.DEFAULT) for i in indices),
        global_size=global_size, local_size=local_size, vals=(),
    )  # fmt: skip


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


_Made = tuple[_Wiring, list[Compiled]]


def _scheduled(spec: MatrixSpec, compile_graphs: Callable[[Sequence[UOp]], list[Compiled]]) -> _Made:
    """Runs in a compiler process."""
    schedule = _Schedule(spec)
    return schedule.wiring, compile_graphs(schedule.graphs)


def _key(spec: MatrixSpec) -> object:
    return source_digest(), fingerprint(spec)


_plans: dict[MatrixSpec, _Plan] = {}
_making: dict[
    MatrixSpec, Callable[[], _Made]
] = {}  # those that compiler processes work on; a call waits for one


def _plan(spec: MatrixSpec) -> _Plan:
    if spec not in _plans:
        _plans[spec] = _Plan(spec)
    return _plans[spec]
