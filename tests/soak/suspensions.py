"""The program or its engine is suspended while a reply streams, and goes on later."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sqlite3
import tempfile
import time
from pathlib import Path

from tests.soak.counts import Counts
from tests.soak.tides import LIMIT_S, TEXT, TOKENS, until, whole
from tools.measure.reach import Terminal

FAULTS = {
    "program suspended": (signal.SIGTSTP, False),
    "program stopped": (signal.SIGSTOP, False),
    "program continued only": (signal.SIGCONT, False),
    "engine stopped": (signal.SIGSTOP, True),
}


def run(tries: int, number: int = 0) -> Counts:
    """The full screen answers a prompt. After the fault the reply must be complete in the history, and the keys of the
    next prompt must arrive."""
    counts, choose = Counts("the program or its engine is suspended and continued"), random.Random(number)
    with tempfile.TemporaryDirectory() as folder:
        terminal = _open(Path(folder))
        for count in range(tries):
            fault = choose.choice([*FAULTS])
            try:
                counts.took(_suffer(terminal, f"number {count}", *FAULTS[fault], choose))
                counts.survived[fault] += 1
            except (RuntimeError, TimeoutError, OSError) as error:
                counts.lost[f"{fault}: {error}"] += 1
                terminal.close()
                terminal = _open(Path(folder))
        terminal.close()
    return counts


def _open(home: Path) -> Terminal:
    behaviour = {
        "rate": 300,
        "tokens": TOKENS,
        "text": TEXT,
        "load_s": 0.0,
        "prefill_s": 0.0,
        "context_length": 1 << 20,
    }
    terminal = Terminal(home, behaviour)
    terminal.wait("ready", LIMIT_S)
    return terminal


def _suffer(
    terminal: Terminal, prompt: str, fault: signal.Signals, is_engine: bool, choose: random.Random
) -> float:
    """Milliseconds from the end of the suspension to the end of the reply."""
    program = terminal.process.pid
    [engine, *_] = _children(program)
    terminal.type(f"{prompt}\r")
    until(lambda: prompt in _messages(terminal.home), "the prompt is not sent")
    time.sleep(choose.uniform(0, 0.2))
    process, terminal.seen = engine if is_engine else program, ""
    os.kill(process, fault)
    if fault != signal.SIGCONT:
        until(lambda: _state(process) == "T", "it is not suspended")
        time.sleep(choose.uniform(0, 0.1))
        os.kill(process, signal.SIGCONT)
    continued = time.monotonic()
    if not is_engine:
        until(lambda: "\x1b[?1049h" in terminal.seen, "the screen is not drawn anew")
        until(lambda: not terminal.translates_enter(), "the terminal is not set up again")
    until(lambda: _messages(terminal.home)[-1] == whole(prompt), "the reply is not complete")
    return (time.monotonic() - continued) * 1e3


def _children(process: int) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def _state(process: int) -> str:
    """The letter for it; "" of a process that is gone."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _messages(home: Path) -> list[str]:
    """The last two that are finished, the older one first."""
    path = next(home.rglob("history.sqlite3"))
    last = "SELECT content FROM messages WHERE finished ORDER BY id DESC LIMIT 2"
    with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
        return [str(content) for (content,) in database.execute(last)][::-1]
