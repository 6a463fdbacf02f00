"""The disk is full for a while, during a chat whose history is on it."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.paths import ROOT
from tests.soak.counts import Counts
from tests.soak.tides import ANSWERS, TEXT, TOKENS, until, whole

SIZE = "24m"


def run(tries: int, number: int = 0) -> Counts:
    """A reply streams while another program fills the disk, and deletes its file later, in the middle of another reply
    or after it. Then the next prompt and all three answers must be in the history, whole. The disk is a tmpfs in a
    namespace of the program's own: that needs Linux, and unshare(1) with user namespaces."""
    counts, choose = Counts("the disk is full for a while during a chat"), random.Random(number)
    with tempfile.TemporaryDirectory() as folder, _chat(Path(folder)) as (program, disk):
        for count in range(tries):
            try:
                counts.took(_suffer(program, disk, f"number {count}", choose))
                counts.survived["all saved"] += 1
            except (RuntimeError, OSError) as error:
                counts.lost[f"{type(error).__name__} {error}"] += 1
    return counts


@contextlib.contextmanager
def _chat(folder: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A chat in lines whose home folder is a disk of its own, and that disk as this process sees it."""
    behaviour = {"rate": 300, "tokens": TOKENS, "text": TEXT, "load_s": 0.0, "prefill_s": 0.0}
    behaviour["context_length"] = 1 << 20
    chat = [sys.executable, "-m", "tests.app.synthetic_cli", json.dumps(behaviour), "--plain"]
    mount = f'mount -t tmpfs -o size={SIZE} tmpfs "$HOME" && touch "$HOME/disk" && exec "$@"'
    with subprocess.Popen(
        ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount, "sh", *chat],
        cwd=ROOT, env={**os.environ, "HOME": str(folder), "XDG_CACHE_HOME": f"{folder}/cache", "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True, bufsize=1,
    ) as program:  # fmt: skip
        disk = Path(f"/proc/{program.pid}/root{folder}")
        try:
            until(lambda: (disk / "disk").exists() or program.poll() is not None, "no disk of its own")
            assert program.stdin
            program.stdin.write("Hello\n")
            until(lambda: _is_saved(disk, "Hello"), "no chat")
            yield program, disk
        finally:
            program.kill()


def _suffer(program: subprocess.Popen[str], disk: Path, prompt: str, choose: random.Random) -> float:
    """Milliseconds from the moment when there is room again until all is saved."""
    assert program.stdin
    if program.poll() is not None:
        raise RuntimeError(f"the program has ended: {program.returncode}")
    prompts = prompt, f"{prompt} again", f"{prompt} at last"
    program.stdin.write(f"{prompt}\n")
    time.sleep(choose.uniform(0, 0.3))
    with (disk / "filler").open("wb", buffering=0) as filler, contextlib.suppress(OSError):
        while filler.write(bytes(1 << 12)):
            pass
    time.sleep(choose.uniform(0, 0.5))
    program.stdin.write(f"{prompts[1]}\n")
    time.sleep(choose.uniform(0, 0.6))
    (disk / "filler").unlink()
    started = time.monotonic()
    program.stdin.write(f"{prompts[2]}\n")  # the line mode does nothing while it waits for a prompt
    for each in prompts:
        until(functools.partial(_is_saved, disk, each), f"not in the history: {each.removeprefix(prompt)}")
    return (time.monotonic() - started) * 1e3


def _is_saved(disk: Path, prompt: str) -> bool:
    return whole(prompt).strip() in _answers(disk, prompt)


def _answers(disk: Path, prompt: str) -> list[str]:
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(OSError, sqlite3.DatabaseError):
        # SQLite opens no file in the namespace of another process.
        for path in disk.rglob("history.sqlite3*"):
            shutil.copy(path, folder)
        with contextlib.closing(sqlite3.connect(Path(folder, "history.sqlite3"))) as database:
            return [str(content).strip() for (content,) in database.execute(ANSWERS, [prompt])]
    return []  # the files are not there, or being changed
