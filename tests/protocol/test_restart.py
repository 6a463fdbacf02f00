"""A worker that starts itself anew while it loads, since what it tried has spoilt its device."""

import subprocess
import sys
from pathlib import Path

import pytest

from engine.cache import candidate_trial
from engine.cache.disk_cache import DiskCache
from engine.devices.clang import find_clang
from engine.protocol.client import LocalEngine
from engine.protocol.events import EngineOptions, Failed, Ready, Warming
from tests.generated_model import write
from tests.paths import ROOT
from tests.protocol.test_client import ask, collect, token_ids, until
from tests.thorough import rarely, thorough

WORKER = """
import os, socket, subprocess, sys, threading, time
from pathlib import Path
from engine.cache.disk_cache import DiskCache
from engine.cache.start_trial import start_trials
from engine.protocol import worker
from engine.protocol.events import Warming
from tests.synthetic import Behaviour, SyntheticModel
worker.MAX_RESTARTS = 2
marks, how, most = sys.argv[1:4]
def load(options, report):
    assert options.model_path == "a model"
    with open(marks, "a") as file:
        print(os.getpid(), file=file)
    times = len(open(marks).readlines())
    report(Warming(done=times, total=0))
    if times <= int(most):
        subprocess.Popen(["sleep", "60"])
        if how == "hangs":
            threading.Timer(0.05, worker.restart).start()
            time.sleep(60)
        if how == "raises":
            start_trials.begin(DiskCache(Path(marks + ".cache"), ""), "found")
            start_trials.__init__()  # as in a later process
            assert start_trials.may_use(DiskCache(Path(marks + ".cache"), ""), "found")
            raise AssertionError("usage of device CUDA disallowed")
        worker.restart()
    return SyntheticModel(Behaviour(load_s=0.0, prefill_s=0.0, rate=0), report)
worker.serve(socket.socket(fileno=int(sys.argv[-1])), load)
"""


def engine(marks, how="faults", restarts=1):
    command = (sys.executable, "-c", WORKER, str(marks), how, str(restarts))
    options = EngineOptions(model_path="a model")
    return LocalEngine(options, environment={"PYTHONPATH": str(ROOT)}, command=command)


@pytest.mark.parametrize("how", [rarely("faults"), "hangs", rarely("raises")])
async def test_its_client_sees_nothing_of_it(engines, tmp_path, how):
    local = engines.add(engine(tmp_path / "marks", how))
    events = await collect(local.start())
    assert [e.done for e in events if isinstance(e, Warming)][:2] == [1, 2]
    assert isinstance(events[-1], Ready)
    assert {int(line) for line in (tmp_path / "marks").read_text().split()} == {local.pid}
    assert token_ids(await collect(local.generate(ask(1, max_tokens=3)))) == [0, 1, 2]
    assert not any(file.read_text() for file in Path(f"/proc/{local.pid}/task").glob("*/children"))


async def test_a_prompt_that_waits_is_answered_by_the_next_one(engines, tmp_path):
    local = engines.add(engine(tmp_path / "marks", restarts=2))
    events = await collect(local.generate(ask(1, max_tokens=3)))
    assert token_ids(events) == [0, 1, 2]


async def test_it_gives_up_at_last(engines, tmp_path):
    local = engines.add(engine(tmp_path / "marks", restarts=100))
    events = await collect(local.generate(ask(1)))
    assert isinstance(events[-1], Failed) and events[-1].kind == "backend"
    assert len((tmp_path / "marks").read_text().split()) == 3


async def test_it_ends_with_its_client_all_the_same(engines, tmp_path):
    local = engines.add(engine(tmp_path / "marks"))
    await until(local.start(), lambda e: isinstance(e, Warming) and e.done == 2)
    await local.close()
    assert local.pid is None


# --- trials of candidates -----------------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path):
    return DiskCache(tmp_path / "cache", "")


@pytest.fixture
def restarts(monkeypatch):
    seen = []
    monkeypatch.setattr(candidate_trial, "restart", lambda: seen.append("restart"))
    return seen


def test_a_candidate_that_works_may_run_again(cache, restarts):
    for _ in range(5):
        with candidate_trial.trial(cache, "key", 5, lambda: True):
            pass
        assert not candidate_trial.has_failed(cache, "key")
    assert not restarts


@pytest.mark.parametrize("works", [True, False])
def test_a_candidate_that_faults_has_failed_and_a_broken_device_restarts_the_process(cache, restarts, works):
    with (
        pytest.raises(candidate_trial.CandidateFailedError),
        candidate_trial.trial(cache, "key", 5, lambda: works),
    ):
        raise RuntimeError("CUDA Error 700")
    assert candidate_trial.has_failed(cache, "key") and restarts == ([] if works else ["restart"])
    assert not candidate_trial.has_failed(cache, "another")


HANGS = """
import sys, time
from pathlib import Path
from engine.cache.disk_cache import DiskCache
from engine.cache.candidate_trial import trial
with trial(DiskCache(Path(sys.argv[1]), ""), "key", float(sys.argv[2]), lambda: True):
    time.sleep(0.05)
    if len(sys.argv) > 3:
        import os; os.kill(os.getpid(), 11)
    time.sleep(20)
"""


def test_a_candidate_that_hangs_ends_the_process_and_has_failed(cache, tmp_path):
    done = subprocess.run([sys.executable, "-c", HANGS, str(tmp_path / "cache"), "0.2"], cwd=ROOT)
    assert done.returncode == 75
    assert candidate_trial.has_failed(cache, "key")


def test_a_candidate_that_kills_the_process_has_failed_the_second_time(cache, tmp_path):
    for wanted in (False, True):
        done = subprocess.run([sys.executable, "-c", HANGS, str(tmp_path / "cache"), "9", "dies"], cwd=ROOT)
        assert done.returncode == -11
        assert candidate_trial.has_failed(cache, "key") == wanted


@thorough
async def test_a_driver_that_shows_no_gpu_leaves_the_cpu(engines, tmp_path):
    """While tinygrad is imported for CUDA, the driver says that there is none."""
    driver = (
        "int cuInit(int flags) { return 100; } int cuDriverGetVersion(int *n) { *n = 12060; return 0; }\n"
    )
    clang, library = find_clang(), tmp_path / "libcuda.so.1"
    assert clang
    command = [clang, "-shared", "-x", "c", "-", "-o", str(library)]
    subprocess.run(command, input=driver.encode(), check=True)
    model = write(tmp_path / "model.gguf")
    environment = {"LD_LIBRARY_PATH": str(tmp_path), "DEV": ""}
    for backend, ends in (("auto", Ready), ("CUDA", Failed)):
        options = EngineOptions(model_path=str(model), backend=backend, context_length=256)
        last = (await collect(engines.add(LocalEngine(options, environment=environment)).start()))[-1]
        assert isinstance(last, ends), last
        if isinstance(last, Ready):
            assert last.backend == "CPU"
        else:
            assert last.message == "The CUDA backend cannot be used: the NVIDIA driver reports error 100."
