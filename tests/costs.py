"""Prints the CPU seconds of the dearest test files and tests, with those of the processes that they start, after those
of the whole run: `pytest -p tests.costs`. With ORIN_COSTS, a file of that name gets the figures of all tests.

CPU seconds on a busy machine are up to twice those on a quiet one: only those of one run can be compared.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Generator
from pathlib import Path

import pytest

SHOWN = 40
_TICKS = os.sysconf("SC_CLK_TCK")
_NAME, _BEFORE = "cpu_s", pytest.StashKey[float]()


def cpu_s(pid: int) -> float:
    """What a process has computed, with its children, also those that have ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:  # it has ended, and its parent has the sum
        return 0.0
    return sum(map(int, fields[11:15])) / _TICKS + sum(cpu_s(int(child)) for child in children)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    item.stash[_BEFORE] = cpu_s(os.getpid())
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    report.user_properties.append((_NAME, cpu_s(os.getpid()) - item.stash[_BEFORE]))
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    tests, files = Counter[str](), Counter[str]()
    for report in itertools.chain.from_iterable(terminalreporter.stats.values()):
        for name, spent in getattr(report, "user_properties", ()):
            if name == _NAME:
                tests[report.nodeid] = max(tests[report.nodeid], spent)
    for test, spent in tests.items():
        files[test.partition("::")[0]] += spent
    terminalreporter.write_line(f"{cpu_s(os.getpid()):.0f} CPU seconds, {tests.total():.0f} of them in tests")
    for costs in files, tests:
        for what, spent in costs.most_common(SHOWN):
            terminalreporter.write_line(f"{spent:8.2f} {what}")
    if path := os.environ.get("ORIN_COSTS"):
        Path(path).write_text("".join(f"{spent:8.2f} {test}\n" for test, spent in tests.most_common()))
