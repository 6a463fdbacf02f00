"""A clang that compiles several sources, one after the other. The start of one takes 25 ms of CPU time, where a kernel
of a CPU takes 50 to compile.

Beside the source that its command reads from the standard input, it is told to read others, each from a pipe of its
own, and it writes all objects to its standard output. So it waits for the next source when it has written an object,
and ends when its last source is compiled, or when this process does. What it does not make of a source, for whatever
reason, is left to a clang that compiles this source alone.
"""

from __future__ import annotations

import os
import select
import struct
import subprocess
import threading
from collections.abc import Sequence

SOURCES = 16  # of a clang: as many as a compiler process makes kernels
LIMIT_S = 60
"""Of a source. The largest takes some seconds, on a slow and busy CPU too. Time in which this process was stopped does
not count."""
SECOND_S = 1.0
_MOST_BYTES = 1 << 20

_keeps = False
_kept: dict[tuple[str, ...], KeptClang] = {}  # by their commands
_unfit: set[tuple[str, ...]] = set()  # commands of which one has failed
_lock = threading.Lock()


def keep() -> None:
    """From now on, a clang is kept for the next source."""
    global _keeps
    _keeps = True


def end() -> None:
    """Ends those that are kept. From now on, each source has its own."""
    global _keeps
    _keeps = False
    with _lock:
        while _kept:
            _kept.popitem()[1].end()


def compiled(command: Sequence[str], source: bytes) -> bytes | None:
    """The object that a clang makes of a source. `command` reads it from the standard input, and writes to the standard
    output. None if no clang is kept, or the kept one failed: then a clang of its own says why. Raises
    subprocess.TimeoutExpired."""
    key = tuple(command)
    if not _keeps or key in _unfit or not _lock.acquire(blocking=False):
        return None
    clang = made = None
    try:
        clang = _kept.pop(key, None) or KeptClang(command)
        if not (made := clang.compiled(source)):
            _unfit.add(key)
    except OSError:
        _unfit.add(key)
    finally:  # also if a signal has interrupted it, after which its next object would be this one
        if clang and made and clang.has_room:
            _kept[key] = clang
        elif clang:
            clang.end()
        _lock.release()
    return made


def object_bytes(made: bytes) -> int | None:
    """How long the ELF file is that begins so: up to the table of its sections, which compilers write last. None
    without a whole header."""
    if len(made) < 64 or made[:4] != b"\x7fELF":
        return None
    (table,) = struct.unpack_from("<Q", made, 40)
    size, n = struct.unpack_from("<HH", made, 58)
    return table + size * n if table else None


class KeptClang:
    """A process, and the pipes from which it reads its sources."""

    def __init__(self, command: Sequence[str]) -> None:
        """Raises OSError."""
        pipes = [os.pipe() for _ in range(SOURCES - 1)]
        reads = [read for read, _ in pipes]
        others = [word for read in reads for word in ("-Xclang", f"/dev/fd/{read}")]
        self._places = [os.fdopen(write, "wb", 0) for _, write in pipes]
        try:
            self._process = subprocess.Popen(
                [*command, *others],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                pass_fds=reads,
            )
        finally:
            for read in reads:
                os.close(read)
        assert self._process.stdin and self._process.stdout and self._process.stderr
        self._places.append(self._process.stdin)  # type: ignore[arg-type]
        self._made, self._says = self._process.stdout.fileno(), self._process.stderr.fileno()

    @property
    def has_room(self) -> bool:
        return bool(self._places)

    def compiled(self, source: bytes) -> bytes | None:
        """The object; None if it says something or ends. Raises OSError and subprocess.TimeoutExpired."""
        place, left, made = self._places.pop(0), memoryview(source), b""
        os.set_blocking(place.fileno(), False)
        poll = select.poll()
        poll.register(place, select.POLLOUT)
        for reads in self._made, self._says:
            poll.register(reads, select.POLLIN)
        seconds = 0
        while seconds < LIMIT_S:
            ready = {number for number, _ in poll.poll(SECOND_S * 1000)}
            seconds += not ready
            if not place.closed and place.fileno() in ready:
                left = left[os.write(place.fileno(), left) :]
                if not left:
                    poll.unregister(place)
                    place.close()
            if self._made in ready:
                if not (part := os.read(self._made, _MOST_BYTES)):
                    return None
                made += part
                if (size := object_bytes(made)) and size <= len(made):
                    return made
            elif self._says in ready:
                return None
        raise subprocess.TimeoutExpired(self._process.args, LIMIT_S)

    def end(self) -> None:
        self._process.kill()
        self.leave()
        self._process.wait()

    def leave(self) -> None:
        """Closes this process's ends of its pipes. After the last one it ends by itself."""
        for stream in (*self._places, self._process.stdout, self._process.stderr):
            if stream:
                stream.close()


def _forget() -> None:
    """A forked process has none: those that it knows are its parent's."""
    global _lock
    _lock = threading.Lock()
    for clang in _kept.values():
        clang.leave()
        clang._process.returncode = 0
    _kept.clear()


os.register_at_fork(after_in_child=_forget)
