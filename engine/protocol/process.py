"""The engine process, seen from its client, from its start to its end: one object is one life of the process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from engine.errors import LOG_IS
from engine.protocol.events import Event, Failed, Shutdown, event_decoder
from engine.protocol.launch import start_child, take_launched, worker_environment
from engine.protocol.transport import Deframer, FrameError, pack
from engine.system.child_process import how_it_ended, signal_group
from engine.system.logs import last_error, log_bytes, open_log, trim_log

SHUTDOWN_GRACE_S = 1.0
TERMINATE_GRACE_S = 0.3
UNKILLABLE_S = 3.0


class EngineProcess(asyncio.Protocol):
    """A child process at the other end of a socket pair. It leads a session of its own.

    `receive` is called with each event. The last call, made once, is a `Failed` that says how the process ended.
    """

    _transport: asyncio.Transport
    _process: _Process
    _reaper: asyncio.Task[None]

    def __init__(
        self, log_path: Path, receive: Callable[[Event], None], log_start: int | None = None
    ) -> None:
        self._log_path = log_path
        self._log_start = log_bytes(log_path) if log_start is None else log_start
        self._receive = receive
        self._deframer = Deframer()
        self._disconnected = asyncio.Event()
        self._killed = self._released = False
        self._sent_garbage = False
        self.has_ended = False  # and all that it said is known
        self._is_read = asyncio.Event()  # what was sent, but for some kilobytes
        self._is_read.set()

    @classmethod
    async def spawn(
        cls,
        command: Sequence[str],
        environment: Mapping[str, str],
        log_path: Path,
        receive: Callable[[Event], None],
    ) -> EngineProcess:
        """Starts `command` with its socket's file descriptor as last argument, and with `environment` added to this
        process's, or takes the process that was launched so. Its output goes to `log_path`. Raises OSError if it cannot
        be started."""
        environment = {**worker_environment(), **environment}
        if launched := take_launched(command, environment):
            self = cls(log_path, receive, launched.log_start)
            await self._connect(launched.client_end)
            self._follow(_Process(launched.pid, launched.wait))
            return self
        client_end, worker_end = socket.socketpair()
        with worker_end, open_log(log_path) as log:
            self = cls(log_path, receive)
            await self._connect(client_end)
            try:
                child = start_child(command, environment, worker_end, log)
            except BaseException:
                self._transport.abort()
                raise
        self._follow(_Process(child.pid, child.wait))
        return self

    @classmethod
    async def adopt(
        cls,
        pid: int,
        client_end: socket.socket,
        unread: bytes,
        log_path: Path,
        receive: Callable[[Event], None],
    ) -> EngineProcess:
        """A process that another client of it has started and `release`d. Raises OSError."""
        self = cls(log_path, receive)
        await self._connect(client_end)
        self._follow(_Process(pid, lambda: _wait_for_stranger(pid)))
        self.data_received(unread)
        return self

    async def _connect(self, client_end: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.create_unix_connection(lambda: self, sock=client_end)

    def _follow(self, process: _Process) -> None:
        self._process = process
        self._reaper = asyncio.create_task(self._reap())

    def release(self) -> tuple[socket.socket, bytes] | None:
        """Lets go of the process, which lives on: the client's end of its socket, and the beginning of a frame that was
        read from it. None if it may not be alive, or has not been told all."""
        if not self.alive or self._transport.get_write_buffer_size():
            return None
        self._transport.pause_reading()
        sock: socket.socket = self._transport.get_extra_info("socket")
        released = socket.socket(fileno=os.dup(sock.fileno()))
        self._killed = self._released = True
        self._reaper.cancel()
        self._transport.abort()
        return released, self._deframer.incomplete

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the process may still answer."""
        return not self._killed and not self._disconnected.is_set() and self._process.returncode is None

    def send(self, frame: bytes) -> None:
        if self.alive:
            self._transport.write(frame)

    async def read(self) -> None:
        """Returns when the process has read what was sent, but for some kilobytes, or is gone."""
        await self._is_read.wait()

    def kill(self) -> None:
        """Kills the process at once, and its children soon after. Events that it has sent are ignored."""
        self._killed = True
        self._kill_leader()
        self._transport.abort()

    async def wait_ended(self) -> None:
        """Returns when the process has ended and its children have been sent SIGTERM."""
        await asyncio.shield(self._reaper)

    async def close(self) -> None:
        """Asks the process to end, then terminates it, then kills it."""
        self.send(pack(Shutdown()))
        try:
            if await self._ended_within(SHUTDOWN_GRACE_S):
                return
            self._terminate_group()
            if await self._ended_within(TERMINATE_GRACE_S):
                return
            self.kill()
            await self.wait_ended()
        except asyncio.CancelledError:
            self.kill()
            raise

    async def _ended_within(self, seconds: float) -> bool:
        return bool((await asyncio.wait((self._reaper,), timeout=seconds))[0])

    def data_received(self, data: bytes) -> None:
        if self._killed:
            return
        try:
            for payload in self._deframer.feed(data):
                if not self._killed:
                    self._receive(event_decoder.decode(payload))
        except (FrameError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            self._sent_garbage = True
            self.kill()

    def pause_writing(self) -> None:
        self._is_read.clear()

    def resume_writing(self) -> None:
        self._is_read.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disconnected.set()
        self._is_read.set()

    async def _reap(self) -> None:
        """Waits for the end of the process, reads its last events, and ends its children."""
        exited = asyncio.create_task(self._process.wait())
        disconnected = asyncio.create_task(self._disconnected.wait())
        try:
            await asyncio.wait((exited, disconnected), return_when=asyncio.FIRST_COMPLETED)
            # Each follows from the other, unless the process closes its socket and lives, or a child holds the socket.
            # On a busy machine, a process that ends may take longer from closing its socket to being gone.
            await asyncio.wait((exited, disconnected), timeout=0.2 if exited.done() else SHUTDOWN_GRACE_S)
            self._kill_leader()
            # A process that waits in a driver or for a disk ends when that comes back, if ever.
            await asyncio.wait((exited,), timeout=UNKILLABLE_S)
            await asyncio.wait((disconnected,), timeout=0.2)
        finally:  # also if the event loop ends before `close`
            self._kill_leader()
            self._terminate_group()
            exited.cancel()
            disconnected.cancel()
            self._transport.abort()
        event = self._exit_event()
        self.has_ended = True
        trim_log(self._log_path)
        self._receive(event)

    def _kill_leader(self) -> None:
        if not self._released:
            self._process.kill()

    def _terminate_group(self) -> None:
        """Ends the process and its children by SIGTERM. multiprocessing's resource tracker ignores that signal, and
        then removes the semaphores that the others shared; SIGKILL would end it too."""
        if not self._released:
            signal_group(self.pid, signal.SIGTERM)

    def _exit_event(self) -> Failed:
        code = self._process.returncode
        if self._sent_garbage:
            message = "The engine process sent something that is not an event."
        elif not self._process.is_over:
            message = (
                "The engine process was killed, but the system holds it: a driver or a disk does not answer."
            )
        elif code is None:
            message = "The engine process, which an earlier run had started, has ended."
        elif code < 0:
            message = f"The engine process died ({how_it_ended(code)})."
        else:
            reason = last_error(self._log_path, self._log_start)
            message = f"The engine process ended by itself ({how_it_ended(code)}{reason and f': {reason}'})."
        hint = f"{LOG_IS} {self._log_path}"
        if code == -signal.SIGBUS:  # the mapped model file has become shorter
            hint = f"The model file was cut short or replaced while it was read. {hint}"
        elif code == -signal.SIGKILL and not self._killed:
            hint = f"If memory ran out, a smaller model or context may help. {hint}"
        return Failed(kind="backend", message=message, hint=hint)


class _Process:
    """A process by its id. `wait` is called in a thread; it returns when the process has ended, with its exit status,
    or None if that is not known."""

    def __init__(self, pid: int, wait: Callable[[], int | None]) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.is_over = False
        self._ended, self._loop = asyncio.Event(), asyncio.get_running_loop()
        threading.Thread(target=self._wait, args=(wait,), name="reaper", daemon=True).start()

    async def wait(self) -> None:
        await self._ended.wait()

    def kill(self) -> None:
        """Kills it, unless it has ended."""
        if not self.is_over:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, signal.SIGKILL)

    def _wait(self, wait: Callable[[], int | None]) -> None:
        self.returncode, self.is_over = wait(), True
        with contextlib.suppress(RuntimeError):  # the event loop has ended
            self._loop.call_soon_threadsafe(self._ended.set)


def _wait_for_stranger(pid: int) -> None:
    """Returns when a process that is no child of this one has ended."""
    with contextlib.suppress(ProcessLookupError):
        fd = os.pidfd_open(pid)
        try:
            select.select([fd], [], [])
        finally:
            os.close(fd)
