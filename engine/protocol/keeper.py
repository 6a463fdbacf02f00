"""The process that keeps an engine warm between two of its clients: it holds the engine's socket, and no more.

    python -m engine.protocol.keeper ENGINE LISTENING SECONDS

ENGINE and LISTENING are file descriptors: the client's end of the engine's socket pair, and a listening Unix socket.
Standard input holds what the next client is to know. A client that connects sends a word: `TAKE` gets this, with the
socket; `STOP` gets an empty answer. After either, after so many seconds, or when the engine has ended, this process
ends. An engine whose socket nobody holds ends by itself. It imports little, since it stays for minutes.
"""

import contextlib
import select
import socket
import sys
import time
from pathlib import Path

TAKE, STOP = b"take\n", b"stop\n"
LENGTH_BYTES = 4
_ANSWER_S = 1.0  # how long a client may take to send its word


def keep(engine: socket.socket, listening: socket.socket, seconds: float, content: bytes) -> None:
    """Returns when the engine is taken, stopped or dead, or after so many seconds. Its path is removed before."""
    path = listening.getsockname()
    until = time.monotonic() + seconds
    taker: socket.socket | None = None
    word = b""
    while word not in (TAKE, STOP) and (left_s := until - time.monotonic()) > 0:
        readable, _, _ = select.select([engine, listening], [], [], left_s)
        if listening in readable:
            taker, _ = listening.accept()
            taker.settimeout(_ANSWER_S)
            with contextlib.suppress(OSError):
                word = taker.recv(len(TAKE), socket.MSG_WAITALL)
        elif readable and has_ended(engine):
            break
        elif readable:
            time.sleep(0.2)  # it has sent something, which waits for the next client
    with contextlib.suppress(OSError):
        Path(path).unlink()
    if taker and word == TAKE:
        with contextlib.suppress(OSError):
            socket.send_fds(taker, [len(content).to_bytes(LENGTH_BYTES, "little")], [engine.fileno()])
            taker.sendall(content)
    if taker:
        taker.close()


def has_ended(engine: socket.socket) -> bool:
    """Whether the engine has closed its end of the socket."""
    try:
        return not engine.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


if __name__ == "__main__":
    _engine, _listening, _seconds = sys.argv[-3:]
    keep(
        socket.socket(fileno=int(_engine)),
        socket.socket(fileno=int(_listening)),
        float(_seconds),
        sys.stdin.buffer.read(),
    )
