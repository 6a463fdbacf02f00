"""What a matrix-vector product costs with a schedule, by a model of the GPU, so that shapes which nobody tuned get a
good one.

A kernel takes its beginning and end, and in between the longest of three times, or rather the root of the sum of their
squares, since none hides the others wholly:

- memory: all bytes at the rate of a copy; longer if some multiprocessors have a block more than others;
- latency: a wait for memory for each step of a thread;
- instructions: of all warps of a multiprocessor, whose four schedulers issue one in a cycle each.

So it is with each round of blocks, as many as fit at a time; the last round may be short.

A schedule that is `early` loads the first weights while the kernel before ends. The compiler then has to load those of
all rows at once, so that more bytes are under way, and needs the registers for it. Without, it takes fewer registers,
and several rows wait one after the other. Blocks that do not fit at a time come too late for that, and hold up the
kernel after them.

Blocks may also be held on a multiprocessor: then the compiler takes the registers that these leave. It serves floats,
which need few to be unpacked.

How many registers the compiler takes without early loads is hardly to be foreseen: with 8 rows of a thread 96 to 168,
and with one row as few as 38, so that loads of the vector wait for each other.

The numbers are those of an H200, where 2,500 schedules of 230 products were timed in whole steps, and 1,195 alone
(docs/schedules.md). None of them is sharp: a quarter more or less of one changes what the choices take by a few per
cent. What differs most among GPUs, `Chip` has.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable

from engine.targets.nvidia.kernels.device import REGISTERS, Chip
from engine.targets.nvidia.kernels.products.matvec import chunks
from engine.targets.nvidia.kernels.products.stacked_matrices import Schedule, StackedMatrices
from engine.targets.nvidia.kernels.rates import H200
from engine.targets.nvidia.kernels.weights.weight_layout import WeightLayout

_BEGIN_AND_END_US = 1.26
_EARLY_US = 0.28  # less, if all blocks of an early kernel fit at a time
_CROWDED_US = 0.97  # more, if none of them do
_LATENCY_US = 0.88  # of a load from memory, with others before it
_GHZ = 1.75  # the clock at which a scheduler issues instructions
_SCHEDULERS = 4  # of a multiprocessor
_UNIT_INSTRUCTIONS = 210  # of a warp, for a unit of a row: 3.3 for each weight
_DIGIT_INSTRUCTIONS = 90  # in place of these, if the vector is in digits
_DIVISION_US = 1.3  # of the kernel that divides it
_SUM_INSTRUCTIONS = 8.6  # for each of the sums of a row that are added one after the other
_UNEVEN = 0.56  # the part that counts of what the busiest multiprocessor has above the mean: it gets others' bandwidth
_NARROW = 0.79  # loads of t threads side by side take 1 + 0.79 / t times as long
_PLAIN_REGISTERS = {1: 56, 2: 96, 4: 98, 8: 124}  # of a thread, by its rows
_PLAIN_WORDS = {2: 18, 8: 34}  # of weights that a thread has asked for at a time
_ONE_ROW_WAITS = 1.27
# Floats take no registers to be unpacked. So a kernel has more of them under way without early loads, and most where
# its blocks are held on a multiprocessor: then the compiler has the registers that these leave, of which so many hold
# no weights. Only the loads of the first step are early: with more steps all take so much longer.
_FLOAT_REGISTERS, _FLOAT_WORDS, _HELD_REGISTERS = {1: 64, 2: 104, 4: 168, 8: 255}, 27, 17
_EARLY_FLOATS = 0.12
# Of a thread whose rows are looked up in a large codebook, and more for each row beside matrices of another type.
_CODE_REGISTERS, _OTHERS_REGISTERS = {1: 80, 2: 124, 4: 160, 8: 200}, 16
_DIGIT_REGISTERS = {1: 56, 2: 60, 4: 80, 8: 128}
# Of one whose loads are all under way together, in Q6_K (NVRTC 12.9).
_TOGETHER_REGISTERS = {1: 78, 2: 95, 4: 128, 8: 255}
_EARLY_REGISTERS, _MOST_EARLY_REGISTERS = 77, 190  # beside the weights; all
_MANY_ROWS_WIDE = 32  # threads of a row, beyond which the compiler loads 8 rows one after the other
_HELD_THREADS = 32  # with fewer threads of a row, held kernels of floats spill no registers after a norm
_LEAST_HELD_REGISTERS = 80  # with fewer registers they spill some
_MANY = 3  # blocks of a multiprocessor at a time
_UNSURE = 0.01  # costs so near are equal: with 0.5 to 2 %, choices differ by 0.04 % of a step
_LARGE = 256  # threads of a block, beyond which only products with a vector in digits were as fast


def ranked(stack: StackedMatrices, schedules: Iterable[Schedule], chip: Chip) -> list[Schedule]:
    """The schedules whose kernels compile as the model assumes, the cheapest first; but of those that cost about as
    little as the cheapest, that whose blocks are nearest to four warps."""
    costs = {s: microseconds(stack, s, chip) for s in schedules if _is_sound(stack, s, chip)}
    about_least = (1 + _UNSURE) * min(costs.values(), default=0.0)

    def order(s: Schedule) -> tuple[bool, float, float]:
        is_dear = costs[s] > about_least
        return is_dear, 0.0 if is_dear else abs(math.log2(s.block_threads / 128)), costs[s]

    return sorted(costs, key=order)


def microseconds(stack: StackedMatrices, s: Schedule, chip: Chip) -> float:
    """The time of the kernel of a product between others, without experts."""
    resident, rates = _resident(stack, s, chip), chip.rates
    of_mean = stack.n_blocks(s) / chip.multiprocessors
    steps, warps = _steps(stack, s), _warps(s)
    of_block = stack.n_bytes / rates.copy_gbps / 1e3 / of_mean * (1 + _NARROW / s.threads)
    if s.early and steps > 1 and _are_floats(stack):
        of_block *= 1 + _EARLY_FLOATS
    latency = steps * _waits(stack, s) * _LATENCY_US * rates.latency_us / H200.latency_us
    of_unit = _DIGIT_INSTRUCTIONS if stack.digits else _UNIT_INSTRUCTIONS
    together = chunks(stack, s) if s.early else 1  # others had one when the numbers were fitted
    sums = s.threads / together + together if together > 1 else s.threads
    instructions = steps * s.rows * of_unit + sums * _SUM_INSTRUCTIONS
    in_a_us = _SCHEDULERS * _GHZ * 1e3 * rates.weights_per_ns / H200.weights_per_ns

    def of_round(blocks: float, of_busiest: int) -> float:
        """The time of a round of so many blocks of a multiprocessor in the mean, and of the busiest one."""
        load = max(1.0, blocks + _UNEVEN * (of_busiest - blocks))
        of_all = warps * of_busiest
        idle = math.ceil(of_all / _SCHEDULERS) * _SCHEDULERS / of_all
        return math.hypot(of_block * load, latency, load * warps * idle * instructions / in_a_us)

    rounds, last = divmod(of_mean, resident)
    within = rounds * of_round(resident, resident) + (of_round(last, math.ceil(last)) if last else 0.0)
    fit = min(1.0, resident / math.ceil(of_mean))
    early = _CROWDED_US * (1 - fit) - _EARLY_US * fit if s.early else 0.0
    between = (_BEGIN_AND_END_US + early) * rates.link_us / H200.link_us
    return between + within - (division_us(chip) if _divides(stack, s) else 0.0)


def _waits(stack: StackedMatrices, s: Schedule) -> float:
    """How often a thread waits for memory in a step."""
    words = s.rows * _unit_words(stack)
    if s.blocks:
        return max(1.0, words / (_held_registers(s) - _HELD_REGISTERS))
    if _are_floats(stack):
        return 1.0 if s.early else max(1.0, words / _FLOAT_WORDS)
    if s.rows == 1:
        return _ONE_ROW_WAITS
    return 1.0 if s.early else max(1.0, words / _PLAIN_WORDS.get(s.rows, math.inf))


def _divides(stack: StackedMatrices, s: Schedule) -> bool:
    """Whether the kernel makes the digits of a next vector beside its product (`epilogues.makes_digits`), as in files
    whose matrices have a codebook: gate and up, which alternate, or what is added to the stream."""
    is_coded = stack.fits_digits and has_large_codebook(stack)
    return is_coded and s.block_rows % (64 if stack.rows > stack.cols else 32) == 0


def division_us(chip: Chip) -> float:
    """The time of the kernel that makes digits of a vector (`digit_rows.divide`)."""
    return _DIVISION_US * chip.rates.link_us / H200.link_us


def _is_sound(stack: StackedMatrices, s: Schedule, chip: Chip) -> bool:
    """Whether the compiler can be relied on. It takes 96 registers or 121 for a thread with four rows without early
    loads, and spills some of a few other kinds."""
    registers = _registers(stack, s)
    if registers * 32 * _warps(s) > REGISTERS or not all(s.divides(rows) for _, rows in stack.matrices):
        return False
    if s.threads * s.groups > _LARGE and not stack.digits:
        return False
    if _are_floats(stack) and chip.launches_early:
        return _can_be_held(stack, s) if s.blocks else 1 < s.rows <= (4 if s.early else 8)
    if s.blocks:
        return False
    if s.early and ((s.rows > 4 and not stack.digits) or registers > _MOST_EARLY_REGISTERS):
        return False
    if s.rows == 1 and _steps(stack, s) > (2 if s.early or not chip.launches_early else 1):
        return False
    if not s.early and (s.rows == 4 or (s.rows == 8 and s.threads > _MANY_ROWS_WIDE)):
        return False
    if not s.early and _share_of_codebooks(stack):  # slower in all cases that were measured
        return False
    resident = _resident(stack, s, chip)  # few blocks hardly load while others compute
    return resident >= _MANY or stack.n_blocks(s) <= resident * chip.multiprocessors


def _can_be_held(stack: StackedMatrices, s: Schedule) -> bool:
    """Whether a kernel of floats whose blocks are held spills no registers: it has a loop, whose last step is whole."""
    is_after_norm = stack.rows > stack.cols  # as far as the shape tells
    is_loop = _steps(stack, s) > 1 and stack.units % s.threads == 0
    has_room = s.rows <= 2 and _held_registers(s) >= _LEAST_HELD_REGISTERS
    return is_loop and has_room and not (is_after_norm and s.threads >= _HELD_THREADS)


def _steps(stack: StackedMatrices, s: Schedule) -> int:
    """Units of a row that a thread takes; of stacked matrices two at least, as when the numbers were fitted."""
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
    """The share of the rows whose weights are looked up in a large codebook, or are small floats."""
    return sum(rows for layout, rows in stack.matrices if _is_large(layout) or layout.is_e2m1) / stack.rows


def _registers(stack: StackedMatrices, s: Schedule) -> float:
    """A guess of those of a thread."""
    if s.blocks:
        return _held_registers(s)
    if stack.digits:
        return (_TOGETHER_REGISTERS if s.together else _DIGIT_REGISTERS)[s.rows]
    if has_large_codebook(stack):
        return _CODE_REGISTERS[s.rows] + _OTHERS_REGISTERS * s.rows * (len(stack.matrices) > 1)
    plain = _PLAIN_REGISTERS[s.rows]
    if not s.early:
        return plain
    if _are_floats(stack):
        return _FLOAT_REGISTERS[s.rows]
    offsets = any(layout.format and layout.offset and layout.bits < 8 for layout, _ in stack.matrices)
    return max(plain, _EARLY_REGISTERS + s.rows * (_unit_words(stack) + 8 * offsets))


def _held_registers(s: Schedule) -> int:
    """The registers of a thread that its held blocks leave to the compiler."""
    of_scheduler = math.ceil(s.blocks * _warps(s) / _SCHEDULERS)  # warps
    return min(255, REGISTERS // _SCHEDULERS // (of_scheduler * 32) // 8 * 8)


@functools.cache
def _are_floats(stack: StackedMatrices) -> bool:
    return all(layout.format is None for layout, _ in stack.matrices)


def _resident(stack: StackedMatrices, s: Schedule, chip: Chip) -> int:
    """Blocks that a multiprocessor holds at a time. Each of its schedulers has a quarter of its registers."""
    warps = _warps(s)
    of_warp = math.ceil(_registers(stack, s) / 8) * 8 * 32
    by_registers = REGISTERS // _SCHEDULERS // of_warp * _SCHEDULERS
    return int(max(1, min(by_registers // warps, chip.warps // warps, 32)))
