"""llama.cpp's llama-server as a child process: finding the program, starting it on a socket, explaining its end."""

import asyncio
import contextlib
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Self

from engine.errors import BackendError, ModelFileError, OrinError, one_line, start_hint
from engine.protocol.events import EngineOptions
from engine.system.child_process import how_it_ended, signal_group
from engine.system.logs import open_log

INSTALL_HINT = (
    "Install llama.cpp (https://github.com/ggml-org/llama.cpp), or say where it is: --llama-server PATH, "
    "llama_server in settings.toml, or the variable LLAMA_SERVER."
)
HELP_TIMEOUT_S = 20.0
_MAX_SOCKET_PATH = 100  # bytes; the system's limit (sun_path in unix(7)) is 104 to 108
# What a fair comparison needs, if this version of llama-server has the option: all layers on the device, flash
# attention (which quantized values in the KV cache need), the context and the format of the KV cache as asked for, no
# cache of other prompts; nothing downloaded, no web page served.
_WANTED_OPTIONS = (
    ("--n-gpu-layers", "all"),
    ("--flash-attn", "on"),
    ("--fit", "off"),
    ("--cache-ram", "0"),
    ("--no-ui",),
    ("--no-webui",),
    ("--offline",),
)
_CPU_OPTIONS = (("--n-gpu-layers", "0"), ("--device", "none"))


def find_llama_server(path: str | None = None) -> str:
    """The absolute path of llama-server: `path`, else LLAMA_SERVER, else the one on PATH. Raises BackendError."""
    for name in (path, os.environ.get("LLAMA_SERVER")):
        if name:
            if program := shutil.which(Path(name).expanduser()):
                return str(Path(program).absolute())
            raise BackendError(f"There is no program {one_line(name)}.", INSTALL_HINT)
    if program := shutil.which("llama-server"):
        return str(Path(program).absolute())
    raise BackendError("llama.cpp's llama-server was not found.", INSTALL_HINT)


class LlamaProcess:
    """A running llama-server. It answers at `base_url`, through the Unix socket `socket` unless that is None, to
    requests with `key`."""

    process: asyncio.subprocess.Process
    base_url: str
    socket: str | None
    key: str

    def __init__(self, log_path: Path) -> None:
        self.log_path = log_path
        self._log_start = 0
        self._folder = Path(tempfile.mkdtemp(prefix="orin-chat-"))  # only its owner can read it

    @classmethod
    async def spawn(cls, program: str, options: EngineOptions, log_path: Path) -> Self:
        """Starts `program` with the model of `options`. It is not ready yet. Its output is appended to `log_path`.
        Raises BackendError."""
        help_text = await asyncio.to_thread(_help, program)
        self = cls(log_path)
        try:
            await self._spawn([program, *self._arguments(options, help_text)])
        except BaseException:
            await self.close()
            raise
        return self

    def _arguments(self, options: EngineOptions, help_text: str) -> list[str]:
        """The arguments for the version of llama-server that has this help text."""
        socket_path = str(self._folder / "llama.sock")
        if ".sock" in help_text and len(os.fsencode(socket_path)) < _MAX_SOCKET_PATH:
            self.socket, self.base_url = socket_path, "http://llama-server"
            address = ["--host", socket_path]
        else:
            port = _free_port()
            self.socket, self.base_url = None, f"http://127.0.0.1:{port}"
            address = ["--host", "127.0.0.1", "--port", str(port)]
        slots = ["-np", str(options.parallel)]
        if isinstance(options.context_length, int):  # which the slots share; else the model's own
            slots += ["-c", str(options.parallel * options.context_length)]
        if options.lora:
            slots += ["--lora-scaled", options.lora]
        kv = ("--cache-type-k", options.kv), ("--cache-type-v", options.kv)
        wanted = _WANTED_OPTIONS + kv + (_CPU_OPTIONS if options.backend.upper() == "CPU" else ())
        supported = {
            name: [name, *_value(values, name, help_text)]
            for name, *values in wanted
            if re.search(rf"(?<![\w-]){name}(?![\w-])", help_text)
        }
        if "--no-ui" in supported:
            supported.pop("--no-webui", None)  # its old name
        extra = [argument for option in supported.values() for argument in option]
        return ["-m", options.model_path, *address, *slots, *extra]

    async def _spawn(self, command: list[str]) -> None:
        self.key = secrets.token_urlsafe(24)
        die_with_parent = str(Path(__file__).with_name("die_with_parent.py"))
        with open_log(self.log_path) as log:
            self._log_start = log.seek(0, os.SEEK_END) if log.seekable() else 0
            try:
                self.process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-I", "-S", die_with_parent, str(os.getpid())),
                    *command,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    # Every user of the machine can read arguments, but not the environment.
                    env={**os.environ, "LLAMA_API_KEY": self.key},
                )
            except OSError as error:
                raise BackendError(
                    f"llama-server could not be started: {error.strerror}.", start_hint(error)
                ) from None

    @property
    def pid(self) -> int:
        return self.process.pid

    async def ended_within(self, seconds: float) -> bool:
        if self.process.returncode is None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.process.wait(), seconds)
        return self.process.returncode is not None

    def exit_error(self, *, was_ready: bool) -> OrinError:
        """Why the process ended, judged by its exit status and its output. It must have ended."""
        code = self.process.returncode
        assert code is not None
        log = f"Its log: {self.log_path}"
        text = self._printed()
        cause = _cause(text)
        less = "choose a smaller model or a shorter context"
        if _OUT_OF_MEMORY.search(text):
            return BackendError("llama-server ran out of memory.", f"{less.capitalize()}. {log}")
        if code == -signal.SIGKILL:
            return BackendError("llama-server was killed.", f"If memory ran out, {less}. {log}")
        if cause and not was_ready and _UNREADABLE_MODEL.search(text):
            return ModelFileError(f"llama-server cannot run this model: {cause}.", log)
        if _ADDRESS_IN_USE.search(text):
            return BackendError(
                f"llama-server cannot use its address: {cause or 'it is in use'}.", f"Try again. {log}"
            )
        when = "died" if was_ready else "ended before it was ready"
        message = f"; it says: {cause}" if cause else "" if text.strip() else "; it printed nothing"
        if code == -signal.SIGILL:
            log = f"It was built for a CPU with other instructions: build it on this machine. {log}"
        return BackendError(f"llama-server {when} ({how_it_ended(code)}){message}.", log)

    def _printed(self) -> str:
        """The last 64 KiB of what this process printed."""
        limit = 1 << 16
        try:
            with self.log_path.open("rb") as log:
                size = log.seek(0, os.SEEK_END)
                log.seek(max(self._log_start if self._log_start <= size else 0, size - limit))
                return log.read(limit).decode("utf-8", "replace")
        except OSError:
            return ""

    async def close(self) -> None:
        """Kills the process and its children: it has nothing to save. May be called twice."""
        shutil.rmtree(self._folder, ignore_errors=True)
        process = getattr(self, "process", None)
        if process and process.returncode is None:
            signal_group(process.pid, signal.SIGKILL)
            await process.wait()


def _value(values: list[str], name: str, help_text: str) -> list[str]:
    """The option's value, as older versions want it: --flash-attn had none, and "all" layers was a large number."""
    if name == "--flash-attn" and not re.search(r"--flash-attn\s+\S*on\b", help_text):
        return []
    return ["999"] if values == ["all"] and "'all'" not in help_text else values


def _help(program: str) -> str:
    """What `program --help` prints. Raises BackendError if it is not a llama-server that works."""
    try:
        run = subprocess.run(
            [program, "--help"],
            capture_output=True,
            stdin=subprocess.DEVNULL,
            timeout=HELP_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise BackendError(f"{one_line(program)} does not answer to --help.", INSTALL_HINT) from None
    except OSError as error:
        raise BackendError(f"{one_line(program)} cannot be run: {error.strerror}.", INSTALL_HINT) from None
    text = (run.stdout + run.stderr).decode("utf-8", "replace")
    if "--ctx-size" not in text:
        cause = one_line(_cause(text) or text)
        reason = f"it says: {cause}" if cause else "it prints nothing"
        raise BackendError(f"{one_line(program)} is no llama-server that works: {reason}.", INSTALL_HINT)
    return text


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


# --- its error messages ----------------------------------------------------------------------------------

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
    """The first line of `text` that reports an error: later ones are consequences. "" if there is none."""
    line = _ERROR_LINE.search(text)
    return one_line(_PREFIX.sub("", line.group()).rstrip(". ")) if line else ""
