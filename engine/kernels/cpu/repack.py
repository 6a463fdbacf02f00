"""From a file's blocks to packed streams, on all cores.

Where the bits of a column lie in a block: block_q4_0 to block_q6_K of ggml/src/ggml-common.h and the
functions dequantize_row_* of ggml/src/ggml-quants.c, both of llama.cpp.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from tinygrad import Tensor, UOp, dtypes

from engine.formats.quantization import Format
from engine.kernels.cpu import memory
from engine.kernels.cpu.packing import UNIT, Packing
from engine.kernels.cpu.program import U16, Index, Program, share, shift_left, shift_right
from engine.kernels.cpu.thread_pool import Cores, Kernel

Place = tuple[Index, Index]  # a byte of a block and the lowest bit in it

# type name -> for each plane of bits, where column c of a block lies
_COLUMNS: dict[str, tuple[Callable[[UOp], Place], ...]] = {
    "Q4_0": (lambda c: (2 + c % 16, c // 16 * 4),),
    "Q4_1": (lambda c: (4 + c % 16, c // 16 * 4),),
    "Q5_0": (lambda c: (6 + c % 16, c // 16 * 4), lambda c: (2 + c // 8, c % 8)),
    "Q5_1": (lambda c: (8 + c % 16, c // 16 * 4), lambda c: (4 + c // 8, c % 8)),
    "Q8_0": (lambda c: (2 + c, 0),),
    "Q4_K": (lambda c: (16 + c // 64 * 32 + c % 32, c // 32 % 2 * 4),),
    "Q5_K": (lambda c: (48 + c // 64 * 32 + c % 32, c // 32 % 2 * 4), lambda c: (16 + c % 32, c // 32)),
    "Q6_K": (
        lambda c: (c // 128 * 64 + c % 64, c // 64 % 2 * 4),
        lambda c: (128 + c // 128 * 32 + c % 32, c // 32 % 4 * 2),
    ),
}


def repack(
    cores: Cores,
    raw: NDArray[np.uint8],
    packing: Packing,
    places: NDArray[np.int32],
    cols: int,
    out: Tensor | None = None,
) -> Tensor:
    """The stream of a matrix, in `out`, of `packing.size` elements, where that is given. `raw`: as the file holds
    it, uint8 (bytes,). `places`: for each row of the stream's matrix, which of the file's it is."""
    lanes = packing.lanes
    if out is None:
        out = memory.zeros(packing.size(len(places), cols), packing.dtype)
    source = np.full(
        packing.groups(len(places)) * lanes, places[-1], np.int32
    )  # the last again, to fill its group
    source[: len(places)] = places
    shape = np.array([cols // packing.block, len(source) // lanes], np.int32)
    types = (packing.dtype, dtypes.uint8 if packing.format else packing.dtype, dtypes.int32, dtypes.int32)
    (program,) = cores.compiled([(_kernel(packing), types)])
    cores.run_once(program, [memory.address(out), *(a.ctypes.data for a in (raw, source, shape))], PARTS)
    return out


PARTS = 16  # of a matrix that is repacked


@functools.cache
def _kernel(packing: Packing) -> Kernel:
    lanes, format = packing.lanes, packing.format

    def kernel(part: UOp, parts: UOp, out: UOp, raw: UOp, places: UOp, shape: UOp) -> UOp:
        k = Program(lanes)
        blocks, groups = (k.index(shape, i) for i in range(2))
        first, count = share(groups, part, parts)
        block_bytes = format.block_bytes if format else 1
        taken = k.registers(block_bytes * lanes, raw.dtype)
        with k.loop(count) as i, k.loop(blocks) as block:
            group = first + i
            rows = [k.index(places, group * lanes + lane) for lane in range(lanes)]
            source = [(row * blocks + block) * block_bytes for row in rows]
            with k.loop(block_bytes) as byte:
                k.store(taken, byte * lanes, UOp.stack(*(k.load(raw, at + byte) for at in source)))
            at = (group * blocks + block) * packing.block_words
            if format is None:
                k.store(out, at, k.vector(taken, 0))
            else:
                _block(k, packing, format, out, at, taken)
        return k.finish(f"repack_{format.name if format else raw.dtype.name}")

    return kernel


def _block(k: Program, packing: Packing, format: Format, out: UOp, at: UOp, taken: UOp) -> None:
    """Writes the block whose bytes, of all lanes side by side, are `taken`."""
    lanes = packing.lanes

    def byte(n: Index) -> UOp:
        return k.vector(taken, n * lanes).cast(U16)

    def word(n: int) -> UOp:
        return byte(n) | shift_left(byte(n + 1), 8)

    d = 208 if format.name == "Q6_K" else 0
    k.store(out, at, word(d))
    if "m" in format.scales:  # subtracted here, added in the types that have no minima
        k.store(out, at + lanes, word(2) if "minimum" in format.scales else word(2) ^ 0x8000)
    units = at + packing.head
    if packing.small_scales:
        for u in range(format.block // UNIT):
            k.store(
                out, units + u * packing.unit, word(192 + 2 * u) if format.group == 16 else _k_scales(byte, u)
            )
        units = units + lanes
    places = _COLUMNS[format.name]

    def bits_of(plane: int, column: Index) -> UOp:
        n, bit = places[plane](column)
        bits = format.bits[plane]
        return byte(n) ^ 128 if bits == 8 else shift_right(byte(n), bit) & (2**bits - 1)

    def weight(column: Index) -> UOp:
        return bits_of(0, column) | shift_left(bits_of(1, column), format.bits[0])

    with k.loop(format.block // UNIT) as u:
        at = units + u * packing.unit
        for plane, bits in enumerate(packing.planes):
            values = weight if bits == 6 else functools.partial(bits_of, plane)
            _plane(k, lanes, out, at, bits, values, u * UNIT)
            at = at + 2 * bits * lanes


def _plane(
    k: Program, lanes: int, out: UOp, at: UOp, bits: int, values: Callable[[Index], UOp], first: UOp
) -> None:
    """Stores the bits of 32 columns from `first` on."""
    vectors, fields = (3, 8) if bits == 6 else (1, 16 // bits)
    with k.loop(bits // vectors) as i:
        columns = first + i * (2 * fields)
        both = [
            _words([values(columns + 2 * f + parity) for f in range(fields)], bits) for parity in range(2)
        ]
        for j, words in enumerate(zip(*both, strict=True)):
            pairs = (w.index(lane) for lane in range(lanes) for w in words)
            k.store(out, at + (i * vectors + j) * (2 * lanes), UOp.stack(*pairs))


def _words(fields: list[UOp], bits: int) -> list[UOp]:
    if bits != 6:
        shifted = [shift_left(field, f * bits) for f, field in enumerate(fields)]
        return [functools.reduce(UOp.__or__, shifted)]
    *rest, a, b = fields
    tops = (a & 15, b & 15, shift_right(a, 4) | shift_left(shift_right(b, 4), 2))
    return [rest[2 * j] | shift_left(rest[2 * j + 1], 6) | shift_left(top, 12) for j, top in enumerate(tops)]


def _k_scales(byte: Callable[[Index], UOp], u: int) -> UOp:
    """The 6-bit scale and minimum of unit u, from the 12 bytes at 4 (get_scale_min_k4)."""
    if u < 4:
        scale, minimum = byte(4 + u) & 63, byte(8 + u) & 63
    else:
        scale = (byte(8 + u) & 15) | shift_left(shift_right(byte(u), 6), 4)
        minimum = shift_right(byte(8 + u), 4) | shift_left(shift_right(byte(4 + u), 6), 4)
    return scale | shift_left(minimum, 8)
