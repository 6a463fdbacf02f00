"""A driver whose call does not return: the engine says so and ends, and the next prompt starts another one."""

import asyncio
import sys
import time

import pytest

from engine.devices import driver_watch
from engine.errors import DeviceHangsError, described
from engine.protocol.client import LocalEngine
from engine.protocol.events import EngineOptions, Failed
from tests.paths import ROOT
from tests.protocol.test_client import ask, collect, token_ids
from tests.thorough import rarely
from tests.waiting import until

WORKER = """
import os, socket, sys, time
from pathlib import Path
from engine.devices import driver_watch
from engine.errors import DeviceHangsError
from engine.protocol import worker
from tests.synthetic import Behaviour, SyntheticModel
driver_watch._SECOND_S = 0.02
driver_watch.LIMIT_S = 3
mark, when = Path(sys.argv[1]), sys.argv[2]
waits = driver_watch.watched(time.sleep)
def driver(now):
    waits(0.001)
    if now == when and not mark.exists():
        mark.touch()
        waits(60)
class Model(SyntheticModel):
    def step(self):
        driver("answering")
        if when == "raising" and not mark.exists():
            mark.touch()
            self._waiting[0][-1](DeviceHangsError())
            self._waiting.popleft()
            return
        super().step()
def load(options, report):
    driver("loading")
    return Model(Behaviour(load_s=0.0, prefill_s=0.0, rate=0), report)
worker.serve(socket.socket(fileno=int(sys.argv[-1])), load)
"""


@pytest.mark.parametrize("when", [rarely("loading"), "answering", rarely("raising")])
async def test_a_call_of_the_driver_that_does_not_return_ends_the_engine(engines, tmp_path, when):
    command = (sys.executable, "-c", WORKER, str(tmp_path / "mark"), when)
    options, environment = EngineOptions(model_path="a model"), {"PYTHONPATH": str(ROOT)}
    local = engines.add(LocalEngine(options, environment=environment, command=command))
    answer = asyncio.create_task(collect(local.generate(ask(1, max_tokens=3))))
    await until((tmp_path / "mark").exists)
    time.sleep(0.2)  # the process has ended before its last words are read
    pid, end = local.pid, (await answer)[-1]
    assert isinstance(end, Failed) and (end.kind, end.message, end.hint) == described(DeviceHangsError())
    assert token_ids(await collect(local.generate(ask(2, max_tokens=3)))) == [0, 1, 2]
    assert local.pid != pid


@pytest.mark.parametrize("slow_s, ticks", [(0, 2 + 60), (90, 2 + 60 + 90)])
def test_a_call_that_waits_for_much_work_may_take_long(monkeypatch, slow_s, ticks):
    """The work was given just before; what was given earlier, and later, does not count."""
    seen = []

    def second(_):
        seen.append(len(seen))
        if len(seen) == 3:
            driver_watch._under_way[1] = object()

    monkeypatch.setattr(driver_watch, "_under_way", {})
    monkeypatch.setattr(driver_watch.time, "sleep", second)
    given = {0: 1e9, 1: 1e9}  # by seconds
    monkeypatch.setattr(
        driver_watch, "work_s", lambda: given.get(len(seen), 1e9 + slow_s + 1e6 * (len(seen) > 3))
    )
    driver_watch._watch(lambda: None)
    assert len(seen) == ticks


def test_what_garbage_frees_on_the_device_is_a_call_within_another(monkeypatch):
    """Python collects garbage where it likes, also as a call begins."""
    monkeypatch.setattr(driver_watch, "_under_way", {})
    seen = []
    free = driver_watch.watched(lambda: seen.append(list(driver_watch._under_way.values())))

    def launch():
        before = list(driver_watch._under_way.values())
        free()
        assert list(driver_watch._under_way.values()) == before != seen[-1]

    driver_watch.watched(launch)()
    assert len(seen) == 1 and not driver_watch._under_way


def test_calls_of_tinygrads_driver_are_watched(monkeypatch):
    from tinygrad.helpers import GlobalCounters
    from tinygrad.runtime.autogen import cuda

    from engine.fixes import driver_calls

    monkeypatch.setattr(cuda, "cuCtxSynchronize", lambda: dict(driver_watch._under_way))
    cuda.cuCtxSynchronize.argtypes = ()
    monkeypatch.setattr("engine.fixes._applied", [])
    saved = {name: call for name, call in vars(cuda).items() if name.startswith("cu")}
    monkeypatch.setattr(driver_watch, "work_s", None)
    driver_calls.apply()
    try:
        assert len(cuda.cuCtxSynchronize()) == 1 and not driver_watch._under_way
        monkeypatch.setattr(GlobalCounters, "global_ops", int(7e11))
        monkeypatch.setattr(GlobalCounters, "global_mem", 0)
        assert driver_watch.work_s() == 7
    finally:
        vars(cuda).update(saved)
