"""The engine process: it gets commands from its client, answers with events, and ends when its client does.

The main thread loads the model and generates. One thread reads commands, so that a `Cancel` arrives in the middle of an
answer; another sends the events. Others make tokens of prompts, so that this delays no other answer.

The process may be killed at any moment. If the search for faster kernels meets a candidate that breaks the device, the
process replaces itself (`restart`), and the client does not notice.
"""

from __future__ import annotations

import atexit
import contextlib
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
from collections import deque
from collections.abc import Callable, Generator, Iterator
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Never

from msgspec.structs import replace

from engine.cache.start_trial import start_trials
from engine.devices import driver_watch
from engine.errors import DeviceHangsError, OrinError, PreemptedError, print_without_messages
from engine.measure.timeline import timeline
from engine.protocol.client_turns import PromptMakers
from engine.protocol.events import (
    EngineOptions,
    Event,
    Failed,
    Finished,
    Generate,
    Load,
    Measure,
    Profile,
    Request,
    Token,
    Tune,
    Tuned,
)
from engine.protocol.inbox import Begun, Inbox
from engine.protocol.outbox import Outbox, die
from engine.protocol.served_model import Model, Report
from engine.protocol.transport import read_all
from engine.system.child_process import end_children
from engine.system.heap import keep_small

if TYPE_CHECKING:
    from engine.runtime.answer import Answer

MAX_RESTARTS = 8
SWITCH_S = 5e-4
"""After so long a thread lets others run: a step waits for it several times while a long prompt is made."""
_RESTARTED = "ORIN_CHAT_RESTARTED"  # how often, and the file descriptor with the commands so far
_GRACE_S = 1.0  # a request that is about to come shall not wait for what prepares later ones
_END = object()  # of pictures

Loader = Callable[[EngineOptions, Report], Model]
_server: _Server | None = None


def serve(sock: socket.socket, load: Loader) -> None:
    """Serves the client at the other end of `sock` until it sends `Shutdown` or the model does not load.

    Takes over the process: it ignores Ctrl-C, and when the client has ended, it kills itself and its children. `load`
    reports `Loading` and `Warming`.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()
    sys.setswitchinterval(SWITCH_S)
    keep_small()
    # Registered first, so it runs last: the interpreter would take long to unload all modules.
    atexit.register(os._exit, 0)
    sock.set_inheritable(False)  # or a compiler process would keep the socket open after this one died
    global _server
    _server = _Server(sock)
    driver_watch.watch(_server.driver_hangs)
    _server.run(load)


def restart() -> Never:
    """Replaces this process by a new one that gets the same commands from the start. It keeps the process id and the
    client's socket. Any thread may call this while a model loads. Ends the process if it happened too often."""
    if _server is None:
        die()
    _server.restart()


class _Server:
    def __init__(self, sock: socket.socket) -> None:
        self._sock, self._load_ms = sock, 0.0
        self._later: deque[Measure | Profile | Tune] = deque()  # what waits until nothing else is to be done
        self._prompts: PromptMakers | None = None  # of the model
        self._beginning = 0  # requests whose prompts these have
        self._suspect: Exception | None = None  # what failed, perhaps the device
        self._restarting = threading.Lock()
        self._restarts, commands_fd = map(int, os.environ.pop(_RESTARTED, "0 -1").split())
        self._outbox = Outbox(sock)
        self._inbox = Inbox(sock, read_all(commands_fd))

    def restart(self) -> Never:
        self._restarting.acquire()  # never released: other threads that want a restart wait for this one
        if self._restarts == MAX_RESTARTS or self._inbox.interruptible:
            die()
        for child in multiprocessing.active_children():
            child.kill()
        end_children()
        self._outbox.close()
        commands_fd = os.memfd_create("commands", 0)
        os.write(commands_fd, self._inbox.close())
        os.environ[_RESTARTED] = f"{self._restarts + 1} {commands_fd}"
        self._sock.set_inheritable(True)
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])

    def driver_hangs(self) -> Never:
        """Ends the process, or begins anew if a result of a search may be the cause. Called beside the main thread,
        which does not come back from the driver."""
        with contextlib.suppress(OSError):  # the disk is full
            faulthandler.dump_traceback()
        if start_trials.failed() and not self._inbox.interruptible:
            self.restart()
        self._outbox.put(Failed.from_error(DeviceHangsError()))
        self._outbox.close()
        die()

    def run(self, load: Loader) -> None:
        model: Model | None = None
        while command := self._inbox.get():
            if isinstance(command, Load):
                model = self._load(command.options, load)
            elif model:
                self._take(model, command)
            if not model or not self._work(model):
                break
            if not self._later:
                self._inbox.wait_for_request(_GRACE_S)
            if not self._warm_up(model):
                break
            self._measure_later(model)
            if self._suspect and not self._work(model):
                break
        while model and model.scheduler.busy:  # all are cancelled
            model.scheduler.step()
        self._outbox.close()

    def _take(self, model: Model, command: Request | Begun) -> None:
        """Begins with a request, or lets it wait until others are answered."""
        if isinstance(command, Begun):
            self._beginning -= 1
            self._add(model, command)
        elif isinstance(command, Generate):
            self._beginning += 1
            self._prompts = self._prompts or PromptMakers(lambda request: self._begin(model, request))
            self._prompts.put(command, self._inbox.known(command.request_id).n_bytes)
        else:
            self._later.append(command)

    def _work(self, model: Model) -> bool:
        """Works until there is a command or nothing to do. False if the engine has failed."""
        try:
            self._check_device(model)
            while model.scheduler.busy and not self._inbox.has_request():
                model.scheduler.step()
                self._check_device(model)
        except Exception as error:
            self._report_failure(error)
            return False
        return True

    def _check_device(self, model: Model) -> None:
        """Raises if the device works no longer. Some of a driver's errors end all of a process's work on it."""
        suspect, self._suspect = self._suspect, None
        if isinstance(suspect, OrinError):
            raise suspect
        if suspect:
            model.check_device()

    def _ends_engine(self, error: Exception) -> bool:
        """Whether what failed ends the engine, which is then what all its clients are told."""
        ends = isinstance(error, OrinError) and error.ends_engine
        if ends or not isinstance(error, OrinError):
            self._suspect = error
        return ends

    def _begin(self, model: Model, request: Generate) -> Iterator[bool]:
        """Makes an answer of a request, in a thread for prompts. Gives way after each of its pictures, and before one
        that takes long, with True."""
        is_cancelled = self._inbox.known(request.request_id).stop.is_set
        begun = yield from self._begun(model, request, is_cancelled)
        self._inbox.put(Begun(request.request_id, begun))

    def _begun(
        self, model: Model, request: Generate, is_cancelled: Callable[[], bool]
    ) -> Generator[bool, None, Answer | Exception | None]:
        started = time.perf_counter()
        pictures = list[object]()  # the model remembers those that are in use
        reading = model.read_pictures(request)
        try:
            while not is_cancelled():
                if (picture := next(reading, _END)) is _END:
                    return model.begin(request, self._reporter(started))
                pictures.append(picture)
                yield picture is None
        except Exception as error:
            # A variable with the error would keep it, and with its frames the prompt, until garbage is collected.
            return error
        return None

    def _add(self, model: Model, begun: Begun) -> None:
        def end(result: Finished | Exception) -> None:
            if isinstance(result, Finished):
                self._end(replace(result, load_ms=self._load_ms), begun.request_id)
            elif not self._ends_engine(result):
                self._end(_failure(result, begun.request_id), begun.request_id)

        if begun.answer is None:
            end(_cancelled(begun.request_id))
        elif isinstance(begun.answer, Exception):
            end(begun.answer)
        else:
            known = self._inbox.known(begun.request_id)
            model.scheduler.add(begun.answer, known.stop.is_set, end, known.came_s)

    def _load(self, options: EngineOptions, load: Loader) -> Model | None:
        started = time.perf_counter()
        try:
            with start_trials.start(self.restart):
                model = load(options, self._outbox.put)
        except Exception as error:
            self._report_failure(error)
            return None
        gc.freeze()  # later garbage collections, in the middle of an answer, skip these objects
        gc.enable()
        self._load_ms = (time.perf_counter() - started) * 1e3
        self._inbox.interruptible = True
        self._outbox.put(replace(model.ready, load_ms=self._load_ms, start=timeline.spans))
        return model

    def _warm_up(self, model: Model) -> bool:
        try:
            model.warm_up(self._has_request)
        except Exception as error:
            self._report_failure(error)
            return False
        return True

    def _has_request(self) -> bool:
        """Whether there is a request. Searches that were cancelled before they began end: what is prepared meanwhile
        may take a minute."""
        waiting = [request for request in self._later if isinstance(request, Tune)]
        for request in waiting:
            if self._inbox.known(request.request_id).stop.is_set():
                self._later.remove(request)
                end = Tuned(request_id=request.request_id, before_us=0.0, after_us=0.0, left=1)
                self._end(end, request.request_id)
        return self._inbox.has_request()

    def _report_failure(self, error: Exception) -> None:
        """Reports why the engine ends. The log comes first, because the client kills the process after `Failed`."""
        with contextlib.suppress(OSError):  # the disk is full
            traceback.print_exception(error)
        self._outbox.put(Failed.from_error(error))

    def _measure_later(self, model: Model) -> None:
        """Measures what was asked for, unless there are requests: answers come first, and so do preparations for them,
        or what is measured would wait for a compiler."""
        while self._later and not (self._beginning or model.scheduler.busy or self._inbox.has_request()):
            self._measure(model, self._later.popleft())

    def _measure(self, model: Model, request: Measure | Profile | Tune) -> None:
        end: Event
        try:
            if isinstance(request, Measure):
                end = model.measure(request)
            elif isinstance(request, Tune):
                stop = self._inbox.known(request.request_id).stop
                end = model.tune(request, lambda: stop.is_set() or self._inbox.has_request())
            else:
                end = model.profile(request, self._inbox.has_request)
        except Exception as error:
            if self._ends_engine(error):
                return
            end = _failure(error, request.request_id)
        self._end(end, request.request_id)

    def _reporter(self, started: float) -> Report:
        """Sends the events of a request that the engine began with at `started`."""

        def report(event: Event) -> None:
            if isinstance(event, Token):
                event = replace(event, at_ms=(time.perf_counter() - started) * 1e3)
            self._outbox.put(event)

        return report

    def _end(self, event: Event, request_id: int) -> None:
        """Sends the last event of a request."""
        self._inbox.forget(request_id)
        self._outbox.put(event)


def _cancelled(request_id: int) -> Finished:
    """The end of a request that was cancelled before its prompt was made."""
    return Finished(
        request_id=request_id,
        reason="cancelled",
        prompt_n=0,
        cached_n=0,
        prompt_ms=0.0,
        predicted_n=0,
        predicted_ms=0.0,
        load_ms=0.0,
        seed=0,
    )


def _failure(error: Exception, request_id: int) -> Failed:
    """The end of a request that failed, which the log tells too."""
    if not isinstance(error, PreemptedError):
        print_without_messages(error)
    return Failed.from_error(error, request_id)


_NEEDED = "engine.model.pending_encoder"  # with numpy and all that reads files
_KERNELS = "engine.targets.nvidia.weights"  # compilers build them


def _load_text_model(options: EngineOptions, report: Report) -> Model:
    from engine.backends import ask_driver, install, no_device_error, open_device, prepare, unusable_cuda
    from engine.formats.templates import template_renderer
    from engine.formats.tokens.merging import MergingProcess
    from engine.kernels import compiler_server

    timeline.until_now("process")
    asked = ask_driver(options)
    merge = MergingProcess(options.model_path)
    template_renderer.start_ahead()
    with timeline.span("device"):
        dev = prepare(options, asked is not None)  # sets the variables that tinygrad reads at import
        is_known = compiler_server.begin(options, [] if dev.startswith("CPU") else [_KERNELS])
        install(dev)
    if asked and (why := asked()):
        if options.backend.upper() == "CUDA":
            raise unusable_cuda(why)
        os.environ["DEV"] = "CPU"  # tinygrad and its fixes are there for CUDA: another process takes over
        restart()
    opening = open_device(dev)
    with timeline.span("imports"):
        from engine.model.pending_encoder import PendingEncoder

        prompts = PendingEncoder(options.model_path, merge)
        from engine.cache import candidate_trial
        from engine.model.open_runner import import_runner
        from engine.model.text_model import TextModel

        import_runner(dev)  # while the driver opens the device

    candidate_trial.restart = restart
    prompts.file()
    try:
        opening()
        model: Model = TextModel(options, report, prompts)
    except ExceptionGroup as failures:  # one for each of the interfaces through which tinygrad tries a device
        raise no_device_error(dev, failures) from failures
    if not is_known:
        compiler_server.remember(options)
    return model


def main() -> None:
    """`python -m engine.protocol.worker FD`: FD is the descriptor of this process's end of the socket pair."""
    gc.disable()  # what a start makes stays alive; garbage collection would take a tenth of the time
    try:
        Path.cwd()  # for which the processes that compile ask, too
    except FileNotFoundError:  # it was deleted
        os.chdir("/")
    # Until the command to load comes: what every model needs. Not tinygrad, which reads options when it is imported.
    threading.Thread(target=import_module, args=(_NEEDED,), daemon=True, name="imports").start()
    serve(socket.socket(fileno=int(sys.argv[-1])), _load_text_model)


if __name__ == "__main__":
    main()
