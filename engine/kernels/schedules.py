"""How a product is cut into threads: measured for a GPU and a shape where they have been, a rule elsewhere."""

from __future__ import annotations

from engine.kernels.matvec import Schedule
from engine.kernels.packing import Packing, units_of

# Compute capability -> (type, rows, columns) -> the fastest of `tuning.tune`'s best within a
# whole decode step: neighbours in a step change what is best by a few percent.
MEASURED: dict[str, dict[tuple[str, int, int], Schedule]] = {
    "sm_90": {
        ("Q6_K", 3072, 2048): Schedule(32, 8, 1, 4),
        ("Q6_K", 2048, 2048): Schedule(32, 8, 1, 4),
        ("Q6_K", 16384, 2048): Schedule(32, 8, 8),
        ("Q6_K", 2048, 8192): Schedule(32, 8, 1, 2),
        ("Q6_K", 128256, 2048): Schedule(16, 4, 8),
        ("Q8_0", 4096, 1024): Schedule(16, 8, 1, 5),
        ("Q8_0", 1024, 2048): Schedule(32, 8, 1, 2),
        ("Q8_0", 6144, 1024): Schedule(16, 8, 2),
        ("Q8_0", 1024, 3072): Schedule(48, 4, 1, 3),
        ("Q8_0", 151936, 1024): Schedule(16, 4, 8),
        ("Q4_K", 4096, 2048): Schedule(32, 8, 2),
        ("Q4_K", 3072, 2048): Schedule(32, 8, 2),
        ("Q6_K", 1024, 2048): Schedule(32, 4, 1, 5),
        ("Q4_K", 2048, 2048): Schedule(32, 8, 1, 2),
        ("Q4_K", 12288, 2048): Schedule(32, 4, 8),
        ("Q4_K", 2048, 6144): Schedule(96, 4, 4),
        ("Q6_K", 2048, 6144): Schedule(96, 4, 4),
        ("Q6_K", 151936, 2048): Schedule(32, 2, 8),
    }
}


def matvec_schedule(
    packing: Packing, rows: int, cols: int, capability: str = "", multiprocessors: int = 64
) -> Schedule:
    """The schedule of a product on a GPU of a compute capability ("sm_87") and a number of multiprocessors."""
    measured = MEASURED.get(capability, {}).get((packing.name, rows, cols))
    return measured or _by_rule(rows, units_of(cols), multiprocessors)


def _by_rule(rows: int, units: int, multiprocessors: int) -> Schedule:
    """Fits any shape. Threads for a row: all its units if they are few, else a divisor of them, so that none
    idles. Rows for a thread: the more, the more often a load of activations is used, as long as there are
    three blocks for two multiprocessors (measured on an H200; assumed of others)."""
    most = 32 if units <= 64 else 64
    threads = min(units, most)
    if units > most:
        threads = next((t for t in range(most, most // 2, -1) if units % t == 0), most)
    groups = max(1, min(8, 256 // threads))
    thread_rows = 1
    while thread_rows < min(8, threads) and rows // (groups * thread_rows * 2) >= 1.5 * multiprocessors:
        thread_rows *= 2
    if groups * thread_rows % 2:  # gate and up stay together
        groups = 2
    return Schedule(threads, groups, thread_rows)
