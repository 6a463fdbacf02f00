"""Rows of a quantized matrix times one vector on tensor cores, as exact as with float32.

Arithmetic of float32 takes three instructions for each weight. Tensor cores take two numbers of 16 bits in a register,
and an instruction makes them of a word: less than half as many instructions in all. But each block has to divide the
vector first, and most products are slower so. What is faster, searches find, and `presets/tuned` has
(docs/schedules.md).

The integers of weights are exact as float16. Each number of the vector becomes two: itself, rounded, and the rest,
times 2**12. Products and sums are float32, and scales and minima are applied to the sums of their columns, in float32
too.

    left tile: 16 rows of the matrix    x    right tile: 8 columns

Four threads share a row of the left tile, and have a unit each (`WeightLayout`). The right tile has the rounded numbers
of unit t in column 2 * t and the rest in column 2 * t + 1, and zeros elsewhere. So the sums of different units are in
different columns, and each thread gets those of its own unit, whose scales it has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tinygrad import UOp

from engine.targets.nvidia.kernels.half_words import rounded_pair
from engine.targets.nvidia.kernels.products.matmul import wmma
from engine.targets.nvidia.kernels.uops import (
    F16,
    F32,
    U32,
    f32,
    half_registers,
    load,
    load_run,
    registers,
    shared,
    store,
    store_run,
    tree,
    u32,
)
from engine.targets.nvidia.kernels.weights.bit_packing import CENTER, BitPacking
from engine.targets.nvidia.kernels.weights.half_pairs import PAIRS, RUN, integer_pairs, integer_scale
from engine.targets.nvidia.kernels.weights.matrix_bytes import QUARTER, UNIT, units_of
from engine.targets.nvidia.kernels.weights.weight_layout import WeightLayout

ABREAST, TILE = 4, 16
"""Threads that share a row of a tile, and its rows."""

_MOST_STEPS = 3  # whose weights a thread has in registers
_RANGE = 2.0**-6
"""The vector is multiplied by it: numbers up to 4e6 fit, of which larger ones give NaN, and those from 1e-2 on have 22
bits; smaller ones are off by at most 1e-9."""
_REST = 2.0**12  # and what rounding leaves by this


def sum_factor() -> float:
    """What the sums must be multiplied by."""
    return 1 / (_RANGE * integer_scale())


def serves(layout: WeightLayout, rows: int, cols: int) -> bool:
    """Whether there are such kernels for a matrix."""
    format = layout.format
    whole = rows % TILE == 0 and units_of(cols) % ABREAST == 0 and cols % UNIT == 0
    return whole and format is not None and not (format.codebook or format.exponent)


def steps(cols: int, warps: int) -> int:
    """Steps of four units that each of the warps takes which share 16 rows."""
    return -(-units_of(cols) // ABREAST // warps)


def shared_bytes(cols: int) -> int:
    """Bytes of shared memory that the vector takes."""
    return 2 * (2 * (cols + RUN) + UNIT) + 4 * (cols // QUARTER)


@dataclass(frozen=True)
class Place:
    """Where a thread is: `warps` warps share each tile of the block. `tile` is the number of its tile, `warp` that of
    its warp among those, `row` that of its first row in the tile, the other is 8 below; `unit` that among four
    units."""

    warps: int
    tile: UOp
    warp: UOp
    row: UOp
    unit: UOp

    @classmethod
    def of(cls, thread: UOp, warps: int) -> Place:
        warp, lane = thread // 32, thread % 32
        return cls(warps, warp // warps, warp % warps, lane // ABREAST, lane % ABREAST)

    @property
    def rows(self) -> list[UOp]:
        """The thread's rows in its block."""
        first = self.tile * TILE + self.row
        return [first, first + TILE // 2]

    @property
    def share(self) -> UOp:
        """The number of the thread among those that share its rows."""
        return self.warp * ABREAST + self.unit


def row_sums(
    layout: WeightLayout,
    cols: int,
    x: UOp,
    planes: Sequence[UOp],
    rows: Sequence[UOp],
    place: Place,
    thread: UOp,
    threads: int,
    factor_of: Callable[[UOp, UOp | None], UOp] | None = None,
) -> list[UOp]:
    """The partial sums of a thread's two rows, which are to be multiplied by `sum_factor`. `x`: float32
    (permuted_size(cols),), the vector scaled for the layout. `factor_of`: as in `matvec`. All weights are loaded before
    the vector."""
    units, n_steps = units_of(cols), steps(cols, place.warps)
    assert n_steps <= _MOST_STEPS and serves(layout, TILE, cols)
    of_steps = [place.warp + k * place.warps for k in range(n_steps)]
    inside = [
        None if (k + 1) * place.warps * ABREAST <= units else step < units // ABREAST
        for k, step in enumerate(of_steps)
    ]
    own = [
        (step if ok is None else ok.where(step, 0)) * ABREAST + place.unit
        for step, ok in zip(of_steps, inside, strict=True)
    ]
    loaded = [layout.load_words(planes, row, units, unit) for unit in own for row in rows]
    kept, ready = _kept(loaded)
    parts, group_sums = _divided(layout, cols, x.after(ready), thread, threads)
    # Threads whose column belongs to another unit take zeros, which lie behind the two parts.
    column, zeros = place.row, 2 * (cols + RUN) // RUN
    mine = (column // 2).eq(place.unit)
    runs = UNIT // RUN
    first = column % 2 * ((cols + RUN) // RUN) + place.unit * runs
    results = [f32(0), f32(0)]
    for k, (step, ok, unit) in enumerate(zip(of_steps, inside, own, strict=True)):
        has = mine if ok is None else mine & ok
        start = has.where(first + step * (ABREAST * runs), UOp.const(zeros))
        words = [layout.unit_of(kept(2 * k + r)) for r in range(2)]
        dots: list[list[UOp]] = [[], []]
        for group in range(0, UNIT, layout.group):
            sums = [f32(0)] * 4
            for run in range(group // RUN, (group + layout.group) // RUN):
                right = [v.cast(F16) for v in load_run(parts, (start + run) * RUN, RUN)]
                left = [integer_pairs(layout, w.words, run * RUN) for w in words]
                for i in (0, 2):
                    pairs = [left[r][j].halves for j in (i, i + 1) for r in range(2)]
                    sums = wmma([h for pair in pairs for h in pair], right[2 * i : 2 * i + 4], sums)
            for r in range(2):
                dots[r].append(sums[2 * r] + sums[2 * r + 1] * f32(1 / _REST))
        quarters = layout.group // QUARTER
        xs = [
            tree([load(group_sums, unit * (UNIT // QUARTER) + g * quarters + i, ok) for i in range(quarters)])
            for g in range(UNIT // layout.group)
        ]
        for r in range(2):
            value = words[r].of_dots(dots[r], xs)
            results[r] = results[r] + (value if factor_of is None else value * factor_of(unit, ok))
    return results


def _kept(loaded: Sequence[Sequence[UOp]]) -> tuple[Callable[[int], list[UOp]], UOp]:
    """What was loaded, in registers, and when: so nothing that follows delays the loads."""
    n = len(loaded[0])
    arrays, stores = [], []
    for i, value in enumerate(loaded[0]):
        array = registers(len(loaded), 20 + i, U32 if value.dtype == U32 else half_registers())
        arrays.append((array, value.dtype))
        stores += store_run(array, 0, [values[i] for values in loaded])
    ready = UOp.group(*stores)
    return lambda k: [load(a.after(ready), k).cast(dtype) for a, dtype in arrays[:n]], ready


def _divided(layout: WeightLayout, cols: int, x: UOp, thread: UOp, threads: int) -> tuple[UOp, UOp]:
    """In shared memory, the vector as float16: its numbers rounded, from cols + RUN on the rest, and then zeros. Each
    eight columns are in the order of `PAIRS`. And the sums of each quarter of a unit."""
    units, packing, half = units_of(cols), BitPacking(layout.bits), half_registers()
    parts, sums = shared(2 * (cols + RUN) + UNIT, 2, half), shared(cols // QUARTER, 3)
    nothing = [u32(0)] * layout.unit_words
    stores = []
    for first in range(0, cols // QUARTER, threads):
        item = thread + first
        ok = None if first + threads <= cols // QUARTER else item < cols // QUARTER
        unit, quarter = item // (UNIT // QUARTER), item % (UNIT // QUARTER)
        quads = quarter * (QUARTER // 4)
        values = [load(x, ((quads + j // 4) * units + unit) * 4 + j % 4, ok) for j in range(QUARTER)]
        values = [v * _undone(packing, quarter, j) for j, v in enumerate(values)]
        stores.append(store(sums, item, tree(values) * f32(integer_scale()), ok))
        for start in range(0, QUARTER, RUN):
            at = [p for pair in integer_pairs(layout, nothing, start) for p in pair.positions]
            columns = [start + j for pair in PAIRS for j in pair]
            ordered = [values[j] * f32(2.0**-p) for j, p in zip(columns, at, strict=True)]
            near = [v for i in range(0, RUN, 2) for v in rounded_pair(*ordered[i : i + 2])]
            rests = [(v - n.cast(F32)) * f32(_REST) for v, n in zip(ordered, near, strict=True)]
            place = (item * (QUARTER // RUN) + start // RUN) * RUN
            stores += store_run(parts, place, near, ok)
            stores += store_run(parts, place + (cols + RUN), rests, ok)
    for first in range(0, UNIT, threads):
        item = thread + first
        ok = None if first + threads <= UNIT else item < UNIT
        stores.append(store(parts, item + 2 * (cols + RUN), f32(0).cast(half), ok))
    done = UOp.group(*stores)
    return parts.after(done), sums.after(done)


def _undone(packing: BitPacking, quarter: UOp, j: int) -> UOp:
    """What column j of a quarter is multiplied by: it was scaled for `BitPacking.position`."""
    of_quarters = [
        _RANGE * 2.0 ** (packing.position(q * QUARTER + j) - CENTER) for q in range(UNIT // QUARTER)
    ]
    factor = f32(of_quarters[0])
    for q, other in enumerate(of_quarters[1:], 1):
        if other != of_quarters[q - 1]:
            factor = (quarter < q).where(factor, f32(other))
    return factor
