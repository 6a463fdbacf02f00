"""Chooses the schedule of a matrix-vector product: the result of a search on this machine, else the one shipped for the
chip and shape, else the one that a model of the GPU finds cheapest (`schedule_cost`). A rule serves where the model was
not compared with measurements: for mixtures of experts. On GPUs that launch no kernel early it serves unless the model
finds another schedule clearly cheaper."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator
from dataclasses import astuple, fields, replace
from importlib import resources
from typing import Literal, NamedTuple, get_args

import msgspec
from tinygrad import Device

from engine.cache.disk_cache import disk_cache, lasting_cache
from engine.cache.sources import source_digest
from engine.cache.start_trial import start_trials
from engine.devices.device_name import device_name
from engine.formats.quantization import Format
from engine.kernels.launch_hints import Release, Together
from engine.targets.nvidia.kernels.device import REGISTERS, Chip, capability, chip
from engine.targets.nvidia.kernels.products import digit_rows
from engine.targets.nvidia.kernels.products.chosen_experts import ChosenExperts
from engine.targets.nvidia.kernels.products.schedule_cost import (
    division_us,
    has_large_codebook,
    microseconds,
    ranked,
)
from engine.targets.nvidia.kernels.products.stacked_matrices import (
    Schedule,
    StackedMatrices,
    usual_release,
)

_TUNED = resources.files("presets") / "tuned"  # data, shipped with the presets
# The source files of the products: a change to them makes earlier measurements outdated.
_SOURCES = tuple(
    f"targets/nvidia/kernels/{name}.py"
    for name in (
        "products/matvec",
        "products/stacked_matrices",
        "products/digit_rows",
        "products/epilogues",
        "products/chosen_experts",
        "products/expert_choice",
        "weights/weight_layout",
        "weights/bit_packing",
    )
)
_UNKNOWN = Chip()
_OF_EXPERTS = re.compile(r"(?<=\d) of \d+")
_Numbers = tuple[int, int, int, int]
_SURE = 1.05  # how much more time the model must see in a schedule to take another
_MAX_IDLE = 0.07  # the largest share of units that threads have beyond a row's end
# Of experts in a product whose vectors come in digits: with 12.6 million they gained nothing.
_MANY_WEIGHTS = 16e6
_MANY_INTEGERS = 25e6  # of gate and up: the smallest that were timed had 25.2 million
_MANY_OF_EXPERTS = 33e6  # of chosen experts in Q4_K: with 33.5 million they gained, with 25 they lost
_FOUR_WARPS, _LEAST_UNITS, _MOST_UNITS = 128, 24, 96
_VOCABULARY, _HEAD_THREADS = 50_000, 40  # rows of a head at least, and the threads of one of its rows at most
_BROUGHT = (0, 4)  # megabytes of the next product's weights, to try (measured: with 2 to 6 about the same)
_RESIDENT_THREADS = (640, 1024)  # on a multiprocessor, to try beside the compiler's choice
_BROUGHT_BY_OUTPUT = 2  # megabytes of gate and up, where these have fewer than 8 bits

Place = Literal["", "attention's output", "gate and up", "down"]
"""Where a product stands, if a rule says what it does there for the next one: in layers without experts."""


def best_schedule(stack: StackedMatrices, place: Place = "") -> Schedule:
    """The schedule of a product on the default device."""
    if found := search_result(stack):
        return found.schedule
    return matvec_schedule(stack, chip(), place)


def in_digits(stack: StackedMatrices, place: Place = "") -> StackedMatrices:
    """The product on the default device, whose vector comes in digits where that takes less time by the model."""
    return with_digits(stack, chip(), place)


def with_digits(stack: StackedMatrices, chip: Chip, place: Place = "") -> StackedMatrices:
    """As `in_digits`, on a GPU that launches kernels early, where it was timed. Of experts, those of many weights, and
    of integers, gate and up of many weights in Q4_K and Q6_K, of experts gate and up and down in Q4_K, and heads in
    Q6_K: the model does not know these."""
    if not (chip.launches_early and stack.fits_digits):
        return stack
    ((layout, rows),) = stack.matrices
    divided, shipped = replace(stack, digits=True), _shipped(chip.capability)
    n_weights = rows * stack.cols * (stack.experts.used if stack.experts else 1)
    if digit_rows.has_integers(layout):  # where it was timed
        least, types = (_MANY_OF_EXPERTS, ("Q4_K",)) if stack.experts else (_MANY_INTEGERS, ("Q4_K", "Q6_K"))
        is_known = (place == "gate and up" or stack.experts is not None) and layout.name in types
        gains = is_known and n_weights >= least and not (stack.shared or _measured(shipped, stack))
        is_like = chip.multiprocessors == shipped.multiprocessors
        return divided if is_like and (gains or _is_head(stack) or _measured(shipped, divided)) else stack
    if stack.experts:
        return divided if n_weights >= _MANY_WEIGHTS and not stack.shared else stack
    if layout.is_e2m1:  # not timed
        return stack
    ours, theirs = ((found, _cheapest(found, chip)) for found in (divided, stack))
    if ours[1] is None or theirs[1] is None:
        return stack
    us = microseconds(divided, ours[1], chip) + division_us(chip)
    return divided if us < microseconds(stack, theirs[1], chip) else stack


def matvec_schedule(stack: StackedMatrices, chip: Chip = _UNKNOWN, place: Place = "") -> Schedule:
    """The schedule of a product without a search."""
    shipped = _shipped(chip.capability)
    is_like = chip.multiprocessors == shipped.multiprocessors
    if found := _measured(shipped, stack):
        return found if is_like else _unless_dear(stack, found, chip)
    if chip.launches_early and _is_modelled(stack) and (found := _cheapest(stack, chip)):
        return _for_the_next(found, stack, place)
    min_blocks = shipped.rule.blocks_a_multiprocessor * chip.multiprocessors
    min_steps = 1 + (len(stack.matrices) > 1)
    s = _by_rule(stack.rows, stack.units, min_blocks / stack.slots, min_steps)
    if stack.experts:
        s = _at_a_time(stack, s, chip)
        if stack.digits and digit_rows.has_integers(stack.matrices[0][0]):
            return _of_experts_in_digits(stack.experts, s)
        is_q4 = all(layout.name == "Q4_K" for layout, _ in stack.matrices)  # others were not timed
        is_early = chip.launches_early and is_q4 and not stack.experts.added
        return replace(s, early=True, releases=usual_release(is_early=True)) if is_early else s
    return _unless_dear(stack, _slim(s) if has_large_codebook(stack) else s, chip)


def _measured(shipped: _Shipped, stack: StackedMatrices) -> Schedule | None:
    """The schedule that is shipped for a product."""
    name = _measured_name(shipped, stack)
    numbers = shipped.early.get(name) or shipped.products.get(name)
    if not numbers:
        return None
    is_early, early_end, streams = (name in s for s in (shipped.early, shipped.early_ends, shipped.streams))
    releases = shipped.releases.get(name, usual_release(is_early))
    brings, together = shipped.brings.get(name, 0), shipped.together.get(name, "")
    return Schedule(*numbers, is_early, releases, early_end, brings, streams, together)


def _for_the_next(s: Schedule, stack: StackedMatrices, place: Place) -> Schedule:
    """The schedule with what it does for the next product: in steps of seven models on an H200, gate and up that let
    down start gained 0.8 % in the mean (-0.3 to 2.4), and output products that bring the beginning of gate and up 1
    (0.1 to 3), but lost 0.4 where weights have 8 bits. Of three models of floats, those that let the next start at the
    ends of attention and of the feed-forward layer gained 0.5 % (0 to 1.3). Down also loads what its end reads before
    it waits: 0.3 % of the steps of six models (-0.05 to 0.6). Three products have all their loads under way before they
    compute: gate and up in Q4_K, whose vector then comes in digits, which gained 2.1 % of the steps of three models
    (1.8 to 2.3), and in Q6_K 1.5 and 5 % of two, in Q8_0, whose weights are also the first to leave the caches, 1.8 and
    0.3 % of two, and down in Q6_K, 1.0 to 2.4 % of three. All else gained with some models what it lost with others."""
    if stack.digits:
        is_held = place == "gate and up" and digit_rows.has_integers(stack.matrices[0][0])
        cut = _head_in_digits if _is_head(stack) else _in_one_step if is_held else None
        return replace(cut(s, stack), together="all") if cut else s  # others were not timed
    if floats := sum(layout.format is None for layout, _ in stack.matrices):
        is_end = place in ("attention's output", "down") and floats == len(stack.matrices)
        return replace(s, releases="after its wait") if is_end else s
    types = {layout.name for layout, _ in stack.matrices}
    if place == "down" and s.early:
        return replace(s, early_end=True, together="all" if types == {"Q6_K"} else "")
    if place == "gate and up" and s.early and types == {"Q8_0"}:
        return replace(s, releases="after its wait", together="all", streams=True)
    is_small = stack.n_bytes < stack.rows * stack.cols
    brings = _BROUGHT_BY_OUTPUT if place == "attention's output" and is_small else 0
    return replace(s, releases="after its wait" if place == "gate and up" else s.releases, brings=brings)


def _of_experts_in_digits(experts: ChosenExperts, s: Schedule) -> Schedule:
    """A rule's schedule for chosen experts of many weights in Q4_K: all loads are under way together, and blocks that
    choose experts have four groups at most. Two layers of a model whose gate and up have 235 million weights and down
    117 took 242.6 microseconds with float32, 215.1 with gate and up in digits (225.9 with eight groups), and 229.9 with
    down; with 101 and 50 million 154.6, 147.4 (152.5) and 148.6."""
    if experts.added:
        return replace(s, early_end=True, together="all")
    usual = usual_release(is_early=True)
    return replace(s, groups=min(s.groups, 4), early=True, releases=usual, together="all")


def _in_one_step(s: Schedule, stack: StackedMatrices) -> Schedule:
    """The schedule for loads that are all under way together, which the model does not know: a thread has one unit of
    each of four rows, and a block four warps at most. Against the model's, 80, 1, 4 gained 2.7 % of a step, 64, 2, 4
    2.7, 48, 2, 4 2.6 and 24, 4, 4 0.2; 80, 2, 4 nothing."""
    if not _LEAST_UNITS <= stack.units <= _MOST_UNITS:
        return s
    groups = 2 ** int(math.log2(_FOUR_WARPS / stack.units))
    found = replace(s, threads=stack.units, groups=groups, rows=4)
    return found if found.fits() and all(found.divides(rows) for _, rows in stack.matrices) else s


def _is_head(stack: StackedMatrices) -> bool:
    """Whether a product is that of the vocabulary, in a type whose digits were timed there: steps of 4 to 16 layers of
    eight models, 1B to 30B, take 0.3 to 4.3 % less with them."""
    ((layout, rows), *others) = stack.matrices
    return layout.name == "Q6_K" and rows > _VOCABULARY and not (others or stack.experts)


def _head_in_digits(s: Schedule, stack: StackedMatrices) -> Schedule:
    """The schedule for a head with all loads together: the fastest that was timed of seven of eight."""
    threads = max(n for n in range(1, _HEAD_THREADS + 1) if stack.units % n == 0)
    found = replace(s, threads=threads, groups=4, rows=4, early=True, releases=usual_release(is_early=True))
    return found if found.fits() and all(found.divides(rows) for _, rows in stack.matrices) else s


def _unless_dear(stack: StackedMatrices, s: Schedule, chip: Chip) -> Schedule:
    """A schedule that a rule gives, or that was measured on another GPU; or the cheapest one, where the rates of this
    one are known and the model is sure."""
    if not (chip.own_rates and _is_modelled(stack)) or not (found := _cheapest(stack, chip)):
        return s
    return found if _SURE * microseconds(stack, found, chip) < microseconds(stack, s, chip) else s


def _slim(s: Schedule) -> Schedule:
    """The schedule with at most four rows of a thread and 128 threads, for kernels that take 160 registers: on an H200,
    gate and up of Llama 3.1 8B in IQ4_XS took 29.7 us so in place of 36.5."""
    rows, groups = min(s.rows, 4), s.groups
    while groups > 1 and s.threads * groups > 128 and groups * rows > 2:
        groups //= 2
    return replace(s, rows=rows, groups=groups)


def _measured_name(shipped: _Shipped, stack: StackedMatrices) -> str:
    """The name of a product, or that of a shipped one with as many chosen experts of others, if it is not shipped."""
    known = shipped.early | shipped.products if stack.experts else {}
    if stack.name in known:
        return stack.name
    name = _OF_EXPERTS.sub("", stack.name)
    return next((other for other in known if _OF_EXPERTS.sub("", other) == name), stack.name)


def _at_a_time(stack: StackedMatrices, s: Schedule, chip: Chip) -> Schedule:
    """The schedule of a product that chooses experts, or one with half the threads and twice the rows of a thread, if
    all blocks run at a time only with that one. Each block makes the choice before it loads anything: on an H200, gate
    and up of Qwen3 30B-A3B took 2.6 us more each time that blocks waited for others. Registers are those of NVRTC 12.6
    for 9.0."""
    if not stack.experts or stack.experts.added or any(f and f.codebook for f in _formats(stack)):
        return s
    wide = replace(s, groups=s.groups // 2, rows=s.rows * 2)

    def fit(s: Schedule, registers: int) -> bool:
        of_block = registers * 32 * math.ceil(s.threads * s.groups / 32)
        return stack.n_blocks(s) * stack.slots <= REGISTERS // of_block * chip.multiprocessors

    is_slim = all(layout.bits in (4, 5) for layout, _ in stack.matrices)
    can_be_wide = s.groups % 2 == 0 and wide.rows <= 8 and wide.fits()
    if not fit(s, 128 if is_slim else 160) and can_be_wide and fit(wide, 168):
        return wide
    return s


def _formats(stack: StackedMatrices) -> list[Format | None]:
    return [layout.format for layout, _ in stack.matrices]


def _is_modelled(stack: StackedMatrices) -> bool:
    """Whether the model of the GPU was compared with such products."""
    return not (stack.experts or stack.beside)


@functools.cache
def _cheapest(stack: StackedMatrices, chip: Chip) -> Schedule | None:
    return next(iter(ranked(stack, _all(stack, chip), chip)), None)


class _Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    blocks_a_multiprocessor: float = 1.5


class _Shipped(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of tuned schedules: where they come from, the multiprocessors of that GPU, and for each
    `StackedMatrices.name` threads, groups, rows and blocks. Those of `early` are `Schedule.early`; `releases`,
    `brings` and `together`, and the names in `early_ends` and `streams` are those fields of a `Schedule`, where they
    are not the usual ones."""

    origin: str = "a guess"
    multiprocessors: int = 0
    early_ends: frozenset[str] = frozenset()
    streams: frozenset[str] = frozenset()
    rule: _Rule = _Rule()
    products: dict[str, _Numbers] = {}
    early: dict[str, _Numbers] = {}
    releases: dict[str, Release] = {}
    brings: dict[str, int] = {}
    together: dict[str, Together] = {}


@functools.cache
def _shipped(chip: str) -> _Shipped:
    path = _TUNED / f"{chip}.toml"
    return msgspec.toml.decode(path.read_bytes(), type=_Shipped) if path.is_file() else _Shipped()


def _by_rule(rows: int, units: int, min_blocks: float, min_steps: int = 1) -> Schedule:
    """A schedule for any shape. Threads of a row: one for each unit if these are few, else a divisor of their number,
    so that no thread is idle, with at least `min_steps` steps each (stacked matrices of several layouts want two). Rows
    of a thread: as many as leave `min_blocks` blocks, since each row uses the loaded activations again."""
    max_threads = 32 if units <= 64 else 64
    max_threads = max(1, min(max_threads, units // min_steps))
    threads = min(units, max_threads)
    if units > max_threads:
        threads = next((t for t in range(max_threads, max_threads // 2, -1) if units % t == 0), max_threads)
    groups = max(1, min(8, 256 // threads))
    thread_rows = 1
    while 2 * thread_rows <= min(8, threads) and rows // (groups * thread_rows * 2) >= min_blocks:
        thread_rows *= 2
    if groups * thread_rows % 2:  # gate and up must be in one block
        groups = 2
    return Schedule(threads, groups, thread_rows)


# --- the search ----------------------------------------------------------------------------------------


def candidates(stack: StackedMatrices, near: Schedule, chip: Chip = _UNKNOWN) -> list[Schedule]:
    """The schedules to try for a product, without `near`: blocks of 64 to 1,024 threads, whole blocks of rows, gate and
    up in one block, few idle threads. Those that the model of the GPU finds cheap come first if it knows the product;
    then those most similar to `near`."""
    tried = (_launched_as(near, s) for s in _all(stack, chip))
    similar = sorted((s for s in tried if s != near), key=lambda s: _distance(s, near))
    first = ranked(stack, similar, chip) if chip.launches_early and _is_modelled(stack) else []
    return list(dict.fromkeys([*first, *similar]))


def neighbours(stack: StackedMatrices, s: Schedule, chip: Chip = _UNKNOWN) -> list[Schedule]:
    """The schedules like one, the most similar first: one that is launched otherwise (`_launched_as`), a number twice
    as large or half, or two of them so that a block has as many threads, or as many rows."""
    others = [_launched_as(s, other) for other in _all(stack, chip)]
    if chip.launches_early:
        others += [replace(s, releases=release) for release in get_args(Release)]
        others += [replace(s, early_end=not s.early_end), replace(s, streams=not s.streams)]
        others += [replace(s, together=together) for together in get_args(Together)]
        others += [replace(s, brings=n) for n in _BROUGHT]
    near = ((_distance(other, s), other) for other in others if other != s)
    size = s.threads * s.groups, s.block_rows
    found = [
        (distance, other)
        for distance, other in near
        if distance <= 1
        or (distance <= 2 and (other.threads * other.groups == size[0] or other.block_rows == size[1]))
    ]
    return [other for _, other in sorted(found, key=lambda pair: pair[0])]


def _launched_as(s: Schedule, other: Schedule) -> Schedule:
    """Another schedule, which does the same as `s` for its end and the next kernel."""
    is_usual = s.releases == usual_release(s.early)
    releases = usual_release(other.early) if is_usual else s.releases
    own = {name: getattr(s, name) for name in ("early_end", "brings", "streams", "together")}
    return replace(other, releases=releases, **own)


def _all(stack: StackedMatrices, chip: Chip) -> list[Schedule]:
    """The schedules of a shape, and where kernels are launched early, the ones without held blocks as `Schedule.early`
    too."""
    plain = list(_of_shape(stack.rows, stack.units, stack.slots))
    early = functools.partial(replace, early=True, releases=usual_release(is_early=True))
    return plain + [early(s) for s in plain if chip.launches_early and not s.blocks]


def _of_shape(rows: int, units: int, slots: int) -> Iterator[Schedule]:
    min_blocks = min(64, max(1, rows // 16)) // slots
    divisors = (n for n in range(8, 129) if units % n == 0)
    for threads in sorted({8, 16, 24, 32, 48, 64, 96, 128, *divisors}):
        if -units % threads > _MAX_IDLE * units and units > 8:
            continue
        for groups in (1, 2, 4, 8, 16, 32):
            for thread_rows in (1, 2, 4, 8):
                s = Schedule(threads, groups, thread_rows)
                divided = s.divides(rows) and s.block_rows % 2 == 0
                if not (threads * groups >= 64 and s.fits() and divided):
                    continue
                if rows // s.block_rows < min_blocks or (rows > 50_000 and thread_rows < 4):
                    continue
                yield s
                if thread_rows <= 2:
                    for resident in _RESIDENT_THREADS:
                        if blocks := resident // (threads * groups):
                            yield replace(s, blocks=blocks)


def _distance(a: Schedule, b: Schedule) -> float:
    steps = sum(
        abs(math.log2(x / y)) for x, y in ((a.threads, b.threads), (a.groups, b.groups), (a.rows, b.rows))
    )
    kinds = 0.5 * (bool(a.blocks) != bool(b.blocks)) + 0.5 * (a.early != b.early)
    return steps + kinds


class Found(NamedTuple):
    """What a search on this machine chose, and the search's width. `is_outdated`: it was measured with other kernels
    than these."""

    schedule: Schedule
    width: int
    is_outdated: bool = False


def search_result(stack: StackedMatrices) -> Found | None:
    """What a search on this machine found. None also if an earlier start failed with it. It is on trial again if no
    start has ended well with it and these kernels."""
    cache, key, kernels = lasting_cache(), _key(stack), _kernels()
    if not (result := cache.get("tuned", key)):
        return None
    numbers, width, measured_with, started_with = result
    if len(numbers) != len(fields(Schedule)):  # of a version whose schedules were others
        return None
    if started_with != kernels:
        start_trials.begin_again(cache, (key, numbers))
        cache.put("tuned", key, (numbers, width, measured_with, kernels))
    if not start_trials.may_use(cache, (key, numbers), lambda: cache.delete("tuned", key)):
        return None
    return Found(Schedule(*numbers), width, measured_with != kernels)


def save_search_result(stack: StackedMatrices, schedule: Schedule, width: int) -> None:
    cache, key, numbers = lasting_cache(), _key(stack), astuple(schedule)
    start_trials.begin(cache, (key, numbers))
    cache.put("tuned", key, (numbers, width, _kernels(), _kernels()))


def _key(stack: StackedMatrices) -> tuple[str, ...]:
    return device_name(str(Device.DEFAULT)), capability(), stack.name


@functools.cache
def _kernels() -> tuple[str, str]:
    """What the kernels of products are made of: our source, and the device's driver, tinygrad and what we change of
    it."""
    return source_digest(*_SOURCES), disk_cache().environment
