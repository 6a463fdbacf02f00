"""An engine's process that is launched before there is an engine for it."""

import os

import pytest

from engine.protocol import launch
from engine.protocol.client import LocalEngine
from engine.protocol.events import EngineOptions, Ready
from tests import synthetic
from tests.protocol.conftest import running
from tests.protocol.test_client import collect


@pytest.fixture
def engine(engines, monkeypatch):
    command = synthetic.engine(load_s=0.0)._command
    monkeypatch.setattr(launch, "WORKER", command)
    yield engines.add(LocalEngine(EngineOptions(model_path="none"), command=command))
    launch.end_launched()


async def test_an_engine_takes_the_process(engine):
    launch.launch()
    pid = launch._launched[0].child.pid
    assert isinstance((await collect(engine.start()))[-1], Ready)
    assert engine.pid == pid
    await engine.close()
    assert not running(pid)
    assert isinstance((await collect(engine.start()))[-1], Ready)
    assert engine.pid != pid


async def test_one_in_another_environment_ends(engine, monkeypatch):
    launch.launch()
    pid = launch._launched[0].child.pid
    monkeypatch.setenv("XDG_CACHE_HOME", os.devnull)
    assert isinstance((await collect(engine.start()))[-1], Ready)
    assert engine.pid != pid and not running(pid)
