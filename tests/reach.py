"""Measures what the screen costs, in a terminal of its own: python -m tests.reach [--seconds N]

The synthetic engine emits tokens; the chat runs as a program behind a pseudo-terminal of 160 x 48 with every pane
of the dashboard open, so that all it draws is written. What is printed are the figures that issue reports ask for:
CPU of the process that draws, the engine's rate with and without it, time from a key to the screen, and how a
conversation of 500 turns scrolls.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import json
import os
import pty
import select
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from pathlib import Path

from app.chat.history import History
from engine.events import Finished, Generate, Message, RawText, decode_rate
from tests import synthetic
from tests.paths import ROOT

COLUMNS, ROWS = 160, 48
CODE = "".join(
    f"def step_{i}(state: dict[str, float], rate: float) -> float:\n    return state['h'] * rate + {i}\n\n"
    for i in range(70)
)
FENCE = f"Here it is:\n\n```python\n{CODE[:6000]}```\n\n"
RARE = "§¶©®±µ×÷ØßæðþÞĐŁ"  # keys that occur in no reply


class Terminal:
    """A chat behind a pseudo-terminal."""

    def __init__(self, home: Path, behaviour: dict[str, object], *arguments: str) -> None:
        self.home = home
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        folders = {f"XDG_{kind}_HOME": str(home / kind) for kind in ("STATE", "DATA", "CONFIG", "CACHE")}
        environment = {**os.environ, **folders, "TERM": "xterm-256color", "COLORTERM": "truecolor"}
        for name in ("SSH_CONNECTION", "TMUX", "NO_COLOR"):
            environment.pop(name, None)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.app.synthetic_cli", json.dumps(behaviour), *arguments],
            stdin=theirs, stdout=theirs, stderr=theirs, cwd=ROOT, env=environment, start_new_session=True,
        )  # fmt: skip
        os.close(theirs)
        self.seen, self.last_at = "", time.monotonic()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        while True:
            try:
                select.select([self._ours], [], [])
                data = os.read(self._ours, 1 << 16)
            except OSError:
                return
            self.seen = (self.seen + data.decode(errors="replace"))[-200_000:]
            self.last_at = time.monotonic()

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def wait(self, text: str, seconds: float = 30.0) -> float:
        """Seconds until `text` is written."""
        started = time.perf_counter()
        while text not in self.seen:
            if time.perf_counter() - started > seconds:
                raise TimeoutError(f"{text!r} did not come")
            time.sleep(0.001)
        return time.perf_counter() - started

    def key_ms(self, key: str) -> float:
        self.seen = ""
        self.type(key)
        return self.wait(key) * 1e3

    def page_ms(self, key: str) -> float:
        """Until nothing more is written for 60 ms after a key."""
        started = self.last_at = time.monotonic()
        self.type(key)
        while time.monotonic() - self.last_at < 0.06:
            time.sleep(0.002)
        return (self.last_at - started) * 1e3

    def cpu_s(self) -> float:
        """Of the drawing process, without the engine's."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def memory_mb(self) -> float:
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) / 1e3

    def close(self) -> None:
        self.type("\x11")  # Ctrl+Q
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
        os.close(self._ours)


def behaviour(rate: float, tokens: int) -> dict[str, object]:
    return {"rate": rate, "tokens": tokens, "text": FENCE, "load_s": 0.1, "prefill_s": 0.05,
            "context_length": 1 << 20}  # fmt: skip


def drawing(home: Path, model: Path, seconds: float) -> tuple[float, list[float]]:
    """Share of a core at 100 tok/s, and milliseconds from keys to the screen meanwhile."""
    terminal = Terminal(home, behaviour(100, round(100 * (seconds + 20))), "--model", str(model))
    try:
        terminal.wait("wall 1,000")  # the kernel table is there
        terminal.type("go\r")
        terminal.wait("def")
        time.sleep(2)
        started, before = time.perf_counter(), terminal.cpu_s()
        time.sleep(seconds)
        share = (terminal.cpu_s() - before) / (time.perf_counter() - started)
        keys = []
        for key in RARE * 5:
            keys.append(terminal.key_ms(key))
            terminal.type("\x7f")
            time.sleep(0.12)
        return share, keys
    finally:
        terminal.close()


async def alone(rate: float, tokens: int) -> float:
    """The engine's own rate, with a client that does nothing."""
    engine = synthetic.engine(**behaviour(rate, tokens))
    request = Generate(request_id=1, prompt=RawText(text="go"))
    try:
        async for event in engine.generate(request):
            if isinstance(event, Finished):
                return decode_rate(event.predicted_n, event.predicted_ms)
    finally:
        await engine.close()
    raise RuntimeError("the synthetic engine did not finish")


def attached(home: Path, model: Path, rate: float, tokens: int) -> float:
    """The engine's rate with the screen attached, as the application notes it."""
    terminal = Terminal(home, behaviour(rate, tokens), "--model", str(model))
    try:
        terminal.wait("wall 1,000")
        terminal.type("go\r")
        noted = home / "STATE" / "orin-chat" / "evidence.json"
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            time.sleep(0.2)
            machines = json.loads(noted.read_text()) if noted.exists() else {}
            for use in (use for models in machines.values() for use in models.values()):
                if use.get("tokens_per_s"):
                    return float(use["tokens_per_s"])
        raise TimeoutError("no speed was noted")
    finally:
        terminal.close()


def scrolling(home: Path, model: Path, turns: int) -> tuple[float, float]:
    """Milliseconds a page up takes (median), and megabytes, in a conversation of `turns` turns."""
    os.environ["XDG_DATA_HOME"] = str(home / "DATA")
    history = History.open()
    chat = history.new_chat("m")
    for i in range(turns):
        text = f"Turn {i}: " + ("A paragraph of an answer, with *emphasis* and `code`. " * 30)
        history.append(chat, Message(role="assistant" if i % 2 else "user", content=text))
    history.close()
    terminal = Terminal(home, behaviour(100, 10), "--model", str(model), "--continue")
    try:
        terminal.wait("wall 1,000")
        time.sleep(1)
        pages = [terminal.page_ms("\x1b[5~") for _ in range(12)]
        return statistics.median(ms for ms in pages if ms), terminal.memory_mb()  # 0: at the top already
    finally:
        terminal.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0)
    seconds = parser.parse_args().seconds
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model.gguf"
        model.touch()
        homes = (Path(folder) / str(i) for i in range(9))
        share, keys = drawing(next(homes), model, seconds)
        print(f"drawing at 100 tok/s      {share:.0%} of a core")
        print(
            f"key to screen             {statistics.quantiles(keys, n=20)[-1]:.0f} ms at the 95th percentile"
        )
        free = asyncio.run(alone(1000, 8000))
        with_screen = attached(next(homes), model, 1000, 8000)
        print(
            f"1000 tok/s asked          {free:.0f} alone, {with_screen:.0f} drawn: {with_screen / free:.1%}"
        )
        short, long = (scrolling(next(homes), model, turns) for turns in (5, 500))
        print(f"a page up                 {short[0]:.0f} ms in 5 turns, {long[0]:.0f} ms in 500")
        print(f"memory                    {short[1]:.0f} MB with 5 turns, {long[1]:.0f} MB with 500")


if __name__ == "__main__":
    main()
