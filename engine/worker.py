"""The engine process: takes commands from its client, answers with events, and ends with its client.

A thread reads commands, so that a `Cancel` is seen in the middle of an answer; the main thread loads the
model and generates, and another thread sends the events. The process may be killed at any instant. A search for
faster kernels that meets one which spoils the device starts it anew (`_Server.restart`), and no one notices.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from importlib import import_module
from queue import SimpleQueue
from typing import Never, Protocol

from msgspec.structs import replace

from engine.errors import PreemptedError
from engine.events import (
    Cancel,
    EngineOptions,
    Event,
    Failed,
    Finished,
    Generate,
    KernelProfile,
    Load,
    Measure,
    Measured,
    Profile,
    Ready,
    Shutdown,
    Token,
    command_decoder,
)
from engine.transport import Deframer, frame, pack

MOST_RESTARTS = 8
_RESTARTED = "ORIN_CHAT_RESTARTED"  # times, and the file that holds the commands so far
_SEND_INTERVAL_S = 0.01

Report = Callable[[Event], None]
Request = Generate | Measure | Profile


class Model(Protocol):
    """What a worker serves. `ready` describes it (the worker fills in `load_ms`)."""

    ready: Ready

    def generate(self, request: Generate, report: Report, cancelled: Callable[[], bool]) -> Finished:
        """Reports `Prefilling`, `Token` and `Thinking` and returns how it ended (the worker fills in
        `load_ms` and sends it). Asks `cancelled` between steps and ends as "cancelled" when it says so. The
        worker adds to each token when it was reported."""
        ...

    def warm_up(self, interrupted: Callable[[], bool]) -> None:
        """Does what makes later answers begin sooner, while there is nothing else to do. Asks `interrupted` again
        and again, and returns where it says so."""
        ...

    def measure(self, request: Measure) -> Measured: ...

    def profile(self, request: Profile, interrupted: Callable[[], bool]) -> KernelProfile:
        """Asks `interrupted` between kernels, and raises PreemptedError where it says so."""
        ...


Loader = Callable[[EngineOptions, Report], Model]
restart: Callable[[], object] = lambda: (
    _die()
)  # starts this process anew while it loads; see `_Server.restart`


def serve(sock: socket.socket, load: Loader) -> None:
    """Serves the client at the other end of `sock` until it says `Shutdown`, or the model does not load.

    Takes over the process: Ctrl-C is ignored, and when the client is gone the process and its children are
    killed. `load` reports `Loading` and `Warming`.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()
    atexit.register(os._exit, 0)  # called last, as the first registered: to take down all modules takes long
    sock.set_inheritable(False)  # or a compiler process would keep the pipe open after this one died
    server = _Server(sock)
    global restart
    restart = server.restart
    server.run(load)


class _Server:
    def __init__(self, sock: socket.socket) -> None:
        self._sock, self._load_ms = sock, 0.0
        self._restarting = threading.Lock()
        times, file = map(int, os.environ.pop(_RESTARTED, "0 -1").split())
        self._restarts = times
        self._outbox = _Outbox(sock)
        self._inbox = _Inbox(sock, _read_all(file))

    def restart(self) -> Never:
        """Replaces this process, whatever it does, by one that gets the same commands from the start: the process
        id stays, and so does the client's end of the socket. May be called by any thread while a model loads. Ends
        the process where that has happened too often."""
        self._restarting.acquire()  # for good
        if self._restarts == MOST_RESTARTS or self._inbox.interruptible:
            _die()
        for child in multiprocessing.active_children():
            child.kill()
        self._outbox.close()
        file = os.memfd_create("commands", 0)
        os.write(file, self._inbox.closed())
        os.environ[_RESTARTED] = f"{self._restarts + 1} {file}"
        self._sock.set_inheritable(True)
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])

    def run(self, load: Loader) -> None:
        model: Model | None = None
        while command := self._inbox.get():
            if not isinstance(command, Load):
                assert model, "Load comes first"
                self._answer(model, command)
            elif not (model := self._load(command.options, load)):
                break
            if not self._warm_up(model):
                break
        self._outbox.close()

    def _load(self, options: EngineOptions, load: Loader) -> Model | None:
        started = time.perf_counter()
        gc.disable()  # what a load makes stays: to look through it again and again takes a tenth of the time
        try:
            model = load(options, self._outbox.put)
        except Exception as error:
            self._outbox.put(Failed.from_error(error))  # first: the log may be on a full disk
            traceback.print_exception(error)
            return None
        gc.freeze()  # nor is it looked through in the middle of an answer
        gc.enable()
        self._load_ms = (time.perf_counter() - started) * 1e3
        self._inbox.interruptible = True
        self._outbox.put(replace(model.ready, load_ms=self._load_ms))
        return model

    def _warm_up(self, model: Model) -> bool:
        try:
            model.warm_up(self._inbox.anything_waits)
        except Exception as error:
            self._outbox.put(Failed.from_error(error))  # first: the log may be on a full disk
            traceback.print_exception(error)
            return False
        return True

    def _answer(self, model: Model, request: Request) -> None:
        end: Event
        try:
            match request:
                case Generate():
                    end = self._generate(model, request)
                case Measure():
                    end = model.measure(request)
                case Profile():
                    end = model.profile(request, self._inbox.anything_waits)
        except PreemptedError as error:
            end = Failed.from_error(error, request.request_id)
        except Exception as error:
            _log_without_messages(error)
            end = Failed.from_error(error, request.request_id)
        self._inbox.forget(request.request_id)
        self._outbox.put(end)

    def _generate(self, model: Model, request: Generate) -> Finished:
        started = time.perf_counter()

        def report(event: Event) -> None:
            if isinstance(event, Token):
                event = replace(event, at_ms=(time.perf_counter() - started) * 1e3)
            self._outbox.put(event)

        end = model.generate(request, report, self._inbox.cancelled(request.request_id))
        return replace(end, load_ms=self._load_ms)


class _Inbox:
    """Commands as they arrive, read by a thread of its own. `interruptible`: the main thread asks whether to
    stop; until then (while it loads) `Shutdown` ends the process on the spot."""

    def __init__(self, sock: socket.socket, before: bytes = b"") -> None:
        self.interruptible = False
        self._sock, self._before = sock, before
        self._deframer = Deframer()
        self._seen: list[bytes] = []  # payloads, while the model loads
        self._reading = threading.Lock()
        self._queue: SimpleQueue[Load | Request | None] = SimpleQueue()
        self._stops: dict[int, threading.Event] = {}
        threading.Thread(target=self._read, name="commands", daemon=True).start()

    def get(self) -> Load | Request | None:
        """The next command; None after `Shutdown`."""
        return self._queue.get()

    def anything_waits(self) -> bool:
        return not self._queue.empty()

    def cancelled(self, request_id: int) -> Callable[[], bool]:
        return self._stops[request_id].is_set

    def forget(self, request_id: int) -> None:
        self._stops.pop(request_id, None)

    def closed(self) -> bytes:
        """All that has arrived so far; from now on nothing is taken from the socket."""
        self._reading.acquire()
        return b"".join(map(frame, self._seen)) + self._deframer.rest

    def _read(self) -> None:
        try:
            data = self._before
            while data or self._sock.recv(1, socket.MSG_PEEK):
                with self._reading:
                    for payload in self._deframer.feed(data or self._sock.recv(1 << 16)):
                        if not self.interruptible:
                            self._seen.append(payload)
                        self._take(payload)
                data = b""
        except Exception as error:  # the client speaks another language
            _log_without_messages(error)
        _die()

    def _take(self, payload: bytes) -> None:
        command = command_decoder.decode(payload)
        if isinstance(command, Cancel):
            if stop := self._stops.get(command.request_id):
                stop.set()
        elif isinstance(command, Shutdown):
            if not self.interruptible:
                _die()
            for stop in list(self._stops.values()):
                stop.set()
            self._queue.put(None)
        else:
            if isinstance(command, Generate):
                self._stops[command.request_id] = threading.Event()
            self._queue.put(command)


class _Outbox:
    """Events on their way out, sent by a thread of its own: waking the client can take the time of a few
    small kernels, and a client that does not read for a while must not hold up the answer. What waits here is
    one answer at most."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._frames: SimpleQueue[bytes] = SimpleQueue()
        self._sender = threading.Thread(target=self._send, name="events", daemon=True)
        self._sender.start()

    def put(self, event: Event) -> None:
        self._frames.put(pack(event))

    def close(self) -> None:
        """Returns when all is sent."""
        self._frames.put(b"")
        self._sender.join()

    def _send(self) -> None:
        closing = False
        while not closing:
            frames = [self._frames.get()]  # after a pause, the first goes at once
            while not self._frames.empty():
                frames.append(self._frames.get())
            closing = not frames[-1]
            try:
                self._sock.sendall(b"".join(frames))
            except OSError:
                _die()
            time.sleep(_SEND_INTERVAL_S)


# --- failures ------------------------------------------------------------------------------------------


def _log_without_messages(error: BaseException | None) -> None:
    """Where each error of the chain was raised and its type. Not its message: that may quote the prompt."""
    while error is not None:
        print(
            "".join(traceback.format_tb(error.__traceback__)), type(error).__name__, file=sys.stderr, sep=""
        )
        error = error.__cause__ or error.__context__


# --- the end -------------------------------------------------------------------------------------------


def _die() -> Never:
    """Ends this process at once, whatever it is doing, with the compilers it started. (Linux can kill a
    process when its parent dies, but that one alone and before this could run: its compilers would work on.)
    """
    if os.getpgrp() == os.getpid():
        os.killpg(
            0, signal.SIGTERM
        )  # which spares a process of multiprocessing that tidies up after the others
    os._exit(1)


def _read_all(file: int) -> bytes:
    """What a file that was handed over holds; nothing for -1."""
    if file < 0:
        return b""
    with os.fdopen(file, "rb") as stream:
        stream.seek(0)
        return stream.read()


def _load_text_model(options: EngineOptions, report: Report) -> Model:
    from engine.backends import install, prepare

    # What takes long to import, and needs no device, while the device's driver starts.
    threading.Thread(target=import_module, args=("engine.formats.prompt",), daemon=True).start()
    install(prepare(options))  # sets the environment that tinygrad reads when it is imported
    from engine import candidate_trial
    from engine.model.generate import TextModel

    candidate_trial.restart = restart
    model: Model = TextModel(options, report)
    return model


def main() -> None:
    """`python -m engine.worker FD`, where FD is this end of the socket pair."""
    serve(socket.socket(fileno=int(sys.argv[-1])), _load_text_model)


if __name__ == "__main__":
    main()
