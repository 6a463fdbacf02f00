"""The checks of kernels for GPUs (tests.kernels.emulated) on the simulated board, with the warps of a block in both
orders. DEV=TEGRA+NV python -m tests.driver.checks CHECK..."""

from __future__ import annotations

import sys

from tinygrad import Device

from engine.tegra import device
from tests.driver import program
from tests.driver.kernel import MULTIPROCESSORS
from tests.driver.simulate import simulated


def main(*checks: str) -> None:
    device.install()
    with simulated() as kernel:
        from engine.kernels.gpu.device import multiprocessors
        from tests.kernels.gpu import emulated

        assert multiprocessors() == MULTIPROCESSORS

        for program.backwards in (False, True):
            for check in checks:
                getattr(emulated, check)()
        fault = kernel.gpus[0].fault
        Device["NV"].finalize()
        assert not fault and not kernel.leaks()


if __name__ == "__main__":
    main(*sys.argv[1:])
