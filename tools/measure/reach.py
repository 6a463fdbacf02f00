"""How the screen keeps up, in a terminal of its own:

    python -m tools.measure reach [--kinds NAME ...] [--rates N ...]

The synthetic engine emits tokens. The chat runs as a program behind a pseudo-terminal of 160 x 48 with every pane of
the dashboard open, so that all it draws is written. For each kind of text and rate, while a reply grows: CPU of the
process that draws, the rate that the screen shows of the one asked for, milliseconds from a key to the screen, and
from Esc to the reply's end. Then how long chats open and scroll.
"""

import argparse
import fcntl
import itertools
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
from dataclasses import dataclass
from pathlib import Path

from app.chat.history import History
from engine.protocol.events import Message
from tests.paths import ROOT

COLUMNS, ROWS = 160, 48
CODE = "".join(
    f"def step_{i}(state: dict[str, float], rate: float) -> float:\n    return state['h'] * rate + {i}\n\n"
    for i in range(70)
)
TEXTS = {
    "prose": "The tide rises twice a day, as the Moon pulls on the near side more than on the middle. " * 4
    + "\n\n",
    "fences": f"Here it is:\n\n```python\n{CODE[:6000]}```\n\n",
    "tables": "| a | b | c |\n|---|---|---|\n"
    + "".join(f"| row {i} | **{i}** | some words in a cell |\n" for i in range(200))
    + "\n",
    "lists": "".join(
        f"{i}. item {i}\n   - nested `a`, more words\n     - deeper *still*\n" for i in range(1, 120)
    )
    + "\n",
}
TEXTS["mixed"] = "".join(TEXTS.values())
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

    def translates_enter(self) -> bool:
        """Whether the terminal is as a shell leaves it, where Enter is a line break."""
        return bool(termios.tcgetattr(self._ours)[0] & termios.ICRNL)

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


def behaviour(rate: float, tokens: int, text: str) -> dict[str, object]:
    return {"rate": rate, "tokens": tokens, "text": text, "load_s": 0.1, "prefill_s": 0.05,
            "context_length": 1 << 20}  # fmt: skip


@dataclass
class Load:
    """What a reply cost. `shown_tps` is the rate of the tokens that the application had received."""

    cpu_share: float
    key_ms: list[float]
    shown_tps: float
    stop_ms: float
    memory_mb: float


def under_load(home: Path, model: Path, text: str, rate: float, tokens: int) -> Load:
    """Types keys while a reply of `tokens` tokens arrives, and stops it near its end."""
    terminal = Terminal(home, behaviour(rate, tokens + round(10 * rate), text), "--model", str(model))
    try:
        terminal.wait("wall 1,000")  # the kernel table is there
        terminal.type("go\r")
        terminal.wait("answering")
        started, cpu_before, keys = time.perf_counter(), terminal.cpu_s(), list[float]()
        while (elapsed := time.perf_counter() - started) * rate < tokens:
            keys.append(terminal.key_ms(RARE[len(keys) % len(RARE)]))
            terminal.type("\x7f")
            time.sleep(0.15)
        share = (terminal.cpu_s() - cpu_before) / elapsed
        memory_mb = terminal.memory_mb()
        terminal.seen = ""
        terminal.type("\x1b")
        stop_ms = terminal.wait("stopped") * 1e3
        return Load(share, keys, noted_rate(home), stop_ms, memory_mb)
    finally:
        terminal.close()


def noted_rate(home: Path) -> float:
    """The decode rate that the application noted of the last reply."""
    noted = home / "STATE" / "orin-chat" / "evidence.json"
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        machines = json.loads(noted.read_text()) if noted.exists() else {}
        for use in (use for models in machines.values() for use in models.values()):
            if use.get("tokens_per_s"):
                return float(use["tokens_per_s"])
        time.sleep(0.1)
    raise TimeoutError("no speed was noted")


@dataclass
class LongChat:
    """Milliseconds until the chat is on the screen, to its first turn, of a page up, and from Enter to an answer."""

    open_ms: float
    top_ms: float
    page_ms: float
    answer_ms: float
    memory_mb: float


def long_chat(home: Path, model: Path, turns: int) -> LongChat:
    """A past chat of `turns` turns, opened from the list of past chats."""
    os.environ["XDG_DATA_HOME"] = str(home / "DATA")
    history = History.open()
    chat = history.new_chat("m")
    for i in range(turns):
        text = f"Turn {i}: " + ("A paragraph of an answer, with *emphasis* and `code`. " * 30)
        history.append(chat, Message(role="assistant" if i % 2 else "user", content=text))
    history.close()
    terminal = Terminal(home, behaviour(100, 1000, TEXTS["prose"]), "--model", str(model))
    try:
        terminal.wait("wall 1,000")
        terminal.type("\x0f")  # Ctrl+O
        terminal.wait("Turn 0")
        time.sleep(0.5)
        terminal.seen = ""
        terminal.type("\r")
        open_ms = terminal.wait(f"Turn {turns - 1}:") * 1e3
        time.sleep(0.5)
        pages = [terminal.page_ms("\x1b[5~") for _ in range(6)]
        terminal.seen = ""
        terminal.type("\x1b[1;5H")  # Ctrl+Home
        top_ms = terminal.wait("Turn 0:") * 1e3
        terminal.type("and then?")
        terminal.wait("then?")
        terminal.seen = ""
        terminal.type("\r")
        answer_ms = terminal.wait("answering") * 1e3
        return LongChat(open_ms, top_ms, statistics.median(pages), answer_ms, terminal.memory_mb())
    finally:
        terminal.close()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, default=50_000, help="of each reply")
    parser.add_argument("--seconds", type=float, default=120, help="of each reply, at most")
    parser.add_argument("--rates", type=float, nargs="*", default=[100, 300, 1000], help="tokens a second")
    parser.add_argument("--kinds", nargs="*", choices=TEXTS, default=["prose", "mixed"])
    parser.add_argument("--turns", type=int, nargs="*", default=[10, 300, 3000], help="of long chats")


def run(given: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model.gguf"
        model.touch()
        homes = (Path(folder) / str(i) for i in itertools.count())
        header = f"{'text':8} {'asked':>6} {'shown':>6} {'tokens':>7} {'CPU':>6} {'key p50':>8} {'p99':>6} {'max':>6}"
        print(f"{header} {'Esc':>6} {'MB':>5}", flush=True)
        for kind, rate in itertools.product(given.kinds, given.rates):
            tokens = min(given.tokens, round(given.seconds * rate))
            load = under_load(next(homes), model, TEXTS[kind], rate, tokens)
            p99 = statistics.quantiles(load.key_ms, n=100)[-1]
            print(
                f"{kind:8} {rate:6.0f} {load.shown_tps:6.0f} {tokens:7} {load.cpu_share:6.1%} "
                f"{statistics.median(load.key_ms):5.0f} ms {p99:3.0f} ms {max(load.key_ms):3.0f} ms "
                f"{load.stop_ms:3.0f} ms {load.memory_mb:5.0f}",
                flush=True,
            )
        for turns in given.turns:
            chat = long_chat(next(homes), model, turns)
            print(
                f"{turns} turns: open {chat.open_ms:.0f} ms, to the top {chat.top_ms:.0f} ms, a page up "
                f"{chat.page_ms:.0f} ms, Enter to answering {chat.answer_ms:.0f} ms, {chat.memory_mb:.0f} MB",
                flush=True,
            )
