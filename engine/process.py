"""One life of the engine process, seen from its client: spawned, spoken to, and gone with all it started."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

import msgspec

from engine.child_process import how_it_ended, signal_group
from engine.events import Event, Failed, Shutdown, event_decoder
from engine.transport import Deframer, FrameError, pack

SHUTDOWN_GRACE_S = 1.0
TERMINATE_GRACE_S = 0.3
LOG_LIMIT_BYTES = 1 << 20


class EngineProcess(asyncio.Protocol):
    """A child process at the other end of a socket pair, leader of a session of its own.

    `receive` is called with each event and, once and last, with a `Failed` that says how the process ended.
    """

    _transport: asyncio.Transport
    _process: asyncio.subprocess.Process
    _reaper: asyncio.Task[None]

    def __init__(self, log_path: Path, receive: Callable[[Event], None]) -> None:
        self._log_path = log_path
        self._receive = receive
        self._deframer = Deframer()
        self._hung_up = asyncio.Event()
        self._killed = False
        self._misspoke = False

    @classmethod
    async def spawn(
        cls,
        command: Sequence[str],
        environment: Mapping[str, str],
        log_path: Path,
        receive: Callable[[Event], None],
    ) -> EngineProcess:
        """Starts `command` with the number of its socket as last argument; what it prints goes to `log_path`.

        Raises OSError if it cannot be started."""
        ours, theirs = socket.socketpair()
        with theirs, open_log(log_path) as log:
            self = cls(log_path, receive)
            self._transport, _ = await asyncio.get_running_loop().create_unix_connection(
                lambda: self, sock=ours
            )
            try:
                self._process = await asyncio.create_subprocess_exec(
                    *command,
                    str(theirs.fileno()),
                    pass_fds=(theirs.fileno(),),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    env={**os.environ, **environment},
                )
            except BaseException:
                self._transport.abort()
                raise
        self._reaper = asyncio.create_task(self._reap())
        return self

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it may still answer."""
        return not self._killed and not self._hung_up.is_set() and self._process.returncode is None

    def send(self, frame: bytes) -> None:
        if self.alive:
            self._transport.write(frame)

    def kill(self) -> None:
        """Ends the process at once, its children in the next moments; what it still sends is ignored."""
        self._killed = True
        self._kill_leader()

    async def gone(self) -> None:
        """Returns when the process is reaped and its children are told to end."""
        await asyncio.shield(self._reaper)

    async def close(self) -> None:
        """Asks the process to end, and makes it."""
        self.send(pack(Shutdown()))
        try:
            if await self._gone_within(SHUTDOWN_GRACE_S):
                return
            self._terminate_group()
            if await self._gone_within(TERMINATE_GRACE_S):
                return
            self.kill()
            await self.gone()
        except asyncio.CancelledError:
            self.kill()
            raise

    async def _gone_within(self, seconds: float) -> bool:
        return bool((await asyncio.wait((self._reaper,), timeout=seconds))[0])

    def data_received(self, data: bytes) -> None:
        if self._killed:
            return
        try:
            for payload in self._deframer.feed(data):
                self._receive(event_decoder.decode(payload))
        except (FrameError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            self._misspoke = True
            self.kill()

    def connection_lost(self, exc: Exception | None) -> None:
        self._hung_up.set()

    async def _reap(self) -> None:
        """Sees the process off: itself reaped, its last events read, its children ended."""
        exited = asyncio.create_task(self._process.wait())
        hung_up = asyncio.create_task(self._hung_up.wait())
        try:
            await asyncio.wait((exited, hung_up), return_when=asyncio.FIRST_COMPLETED)
            # One brings the other, unless it closed its socket and lives, or a child of its holds the socket.
            await asyncio.wait((exited, hung_up), timeout=0.2)
            self._kill_leader()
            await exited
            await asyncio.wait((hung_up,), timeout=0.2)
        finally:  # also when the event loop ends without `close`
            self._kill_leader()
            self._terminate_group()
            hung_up.cancel()
            self._transport.abort()
        trim_log(self._log_path)
        self._receive(self._obituary())

    def _kill_leader(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    def _terminate_group(self) -> None:
        """Ends the process and its children. Not by SIGKILL: one of multiprocessing's processes ignores
        SIGTERM and removes the semaphores that the others shared."""
        signal_group(self.pid, signal.SIGTERM)

    def _obituary(self) -> Failed:
        code = self._process.returncode
        assert code is not None
        if self._misspoke:
            message = "The engine process sent something that is not an event."
        elif code < 0:
            message = f"The engine process died ({how_it_ended(code)})."
        else:
            message = f"The engine process ended by itself ({how_it_ended(code)})."
        hint = f"The engine's log: {self._log_path}"
        if code == -signal.SIGBUS:  # pages of the mapped file that are no longer there
            hint = f"The model file was cut short or replaced while it was read. {hint}"
        elif code == -signal.SIGKILL and not self._killed:
            hint = f"If memory ran out, a smaller model or context may help. {hint}"
        return Failed(kind="backend", message=message, hint=hint)


def open_log(path: Path) -> IO[bytes]:
    """The log file, to be appended to by its owner alone; nothing, where none can be written."""
    trim_log(path)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return os.fdopen(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "ab")
    except OSError:
        return Path(os.devnull).open("wb")


def trim_log(path: Path) -> None:
    """Empties the log where it has grown beyond LOG_LIMIT_BYTES."""
    with contextlib.suppress(OSError):
        if path.stat().st_size > LOG_LIMIT_BYTES:
            os.truncate(path, 0)
