"""`orin-chat tune` as a whole process, or two at once, is ended at a random moment of its search on a simulated GPU,
also with a clock that is wrong: the program, its engine or all of its processes."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests import generated_model
from tests.paths import ROOT
from tests.soak.counts import Counts
from tests.soak.simulated_search import MODULE

LIMIT_S = 240.0
"""An engine whose schedules hang or fail begins anew up to eight times, and opens its model each time."""
LEFT_S = 6.0
FAULTS = {
    "the program is killed": signal.SIGKILL,
    "Ctrl+C": signal.SIGINT,
    "terminated": signal.SIGTERM,
    "its engine is killed": signal.SIGKILL,
    "its engine freezes, then Ctrl+C": signal.SIGSTOP,
    "all of it is killed": signal.SIGKILL,
}


def run(tries: int, number: int = 0) -> Counts:
    """Each search goes on where the last one was ended. It must end with no more than a sentence, and leave no process
    behind. The next start must give the same answer as before."""
    counts, choose = (
        Counts("`orin-chat tune` is ended while it searches, on a simulated GPU"),
        random.Random(number),
    )
    with tempfile.TemporaryDirectory() as folder:
        model = generated_model.write(
            Path(folder, "model.gguf"), layers=1, dim=1024, ffn=4096, heads=8, kv_heads=2, quant="Q4_K"
        )
        expected = _answer(folder, model)
        for _ in range(tries):
            fault = choose.choice([*FAULTS])
            with counts.trying():
                try:
                    _suffer(folder, model, fault, choose)
                finally:
                    for pid, _ in [*_processes(folder)]:
                        _send(pid, signal.SIGKILL)
                if _answer(folder, model) != expected:
                    raise RuntimeError(f"{fault}: another answer than before")
                counts.survived[fault] += 1
    return counts


def _suffer(folder: str, model: Path, fault: str, choose: random.Random) -> None:
    again = ["--again"] if choose.random() < 0.6 else []
    command = ["tune", "--model", str(model), "--backend", "CUDA", "--seconds", "6", *again]
    searches = [_begin(folder, command) for _ in range(choose.choice([1, 1, 2]))]
    time.sleep(choose.uniform(0.3, 14))
    for pid in _victims(folder, fault, searches[0]):
        _send(pid, FAULTS[fault])
    if FAULTS[fault] == signal.SIGSTOP:
        for search in searches:
            search.send_signal(signal.SIGINT)
    for search in searches:
        said = search.communicate(timeout=LIMIT_S)[1]
        if "Traceback" in said and "KeyboardInterrupt" not in said:  # Python says that of Ctrl+C as it begins
            raise RuntimeError(f"{fault}: {said[-300:]}")
    _wait_for(lambda: not [*_processes(folder)], f"{fault}: processes that stay")


def _victims(folder: str, fault: str, search: subprocess.Popen[str]) -> list[int]:
    if fault == "all of it is killed":
        return [pid for pid, _ in _processes(folder)]
    if "its engine" in fault:
        return [pid for pid, command in _processes(folder) if b"worker" in command][:1]
    return [search.pid]


def _send(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return  # it has ended by itself


def _wait_for(is_so: Callable[[], bool], otherwise: str) -> None:
    end = time.monotonic() + LEFT_S
    while not is_so():
        if time.monotonic() > end:
            raise RuntimeError(otherwise)
        time.sleep(0.1)


def _begin(folder: str, arguments: list[str]) -> subprocess.Popen[str]:
    homes = {f"XDG_{kind}_HOME": folder for kind in ("CACHE", "STATE", "CONFIG", "DATA")}
    return subprocess.Popen(
        [sys.executable, "-m", MODULE, *arguments],
        cwd=ROOT,
        env=os.environ | homes,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _processes(folder: str) -> Iterator[tuple[int, bytes]]:
    """Those of the program in this folder, and their command lines."""
    for process in Path("/proc").iterdir():
        try:
            if (
                process.name.isdigit()
                and f"XDG_CACHE_HOME={folder}".encode() in (process / "environ").read_bytes()
            ):
                yield int(process.name), (process / "cmdline").read_bytes()
        except OSError:
            continue  # it has ended


def _answer(folder: str, model: Path) -> str:
    start = _begin(
        folder, ["--model", str(model), "--backend", "CUDA", "--raw", "--max-tokens", "3", "water"]
    )
    said, errors = start.communicate(timeout=LIMIT_S)
    if start.returncode:
        raise RuntimeError(f"the next start ended with {start.returncode}: {errors[-300:]}")
    return said
