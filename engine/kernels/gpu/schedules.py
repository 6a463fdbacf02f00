"""How a product is cut into threads: as a search on this machine found, as was measured for a chip and a shape, or
by a rule."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from importlib import resources

import msgspec

from engine.disk_cache import disk_cache, source_digest
from engine.kernels.gpu.device import capability, multiprocessors
from engine.kernels.gpu.matvec import Schedule, Stack
from engine.kernels.gpu.packing import units_of

_TUNED = resources.files("presets") / "tuned"  # data, shipped with the presets
_WRITTEN_IN = ("kernels/gpu/matvec.py", "kernels/gpu/packing.py")  # what schedules are for
_BLOCKS = (640, 1024)  # threads that a multiprocessor is to hold, beside as many as the compiler likes


def schedule_here(stack: Stack) -> Schedule:
    """The schedule of a product on the GPU at hand."""
    if found := searched(stack):
        return found[0]
    return matvec_schedule(stack, capability(), multiprocessors())


def matvec_schedule(stack: Stack, chip: str = "", multiprocessors: int = 64) -> Schedule:
    """The schedule of a product on a GPU of a compute capability ("sm_87") and a number of multiprocessors, where
    nothing was searched."""
    shipped = _shipped(chip)
    known = shipped.products.get(stack.name)
    least_blocks = shipped.rule.blocks_a_multiprocessor * multiprocessors
    steps = 1 + (len(stack.matrices) > 1)
    return Schedule(*known) if known else _by_rule(stack.rows, units_of(stack.cols), least_blocks, steps)


class _Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    blocks_a_multiprocessor: float = 1.5


class _Shipped(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is known of a chip, and where from: `Stack.name` -> threads, groups, rows, blocks."""

    origin: str = "a guess"
    rule: _Rule = _Rule()
    products: dict[str, tuple[int, int, int, int]] = {}


@functools.cache
def _shipped(chip: str) -> _Shipped:
    path = _TUNED / f"{chip}.toml"
    return msgspec.toml.decode(path.read_bytes(), type=_Shipped) if path.is_file() else _Shipped()


def _by_rule(rows: int, units: int, least_blocks: float, steps: int = 1) -> Schedule:
    """Fits any shape. Threads for a row: all its units if they are few, else a divisor of them, so that none
    idles. Rows for a thread: the more, the more often a load of activations is used, as long as there are
    `least_blocks`. Threads take `steps` steps at least where there is work for them: mixed matrices want two."""
    most = 32 if units <= 64 else 64
    most = max(1, min(most, units // steps))
    threads = min(units, most)
    if units > most:
        threads = next((t for t in range(most, most // 2, -1) if units % t == 0), most)
    groups = max(1, min(8, 256 // threads))
    thread_rows = 1
    while thread_rows < min(8, threads) and rows // (groups * thread_rows * 2) >= least_blocks:
        thread_rows *= 2
    if groups * thread_rows % 2:  # gate and up stay together
        groups = 2
    return Schedule(threads, groups, thread_rows)


# --- what a search has to choose from, and what it found -------------------------------------------------------


def candidates(rows: int, cols: int, near: Schedule) -> list[Schedule]:
    """Schedules that fit a shape, those like `near` first: blocks of 64 to 512 threads, whole blocks of rows, gate
    and up together, no thread without work."""
    found = dict.fromkeys(s for s in _all(rows, units_of(cols)) if s != near)
    return sorted(found, key=lambda s: _distance(s, near))


def _all(rows: int, units: int) -> Iterator[Schedule]:
    least_blocks = min(64, max(1, rows // 16))
    for threads in (8, 16, 24, 32, 48, 64, 96, 128):
        if units % threads and units > 8:
            continue
        for groups in (1, 2, 4, 8, 16):
            for thread_rows in (1, 2, 4, 8):
                s = Schedule(threads, groups, thread_rows)
                whole = rows % s.block_rows == 0 and s.block_rows % 2 == 0
                if not (64 <= threads * groups <= 512 and s.fits() and whole):
                    continue
                if rows // s.block_rows < least_blocks or (rows > 50_000 and thread_rows < 4):
                    continue
                yield s
                if thread_rows <= 2:
                    for held in _BLOCKS:
                        yield Schedule(threads, groups, thread_rows, held // (threads * groups))


def _distance(a: Schedule, b: Schedule) -> float:
    steps = sum(
        abs(math.log2(x / y)) for x, y in ((a.threads, b.threads), (a.groups, b.groups), (a.rows, b.rows))
    )
    return steps + 0.5 * (bool(a.blocks) != bool(b.blocks))


def searched(stack: Stack) -> tuple[Schedule, int] | None:
    """What a search on this machine found, and how wide it was."""
    found = disk_cache().get("tuned", _key(stack))
    return found and (Schedule(*found[0]), found[1])


def note_searched(stack: Stack, schedule: Schedule, width: int) -> None:
    s = schedule
    disk_cache().put("tuned", _key(stack), ((s.threads, s.groups, s.rows, s.blocks), width))


def _key(stack: Stack) -> tuple[str, ...]:
    return source_digest(*_WRITTEN_IN), capability(), stack.name
