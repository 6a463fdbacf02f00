"""How fast a GPU does each of the things that a kernel's time consists of, as its probes measure it
(`engine.targets.nvidia.calibration`).

The models of what kernels cost have numbers that fit an H200. On another GPU each number is multiplied by the ratio of
the two GPUs' rates.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace
from typing import NamedTuple

from engine.cache.disk_cache import disk_cache
from engine.cache.sources import source_digest

_SOURCES = tuple(
    f"targets/nvidia/{name}.py" for name in ("calibration", "kernels/rates", "probes", "kernels/copy_kernel")
)
_NEAR = 1.2  # how far a rate may be from the estimate, and the estimate stays
_LIKELY = 6.0  # how far a GPU's rate may be from the estimate: beyond, something disturbed the measurement


@dataclass(frozen=True)
class Rates:
    """`copy_gbps`: of a copy in the GPU's memory, bytes read plus bytes written, 10^9 a second. `link_us`: from the
    begin of a kernel to that of the next one, which waits for it, in a graph. `latency_us`: a load from memory that
    nothing hides. Of a multiprocessor: `weights_per_ns`, integers of 4 bits that it unpacks and multiplies, and
    `tensor_tflops` of its tensor cores, float16 with sums of float32."""

    copy_gbps: float
    link_us: float
    latency_us: float
    weights_per_ns: float
    tensor_tflops: float

    def are_likely(self, estimate: Rates) -> bool:
        """Whether none is far from the `estimate`."""
        pairs = zip(astuple(self), astuple(estimate), strict=True)
        return all(x > 0 and max(x / y, y / x) < _LIKELY for x, y in pairs)

    def best(self, other: Rates) -> Rates:
        """The faster of each: other programs on the GPU only make a measurement slower."""
        pairs = zip(astuple(self), astuple(other), (max, min, min, max, max), strict=True)
        return Rates(*(faster(x, y) for x, y, faster in pairs))

    def settled(self, estimate: Rates) -> Rates:
        """These rates, with the numbers of the `estimate` where they are near."""
        pairs = zip(astuple(self), astuple(estimate), strict=True)
        return Rates(*(y if max(x / y, y / x) < _NEAR else x for x, y in pairs))


H200 = Rates(copy_gbps=4000.0, link_us=0.98, latency_us=0.45, weights_per_ns=75.0, tensor_tflops=3.3)
_MULTIPROCESSORS, _GHZ = 132, 1.98


def estimated(multiprocessors: int, gbps: float = 0.0, ghz: float = 0.0) -> Rates:
    """The rates of a GPU that was not measured: `multiprocessors` like an H200's at another clock, and the rate of a
    copy, which is theirs too if it is not known (0)."""
    clock = (ghz or _GHZ) / _GHZ
    return replace(
        H200,
        copy_gbps=gbps or H200.copy_gbps / _MULTIPROCESSORS * multiprocessors,
        weights_per_ns=H200.weights_per_ns * clock,
        tensor_tflops=H200.tensor_tflops * clock,
    )


class Kept(NamedTuple):
    """The best rates of a GPU that were measured in so many starts."""

    rates: Rates
    starts: int


def kept_rates(multiprocessors: int) -> Kept | None:
    """What was measured on the default GPU with this driver and these probes; None if nothing was. (On a Jetson some
    power modes switch multiprocessors off.)"""
    kept = disk_cache().get("rates", _key(multiprocessors))
    return kept if isinstance(kept, Kept) else None


def keep_rates(kept: Kept, multiprocessors: int) -> None:
    disk_cache().put("rates", _key(multiprocessors), kept)


def _key(multiprocessors: int) -> tuple[str, int]:
    return source_digest(*_SOURCES), multiprocessors
