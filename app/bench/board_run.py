"""One run of `orin-chat board`: a process of `orin-chat bench`. Its results stay in a folder. A run that has results is
not repeated."""

import contextlib
import re
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from app.bench.board_plan import Board, BoardModel, BoardSetup, Lengths
from app.bench.results import PEER, Result, read
from engine.errors import UsageError
from engine.system.child_process import module_command, module_environment, signal_group
from widgets.text import one_line

_TERM_GRACE_S = 20.0
"""A run that gets SIGTERM has this long to write its results."""
_LOG_TAIL_BYTES = 4096


@dataclass
class BoardRun:
    """One model with one setup. Its files in `folder` say how it went; `not_started` says why there are none."""

    folder: Path
    model: BoardModel
    setup: BoardSetup
    not_started: str = ""

    @property
    def name(self) -> str:
        return f"{re.sub(r'[^A-Za-z0-9.-]+', '-', self.model.title)}.{self.setup.name}"

    @property
    def title(self) -> str:
        return f"{self.model.title}, {self.setup.title}"

    @property
    def results_path(self) -> Path:
        return self.folder / f"{self.name}.json"

    @property
    def failure_path(self) -> Path:
        return self.folder / f"{self.name}.failed.txt"

    @property
    def log_path(self) -> Path:
        return self.folder / f"{self.name}.log"

    @property
    def is_done(self) -> bool:
        return self.results_path.exists() or self.failure_path.exists()

    @property
    def failure(self) -> str:
        """Why results are missing; "" if none are."""
        with contextlib.suppress(OSError):
            return self.failure_path.read_text("utf-8").strip()
        return ""

    def results(self) -> list[Result]:
        with contextlib.suppress(UsageError):
            return read(self.results_path)
        return []

    def delete_failure(self) -> None:
        """Deletes what a run that failed has left, so that it is done again."""
        if self.failure:
            self.failure_path.unlink(missing_ok=True)
            self.results_path.unlink(missing_ok=True)

    def measure(
        self, model_path: Path, lengths: Lengths, llama_server: str, timeout_s: float, chip: str = ""
    ) -> bool:
        """Runs the benchmark and writes its results, or its failure. If `llama_server` names the program, llama.cpp is
        measured, too. Returns False if it took longer than `timeout_s` and was ended."""
        preset = f"board-{self.setup.name}"
        presets = self.folder / "config/orin-chat/presets"
        presets.mkdir(parents=True, exist_ok=True)
        (presets / f"{preset}.toml").write_text(self.setup.preset(), "utf-8")
        partial_results = self.results_path.with_suffix(".part")
        command = module_command("app", "bench", "--model", str(model_path), "--preset", preset)
        command += [*lengths.arguments(), "-o", "json", "--save", str(partial_results)]
        command += ["--kernels"] * (self.setup.kernels == "fused") + ["--as", chip] * bool(chip)
        if llama_server:
            command += ["--compare", PEER, "--llama-server", llama_server]
        with self.log_path.open("wb") as log:
            code = _run(command, _environment(self.folder), log, timeout_s)
        if partial_results.exists():
            partial_results.replace(self.results_path)
        if code is None:
            self.failure_path.write_text(f"it took longer than {timeout_s / 60:.0f} minutes\n", "utf-8")
        elif code or not self.results_path.exists():
            self.failure_path.write_text(f"{self._last_message() or f'exit code {code}'}\n", "utf-8")
        return code is not None

    def _last_message(self) -> str:
        """The last line of the log that orin-chat wrote, else its last line."""
        log = self.log_path.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace")
        lines = [line for line in log.splitlines() if line.strip()]
        lines = [line for line in lines if line.startswith("orin-chat: ")] or lines
        return one_line(lines[-1].removeprefix("orin-chat: ")) if lines else ""


def board_runs(board: Board, folder: Path) -> list[BoardRun]:
    """Each setup with each model, but only our own kernels with those that are `at_hand`."""
    return [
        BoardRun(folder, model, setup)
        for setup in board.setups
        for model in board.models
        if setup.kernels == "fused" or not model.at_hand
    ]


def hung_backends_last(runs: list[BoardRun]) -> Iterator[BoardRun]:
    """Takes the runs one by one out of `runs`. When one hangs, the others of its backend become the last: each of them
    may hang as long."""
    while runs:
        run = runs.pop(0)
        yield run
        if "longer than" in run.failure:
            runs.sort(key=lambda other: other.setup.backend == run.setup.backend)


def _environment(folder: Path) -> dict[str, str]:
    """Presets and state lie in `folder`; caches are the user's."""
    folders = {"XDG_CONFIG_HOME": folder / "config", "XDG_STATE_HOME": folder / "state"}
    return {**module_environment(), **{name: str(path.absolute()) for name, path in folders.items()}}


def _run(
    command: Sequence[str], environment: Mapping[str, str], log: IO[bytes], timeout_s: float
) -> int | None:
    """The exit code; None if it took too long. At SIGTERM a benchmark writes the results that it has, and its engines
    end with it."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=log,
        env=environment,
        start_new_session=True,
    )
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            signal_group(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_TERM_GRACE_S)
                break
