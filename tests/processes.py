"""Runs the tests in several processes, `-n N` of them. They are forked when all tests are collected, so modules are
imported once. Each takes a file's tests when it has ended those of another, and tells this process what came of them.

A test whose process dies has failed, and so have those that nobody has run.

pytest-xdist does the same, but each of its three processes collects all tests anew, which took 8 CPU seconds each, of
the 480 that two CPUs have in four minutes, and takes two files ahead, so that one of them is idle at the end.
"""

from __future__ import annotations

import gc
import itertools
import os
import signal
import threading
import traceback
from collections.abc import Iterator
from multiprocessing import connection
from pathlib import Path
from typing import Any

import pytest
from _pytest.config import create_terminal_writer

Groups = list[list[pytest.Item]]
"""The tests of each file."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("processes")._addoption(  # as pytest-xdist does: addoption takes no small letter
        "-n",
        "--processes",
        default="auto",
        help="how many processes run tests; 0: this one. Half as many again as CPUs unless given.",
    )


def usual() -> int:
    """Half as many processes again as CPUs: a test waits for processes and timers a quarter of its time. Twice as many
    take 7 % more CPU time for the same tests, and longer."""
    n = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(n + -(-n // 2), 8)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    options = session.config.option
    groups = [list(items) for _, items in itertools.groupby(session.items, lambda item: item.path)]
    n = usual() if options.processes == "auto" else int(options.processes)
    n = min(n, len(groups))
    if n < 2 or session.testsfailed or options.collectonly or options.usepdb:
        return None  # pytest runs them, or says why not
    unread = _all(groups)
    gc.collect()
    gc.freeze()
    processes = [_Process(session, groups, unread, number) for number in range(n)]
    os.close(unread)
    try:
        _report(session, processes)
    finally:
        for process in processes:
            process.end()
    return True


def _all(groups: Groups) -> int:
    """A pipe from which each process reads the number of the group that it takes, until it is empty."""
    unread, unwritten = os.pipe()
    os.write(unwritten, b"".join(number.to_bytes(2, "little") for number in range(len(groups))))
    os.close(unwritten)
    return unread


def _report(session: pytest.Session, processes: list[_Process]) -> None:
    """Passes on what processes report until all have ended."""
    config, left = session.config, {item.nodeid: item for item in session.items}
    running = {process.reports: process for process in processes}
    while running:
        for reports in connection.wait(running):
            try:
                data = reports.recv()
            except (EOFError, ConnectionError):
                running.pop(reports).end()
                continue
            report = config.hook.pytest_report_from_serializable(config=config, data=data)
            if report.when == "teardown":
                left.pop(report.nodeid, None)  # a file that is named twice has its tests twice
            config.hook.pytest_runtest_logreport(report=report)
            if stop := session.shouldfail or session.shouldstop:
                raise (session.Failed if session.shouldfail else session.Interrupted)(stop)
    ends = ", ".join(str(process.code) for process in processes)
    for item in left.values():
        what = f"The test has not ended. Exit codes of the processes: {ends}"
        config.hook.pytest_runtest_logreport(
            report=pytest.TestReport(item.nodeid, item.location, {}, "failed", what, "call")
        )


class _Process:
    """A forked process, seen from the one that collected the tests."""

    def __init__(self, session: pytest.Session, groups: Groups, unread: int, number: int) -> None:
        assert threading.active_count() == 1, "a module has started a thread, which a fork would not have"
        self.reports, theirs = connection.Pipe(duplex=False)
        self.pid = os.fork()
        self.code: int | None = None
        if self.pid == 0:
            self.reports.close()
            _work(session, groups, unread, number, theirs)
        theirs.close()

    def end(self) -> None:
        if self.code is None:
            os.kill(self.pid, signal.SIGKILL)
            self.code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            self.reports.close()


# --- the processes that run tests ------------------------------------------------------------------------


def _work(
    session: pytest.Session, groups: Groups, unread: int, number: int, reports: connection.Connection
) -> None:
    code = 1
    try:
        _become_worker(session.config, number, reports)
        for item, following in _with_next(groups, unread):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if session.shouldfail or session.shouldstop:
                break
        session.config.hook.pytest_sessionfinish(session=session, exitstatus=0)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _become_worker(config: pytest.Config, number: int, reports: connection.Connection) -> None:
    """What is shown, kept for the next run and named after this one is left to the process that collected the tests.
    Plugins know its workers as those of pytest-xdist."""
    os.environ["PYTEST_XDIST_WORKER"] = f"gw{number}"
    config.workerinput = {}  # type: ignore[attr-defined]
    config.pluginmanager.unregister(name="terminalreporter")
    config.pluginmanager.register(_Sender(config, reports), "terminalreporter")
    if capture := config.pluginmanager.getplugin("capturemanager"):  # into files of its own
        capture.stop_global_capturing()
        capture.start_global_capturing()
    folders: Any = config._tmp_path_factory  # type: ignore[attr-defined]
    folders._basetemp = folders.getbasetemp() / f"process-{number}"
    folders._basetemp.mkdir(0o700)


class _Sender:
    """In the place of what writes to the terminal, whose writer says how the texts of failed assertions look."""

    def __init__(self, config: pytest.Config, reports: connection.Connection) -> None:
        self.config, self.reports = config, reports
        self._tw = create_terminal_writer(config, Path(os.devnull).open("w"))  # noqa: SIM115 (open until the end)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        hook = self.config.hook
        self.reports.send(hook.pytest_report_to_serializable(config=self.config, report=report))


def _with_next(groups: Groups, unread: int) -> Iterator[tuple[pytest.Item, pytest.Item | None]]:
    """The tests that this process runs, each with the next one. A group is taken when the last test of another is
    due."""
    group = _taken(groups, unread)
    while group:
        yield from itertools.pairwise(group)
        following = _taken(groups, unread)
        yield group[-1], following[0] if following else None
        group = following


def _taken(groups: Groups, unread: int) -> list[pytest.Item]:
    number = os.read(unread, 2)
    return groups[int.from_bytes(number, "little")] if number else []
