"""The doctor's checks of NV with the simulated driver below it, made small, each result a line of JSON:
python -m tests.doctor.on_a_simulated_board."""

from __future__ import annotations

import os
import sys

import msgspec

from engine.backends import prepare
from engine.protocol.events import EngineOptions

prepare(EngineOptions(model_path="", backend="NV"))

import engine.measure.bandwidth as bandwidth  # noqa: E402  (the device is chosen before tinygrad is imported)
from engine.doctor import checks  # noqa: E402
from tests.driver.simulate import simulated  # noqa: E402


def main() -> None:
    bandwidth.DEVICE_BYTES, bandwidth.ROUNDS, bandwidth.COPIES = 1 << 16, 1, 1
    checks._SIZE, checks._LAUNCHES, checks._ROUNDS = 64, 4, 8
    checks._KERNELS, checks._IN_GRAPH = 20, 4
    checks._BUFFER_BYTES, checks._GPU_BYTES = 1 << 16, 1 << 18
    with simulated():
        for run in (checks.quick, checks.stress):
            print(msgspec.json.encode(run("NV")).decode(), flush=True)
        sys.stdout.flush()
        os._exit(0)  # the board outlives the device, as a real one does


if __name__ == "__main__":
    main()
