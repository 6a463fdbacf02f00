"""The whole engine over a board that fails: the user gets two sentences, and no process stays."""

import asyncio
import contextlib
import os
import re
import sys
import time
from pathlib import Path

import pytest

from engine import backends
from engine.protocol.client import LocalEngine
from engine.protocol.events import EngineOptions, Failed
from engine.tegra import abi
from tests import generated_model
from tests.paths import ROOT
from tests.protocol.conftest import running
from tests.thorough import rarely
from tests.waiting import LIMIT_S


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "model.gguf"
    return generated_model.write(path, quant="Q8_0", layers=1, dim=64, heads=4, kv_heads=2)


@pytest.mark.parametrize(
    ("fault", "message", "hint"),
    [
        (("0", "EACCES"), "Opening /dev/nvmap failed: EACCES", "groups"),
        rarely(("gpu", "2"), "The GPU stopped: the GPU touched memory that is not mapped", "Restart"),
        rarely(("8", "ENOTTY"), "failed: ENOTTY", "another version"),
    ],
    ids=["no permission", "a fault of the GPU", "another driver"],
)
async def test_a_start_that_fails(model, fault, message, hint, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    engine = LocalEngine(
        EngineOptions(model_path=str(model), backend="NV", kernels="graph", context_length=64),
        environment={"PYTHONPATH": str(ROOT), "CACHEDB": str(tmp_path / "cache.db")},
        command=(sys.executable, "-m", "tests.driver.worker", *fault),
    )
    try:
        events = [event async for event in engine.start()]
    finally:
        await engine.close()
    failed = events[-1]
    assert isinstance(failed, Failed) and failed.kind == "backend", failed
    assert message in failed.message and hint in failed.hint
    worker = int(re.search(r"board in process (\d+)", engine.log_path.read_text())[1])
    deadline = time.monotonic() + LIMIT_S
    # What it started is told to end, and not waited for.
    while left := [pid for pid in _group(worker) if running(pid)]:
        assert worker not in left and time.monotonic() < deadline, left
        await asyncio.sleep(0.02)


def _group(leader):
    """The processes of a group."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(ProcessLookupError):
            if os.getpgid(int(process.name)) == leader:
                yield int(process.name)


def test_what_keeps_nv_from_working(tmp_path, monkeypatch):
    nodes = [tmp_path / "nvmap", tmp_path / "ctrl"]
    monkeypatch.setattr(abi, "NVMAP", str(nodes[0]))
    monkeypatch.setattr(abi, "CTRL", str(nodes[1]))
    if not Path("/dev/nvidiactl").exists():
        assert "/dev/nvidiactl" in backends.unusable_because("NV")
    for node in nodes:
        node.touch()
    assert backends.unusable_because("NV") == ""
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) == nodes[1])
    assert backends.unusable_because("NV") == f"no permission for {nodes[0]} (groups video and render)"
