"""`python -m engine.doctor.driver_check nvgpu`: asks a Jetson's drivers about its GPU, through the interface for which
the NV backend was written. It opens neither an address space nor a channel."""

from __future__ import annotations

import sys
from contextlib import closing

from engine.doctor.check_result import CheckResult, write_result
from engine.tegra.abi import L4T
from engine.tegra.driver import Control, Nvmap


def run(driver: str) -> CheckResult:
    """Raises DriverError if the drivers have another interface."""
    with closing(Nvmap()), closing(Control()) as control:
        gpu, multiprocessors = control.characteristics(), control.multiprocessors()
        free = control.free_bytes()
    chip = bytes(gpu.chipname).decode(errors="replace")
    major, minor = gpu.sm_version >> 8, gpu.sm_version & 0xFF
    text = (
        f"has the interface of {L4T}: {chip}, sm_{major}{minor}, {multiprocessors} multiprocessors, "
        f"at most {gpu.max_freq / 1e6:.0f} MHz, {gpu.l2_cache_size >> 20} MiB L2 cache, {free / 1e9:.1f} GB free"
    )
    return CheckResult(backend=driver, ok=True, text=text, arch=f"sm_{major}{minor}")


if __name__ == "__main__":
    write_result(sys.argv[1], run)
