"""How keys keep up on a slow line:

    python -m tools.measure slow_line [--rates KB_PER_S ...] [--rate TOKENS_PER_S] [--columns N] [--mute]

As `reach`, but the pseudo-terminal reads only so many bytes a second, as a line of that speed would, and answers a
terminal's questions after what came before them. `--mute`: it answers none. For each speed (0: unbounded): bytes a
second while a reply of prose grows, milliseconds from a key to its sign on the screen, and bytes a second when idle.
"""

import argparse
import os
import select
import statistics
import tempfile
import time
from pathlib import Path

from tools.measure import reach
from tools.measure.reach import RARE, TEXTS, Terminal, behaviour

SLICE_S = 0.02
QUESTION, ANSWER = "\x1b[5n", b"\x1b[0n"


class SlowTerminal(Terminal):
    """`bytes_per_s` 0: as fast as it comes."""

    def __init__(self, home: Path, bytes_per_s: int, mute: bool, *arguments: object) -> None:
        self._bytes_per_s, self._mute, self.read_bytes, self._tail = bytes_per_s, mute, 0, ""
        super().__init__(home, *arguments)  # type: ignore[arg-type]

    def _read(self) -> None:
        size = max(1, int(self._bytes_per_s * SLICE_S)) or 1 << 16
        while True:
            try:
                select.select([self._ours], [], [])
                data = os.read(self._ours, size if self._bytes_per_s else 1 << 16)
            except OSError:
                return
            text = data.decode(errors="replace")
            self.read_bytes += len(data)
            if self._bytes_per_s:
                time.sleep(len(data) / self._bytes_per_s)
            asked = (self._tail + text).count(QUESTION)
            self._tail = text[-len(QUESTION) + 1 :]
            self.seen = (self.seen + text)[-200_000:]
            if asked and not self._mute:
                os.write(self._ours, ANSWER * asked)

    def rate(self, seconds: float) -> float:
        """Bytes a second that are read in the next `seconds`."""
        before, started = self.read_bytes, time.monotonic()
        time.sleep(seconds)
        return (self.read_bytes - before) / (time.monotonic() - started)


def measure(model: Path, bytes_per_s: int, tokens_per_s: float, mute: bool) -> str:
    with tempfile.TemporaryDirectory() as folder:
        doing = behaviour(tokens_per_s, round(tokens_per_s * 120), TEXTS["prose"])
        terminal = SlowTerminal(Path(folder), bytes_per_s, mute, doing, "--model", str(model))
        try:
            terminal.wait("Enter sends")
            time.sleep(6)
            idle = terminal.rate(5)
            terminal.type("go\r")
            time.sleep(16)  # until the text scrolls
            busy = terminal.rate(5)
            keys = []
            for key in RARE[:10]:
                keys.append(terminal.key_ms(key))
                terminal.type("\x7f")
                time.sleep(0.3)
            return (
                f"{bytes_per_s / 1e3 or 'any':>6} kB/s: {busy / 1e3:6.1f} kB/s for {tokens_per_s:.0f} tok/s, "
                f"idle {idle:6.0f} B/s, keys {statistics.median(keys):5.0f} ms, worst {max(keys):5.0f} ms"
            )
        finally:
            terminal.process.kill()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rates", type=float, nargs="+", default=[0, 30, 10], metavar="KB_PER_S")
    parser.add_argument("--rate", type=float, default=50, metavar="TOKENS_PER_S")
    parser.add_argument("--columns", type=int, default=160)
    parser.add_argument("--mute", action="store_true", help="a terminal that answers no questions")


def run(given: argparse.Namespace) -> None:
    reach.COLUMNS = given.columns
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model.gguf"
        model.touch()
        for rate in given.rates:
            print(measure(model, int(rate * 1e3), given.rate, given.mute), flush=True)
