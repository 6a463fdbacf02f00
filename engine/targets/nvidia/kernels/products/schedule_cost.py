"""What a matrix-vector product costs with a schedule, by a model of the GPU, so that shapes which nobody tuned get a
good one.

A kernel takes its beginning and end, and in between the longest of three times, or rather the root of the sum of their
squares, since none hides the others wholly:

- memory: all bytes at the rate of a copy; longer if some multiprocessors have a block more than others;
- latency: a wait for memory for each step of a thread, and for each round of blocks, as many as fit at a time;
- instructions: of all warps of a multiprocessor, which issues four in a cycle, if it has warps enough.

A schedule that is `early` loads the first weights while the kernel before ends. The compiler then has to load those of
all rows at once, so that more bytes are under way, and needs the registers for it. Without, it takes fewer registers,
and several rows wait one after the other.

How many registers the compiler takes without early loads is hardly to be foreseen: with 8 rows of a thread 96 to 168,
and with one row as few as 38, so that loads of the vector wait for each other.

The numbers are those of an H200, where 1,195 kernels of 78 products and twelve types were timed alone, and 363 of 25 in
whole steps (docs/schedules.md). None of them is sharp: a quarter more or less of one changes what the choices take by
a few per cent. What differs most among GPUs, `Chip` has.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable

from engine.targets.nvidia.kernels.device import REGISTERS, Chip
from engine.targets.nvidia.kernels.products.matvec import Schedule, StackedMatrices
from engine.targets.nvidia.kernels.rates import H200
from engine.targets.nvidia.kernels.weights.weight_layout import WeightLayout

_BEGIN_AND_END_US = 1.54
_EARLY_US = 0.23  # of these, if all blocks fit at a time
_LATENCY_US = 1.02  # of memory, with other loads before
_GHZ = 1.75  # at which it issues
_UNIT_INSTRUCTIONS = 200  # of a warp, for a unit of a row: 3.1 for each weight
_CODE_INSTRUCTIONS = 80  # more, if weights are looked up in a codebook
_DIGIT_INSTRUCTIONS = 140  # in place of both, if the vector is in digits
_DIVISION_US = 1.3  # of the kernel that divides it
_STEP_INSTRUCTIONS = 50  # for a unit of the vector, which all rows of a thread share
_SUM_INSTRUCTIONS = 2.8  # for each thread of a row, when their sums are added
_BUSY_WARPS = 12  # of a multiprocessor, with fewer of which it does not issue in each cycle
_UNEVEN = 0.64  # of what the busiest multiprocessor needs more than the mean: it has the others' bandwidth
_NARROW = 0.15  # loads of t threads side by side take 1 + 0.15 / t times as long
_PLAIN_REGISTERS = {1: 56, 2: 96, 4: 98, 8: 124}  # of a thread, by its rows
_PLAIN_WORDS = {2: 16, 4: 58, 8: 50}  # of weights that a thread has asked for at a time
_ONE_ROW_WAITS = 1.27
# Of a thread whose rows are looked up in a large codebook, and more for each row beside matrices of another type.
_CODE_REGISTERS, _OTHERS_REGISTERS = {1: 80, 2: 124, 4: 160, 8: 200}, 16
_DIGIT_REGISTERS = {1: 56, 2: 60, 4: 80, 8: 128}
_EARLY_REGISTERS, _MOST_EARLY_REGISTERS = 77, 170  # beside the weights; all
_MANY_ROWS_WIDE = 32  # threads of a row, beyond which the compiler loads 8 rows one after the other
_WIDE = 48  # threads of a row, beyond which the sums of many blocks take too long


def ranked(stack: StackedMatrices, schedules: Iterable[Schedule], chip: Chip) -> list[Schedule]:
    """The schedules whose kernels compile as the model assumes, the cheapest first; of equal ones that whose blocks are
    nearest to four warps."""

    def cost(s: Schedule) -> tuple[float, float]:
        return microseconds(stack, s, chip), abs(math.log2(s.threads * s.groups / 128))

    return sorted((s for s in schedules if _is_sound(stack, s, chip)), key=cost)


def microseconds(stack: StackedMatrices, s: Schedule, chip: Chip) -> float:
    """The time of the kernel of a product between others, without experts."""
    blocks, resident = stack.n_blocks(s), _resident(stack, s, chip)
    of_mean = blocks / chip.multiprocessors
    of_busiest = math.ceil(of_mean)
    load = max(1.0, of_mean + _UNEVEN * (of_busiest - of_mean))
    steps, warps = _steps(stack, s), _warps(s)
    rates = chip.rates
    memory = stack.n_bytes / rates.copy_gbps / 1e3 * load / of_mean * (1 + _NARROW / s.threads)
    rounds = max(1.0, of_mean / resident) if of_busiest > resident else 1.0
    waits = _ONE_ROW_WAITS if s.rows == 1 else max(1.0, s.rows * _unit_words(stack) / _words_under_way(s))
    latency = rounds * steps * waits * _LATENCY_US * rates.latency_us / H200.latency_us
    of_unit = _UNIT_INSTRUCTIONS + _CODE_INSTRUCTIONS * _share_of_codebooks(stack)
    of_unit = _DIGIT_INSTRUCTIONS if stack.digits else of_unit
    instructions = steps * (s.rows * of_unit + _STEP_INSTRUCTIONS) + s.threads * _SUM_INSTRUCTIONS
    waiting = max(1.0, _BUSY_WARPS / (warps * min(resident, of_busiest)))
    clock_ghz = _GHZ * rates.weights_per_ns / H200.weights_per_ns
    issue = load * warps * instructions * waiting / 4 / clock_ghz / 1e3
    gain = _EARLY_US * min(1.0, resident / of_busiest) if s.early else 0.0
    between = (_BEGIN_AND_END_US - gain) * rates.link_us / H200.link_us
    return between + math.hypot(memory, latency, issue)


def division_us(chip: Chip) -> float:
    """The time of the kernel that makes digits of a vector (`digit_rows.divide`)."""
    return _DIVISION_US * chip.rates.link_us / H200.link_us


def _is_sound(stack: StackedMatrices, s: Schedule, chip: Chip) -> bool:
    """Whether the compiler can be relied on. It takes 96 registers or 121 for a thread with four rows without early
    loads, and spills some of a few other kinds."""
    size, registers = s.threads * s.groups, _registers(stack, s)
    if s.tensor or s.blocks or size > 256 or registers * 32 * _warps(s) > REGISTERS:
        return False
    if s.early and (s.rows > 4 or registers > _MOST_EARLY_REGISTERS):
        return False
    if not s.early and (s.rows == 4 or (s.rows == 8 and s.threads > _MANY_ROWS_WIDE)):
        return False
    if not s.early and _share_of_codebooks(stack):  # slower in all cases that were measured
        return False
    if not all(s.divides(rows) for _, rows in stack.matrices):
        return False
    of_busiest = math.ceil(stack.n_blocks(s) / chip.multiprocessors)
    return s.threads <= _WIDE or of_busiest <= _resident(stack, s, chip)


def _steps(stack: StackedMatrices, s: Schedule) -> int:
    """Units of a row that a thread takes; the loop of stacked matrices has two steps at least."""
    return max(1 + (len(stack.matrices) > 1), math.ceil(stack.units / s.threads))


def _warps(s: Schedule) -> int:
    return math.ceil(s.threads * s.groups / 32)


@functools.cache
def _unit_words(stack: StackedMatrices) -> float:
    """Words of 32 bits of a unit of a row, in the mean."""
    return stack.n_bytes / (stack.rows * stack.units) / 4


def has_large_codebook(stack: StackedMatrices) -> bool:
    """Whether a matrix is looked up in a codebook of more than eight numbers, which takes registers."""
    return any(_is_large(layout) for layout, _ in stack.matrices)


def _is_large(layout: WeightLayout) -> bool:
    return layout.has_codes and layout.format is not None and len(layout.format.codebook) > 8


@functools.cache
def _share_of_codebooks(stack: StackedMatrices) -> float:
    """Of the rows: those whose weights are looked up in a large codebook, or are small floats."""
    return sum(rows for layout, rows in stack.matrices if _is_large(layout) or layout.is_e2m1) / stack.rows


def _registers(stack: StackedMatrices, s: Schedule) -> float:
    """A guess of those of a thread."""
    if stack.digits:
        return _DIGIT_REGISTERS[s.rows]
    if has_large_codebook(stack):
        return _CODE_REGISTERS[s.rows] + _OTHERS_REGISTERS * s.rows * (len(stack.matrices) > 1)
    plain = _PLAIN_REGISTERS[s.rows]
    if not s.early:
        return plain
    offsets = any(layout.format and layout.offset for layout, _ in stack.matrices)
    return max(plain, _EARLY_REGISTERS + s.rows * (_unit_words(stack) + 8 * offsets))


def _words_under_way(s: Schedule) -> float:
    """Words of weights that a thread can have asked for."""
    return math.inf if s.early else _PLAIN_WORDS[s.rows]


def _resident(stack: StackedMatrices, s: Schedule, chip: Chip) -> int:
    """Blocks that a multiprocessor holds at a time."""
    warps = _warps(s)
    registers = math.ceil(_registers(stack, s) / 8) * 8 * 32 * warps
    return max(1, min(int(REGISTERS // registers), chip.warps // warps, 32))
