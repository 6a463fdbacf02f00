"""What `orin-chat board` measures and what was measured before (board.toml), and each run of it: a process of
`orin-chat bench`, whose results stay in a folder, so that a run that is there is never done again."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from app.bench.report import PEER, Result, read
from engine.child_process import module_command, module_environment, signal_group
from engine.errors import UsageError
from widgets.text import one_line

_DATA = Path(__file__).with_name("board.toml")
_PATIENCE_S = 20.0  # for a run that was told to end and has results to write
_LOG_TAIL_BYTES = 4096


class BoardModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    title: str


class BoardSetup(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A preset of the board's own. One that is `asked_for` is measured when it is named alone."""

    name: str
    title: str
    backend: str
    kernels: str
    jitbeam: int = 0
    asked_for: bool = False

    def preset(self) -> str:
        """As a file of presets."""
        return (
            f'title = "{self.title}"\nbackend = "{self.backend}"\nkernels = "{self.kernels}"\n'
            f"jitbeam = {self.jitbeam}\n"
        )


class Board(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`figures`: tokens a second by the name of a model, of a setup (or llama.cpp), of a test."""

    models: list[BoardModel] = msgspec.field(name="model")
    setups: list[BoardSetup] = msgspec.field(name="setup")
    figures: dict[str, dict[str, dict[str, float]]] = {}


def load(models: Sequence[str] = (), setups: Sequence[str] = ()) -> Board:
    """The board, or a part of it and models of other names and files. Raises UsageError for unknown setups."""
    board = msgspec.toml.decode(_DATA.read_bytes(), type=Board)
    known = {model.name: model for model in board.models}
    titled = [known.get(name) or BoardModel(name=name, title=Path(name).name) for name in models]
    if unknown := set(setups) - {setup.name for setup in board.setups}:
        names = ", ".join(setup.name for setup in board.setups)
        raise UsageError(f"There is no setup {unknown.pop()!r}.", f"Choose from {names}.")
    chosen = [s for s in board.setups if (s.name in setups if setups else not s.asked_for)]
    return Board(models=titled or board.models, setups=chosen, figures=board.figures)


@dataclass(frozen=True)
class Lengths:
    """Of prompts and generations, in tokens: what is measured of each."""

    prompts: tuple[int, ...] = (32, 128, 256, 512)
    gen: tuple[int, ...] = (128,)
    repetitions: int = 2

    @property
    def names(self) -> list[str]:
        return [*(f"tg{n}" for n in self.gen if n), *(f"pp{n}" for n in self.prompts if n)]

    def arguments(self) -> list[str]:
        lengths = {"-p": self.prompts, "-n": self.gen, "-d": (0,), "-r": (self.repetitions,)}
        return [part for flag, ns in lengths.items() for part in (flag, ",".join(map(str, ns or (0,))))]


@dataclass
class Run:
    """One model with one setup. Its files in `folder` say how it went."""

    folder: Path
    model: BoardModel
    setup: BoardSetup
    left_out: str = field(default="")  # why it was not started this time

    @property
    def name(self) -> str:
        return f"{re.sub(r'[^A-Za-z0-9.-]+', '-', self.model.title)}.{self.setup.name}"

    @property
    def title(self) -> str:
        return f"{self.model.title}, {self.setup.title}"

    @property
    def _results(self) -> Path:
        return self.folder / f"{self.name}.json"

    @property
    def _failure(self) -> Path:
        return self.folder / f"{self.name}.failed.txt"

    @property
    def log(self) -> Path:
        return self.folder / f"{self.name}.log"

    @property
    def is_done(self) -> bool:
        return self._results.exists() or self._failure.exists()

    @property
    def failed(self) -> str:
        """Why there are no results, or not all; "" where nothing went wrong."""
        with contextlib.suppress(OSError):
            return self._failure.read_text("utf-8").strip()
        return ""

    def results(self) -> list[Result]:
        with contextlib.suppress(UsageError):
            return read(self._results)
        return []

    def forget_failure(self) -> None:
        if self.failed:
            self._failure.unlink(missing_ok=True)
            self._results.unlink(missing_ok=True)

    def do(self, path: Path, tests: Lengths, llama_server: str, timeout_s: float) -> bool:
        """Measures `path`, with llama.cpp beside it where a program is given. Whatever happens is in the files.
        Returns whether it ended by itself."""
        preset = f"board-{self.setup.name}"
        presets = self.folder / "config/orin-chat/presets"
        presets.mkdir(parents=True, exist_ok=True)
        (presets / f"{preset}.toml").write_text(self.setup.preset(), "utf-8")
        part = self._results.with_suffix(".part")
        command = module_command("app", "bench", "--model", str(path), "--preset", preset)
        command += [*tests.arguments(), "-o", "json", "--save", str(part)]
        if llama_server:
            command += ["--compare", PEER, "--llama-server", llama_server]
        with self.log.open("wb") as log:
            code = _run(command, _environment(self.folder), log, timeout_s)
        if part.exists():
            part.replace(self._results)
        if code is None:
            self._failure.write_text(f"it took longer than {timeout_s / 60:.0f} minutes\n", "utf-8")
        elif code or not self._results.exists():
            self._failure.write_text(f"{self._last_words() or f'exit code {code}'}\n", "utf-8")
        return code is not None

    def _last_words(self) -> str:
        text = self.log.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace")
        said = [line for line in text.splitlines() if line.startswith("orin-chat: ")]
        lines = said or [line for line in text.splitlines() if line.strip()]
        return one_line(lines[-1].removeprefix("orin-chat: ")) if lines else ""


def runs(board: Board, folder: Path) -> list[Run]:
    """All of a board, one setup after the other."""
    return [Run(folder, model, setup) for setup in board.setups for model in board.models]


def in_turn(waiting: list[Run]) -> Iterator[Run]:
    """The runs one by one. Where one of a backend hung, its others come last: each may hang as long."""
    while waiting:
        run = waiting.pop(0)
        yield run
        if "longer than" in run.failed:
            waiting.sort(key=lambda other: other.setup.backend == run.setup.backend)


def figures(board: Board, run: Run) -> Mapping[str, float]:
    return board.figures.get(run.model.name, {}).get(run.setup.name, {})


def _environment(folder: Path) -> dict[str, str]:
    """With presets, logs and notes of the board's own, and the caches of all."""
    own = {"XDG_CONFIG_HOME": folder / "config", "XDG_STATE_HOME": folder / "state"}
    return {**module_environment(), **{name: str(value.absolute()) for name, value in own.items()}}


def _run(command: Sequence[str], environment: Mapping[str, str], log: object, timeout_s: float) -> int | None:
    """The exit code; None for a process that had to be ended. Ended by SIGTERM, a benchmark writes what it has; its
    engines end when it does."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=log,  # type: ignore[call-overload]
        env=environment,
        start_new_session=True,
    )
    try:
        return int(process.wait(timeout_s))
    except subprocess.TimeoutExpired:
        return None
    finally:
        for end in (signal.SIGTERM, signal.SIGKILL):
            signal_group(process.pid, end)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_PATIENCE_S)
                break
