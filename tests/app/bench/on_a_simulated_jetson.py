"""The file that `orin-chat board` ends with, on a Jetson that is a folder:

    python -m tests.app.bench.on_a_simulated_jetson FILE

A small model is measured on this CPU. Release, nodes, power, clocks and modes are those that the folder says.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path

from app.bench import benchmark as benchmarks
from app.bench.benchmark import Benchmark, Case
from app.bench.board_file import board_text
from app.bench.board_plan import BoardModel, load
from app.bench.board_run import BoardRun
from app.bench.results import to_json
from app.chat.settings import Settings
from app.cli import doctor
from engine.doctor.checks import CheckResult
from engine.measure.jetson_counters import JetsonCounters
from engine.measure.power import PowerMeter
from engine.protocol.events import Counter, EngineOptions
from tests import generated_model
from tests.doctor import machines
from tests.environment import enter

# A call that is never reached fails.
WORKER = (sys.executable, "-m", "tests.driver.worker", str(1 << 30), "EACCES")
CONTEXT = 256


def jetson(root: Path) -> Path:
    """An AGX Orin in its mode of 30 W."""
    rail = "sys/bus/i2c/devices/1-0040/hwmon/hwmon3"
    machines.jetson(root, "# R39 (release), REVISION: 2.0, GCID: 1")
    return machines.write(root, {
        "sys/class/devfreq/17000000.gpu/cur_freq": "612000000",
        "sys/class/devfreq/17000000.gpu/min_freq": "306000000",
        "sys/kernel/debug/bpmp/debug/clk/emc/rate": "2133000000",
        "sys/kernel/debug/bpmp/debug/clk/emc/max_rate": "3199000000",
        f"{rail}/in1_label": "VDD_IN", f"{rail}/in1_input": "19000", f"{rail}/curr1_input": "1200",
        "sys/class/thermal/cooling_device0/type": "gpu-throttle-alert",
        "sys/class/thermal/cooling_device0/cur_state": "0",
    })  # fmt: skip


def main(path: str) -> None:
    enter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = generated_model.write(folder / "model.gguf", quant="Q8_0", layers=1)
        root = jetson(folder / "jetson")
        counters = JetsonCounters(root)
        counters._mode = Counter(name="power mode", text="MODE_30W")
        benchmarks.is_jetson = lambda: True  # type: ignore[attr-defined]
        options = EngineOptions(model_path=str(model), backend="CPU", context_length=CONTEXT)
        benchmark = Benchmark(
            options, [Case(16, 0, 0), Case(0, 4, 0)], vocab_size=256, repetitions=2,
            meter=PowerMeter(counters.read), with_kernels=True,
        )  # fmt: skip
        asyncio.run(benchmark.run())
        assert benchmark.results(), benchmark.engines[0].failed
        board = load(models=[str(model)], setups=["cpu"])
        run = BoardRun(folder, BoardModel(name=str(model), title=model.name), board.setups[0])
        run.results_path.write_text(to_json(benchmark.results()))
        works = lambda backend: CheckResult(backend=backend, ok=True, text="works", device="simulated")
        report = doctor.examine(Settings(), root, check=works)
        Path(path).write_text(board_text(report, board, [run], []), "utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
