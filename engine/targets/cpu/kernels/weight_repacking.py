"""Repacks a matrix from a file's blocks to the CPU's layout, on all threads of a pool."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from tinygrad import Tensor, UOp, dtypes

from engine.formats.quantization import Format, Planes
from engine.kernels.compilation import KernelFunction
from engine.targets.cpu.kernels import memory
from engine.targets.cpu.kernels.file_block import FileBlock
from engine.targets.cpu.kernels.kernel_builder import (
    U16,
    Index,
    KernelBuilder,
    even_share,
    shift_left,
    shift_right,
)
from engine.targets.cpu.kernels.stream_size import UNIT
from engine.targets.cpu.kernels.thread_pool import ThreadPool
from engine.targets.cpu.kernels.weight_layout import LaneLayout

_PARTS = 16  # of a matrix, for the threads to share


def repack(
    pool: ThreadPool,
    raw: NDArray[np.uint8],
    layout: LaneLayout,
    source_rows: NDArray[np.int32],
    cols: int,
    out: Tensor | None = None,
    first: int = 0,
) -> Tensor:
    """The stream of a matrix, of `layout.size` elements, in `out` if given: there from row `first` on, a multiple of
    `layout.lanes`. `raw`: the matrix as the file holds it, uint8 (bytes,). `source_rows`: for each row of the result,
    the number of its row in `raw`, int32 (rows,)."""
    rows, groups = len(source_rows), layout.groups(len(source_rows))
    if out is None:
        out = memory.zeros(layout.size(rows, cols), layout.dtype)
    sources = np.full(groups * layout.lanes, source_rows[-1], np.int32)  # the last row again fills its group
    sources[:rows] = source_rows
    shape = np.array([cols // layout.block, groups], np.int32)
    types = (layout.dtype, dtypes.uint8 if layout.format else layout.dtype, dtypes.int32, dtypes.int32)
    (program,) = pool.compile([(_kernel(layout), types)])
    address = memory.address(out) + layout.size(first, cols) * layout.dtype.itemsize
    pool.run_once(program, [address, *(a.ctypes.data for a in (raw, sources, shape))], _PARTS)
    return out


@functools.cache
def _kernel(layout: LaneLayout) -> KernelFunction:
    """Buffers: the stream; the file's bytes, uint8 (values of the file's type for floats); the source of each row,
    int32; the blocks in a row and the groups of rows, int32 (2,)."""
    lanes, format = layout.lanes, layout.format

    def kernel(part: UOp, parts: UOp, out: UOp, raw: UOp, source_rows: UOp, shape: UOp) -> UOp:
        k = KernelBuilder(lanes)
        blocks, groups = (k.index(shape, i) for i in range(2))
        first, count = even_share(groups, part, parts)
        n_bytes = format.block_bytes if format else 1
        block_bytes = k.registers(n_bytes * lanes, raw.dtype)
        with k.loop(count) as i, k.loop(blocks) as block:
            group = first + i
            rows = [k.index(source_rows, group * lanes + lane) for lane in range(lanes)]
            source = [(row * blocks + block) * n_bytes for row in rows]
            with k.loop(n_bytes) as byte:
                k.store(block_bytes, byte * lanes, UOp.stack(*(k.load(raw, at + byte) for at in source)))
            at = (group * blocks + block) * layout.block_words
            if format is None:
                k.store(out, at, k.vector(block_bytes, 0))
            else:
                _block(k, layout, format, out, at, block_bytes)
        return k.finish(f"repack_{format.name if format else raw.dtype.name}")

    return kernel


def _block(k: KernelBuilder, layout: LaneLayout, format: Format, out: UOp, at: UOp, block_bytes: UOp) -> None:
    """Writes a block of the stream at index `at`, from its `block_bytes` (bytes of a block, lanes)."""
    lanes = layout.lanes
    block = FileBlock(format, lambda n: k.vector(block_bytes, n * lanes).cast(U16))
    k.store(out, at, shift_left(block.byte(format.d), 7) if format.exponent else block.word(format.d))
    if format.m is not None:  # products subtract it
        m = block.word(format.m)
        k.store(out, at + lanes, m if format.minimum else m ^ 0x8000)
    units, groups = at + layout.header_words, UNIT // format.group
    if layout.has_small_scales:
        for u in range(format.block // UNIT):
            in_bytes = [block.small(format.scale, u * groups + i) for i in range(groups)]
            if format.has_nibble_scales:
                minima = [block.small(format.minimum, u * groups + i) for i in range(groups)]
                in_bytes = [a | shift_left(b, 4) for a, b in zip(in_bytes, minima, strict=True)]
            elif format.minimum:
                in_bytes.append(block.small(format.minimum, u))
            joined = [b if not i else shift_left(b, 8) for i, b in enumerate(in_bytes)]
            k.store(out, units + u * layout.unit_words, functools.reduce(UOp.__or__, joined))
        units = units + lanes
    with k.loop(format.block // UNIT) as u:
        at = units + u * layout.unit_words
        stored = [format.q] if layout.planes == (6,) else [(plane,) for plane in format.q]
        for planes, bits in zip(stored, layout.planes, strict=True):

            def value(i: Index, planes: Planes = planes) -> UOp:
                return layout.stored(block.number(planes, i, format.block))

            _plane(k, lanes, out, at, bits, value, u * UNIT)
            at = at + 2 * bits * lanes


def _plane(
    k: KernelBuilder, lanes: int, out: UOp, at: UOp, bits: int, values: Callable[[Index], UOp], first: UOp
) -> None:
    """Stores a plane of 32 columns from `first` on."""
    vectors, fields = (3, 8) if bits == 6 else (1, 16 // bits)
    with k.loop(bits // vectors) as i:
        columns = first + i * (2 * fields)
        even_and_odd = [
            _words([values(columns + 2 * f + parity) for f in range(fields)], bits) for parity in range(2)
        ]
        for j, words in enumerate(zip(*even_and_odd, strict=True)):
            pairs = (w.index(lane) for lane in range(lanes) for w in words)
            k.store(out, at + (i * vectors + j) * (2 * lanes), UOp.stack(*pairs))


def _words(fields: list[UOp], bits: int) -> list[UOp]:
    """The words of a row that hold its even columns, or its odd ones, uint16: one, or three for planes of 6 bits."""
    if bits != 6:
        shifted = [shift_left(field, f * bits) for f, field in enumerate(fields)]
        return [functools.reduce(UOp.__or__, shifted)]
    *rest, a, b = fields
    tops = (a & 15, b & 15, shift_right(a, 4) | shift_left(shift_right(b, 4), 2))
    return [rest[2 * j] | shift_left(rest[2 * j + 1], 6) | shift_left(top, 12) for j, top in enumerate(tops)]
