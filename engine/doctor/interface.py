"""`python -m engine.doctor.interface nvgpu`: whether a Jetson's drivers speak the interface that NV was written for,
and what they say of the GPU. Only asks: no address space, no channel."""

from __future__ import annotations

import sys
from contextlib import closing

from engine.doctor.trial import main
from engine.doctor.trials import Trial
from engine.tegra.abi import L4T
from engine.tegra.driver import Control, Nvmap


def run(name: str) -> Trial:
    """Raises DriverError."""
    with closing(Nvmap()), closing(Control()) as control:
        gpu, multiprocessors = control.characteristics(), control.multiprocessors()
        free = control.free_bytes()
    chip = bytes(gpu.chipname).decode(errors="replace")
    major, minor = gpu.sm_version >> 8, gpu.sm_version & 0xFF
    text = (
        f"speaks as {L4T} does: {chip}, sm_{major}{minor}, {multiprocessors} multiprocessors, "
        f"{gpu.max_freq / 1e6:.0f} MHz at most, {gpu.l2_cache_size >> 20} MiB of L2, {free / 1e9:.1f} GB free"
    )
    return Trial(backend=name, ok=True, text=text, arch=f"sm_{major}{minor}")


if __name__ == "__main__":
    main(sys.argv[1], run)
