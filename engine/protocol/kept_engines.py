"""Engines that stay warm after their client has ended, for the next one: how they are kept, found and ended.

Each is held by a process of its own (`engine.protocol.keeper`), which listens on a Unix socket in a folder that only
the user can open. The socket's name is a digest of all that the engine follows from: its options, the state of the
model's files, the program's source, and the environment. So a client finds only an engine that it would have started
itself.
"""

import contextlib
import hashlib
import os
import socket
import struct
import subprocess
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
import platformdirs

from engine.protocol.events import EngineOptions, Ready
from engine.protocol.keeper import LENGTH_BYTES, STOP, TAKE, has_ended
from engine.system.child_process import module_command, module_environment

_ANSWER_S = 2.0
_MAX_CONTENT_BYTES = 64 << 20
_PEER = struct.Struct("3i")  # process, user, group (unix(7))
# Variables that decide which device an engine takes, how it computes, and where its files are.
_VARIABLES = (
    "DEV", "CC", "PARALLEL", "JIT_BATCH_SIZE", "ALLOW_HALF8", "NOOPT", "CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH",
    "PYTHONPATH", "HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME", "XDG_DATA_HOME",
)  # fmt: skip


class Kept(msgspec.Struct, frozen=True):
    """What the next client of an engine is to know. `unread`: the beginning of a frame that it has sent."""

    pid: int
    ready: Ready
    unread: bytes = b""


def name_of(options: EngineOptions, environment: Mapping[str, str]) -> str:
    """The name of an engine with these options; "" if a file of its model cannot be looked at."""
    variables = {name: os.environ.get(name) for name in _VARIABLES} | dict(environment)
    digest = hashlib.sha256(msgspec.json.encode([options, sorted(variables.items())]))
    try:
        sources = sorted(Path(__file__).parents[1].rglob("*.py"))  # of the engine
        adapters = [name.rpartition(":")[0] for name in options.lora.split(",")]
        named = filter(None, (options.model_path, options.mmproj, options.draft, *adapters))
        for path in [*(Path(name).resolve() for name in named), *sources]:
            state = path.stat()
            digest.update(f"{path} {state.st_size} {state.st_mtime_ns} {state.st_ino}\n".encode())
    except OSError:
        return ""
    return digest.hexdigest()[:32]


def are_any() -> bool:
    """Whether any engine may be kept."""
    return next(_paths(), None) is not None


def take(name: str) -> tuple[Kept, socket.socket] | None:
    """The engine that is kept under this name, which is the caller's from now on, and the client's end of its socket.
    None if there is none."""
    folder = _folder()
    if not folder or not name or not (connection := _connect(folder / name)):
        return None
    with connection, contextlib.suppress(OSError, msgspec.MsgspecError, ValueError):
        connection.sendall(TAKE)
        length, fds, _, _ = socket.recv_fds(connection, LENGTH_BYTES, 1)
        if not fds:
            return None
        sock = socket.socket(fileno=fds[0])
        try:
            content = _receive(connection, int.from_bytes(length, "little"))
            if has_ended(sock):
                raise ValueError("it has ended")
            return msgspec.msgpack.decode(content, type=Kept), sock
        except BaseException:
            sock.close()  # so the engine ends
            raise
    return None


def keep(name: str, sock: socket.socket, kept: Kept, seconds: float) -> bool:
    """Keeps an engine for so many seconds. False if it cannot be kept; then it is still the caller's."""
    folder = _folder()
    if not folder or not name:
        return False
    with (
        contextlib.suppress(OSError),
        socket.socket(socket.AF_UNIX) as listening,
        tempfile.TemporaryFile() as content,
    ):
        path = folder / name
        if connection := _connect(path):  # another one of the kind
            connection.close()
            return False
        path.unlink(missing_ok=True)
        listening.bind(str(path))
        listening.listen()
        content.write(msgspec.msgpack.encode(kept))
        content.seek(0)
        fds = sock.fileno(), listening.fileno()
        subprocess.Popen(
            module_command("engine.protocol.keeper", *map(str, fds), str(seconds)),
            pass_fds=fds,
            stdin=content,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env=module_environment(),
            cwd="/",
        )
        return True
    return False


def stop(other_than: str = "") -> int:
    """Ends all kept engines, but for one name. Returns how many there were."""
    stopped = 0
    for path in _paths():
        if path.name == other_than:
            continue
        if connection := _connect(path):
            with connection, contextlib.suppress(OSError):
                connection.sendall(STOP)
                connection.recv(1)  # b"" when it is done
                stopped += 1
        else:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
    return stopped


def _paths() -> Iterator[Path]:
    folder = _folder()
    if folder:
        yield from sorted(folder.iterdir())


def _connect(path: Path) -> socket.socket | None:
    """A connection to a process of the user's own. Who may change the folder above ours can put another socket there,
    also after `_folder` has looked."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(_ANSWER_S)
        connection.connect(str(path))
        if hasattr(socket, "SO_PEERCRED"):  # Linux
            peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
            _, user, _ = _PEER.unpack(peer)
            if user != os.getuid():
                raise PermissionError(path)
    except OSError:
        connection.close()
        return None
    return connection


def _receive(connection: socket.socket, n_bytes: int) -> bytes:
    """Raises ValueError if there are more than are allowed, or fewer than announced."""
    if n_bytes > _MAX_CONTENT_BYTES:
        raise ValueError("too long")
    with connection.makefile("rb") as file:
        content = file.read(n_bytes)
    if len(content) < n_bytes:
        raise ValueError("too short")
    return content


def _folder() -> Path | None:
    """The folder of the sockets, which is made if it is not there; None if others could open it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it takes a folder in /tmp, which is as good
        folder = platformdirs.user_runtime_path("orin-chat", appauthor=False) / "warm"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        state = folder.lstat()
    except OSError:
        return None
    return folder if state.st_uid == os.getuid() and not state.st_mode & 0o077 else None
