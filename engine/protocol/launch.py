"""Starts engine processes: also one before there is a client for it, since the process imports what it needs while this
one does. That one is forked where it can be: it has what this one has imported so far, and Python itself."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import IO, NamedTuple

from engine.system.child_process import module_command, module_environment
from engine.system.forked_module import fork_module, may_fork
from engine.system.logs import log_bytes, log_path, open_log

_MODULE = "engine.protocol.worker"
_NAME = "orin-chat engine"
WORKER = module_command(_MODULE)
ENGINE_LOG = "engine"


class Launched(NamedTuple):
    """An engine process that waits for its client: how it was started, and the client's end of its socket."""

    command: Sequence[str]
    environment: Mapping[str, str]
    pid: int
    wait: Callable[[], int]
    """Returns when it has ended, with its exit status."""
    client_end: socket.socket
    log_start: int
    """How long the log was when it started, in bytes."""


_launched: list[Launched] = []


def worker_environment() -> dict[str, str]:
    """The environment of engine processes. They have no threads of numpy's BLAS, which wait by spinning, unless the
    user's variables say so: the engine has threads of its own."""
    return {"OPENBLAS_NUM_THREADS": "1", **module_environment()}


def launch() -> None:
    """Starts the process of the engine that is going to be needed. If nobody takes it, it ends with this process."""
    path = log_path(ENGINE_LOG)
    environment, log_start = worker_environment(), log_bytes(path)
    client_end, worker_end = socket.socketpair()
    # What fails here fails again when the engine is needed, and is reported then.
    with suppress(OSError), worker_end, open_log(path) as log:
        if may_fork():
            pid, wait = fork_module(_NAME, _MODULE, environment, worker_end.fileno(), log.fileno())
        else:
            child = start_child(WORKER, environment, worker_end, log)
            pid, wait = child.pid, child.wait
        _launched.append(Launched(WORKER, environment, pid, wait, client_end, log_start))


def take_launched(command: Sequence[str], environment: Mapping[str, str]) -> Launched | None:
    """The process that was launched, if it was started with this command and environment. Another one ends."""
    if _launched and (_launched[0].command, _launched[0].environment) == (command, environment):
        return _launched.pop()
    end_launched()
    return None


def end_launched() -> None:
    """Ends the process that was launched, if nobody took it."""
    while _launched:
        launched = _launched.pop()
        launched.client_end.close()
        with suppress(ProcessLookupError):
            os.kill(launched.pid, signal.SIGKILL)
        launched.wait()


def start_child(
    command: Sequence[str], environment: Mapping[str, str], worker_end: socket.socket, log: IO[bytes]
) -> subprocess.Popen[bytes]:
    """Starts `command` with the file descriptor of `worker_end` as last argument, as the leader of a session. Raises
    OSError."""
    return subprocess.Popen(
        [*command, str(worker_end.fileno())],
        pass_fds=(worker_end.fileno(),),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
        env=environment,
    )
