"""A model decoded by the engine on the simulated board: the tokens of a float32 reference, and where NV comes from."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.tegra import abi
from tests import generated_model
from tests.driver.compiler import keeping_kernels
from tests.paths import ROOT
from tests.reference import Reference
from tests.thorough import rarely, thorough

# Enough tokens for tensor cores.
PROMPT = (5, 17, 300, 42, 9, 11, 200, 33, 7, 8, 100, 101, 102, 44, 45, 46, 300, 301)
SEED = 37  # of a model whose next token is never a close call: prefill is done in half precision on NV
N_TOKENS = 12


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("decode") / "model.gguf"
    return generated_model.write(path, quant="Q8_0", layers=2, dim=64, heads=4, kv_heads=2, seed=SEED)


@pytest.fixture(scope="module")
def wanted(model):
    """The tokens that a float32 reference says."""
    reference, tokens = Reference(model), list(PROMPT)
    for _ in range(N_TOKENS):
        tokens.append(int(reference.logits(tokens)[-1].argmax()))
    assert len(set(tokens[len(PROMPT) :])) > 5
    return tokens[len(PROMPT) :]


@pytest.mark.parametrize("kernels", ["fused", rarely("graph")])
def test_the_same_tokens_as_in_float32(model, wanted, kernels):
    command = [sys.executable, "-m", "tests.driver.decode", "NV", kernels, model, N_TOKENS, *PROMPT]
    environment = keeping_kernels(DEV="NV", PARALLEL="0", PYTHONPATH=str(ROOT))
    run = subprocess.run(list(map(str, command)), cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    found = json.loads(run.stdout.splitlines()[-1])
    assert found["tokens"] == wanted and found["reason"] == "length"
    assert found["fault"] == "" and found["warnings"] == [] and found["leaks"] == []
    assert found["launches"] > 100 and found["chained"] > found["launches"] // 2  # as graphs: few submissions
    assert found["qmd_releases"] == 0 and found["submissions"] < found["launches"] // 2
    assert found["accesses"] > 1_000_000


CHOICES = {  # by name on a board: tests/kernels/gpu
    "on a board": ("NV", True),
    "elsewhere, by name": ("TEGRA+NV", False),
    "elsewhere": ("NV", False),
}
OPEN = """
import os, sys
dev, nodes = sys.argv[1], tuple(sys.argv[2:])
os.environ["DEV"] = dev
from engine.backends import prepare
from engine.protocol.events import EngineOptions
from engine.backends import install
from tests.driver.kernel import SimulatedKernel
from tests.driver.simulate import simulated
dev = prepare(EngineOptions(model_path=""))
with simulated(SimulatedKernel(nodes=nodes), others=True) as kernel:
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


@thorough
@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="a real GPU would be opened")
def test_dev_chooses_the_interface():
    processes = {}
    for case, (dev, has_nodes) in CHOICES.items():
        command = [sys.executable, "-c", OPEN, dev, *((abi.NVMAP, abi.CTRL) if has_nodes else ())]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        processes[case] = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
        )
    said = {case: process.communicate(timeout=120)[0].splitlines() for case, process in processes.items()}
    assert said["on a board"] == ["TEGRAIface sm_87"]
    alone = said["elsewhere, by name"]
    assert len(alone) == 1 and alone[0].startswith("DriverError Opening /dev/nvmap failed: ENOENT")
    assert len(said["elsewhere"]) == 3 and "/dev/nvidiactl" in said["elsewhere"][1]
