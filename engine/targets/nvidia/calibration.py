"""Measures the rates of the default GPU (`kernels.rates`), by which tiles and schedules are chosen.

It does so with each driver and version, in a start that waits for compiler processes anyway: five small kernels are
compiled meanwhile, and run for a few milliseconds, before weights travel. No further one is begun once the time is up.
From the next start on, the rates are used. What is near to what the driver tells stays as that is, since other numbers
would mean that kernels are compiled again, for a gain of less than a per cent. Where one is not near, another program
may have had the GPU meanwhile. So the next such starts, and `tune`, measure again, three in all, and the fastest
counts. If something fails, all rates are what the driver tells, and the engine's log says so.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

from tinygrad import Device, dtypes
from tinygrad.helpers import Context

from engine.kernels.device_memory import device_zeros, free_cached_memory
from engine.measure.timeline import timeline
from engine.targets.nvidia import probes
from engine.targets.nvidia.kernels import device
from engine.targets.nvidia.kernels.copy_kernel import copy_kernel
from engine.targets.nvidia.kernels.kernel_sequence import KernelSequence
from engine.targets.nvidia.kernels.rates import Kept, Rates, keep_rates, kept_rates

_COPIED = 1 << 25  # numbers of 32 bits: with their copy beyond the caches of all GPUs
_COPIES, _LINKS, _CHASES = 8, 64, 2  # kernels of a graph
_BLOCKS = 12  # of a multiprocessor: more than it holds at a time
_ROUNDS = 4  # of which the fastest counts: other programs only make them slower
_AT_MOST_S = 0.7
_STARTS = 3  # that measure a GPU whose rates are not what the driver tells


class _Probe(NamedTuple):
    """A sequence of kernels, and which rate it gives: `of` the seconds that it takes."""

    name: str
    sequence: KernelSequence
    of: Callable[[float], float]


def calibrate() -> None:
    """Measures the default GPU's rates and keeps them for later starts, unless that was done. Only where CUDA runs it,
    and not where it stands in for another one."""
    if not device.is_own_cuda():
        return
    count, told = device.multiprocessors(), device.told_rates()
    kept = kept_rates(count) or Kept(told, 0)
    if kept.starts >= _STARTS or (kept.starts and kept.rates == told):
        return
    with timeline.span("calibration"):
        try:
            rates = measured(device.chip())
        except (
            Exception
        ) as error:  # of memory, the compiler or the driver: opening the model says what is wrong
            print(f"The GPU's rates were not measured: {error}", file=sys.stderr)
            return
    if rates.are_likely(told):
        best = rates.best(kept.rates) if kept.starts else rates
        keep_rates(Kept(best.settled(told), kept.starts + 1), count)
    else:
        print(f"Something disturbed the measurement of the GPU's rates: {rates}", file=sys.stderr)


def measured(chip: device.Chip, at_most_s: float = _AT_MOST_S) -> Rates:
    """The rates of the default GPU, which is `chip`; those that there was no time for as they are there. Raises what
    tinygrad raises."""
    until_s, found = time.perf_counter() + at_most_s, dict[str, float]()
    for probe in _probes(chip.multiprocessors):
        if time.perf_counter() > until_s:
            break
        with Context(PARALLEL=0):  # compiler processes would be waited for
            run = probe.sequence.capture()
        found[probe.name] = probe.of(_fastest(run))
    free_cached_memory()
    return replace(chip.rates, **found)


def _probes(multiprocessors: int) -> Iterator[_Probe]:
    """What differs most among GPUs comes first."""
    source, target = device_zeros(_COPIED, dtypes.uint32), device_zeros(_COPIED, dtypes.uint32)
    copies, links, chases, unpacking, products = (KernelSequence() for _ in range(5))
    for _ in range(_COPIES):
        copies.add(copy_kernel(_COPIED), target=target, source=source)
    yield _Probe("copy_gbps", copies, lambda s: _COPIES * 2 * 4 * _COPIED / s / 1e9)

    ends = [device_zeros(probes.LINK_FLOATS) for _ in range(2)]
    for i in range(_LINKS):
        links.add(probes.link(), target=ends[i % 2], source=ends[1 - i % 2])
    yield _Probe("link_us", links, lambda s: s / _LINKS * 1e6)

    place = device_zeros(1, dtypes.uint32)
    for _ in range(_CHASES):
        chases.add(probes.chase(_COPIED), place=place, zeros=source)
    yield _Probe("latency_us", chases, lambda s: s / (_CHASES * probes.CHASED) * 1e6)

    blocks = _BLOCKS * multiprocessors
    out, x = device_zeros(blocks * probes.THREADS), device_zeros(probes.FACTORS)
    unpacking.add(probes.unpack(blocks), out=out, x=x)
    yield _Probe("weights_per_ns", unpacking, lambda s: probes.unpacked(blocks) / multiprocessors / s / 1e9)

    halves = device_zeros(probes.FACTORS, dtypes.float16)
    products.add(probes.multiply(blocks), out=out, x=halves)
    yield _Probe("tensor_tflops", products, lambda s: probes.multiplied(blocks) / multiprocessors / s / 1e12)


def _fastest(run: Callable[[], None]) -> float:
    """Seconds of a captured sequence."""
    best = float("inf")
    for turn in range(1 + _ROUNDS):
        started_s = time.perf_counter()
        run()
        Device[Device.DEFAULT].synchronize()
        if turn:  # the first one uploads the graph
            best = min(best, time.perf_counter() - started_s)
    return best
