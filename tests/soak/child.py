"""Parts of the soak that load models: each runs in a process of its own, which prints how its tries went."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable

from tests.paths import ROOT
from tests.soak.counts import Counts


def follow(counts: Counts, module: str, *arguments: int) -> int:
    """Runs a module and counts its tries; returns how many there were. An end that is not in order is a loss."""
    command, done = [sys.executable, "-m", module, *map(str, arguments)], 0
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        for line in process.stdout:
            outcome, took_ms = json.loads(line)
            done += 1
            (counts.lost if outcome.startswith("lost") else counts.survived)[outcome] += 1
            counts.took(took_ms)
    if process.returncode:
        counts.lost[f"the process ended with {process.returncode}"] += 1
        done += 1
    return done


def report(i: int, attempt: Callable[[], str]) -> None:
    """Prints how try number `i` went, for `follow`."""
    started = time.perf_counter()
    try:
        outcome = attempt()
    except Exception as error:
        outcome = f"lost {i}: {type(error).__name__} {str(error)[:100]}"
    print(json.dumps([outcome, (time.perf_counter() - started) * 1e3]), flush=True)
