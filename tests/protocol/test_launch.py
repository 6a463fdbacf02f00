"""An engine's process that is launched before there is an engine for it."""

import os
import signal
import socket
import sys
import threading
from pathlib import Path

import pytest

from engine.protocol import launch, worker
from engine.protocol.client import LocalEngine
from engine.protocol.events import EngineOptions, Ready
from engine.system import forked_module
from tests import synthetic
from tests.protocol.conftest import running
from tests.protocol.test_client import collect


@pytest.fixture
def engine(engines, monkeypatch):
    command = synthetic.engine(load_s=0.0)._command
    monkeypatch.setattr(launch, "WORKER", command)
    yield engines.add(LocalEngine(EngineOptions(model_path="none"), command=command))
    launch.end_launched()


def serve_in_fork() -> None:
    """As the process of an engine that was forked: it has its socket, and of this process no file."""
    descriptor = int(sys.argv[-1])
    for other in range(3, 64):
        if other != descriptor:
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.fstat(other)
    assert os.getsid(0) == os.getpid() and os.environ["OPENBLAS_NUM_THREADS"] == "1"
    behaviour = synthetic.Behaviour(load_s=0.0)
    worker.serve(
        socket.socket(fileno=descriptor), lambda _, report: synthetic.SyntheticModel(behaviour, report)
    )


async def test_an_engine_takes_the_process(engine, monkeypatch):
    monkeypatch.setattr(launch, "may_fork", lambda: True)
    monkeypatch.setattr(launch, "_MODULE", synthetic.__name__)
    monkeypatch.setattr(synthetic, "main", serve_in_fork)
    launch.launch()
    pid = launch._launched[0].pid
    assert isinstance((await collect(engine.start()))[-1], Ready)
    assert engine.pid == pid
    command = Path(f"/proc/{pid}/cmdline").read_bytes()
    own = Path("/proc/self/cmdline").read_bytes()  # of the run of tests, which has no other room
    assert command == b"orin-chat engine"[: len(own) - 1].ljust(len(own), b"\0")
    await engine.close()
    assert not running(pid)
    assert isinstance((await collect(engine.start()))[-1], Ready)
    assert engine.pid != pid


async def test_one_that_cannot_hide_the_arguments_starts_as_others_do(engine, monkeypatch, tmp_path):
    monkeypatch.setattr(launch, "may_fork", lambda: True)
    monkeypatch.setattr(forked_module, "_MEMORY", tmp_path / "none")
    monkeypatch.setattr(forked_module, "module_command", lambda _, number: [*launch.WORKER, number])
    launch.launch()
    pid = launch._launched[0].pid
    assert isinstance((await collect(engine.start()))[-1], Ready)
    assert engine.pid == pid
    command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    assert command[: len(launch.WORKER)] == [part.encode() for part in launch.WORKER]


def test_one_ends_where_the_ends_of_children_are_ignored(monkeypatch):
    """As in a program that was started so (SIGCHLD): the system then keeps no exit status."""
    monkeypatch.setattr(launch, "may_fork", lambda: True)
    monkeypatch.setattr(launch, "_MODULE", synthetic.__name__)
    monkeypatch.setattr(synthetic, "main", serve_in_fork)
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        launch.launch()
        pid = launch._launched[0].pid
        launch.end_launched()
        assert not running(pid)
        launch.launch()
        launch._launched[0].client_end.close()
        assert launch._launched[0].wait() == 0  # it has ended with its client
        launch.end_launched()
    finally:
        signal.signal(signal.SIGCHLD, before)


async def test_one_in_another_environment_ends(engine, monkeypatch):
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()  # so this process must not fork
    launch.launch()
    end.set()
    thread.join()
    pid = launch._launched[0].pid
    monkeypatch.setenv("XDG_CACHE_HOME", os.devnull)
    assert isinstance((await collect(engine.start()))[-1], Ready)
    assert engine.pid != pid and not running(pid)
