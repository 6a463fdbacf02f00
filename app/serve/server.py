"""Runs the server: the socket, the start of the engine beside it, and an orderly end."""

import asyncio
import errno
import gc
import logging
import resource
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import uvicorn
from starlette.types import ASGIApp

from app.cli.left_threads import leave_threads
from app.cli.signals import run_until_signal
from app.serve.connection import MOST_CONNECTIONS, Connection
from app.serve.model_pool import ModelPool
from app.serve.service import Service
from engine.errors import UsageError
from engine.protocol.client import Engine, leave
from engine.protocol.events import Event, Failed, Ready
from engine.system.heap import keep_small

DRAIN_S = 5.0  # for answers in progress, after the first signal
_ENDING_S = 5  # for the last words of those that are ended then
_BACKLOG = 2048
_IDLE_CONNECTION_S = 75
"""Clients and proxies keep idle connections for 5 to 60 s. If the server closed one first, it would now and then do so
while a request is on its way."""
UNREAD_S = 60.0
"""A client that takes nothing of its answer for so long is gone: it would keep a place that others wait for."""
SWITCH_S = 5e-4
"""After so long a thread that works at a long request lets the loop run, and so each time that the loop waited."""


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens there. Raises UsageError if that cannot be."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, protocol)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux; accepted sockets inherit it
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(UNREAD_S * 1e3))
        try:
            sock.bind(address)
            sock.listen(_BACKLOG)
        except OSError:
            sock.close()
            raise
    except (OSError, UnicodeError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(
            f"The server cannot listen on {host} port {port}: {reason}.", "Choose another --host or --port."
        ) from None
    return sock


class Server:
    """One run of the server. `show` gets the events of the engine's start. `pool` has the models beside that of
    `service`, if there are any."""

    def __init__(
        self,
        service: Service,
        engine: Engine,
        app: ASGIApp,
        sock: socket.socket,
        show: Callable[[Event], object],
        pool: ModelPool | None = None,
    ) -> None:
        self._service, self._engine, self._show, self._sock = service, engine, show, sock
        self._pool = pool or ModelPool(service)
        config = uvicorn.Config(
            app,
            http=Connection,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            proxy_headers=False,  # or a client could give itself any address
            timeout_keep_alive=_IDLE_CONNECTION_S,
            timeout_graceful_shutdown=round(DRAIN_S) + _ENDING_S,
        )
        # It warns of clients that go while several tokens are sent to them: nobody has to do anything about that.
        logging.getLogger("asyncio").setLevel(logging.ERROR)
        logging.getLogger("asyncio").addFilter(_is_no_lack_of_files)
        # This one warns of each client that sends nonsense.
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
        self._http = _HttpServer(config)
        self._loading: asyncio.Task[int] | None = None

    async def run(self) -> int:
        """Serves until SIGINT or SIGTERM, and returns the exit code: that of the failure if the engine does not start.

        The first signal lets answers end for DRAIN_S; then, or at the second signal, they are ended."""
        leave_threads()
        Connection.most = _connections()
        keep_small()
        gc.freeze()  # what is there stays: garbage collections look at what requests make, and so come in time
        sys.setswitchinterval(SWITCH_S)
        try:
            return await run_until_signal(self._serve(), signal.SIGINT, signal.SIGTERM, stop=self._stop)
        finally:
            for service in self._pool.known:
                await leave(self._engine if service is self._service else service.engine)

    async def _serve(self) -> int:
        self._loading = asyncio.create_task(self._load())
        serving = asyncio.create_task(self._http.serve(sockets=[self._sock]))
        unloading = asyncio.create_task(self._pool.unload_idle())
        try:
            with suppress(asyncio.CancelledError):
                if code := await self._loading:
                    self._service.stopping = self._http.should_exit = True  # or a request would load it again
                    await serving
                    return code
            await serving
            return 0
        finally:
            unloading.cancel()

    async def _load(self) -> int:
        async for event in self._engine.start():
            if isinstance(event, Ready):
                self._service.ready, self._service.parallel = event, event.parallel
            self._show(event)
            if isinstance(event, Failed):
                return event.exit_code
        return 0

    async def _stop(self) -> None:
        is_first, services = not self._service.stopping, self._pool.known
        for service in services:
            service.stopping = True
        self._http.should_exit = True
        if self._loading:
            self._loading.cancel()
        end = asyncio.get_running_loop().time() + (DRAIN_S if is_first else 0)
        while any(service.open for service in services) and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(0.05)
        await asyncio.gather(
            self._engine.stop(), *(s.engine.stop() for s in services if s is not self._service)
        )


def _connections() -> int:
    """How many connections there may be. Raises the limit of open files, commonly 1,024, so that they do not use them
    up; where the system allows no more, there are fewer."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * MOST_CONNECTIONS if hard == resource.RLIM_INFINITY else min(2 * MOST_CONNECTIONS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return MOST_CONNECTIONS if soft == resource.RLIM_INFINITY else min(MOST_CONNECTIONS, soft // 2)


def _is_no_lack_of_files(record: logging.LogRecord) -> bool:
    """asyncio tells each second, with a traceback, that connections wait for the end of others."""
    error = record.exc_info[1] if record.exc_info else None
    return not (isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE))


class _HttpServer(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals to `Server.run`."""
        yield
