"""llama.cpp's server as a process of ours: found, started on a socket of its own, and gone with us."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Self

from engine.child_process import how_it_ended, signal_group
from engine.errors import BackendError, ModelFileError, OrinError, one_line
from engine.events import EngineOptions
from engine.process import open_log

HOW_TO_GET_IT = (
    "Install llama.cpp (https://github.com/ggml-org/llama.cpp), or say where it is: --llama-server PATH, "
    "llama_server in settings.toml, or the variable LLAMA_SERVER."
)
HELP_S = 20.0
_LONGEST_SOCKET_PATH = 100  # bytes; the system's limit is 104 to 108
# What a fair comparison wants, where this version of llama-server has it: all layers on the device, flash
# attention, the context as asked for, no memory of other prompts, nothing fetched or served beside.
_WISHES = (
    ("--n-gpu-layers", "all"),
    ("--flash-attn", "on"),
    ("--fit", "off"),
    ("--cache-ram", "0"),
    ("--no-ui",),
    ("--no-webui",),
    ("--offline",),
)
_ON_THE_CPU = (("--n-gpu-layers", "0"), ("--device", "none"))


def find(given: str | None = None) -> str:
    """The path of llama-server: as `given`, else as LLAMA_SERVER says, else on PATH. Raises BackendError."""
    for name in (given, os.environ.get("LLAMA_SERVER")):
        if name:
            if found := shutil.which(Path(name).expanduser()):
                return str(Path(found).absolute())
            raise BackendError(f"There is no program {one_line(name)}.", HOW_TO_GET_IT)
    if found := shutil.which("llama-server"):
        return str(Path(found).absolute())
    raise BackendError("llama.cpp's llama-server was not found.", HOW_TO_GET_IT)


class LlamaProcess:
    """A running llama-server at `base_url`, through the Unix socket `socket` unless that is None; it wants
    `key`."""

    process: asyncio.subprocess.Process
    base_url: str
    socket: str | None
    key: str

    def __init__(self, log_path: Path) -> None:
        self.log_path = log_path
        self._log_start = 0
        self._folder = Path(tempfile.mkdtemp(prefix="orin-chat-"))  # readable by its owner alone

    @classmethod
    async def spawn(cls, program: str, options: EngineOptions, log_path: Path) -> Self:
        """Starts `program` on the model of `options`; what it prints is added to `log_path`. Raises
        BackendError."""
        known = await asyncio.to_thread(_help, program)
        self = cls(log_path)
        try:
            await self._spawn([program, *self._arguments(options, known)])
        except BaseException:
            await self.close()
            raise
        return self

    def _arguments(self, options: EngineOptions, known: str) -> list[str]:
        socket = str(self._folder / "llama.sock")
        if ".sock" in known and len(os.fsencode(socket)) < _LONGEST_SOCKET_PATH:
            self.socket, self.base_url = socket, "http://llama-server"
            place = ["--host", socket]
        else:
            port = _free_port()
            self.socket, self.base_url = None, f"http://127.0.0.1:{port}"
            place = ["--host", "127.0.0.1", "--port", str(port)]
        context = ["-c", str(options.context_length)] if options.context_length else []
        wishes = _WISHES + (_ON_THE_CPU if options.backend.upper() == "CPU" else ())
        granted = {
            name: [name, *_value(values, name, known)]
            for name, *values in wishes
            if re.search(rf"(?<![\w-]){name}(?![\w-])", known)
        }
        if "--no-ui" in granted:
            granted.pop("--no-webui", None)  # its old name
        flags = [argument for wish in granted.values() for argument in wish]
        return ["-m", options.model_path, *place, "-np", "1", *context, *flags]

    async def _spawn(self, command: list[str]) -> None:
        self.key = secrets.token_urlsafe(24)
        leash = str(Path(__file__).with_name("die_with_parent.py"))
        with open_log(self.log_path) as log:
            self._log_start = log.seek(0, os.SEEK_END) if log.seekable() else 0
            try:
                self.process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-I", "-S", leash, str(os.getpid())),
                    *command,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    # Not among the arguments, which every user of the machine can read.
                    env={**os.environ, "LLAMA_API_KEY": self.key},
                )
            except OSError as error:
                raise BackendError(
                    f"llama-server could not be started: {error.strerror}.", "Free some memory and try again."
                ) from None

    @property
    def pid(self) -> int:
        return self.process.pid

    async def ended_within(self, seconds: float) -> bool:
        if self.process.returncode is None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.process.wait(), seconds)
        return self.process.returncode is not None

    def obituary(self, *, was_ready: bool) -> OrinError:
        """Why the process ended, from its status and what it printed."""
        code = self.process.returncode
        log = f"Its log: {self.log_path}"
        text = self._printed()
        assert code is not None
        cause = _cause(text)
        less = "a smaller model or a shorter context needs less"
        if _OUT_OF_MEMORY.search(text):
            return BackendError("llama-server ran out of memory.", f"{less.capitalize()}. {log}")
        if code == -signal.SIGKILL:
            return BackendError("llama-server was killed.", f"If memory ran out, {less}. {log}")
        if cause and not was_ready and _UNREADABLE_MODEL.search(text):
            return ModelFileError(f"llama-server cannot run this model: {cause}.", log)
        if _ADDRESS_IN_USE.search(text):
            return BackendError(f"llama-server found its address in use: {cause}.", f"Try again. {log}")
        when = "died" if was_ready else "ended before it was ready"
        told = f"; it says: {cause}" if cause else "" if text.strip() else "; it printed nothing"
        if code == -signal.SIGILL:
            log = f"It wants instructions that this machine's CPU refuses: build it here, without them. {log}"
        return BackendError(f"llama-server {when} ({how_it_ended(code)}){told}.", log)

    def _printed(self, limit: int = 1 << 16) -> str:
        """The end of what this process printed."""
        try:
            with self.log_path.open("rb") as log:
                size = log.seek(0, os.SEEK_END)
                log.seek(max(self._log_start if self._log_start <= size else 0, size - limit))
                return log.read(limit).decode("utf-8", "replace")
        except OSError:
            return ""

    async def close(self) -> None:
        """Ends the process and all it started, at once: it has nothing to save. Can be called again."""
        shutil.rmtree(self._folder, ignore_errors=True)
        process = getattr(self, "process", None)
        if process and process.returncode is None:
            signal_group(process.pid, signal.SIGKILL)
            await process.wait()


def _value(values: list[str], name: str, known: str) -> list[str]:
    """Of --flash-attn, which took no value before there was a choice."""
    if name == "--flash-attn" and not re.search(r"--flash-attn\s+\S*on\b", known):
        return []
    return ["999"] if values == ["all"] and "'all'" not in known else values


def _help(program: str) -> str:
    """What the program says of its options. Raises BackendError where it is no llama-server."""
    try:
        run = subprocess.run(
            [program, "--help"], capture_output=True, stdin=subprocess.DEVNULL, timeout=HELP_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise BackendError(f"{one_line(program)} does not answer to --help.", HOW_TO_GET_IT) from None
    except OSError as error:
        raise BackendError(f"{one_line(program)} cannot be run: {error.strerror}.", HOW_TO_GET_IT) from None
    text = (run.stdout + run.stderr).decode("utf-8", "replace")
    if "--ctx-size" not in text:
        cause = one_line(_cause(text) or text)
        told = f"it says: {cause}" if cause else "it prints nothing"
        raise BackendError(f"{one_line(program)} is no llama-server that works: {told}.", HOW_TO_GET_IT)
    return text


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


# --- what it says when it fails ------------------------------------------------------------------------

_ERROR_LINE = re.compile(
    r"^(?:[\d.]+ E |.*\berror: |.*\bwhat\(\): |.*error while loading shared libraries).*$",
    re.MULTILINE | re.IGNORECASE,
)
_PREFIX = re.compile(r"^(?:[\d.]+ E )?(?:(?:cmn|srv|main|que|slot)\s+)?(?:\w+: )?(?:error: )?\s*")
_OUT_OF_MEMORY = re.compile(
    r"insufficient memory|out of memory|unable to allocate|failed to allocate|bad_alloc|cannot allocate",
    re.IGNORECASE,
)
_UNREADABLE_MODEL = re.compile(r"error loading model|failed to load model", re.IGNORECASE)
_ADDRESS_IN_USE = re.compile(r"couldn't bind|address already in use", re.IGNORECASE)


def _cause(text: str) -> str:
    """The first line that tells of an error: those after it say what became of it."""
    line = _ERROR_LINE.search(text)
    return one_line(_PREFIX.sub("", line.group()).rstrip(". ")) if line else ""
