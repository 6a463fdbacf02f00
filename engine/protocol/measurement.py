"""What is said of measurements: commands that ask for them, and the events that answer these."""

from __future__ import annotations

from typing import Literal

from engine.protocol.conversation import Record as _Record

Step = Literal["decode", "prefill"]
KernelRole = Literal[
    "embedding", "QKV projection", "attention", "delta net", "attention output", "FFN gate+up", "FFN down", "router",
    "experts gate+up", "experts down", "output head", "norm", "element-wise", "sampling", "copy",
]  # fmt: skip


class Measure(_Record, frozen=True, kw_only=True):
    """Measure what the figures of answers are compared with (see `Measured`). Waits for earlier requests."""

    request_id: int


class Profile(_Record, frozen=True, kw_only=True):
    """Time each kernel of a step by itself. Waits for earlier requests; a later one stops it."""

    request_id: int
    step: Step = "decode"


class Measured(_Record, frozen=True, kw_only=True):
    """The answer to `Measure`. `copy_gbps` is the bandwidth of a copy in the device's memory, bytes read plus bytes
    written, in 10^9 bytes a second (on a CPU, of reading alone: see `engine.measure.bandwidth`). `kernels_per_token`
    counts the launches of a decode step. `device_bytes` is the device memory that the engine holds."""

    request_id: int
    copy_gbps: float
    kernels_per_token: int
    device_bytes: int


class KernelTime(_Record, frozen=True, kw_only=True):
    """All kernels of a step with the same name and role. `total_us` is the time of all `calls`, by the device's clock
    if it has one; `bytes` is what they must read and write. `source` is the source code, `options` are tinygrad's
    optimizations of the loops (both may be empty)."""

    name: str
    role: KernelRole
    calls: int
    total_us: float
    bytes: int
    source: str = ""
    options: tuple[str, ...] = ()


class KernelProfile(_Record, frozen=True, kw_only=True):
    """The answer to `Profile`: a step of `tokens` tokens (1 in decode) at `position`, kernel by kernel. `wall_us` is
    the time of the whole step as it runs in an answer, gaps between launches included. All times are medians of
    `rounds`."""

    request_id: int
    step: Step
    position: int
    tokens: int
    kernels: tuple[KernelTime, ...]
    wall_us: float
    rounds: int
