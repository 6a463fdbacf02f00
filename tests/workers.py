"""Runs the tests in several processes: `-n 2`, or on all CPUs without. `-n 0` is one process.

The processes are forked when all tests are collected, so that each has at once what took ten seconds to import. Each
takes the next file when it has done one: the tests of a file share fixtures. A process that dies costs the test that it
ran; another one goes on with the rest of the file.
"""

from __future__ import annotations

import atexit
import gc
import itertools
import os
import pickle
import random
import selectors
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

_LENGTH = struct.Struct("<I")
_NUMBER = struct.Struct("<H")  # of a file

Items = Sequence[pytest.Item]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("workers")
    group._addoption(  # the public one takes no small letters
        "-n", dest="workers", type=int, metavar="N", help="processes that run tests; 0: none but this one"
    )


def usual_workers() -> int:
    """Twice as many as CPUs: a test waits for processes and timers a quarter of its time."""
    n = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(8, 2 * n)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    config = session.config
    files = [list(items) for _, items in itertools.groupby(session.items, lambda item: item.path)]
    n = config.getoption("workers")
    n = min(usual_workers() if n is None else n, len(files))
    alone = (
        config.option.collectonly or config.getoption("usepdb") or config.getoption("update_snapshots", None)
    )
    if n < 2 or alone or (session.testsfailed and not config.option.continue_on_collection_errors):
        return None
    Workers(session, files).run(n)
    if session.shouldfail:
        raise session.Failed(session.shouldfail)
    return True


class Workers:
    """The processes, as the one that has collected the tests sees them. It hands their reports to pytest."""

    def __init__(self, session: pytest.Session, files: Sequence[Items]) -> None:
        self._session, self._files = session, files
        self._numbers, self._queue = os.pipe()  # of files that nobody has taken; a read is a taking
        os.write(self._queue, b"".join(map(_NUMBER.pack, range(len(files)))))
        os.close(self._queue)
        self._selector = selectors.DefaultSelector()
        self._names = itertools.count()

    def run(self, n: int) -> None:
        # Other plugins know by this that tests run in other processes.
        os.environ["PYTEST_XDIST_WORKER_COUNT"] = str(n)
        gc.collect()
        gc.freeze()  # or a collection of garbage would copy what the processes share
        try:
            for _ in range(n):
                self._start(())
            while self._selector.get_map():
                for key, _ in self._selector.select():
                    self._read(key.data)
                if self._session.shouldfail:
                    while os.read(self._numbers, 1 << 16):
                        pass  # nobody takes another file
        finally:
            for key in list(self._selector.get_map().values()):
                os.kill(key.data.pid, signal.SIGTERM)
                self._end(key.data)

    def _start(self, first: Items) -> None:
        ours, theirs = socket.socketpair()
        number = next(self._names)
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            for key in self._selector.get_map().values():
                key.data.reports.close()
            ours.close()
            _be_worker(self._session, number, self._stream(first), theirs)
        theirs.close()
        worker = Worker(pid, ours)
        self._selector.register(ours, selectors.EVENT_READ, worker)

    def _stream(self, first: Items) -> Iterator[pytest.Item]:
        yield from first
        while taken := os.read(self._numbers, _NUMBER.size):
            yield from self._files[_NUMBER.unpack(taken)[0]]

    def _read(self, worker: Worker) -> None:
        for name, values in worker.messages():
            hook = self._session.config.hook
            if name == "error":
                raise RuntimeError(f"A process of tests failed:\n{values}")
            if name == "report":
                report = hook.pytest_report_from_serializable(config=self._session.config, data=values)
                hook.pytest_runtest_logreport(report=report)
            else:
                getattr(hook, name)(**values)
                worker.runs = values if name == "pytest_runtest_logstart" else None
        if worker.is_open:
            return
        status = self._end(worker)
        if worker.runs is None and status == 0:
            return
        rest = self._died(worker, status)
        if not self._session.shouldfail:
            self._start(rest)

    def _end(self, worker: Worker) -> int:
        self._selector.unregister(worker.reports)
        worker.reports.close()
        return os.waitstatus_to_exitcode(os.waitpid(worker.pid, 0)[1])

    def _died(self, worker: Worker, status: int) -> Items:
        """Reports that the test failed which has ended a process. Returns what comes after it in its file."""
        if worker.runs is None:
            raise RuntimeError(f"A process of tests ended between two of them: {status}")
        nodeid = worker.runs["nodeid"]
        for items in self._files:
            for i, item in enumerate(items):
                if item.nodeid == nodeid:
                    said = f"The process ended: {status}"
                    report = pytest.TestReport(nodeid, item.location, {}, "failed", said, "call")
                    self._session.config.hook.pytest_runtest_logreport(report=report)
                    self._session.config.hook.pytest_runtest_logfinish(**worker.runs)
                    return items[i + 1 :]
        raise RuntimeError(nodeid)


class Worker:
    """A process and the end of a connection from which its reports come."""

    def __init__(self, pid: int, reports: socket.socket) -> None:
        self.pid, self.reports, self.is_open = pid, reports, True
        self.runs: dict[str, Any] | None = None
        """The test that it has begun and not ended, as `pytest_runtest_logstart` has it."""
        self._came = b""

    def messages(self) -> Iterator[tuple[str, Any]]:
        came = self.reports.recv(1 << 20)
        self.is_open = bool(came)
        self._came += came
        while len(self._came) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._came)[0]
            if len(self._came) < end:
                return
            message, self._came = self._came[_LENGTH.size : end], self._came[end:]
            yield pickle.loads(message)


# --- in a process of tests ----------------------------------------------------------------------------------


class Colors:
    """In the place of the plugin that prints, and that knows how to write a difference."""

    def __init__(self, writer: Any) -> None:
        self._tw = writer


class Sender:
    """A plugin that sends what happens to the process which reports it."""

    def __init__(self, config: pytest.Config, reports: socket.socket) -> None:
        self._config, self._reports = config, reports

    def pytest_runtest_logstart(self, nodeid: str, location: tuple[str, int | None, str]) -> None:
        _send(self._reports, "pytest_runtest_logstart", {"nodeid": nodeid, "location": location})

    def pytest_runtest_logfinish(self, nodeid: str, location: tuple[str, int | None, str]) -> None:
        _send(self._reports, "pytest_runtest_logfinish", {"nodeid": nodeid, "location": location})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        _send(self._reports, "report", data)


def _send(reports: socket.socket, name: str, values: Any) -> None:
    packed = pickle.dumps((name, values))
    reports.sendall(_LENGTH.pack(len(packed)) + packed)


def _be_worker(
    session: pytest.Session, number: int, stream: Iterator[pytest.Item], reports: socket.socket
) -> None:
    """Runs tests until none is left, and ends the process."""
    status = 1
    try:
        config = session.config
        os.environ["PYTEST_XDIST_WORKER"] = f"gw{number}"
        random.seed()
        _capture_alone(config)
        _have_a_folder(config, f"worker-{number}")
        terminal = config.pluginmanager.unregister(name="terminalreporter")
        config.pluginmanager.register(Colors(terminal._tw), "terminalreporter")
        config.pluginmanager.register(Sender(config, reports))
        for item, following in itertools.pairwise(itertools.chain(stream, (None,))):
            if item is not None and not session.shouldfail:
                config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        atexit._run_exitfuncs()
        status = 0
    except KeyboardInterrupt:
        pass
    except BaseException:
        _send(reports, "error", traceback.format_exc())
    finally:
        os._exit(status)


def _capture_alone(config: pytest.Config) -> None:
    """What tests print goes to files of this process."""
    capture = config.pluginmanager.getplugin("capturemanager")
    capture.stop_global_capturing()
    capture.start_global_capturing()


def _have_a_folder(config: pytest.Config, name: str) -> None:
    factory = config._tmp_path_factory  # type: ignore[attr-defined]
    factory._basetemp = Path(factory.getbasetemp(), name)
    factory._basetemp.mkdir(0o700)
