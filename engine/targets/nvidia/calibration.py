"""Measures the rates of the default GPU (`kernels.rates`), by which tiles and schedules are chosen.

It does so once, before the first model that a GPU opens with this driver and version: another choice later would mean
that kernels are compiled again. Five small kernels are compiled, while the compiler processes of the model's own start,
and run for about a tenth of a second. What was measured is kept on disk. If something fails, the engine goes on with
what the driver tells of the GPU, and its log says so.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from tinygrad import Device, dtypes
from tinygrad.helpers import Context

from engine.fixes import compiler_processes
from engine.kernels.compilation import compile_all
from engine.kernels.device_memory import device_zeros, free_cached_memory
from engine.measure.timeline import timeline
from engine.targets.nvidia import probes
from engine.targets.nvidia.kernels import device
from engine.targets.nvidia.kernels.copy_kernel import copy_kernel
from engine.targets.nvidia.kernels.kernel_sequence import KernelSequence
from engine.targets.nvidia.kernels.rates import Rates, keep_rates, kept_rates

_COPIED = 1 << 25  # numbers of 32 bits: with their copy beyond the caches of all GPUs
_COPIES, _LINKS, _CHASES = 2, 64, 2  # kernels of a graph
_BLOCKS = 6  # of a multiprocessor: more than it holds at a time
_ROUNDS = 4  # of which the fastest counts: other programs only make them slower
_AT_MOST_S = 0.5  # for the rounds of a slow GPU


def calibrate() -> None:
    """Measures the default GPU's rates and keeps them, unless that was done. Only where CUDA runs it, and not where it
    stands in for another one."""
    if not device.is_own_cuda() or kept_rates(count := device.multiprocessors()):
        return
    compiler_processes.prepare()
    with timeline.span("calibration"):
        try:
            rates = measured(count)
        except (
            Exception
        ) as error:  # of memory, the compiler or the driver: opening the model says what is wrong
            print(f"The GPU's rates were not measured: {error}", file=sys.stderr)
            return
    if rates.are_likely(device.chip().rates):
        keep_rates(rates, count)
        device.chip.cache_clear()
    else:
        print(f"Something disturbed the measurement of the GPU's rates: {rates}", file=sys.stderr)


def measured(multiprocessors: int) -> Rates:
    """The rates of the default GPU, which has so many multiprocessors. Raises what tinygrad raises."""
    blocks = _BLOCKS * multiprocessors
    source, target = device_zeros(_COPIED, dtypes.uint32), device_zeros(_COPIED, dtypes.uint32)
    ends = [device_zeros(probes.LINK_FLOATS) for _ in range(2)]
    out, place = device_zeros(blocks * probes.THREADS), device_zeros(1, dtypes.uint32)
    x, halves = device_zeros(probes.FACTORS), device_zeros(probes.FACTORS, dtypes.float16)
    copies, links, chases, unpacking, products = (KernelSequence() for _ in range(5))
    for _ in range(_COPIES):
        copies.add(copy_kernel(_COPIED), target=target, source=source)
    for i in range(_LINKS):
        links.add(probes.link(), target=ends[i % 2], source=ends[1 - i % 2])
    for _ in range(_CHASES):
        chases.add(probes.chase(_COPIED), place=place, zeros=source)
    unpacking.add(probes.unpack(blocks), out=out, x=x)
    products.add(probes.multiply(blocks), out=out, x=halves)
    with Context(PARALLEL=0):  # compiler processes would be waited for
        compile_all([sequence.linear for sequence in (copies, links, chases, unpacking, products)])
    until_s = time.perf_counter() + _AT_MOST_S
    seconds = [_fastest(s.capture(), until_s) for s in (copies, links, chases, unpacking, products)]
    del source, target
    free_cached_memory()
    copy_s, links_s, chases_s, unpacking_s, products_s = seconds
    return Rates(
        copy_gbps=_COPIES * 2 * 4 * _COPIED / copy_s / 1e9,
        link_us=links_s / _LINKS * 1e6,
        latency_us=chases_s / (_CHASES * probes.CHASED) * 1e6,
        weights_per_ns=probes.unpacked(blocks) / multiprocessors / unpacking_s / 1e9,
        tensor_tflops=probes.multiplied(blocks) / multiprocessors / products_s / 1e12,
    )


def _fastest(run: Callable[[], None], until_s: float) -> float:
    """Seconds of a captured sequence."""
    now, best = Device[Device.DEFAULT], float("inf")
    for turn in range(1 + _ROUNDS):
        started_s = time.perf_counter()
        run()
        now.synchronize()
        ended_s = time.perf_counter()
        if turn:  # the first one uploads the graph
            best = min(best, ended_s - started_s)
            if ended_s > until_s:
                break
    return best
