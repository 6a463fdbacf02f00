"""A model decoded by the engine on the simulated board: the same tokens as on the CPU, and where NV comes from."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import generated_model

ROOT = Path(__file__).resolve().parents[2]
PROMPT = (5, 17, 300, 42, 9, 11, 200, 33)
N_TOKENS = 12


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """What each backend and kind of kernels made of the same model and prompt, side by side on two cores. Nothing is
    taken from or left in the user's caches."""
    folder = tmp_path_factory.mktemp("decode")
    path = generated_model.write(folder / "model.gguf", quant="Q8_0", layers=2, dim=64, heads=8, kv_heads=4)
    processes = {}
    for backend, kernels in (("NV", "fused"), ("NV", "graph"), ("CPU", "graph")):
        environment = os.environ | {
            "DEV": backend,
            "CACHEDB": str(folder / f"{backend}-{kernels}.db"),
            "XDG_CACHE_HOME": str(folder / f"{backend}-{kernels}"),
            "PYTHONPATH": str(ROOT),
        }
        command = [sys.executable, "-m", "tests.driver.decode", backend, kernels, path, N_TOKENS, *PROMPT]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        processes[backend, kernels] = subprocess.Popen(
            list(map(str, command)), cwd=ROOT, env=environment, **pipes
        )
    found = {}
    for key, process in processes.items():
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
        found[key] = json.loads(out.splitlines()[-1])
    return found


@pytest.mark.parametrize("kernels", ["fused", "graph"])
def test_the_same_tokens_as_on_the_cpu(runs, kernels):
    found, wanted = runs["NV", kernels], runs["CPU", "graph"]
    assert len(wanted["tokens"]) == N_TOKENS and len(set(wanted["tokens"])) > 4
    assert found["tokens"] == wanted["tokens"] and found["reason"] == "length"
    assert found["fault"] == "" and found["warnings"] == [] and found["leaks"] == []
    assert found["launches"] > 100 and found["chained"] > found["launches"] // 2  # as graphs: few submissions
    assert found["qmd_releases"] == 0 and found["submissions"] < found["launches"] // 2
    assert found["accesses"] > 1_000_000


def open_nv(dev, nodes):
    """What a process with this DEV, on a machine with simulated nodes or without, says that NV is."""
    script = f"""
import os
os.environ["DEV"] = {dev!r}
from engine.backends import prepare
from engine.events import EngineOptions
from engine.fixes import install
from tests.driver.kernel import SimulatedKernel
from tests.driver.simulate import simulated
dev = prepare(EngineOptions(model_path=""))
with simulated(SimulatedKernel(nodes={nodes!r})) as kernel:
    install(dev)
    from tinygrad import Device
    try:
        print(type(Device["NV"].iface).__name__, Device["NV"].renderer.target.arch)
        Device["NV"].finalize()
        assert kernel.leaks() == [], kernel.leaks()
    except Exception as error:
        for e in getattr(error, "exceptions", [error]):
            print(type(e).__name__, e)
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", script]
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60
    ).stdout


def test_dev_chooses_the_interface():
    from engine.tegra import abi

    nodes = (abi.NVMAP, abi.CTRL)
    assert open_nv("NV", nodes) == "TEGRAIface sm_87\n"
    assert open_nv("TEGRA+NV", nodes) == "TEGRAIface sm_87\n"
    alone = open_nv("TEGRA+NV", ())
    assert alone.startswith("DriverError Opening /dev/nvmap failed: ENOENT") and alone.count("\n") == 1
    if not Path("/dev/nvidiactl").exists():  # never open a real GPU here
        others = open_nv("NV", ()).splitlines()
        assert len(others) == 3 and "/dev/nvidiactl" in others[1]
