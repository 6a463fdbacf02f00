"""`python -m engine.doctor.endurance BACKEND`: what only a real GPU shows. Ten thousand kernels that each depend on the
one before, in captured graphs, of which none may be lost; and buffers of 512 MiB, one after the other, until they are
9 GiB, each with numbers of its own that must still be there when all are: on a Jetson, a buffer in a memory window
would stop the GPU. With "endless" as second argument it launches kernels until it is killed."""

from __future__ import annotations

import sys
from pathlib import Path

from engine.backends import install, prepare
from engine.doctor.trial import main
from engine.doctor.trials import Trial
from engine.events import EngineOptions

_KERNELS, _IN_GRAPH = 10_000, 100
_BUFFER_BYTES, _MOST_BYTES, _MOST_ON_CPU_BYTES = 512 << 20, 9 << 30, 1 << 30


def run(backend: str) -> Trial:
    """Raises whatever the backend does."""
    install(prepare(EngineOptions(model_path="", backend=backend)))
    lost = count_kernels(_KERNELS)
    if lost:
        text = f"{lost} of {_KERNELS:,} dependent kernels did not count"
        return Trial(backend=backend, ok=False, text=text, advice="Do not use it; please send the report.")
    asked = min(_MOST_BYTES if backend != "CPU" else _MOST_ON_CPU_BYTES, _available_bytes() // 2)
    held, spoilt = hold_buffers(asked, _BUFFER_BYTES)
    gib = held / 2**30
    if spoilt:
        text = f"{spoilt} buffers of {gib:.1f} GiB do not hold what was written to them"
        return Trial(backend=backend, ok=False, text=text, advice="Do not use it; please send the report.")
    text = f"{_KERNELS:,} dependent kernels, none lost; {gib:.1f} GiB in buffers of 512 MiB hold what they should"
    return Trial(backend=backend, ok=True, text=text)


def count_kernels(n: int) -> int:
    """How many of `n` kernels, each of which adds one, did not."""
    from tinygrad import Tensor, TinyJit, dtypes

    counts = Tensor.zeros(4096, dtype=dtypes.int32).contiguous().realize()

    def launches() -> None:
        for _ in range(_IN_GRAPH):
            counts.assign(counts + 1).realize()

    step, before = TinyJit(launches), 0
    for _ in range(3):  # runs as it is, is captured, is replayed
        step()
    before = counts.tolist()[0]
    for _ in range(n // _IN_GRAPH):
        step()
    found = counts.tolist()
    return int(max(abs(value - before - n) for value in found))


def hold_buffers(n_bytes: int, each: int) -> tuple[int, int]:
    """The bytes of the buffers that there was room for, and how many of these buffers were wrong in the end."""
    from tinygrad import Tensor, dtypes

    buffers: list[Tensor] = []
    for i in range(max(1, n_bytes // each)):
        try:
            buffers.append(Tensor.full((each // 4,), i + 1, dtype=dtypes.int32).contiguous().realize())
        except (MemoryError, RuntimeError):
            break
    spoilt = sum(
        not (int(buffer.min().item()) == int(buffer.max().item()) == i + 1)
        for i, buffer in enumerate(buffers)
    )
    return len(buffers) * each, spoilt


def _available_bytes() -> int:
    """Of this machine's memory, which on a Jetson is the GPU's too."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return _BUFFER_BYTES


def endless(backend: str) -> Trial:
    install(prepare(EngineOptions(model_path="", backend=backend)))
    while True:
        count_kernels(_KERNELS)


if __name__ == "__main__":
    main(sys.argv[1], endless if sys.argv[2:] == ["endless"] else run)
