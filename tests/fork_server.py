"""Starts synthetic engines, and the processes of templates and pictures, quickly: a process that has imported all they
need forks one for each.

A start takes milliseconds, instead of the tenth of a second in which Python imports the module. What differs from a
process of its own: its parent is the fork server, and nothing was executed anew. `tests/protocol/test_process.py`
starts its engines as the application does, and so do engines that are started their templates' processes.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import pickle
import selectors
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO
from unittest import mock

import pytest

from engine.formats import limited_process, picture_process
from engine.formats.templates import template_process
from engine.protocol import launch, process
from tests import synthetic
from tests.paths import ROOT

MODULE = synthetic.__name__
MAINS = {module.__name__: module.main for module in (synthetic, template_process, picture_process)}
_PYTHON = sys.executable
_MOST_BYTES = 1 << 16

start_child = process.start_child
start_module = limited_process.start_module


class ForkedChild:
    """A child of the fork server, which tells by a socket of its own which process id it has, and how it ended."""

    def __init__(self, status: socket.socket) -> None:
        self.pid = int.from_bytes(status.recv(8), "little")
        self._status = status

    def wait(self) -> int:
        with self._status:
            return int.from_bytes(self._status.recv(8), "little", signed=True)


class ForkedProcess:
    """A child of the fork server with pipes: what `subprocess.Popen` is to `LimitedProcess` and its tests."""

    def __init__(self, status: socket.socket, requests: int, answers: int) -> None:
        self.pid, self._status = int.from_bytes(status.recv(8), "little"), status
        self.stdin, self.stdout = os.fdopen(requests, "wb"), os.fdopen(answers, "rb")
        self.returncode: int | None = None

    def poll(self, flags: int = socket.MSG_DONTWAIT) -> int | None:
        with contextlib.suppress(BlockingIOError):
            if self.returncode is None:
                self.returncode = int.from_bytes(self._status.recv(8, flags), "little", signed=True)
                self._status.close()
        return self.returncode

    def wait(self) -> int | None:
        return self.poll(0)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it ends meanwhile
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        self.wait()
        self.stdout.close()
        self.stdin.close()


class ForkServer:
    """The process that forks, as its clients see it: the process that has started it, and those that are forked from
    that one later. It starts with the first request unless `start` was called."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._client = 0

    def start(self) -> None:
        self._control()

    def start_child(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        worker_end: socket.socket,
        log: IO[bytes],
    ) -> subprocess.Popen[bytes] | ForkedChild:
        """In the place of `process.start_child`: synthetic engines are forked, others are started."""
        if tuple(command[1:3]) != ("-m", MODULE):
            return start_child(command, environment, worker_end, log)
        request = command[2], command[3:], environment
        return ForkedChild(self._ask(request, worker_end.fileno(), log.fileno()))

    def start_module(self, module: str) -> subprocess.Popen[bytes] | ForkedProcess:
        """In the place of `limited_process.start_module`."""
        if sys.executable != _PYTHON:
            return start_module(module)
        (child_reads, requests), (answers, child_writes) = os.pipe(), os.pipe()
        status = self._ask((module, (), limited_process.module_environment()), child_reads, child_writes)
        os.close(child_reads)
        os.close(child_writes)
        return ForkedProcess(status, requests, answers)

    def _ask(self, request: tuple[str, Sequence[str], Mapping[str, str]], *fds: int) -> socket.socket:
        """Where the child's process id will come, and how it ended."""
        ours, theirs = socket.socketpair()
        with theirs:
            data = pickle.dumps((*request, Path.cwd()))
            assert len(data) < _MOST_BYTES
            socket.send_fds(self._control(), [data], [*fds, theirs.fileno()])
        return ours

    def _control(self) -> socket.socket:
        if self._process is None:
            self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._client = os.getpid()
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "tests.fork_server", str(theirs.fileno())],
                    cwd=ROOT,
                    pass_fds=(theirs.fileno(),),
                )
        return self._requests

    @property
    def pid(self) -> int | None:
        return self._process and self._process.pid

    def close(self) -> None:
        if self._process is not None and self._client == os.getpid():
            self._requests.close()
            self._process.wait()
            self._process = None


SERVER = ForkServer()


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    yield SERVER
    SERVER.close()


@pytest.fixture(scope="session", autouse=True)
def _forked_processes(fork_server: ForkServer) -> Iterator[None]:
    with mock.patch.object(limited_process, "start_module", fork_server.start_module):
        yield


@pytest.fixture
def started_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes with limits start as the application starts them."""
    monkeypatch.setattr(limited_process, "start_module", start_module)


@pytest.fixture
def forked_engines(fork_server: ForkServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes of synthetic engines are forked, and none is launched before there is an engine."""
    monkeypatch.setattr(launch, "launch", lambda: None)
    monkeypatch.setattr(process, "start_child", fork_server.start_child)


# --- the process that forks ------------------------------------------------------------------------------


def serve(requests: socket.socket) -> None:
    """Forks a process for each request, until the client is gone. Tells each one's end to who asked for it."""
    woken, wakes = socket.socketpair()
    woken.setblocking(False)
    wakes.setblocking(False)
    signal.set_wakeup_fd(wakes.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    waiting: dict[int, socket.socket] = {}
    with selectors.DefaultSelector() as selector:
        selector.register(requests, selectors.EVENT_READ)
        selector.register(woken, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is woken:
                    woken.recv(_MOST_BYTES)
                    _tell_ends(waiting)
                    continue
                request, fds, *_ = socket.recv_fds(requests, _MOST_BYTES, 3)
                if not request:
                    return
                *streams, status = fds
                pid = os.fork()
                if pid == 0:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    for other in (requests, woken, wakes, *waiting.values()):
                        other.close()
                    os.close(status)
                    _run(*pickle.loads(request), *streams)
                for stream in streams:
                    os.close(stream)
                waiting[pid] = socket.socket(fileno=status)
                waiting[pid].send(pid.to_bytes(8, "little"))


def _tell_ends(waiting: dict[int, socket.socket]) -> None:
    while waiting:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        with waiting.pop(pid) as client:
            code = os.waitstatus_to_exitcode(status)
            with contextlib.suppress(OSError):  # its test has ended
                client.send(code.to_bytes(8, "little", signed=True))


def _run(
    module: str, arguments: Sequence[str], environment: dict[str, str], folder: Path, takes: int, tells: int
) -> None:
    """What a new process does: becomes the leader of a session, as a started one would be, and runs the module. An
    engine takes requests from a socket, whose number is its last argument; others read their standard input."""
    os.setsid()
    os.chdir(folder)
    nothing = os.open(os.devnull, os.O_RDWR)
    is_engine = module == MODULE
    for file, number in (
        (nothing if is_engine else takes, 0),
        (tells, 1),
        (tells if is_engine else nothing, 2),
    ):
        os.dup2(file, number)
    for file in (nothing, tells, *(() if is_engine else (takes,))):
        os.close(file)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [module, *arguments, *([str(takes)] if is_engine else ())]
    code = 1
    try:
        MAINS[module]()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        atexit._run_exitfuncs()
        os._exit(code)


if __name__ == "__main__":
    gc.freeze()
    serve(socket.socket(fileno=int(sys.argv[-1])))
