"""Runs code in processes of its own, or in several that are forked from one, which has imported what takes long."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence

from tests.paths import ROOT

_SCRIPT = """
import json, os, sys
before, code, runs = json.loads(sys.argv.pop())
names = {"__name__": "__main__"}
exec(before, names)
for arguments in runs:
    sys.stdout.flush()
    if os.fork() == 0:
        sys.argv[1:] = arguments
        exec(code, names)
        print(end="\\0")
        sys.exit()
    if os.wait()[1]:
        sys.exit("it failed: " + " ".join(arguments))
"""


def output_of(command: Sequence[str], given: str | None = None, **env: str) -> str:
    """What a process prints that imports this project's modules, with `given` as its standard input. Raises
    AssertionError if it fails."""
    done = subprocess.run(
        command,
        input=given,
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,  # a machine may be busy
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def run_each(before: str, code: str, *runs: Sequence[str], **env: str) -> list[str]:
    """What `code` prints with each of these `sys.argv[1:]`. `before` runs once, for all of them. Raises AssertionError
    if any fails."""
    *printed, rest = output_of(
        [sys.executable, "-c", _SCRIPT, json.dumps((before, code, runs))], **env
    ).split("\0")
    assert len(printed) == len(runs) and not rest, (printed, rest)
    return printed
