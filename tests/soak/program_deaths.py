"""The program is killed while a reply streams. What the user had seen must be in the history."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from app.chat.history import History
from tests.paths import ROOT
from tests.soak.counts import Counts

MOST_LOST_MS = 200.0
BEGIN = "\N{SECTION SIGN}"
LIMIT_S = 60.0


def run(tries: int, number: int = 0) -> Counts:
    """A reply is lost from the moment on in which its first character was shown that the history lacks."""
    counts, choose = Counts("the program is killed while a reply streams"), random.Random(number)
    for _ in range(tries):
        with tempfile.TemporaryDirectory() as home:
            try:
                lost_ms = _die(Path(home), choose.uniform(0.05, 1.2))
            except (RuntimeError, IndexError) as error:
                counts.lost[f"{type(error).__name__} {error}"] += 1
                continue
        counts.took(lost_ms)
        if lost_ms > MOST_LOST_MS:
            counts.lost[f"more than {MOST_LOST_MS:.0f} ms of text"] += 1
        else:
            counts.survived["kept"] += 1
    return counts


def _die(home: Path, after_s: float) -> float:
    """Milliseconds of text that were lost."""
    behaviour = {
        "rate": 200,
        "tokens": 4000,
        "load_s": 0.0,
        "prefill_s": 0.0,
        "text": f"{BEGIN}{'word ' * 4000}",
    }
    environment = {**os.environ, "HOME": str(home), "PYTHONPATH": str(ROOT)}
    environment |= {name: str(home / name) for name in ("XDG_DATA_HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME")}
    program = subprocess.Popen(
        [sys.executable, "-m", "tests.app.synthetic_cli", json.dumps(behaviour), "--plain"],
        cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    assert program.stdin and program.stdout
    program.stdin.write(b"Tell me.\n")
    program.stdin.flush()
    shown, times = "", [(time.monotonic(), 0)]  # of the reply
    deadline, kill_at = time.monotonic() + LIMIT_S, None
    os.set_blocking(program.stdout.fileno(), False)
    while (now := time.monotonic()) < (kill_at or deadline):
        shown += (program.stdout.read() or b"").decode()
        if BEGIN in shown:
            kill_at = kill_at or now + after_s
            times.append((now, len(shown.partition(BEGIN)[2]) + 1))
        time.sleep(0.004)
    program.send_signal(signal.SIGKILL)
    killed = time.monotonic()
    program.wait()
    program.stdin.close()
    program.stdout.close()
    if kill_at is None:
        raise RuntimeError("no reply began")
    [path] = home.rglob("history.sqlite3")
    history = History(path)
    stored = history.messages(history.chats()[0].id)
    history.close()
    if stored[0].message.content != "Tell me.":
        raise RuntimeError("the prompt was lost")
    kept = len(stored[1].message.content) if len(stored) > 1 else 0
    return max([0.0, *((killed - at) * 1e3 for at, length in times if length > kept)])
