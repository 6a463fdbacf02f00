"""The engine as the application sees it: the interface of all engines, and the engine that runs tinygrad in a child
process."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

import msgspec
from msgspec.structs import replace

from engine.errors import LOG_IS, start_hint
from engine.protocol.event_stream import AnswerStats, EventStream
from engine.protocol.events import (
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
    Prefilling,
    Profile,
    Ready,
    Request,
    Slots,
    Step,
    Token,
    Tune,
    Tuned,
    command_decoder,
)
from engine.protocol.fairness import address_of
from engine.protocol.launch import ENGINE_LOG, WORKER, end_launched
from engine.protocol.one_at_a_time import OneAtATime
from engine.protocol.process import EngineProcess
from engine.protocol.transport import FrameError, pack
from engine.system.logs import log_path, trim_log

CANCEL_GRACE_S = 0.07  # the time in which the worker may end an answer itself; `Engine.stop` promises 100 ms
LONG_BYTES = 64 << 10  # of a request: such ones are sent one after the other, and short ones between them
DEAF_S = 10.0  # a worker that neither ends a cancelled request nor sends anything for so long hangs, and is replaced


class Engine(Protocol):
    """Answers conversations: tinygrad in a child process, llama-server, or a server elsewhere.

    Expected failures are not raised: both streams end with `Failed` instead. An engine answers one request at a time.
    After a `Failed` without `request_id` (the engine has ended) `start` may be called again.
    """

    name: str

    def start(self) -> AsyncIterator[Event]:
        """`Loading` and `Warming` while it starts, then `Ready` or `Failed` as the last event."""

    def generate(self, request: Generate) -> AsyncIterator[Event]:
        """`Prefilling`, then `Token` and `Thinking`, then `Finished` or `Failed` as the last event."""

    async def stop(self) -> None:
        """Stops the answer in progress: its stream ends with `Finished(reason="cancelled")` within 100 ms."""

    async def close(self) -> None:
        """Ends the engine and its child processes. May be called twice and at any time."""


@runtime_checkable
class Measurable(Protocol):
    """An engine that can measure itself while it is idle."""

    async def measure(self) -> Measured | Failed: ...

    async def profile(self, step: Step = "decode") -> KernelProfile | Failed: ...


@runtime_checkable
class Tunable(Protocol):
    """An engine that can search for faster kernels while it is idle."""

    async def tune(self, seconds: float) -> Tuned | Failed: ...

    def stop_tuning(self) -> None: ...


@runtime_checkable
class Keepable(Protocol):
    """An engine that can outlive the program."""

    async def keep(self) -> bool: ...


class LocalEngine:
    """The tinygrad engine: it computes in a child process, which may die at any moment.

    `generate` starts the process if there is none or it died. Then `Loading`, `Warming` and `Ready` (or the `Failed`
    of the start) come before the events of the answer. Requests made while the engine loads wait, and get the events
    of the load. A request of which a process that was ready has answered nothing when it dies is sent to the next one.
    Closing a stream early cancels its request. An instance belongs to one event loop.
    """

    name = "tinygrad"

    def __init__(
        self,
        options: EngineOptions,
        *,
        environment: Mapping[str, str] = {},
        command: Sequence[str] = WORKER,
        keep_warm_s: float | None = None,
    ) -> None:
        """`environment` is added to this process's for the child. `command` gets the file descriptor of its socket
        as last argument. With `keep_warm_s`, an engine that an earlier run kept warm is taken if it is the same, and
        all others are ended; and `keep` lets it live on for so many seconds, for the next run. The attribute `on_event`
        may be set to a function; it gets every event of the process."""
        self.options = options
        self.on_event: Callable[[Event], object] = lambda _: None
        self._environment = environment
        self._command = command
        self._process: EngineProcess | None = None
        self._ready: Ready | None = None
        self._keep_warm_s = keep_warm_s
        self._taken: Ready | None = None  # of a warm engine, until its clients were told
        self._spawning = asyncio.Lock()
        self._long = OneAtATime()
        self._streams: dict[int, _Stream] = {}
        # A warm engine may still send events for requests of its last client.
        self._serials = itertools.count(1 if keep_warm_s is None else time.monotonic_ns() // 1000)
        self._cancelled: set[int] = set()  # serials of the requests that the process has not ended yet
        self._heard_s = 0.0  # when the process sent its last event (time.monotonic)

    @property
    def pid(self) -> int | None:
        """The process id, while it runs."""
        return self._process.pid if self._process and self._process.alive else None

    @property
    def log_path(self) -> Path:
        """The file with the output of the process: tracebacks, never a prompt."""
        return log_path(ENGINE_LOG)

    def start(self) -> AsyncGenerator[Event, None]:
        return self._events(None)

    def generate(self, request: Generate) -> AsyncGenerator[Event, None]:
        return self._events(request)

    async def measure(self) -> Measured | Failed:
        """Measures what an answer's figures are compared with (see `Measured`). Takes a second."""
        *_, end = [event async for event in self._events(Measure(request_id=0))]
        assert isinstance(end, Measured | Failed)
        return end

    async def profile(self, step: Step = "decode") -> KernelProfile | Failed:
        """Times a step kernel by kernel. `Failed` if a prompt comes meanwhile."""
        *_, end = [event async for event in self._events(Profile(request_id=0, step=step))]
        assert isinstance(end, KernelProfile | Failed)
        return end

    async def tune(self, seconds: float) -> Tuned | Failed:
        """Searches for faster kernels. Ends soon if a prompt comes meanwhile, or after `stop_tuning`."""
        *_, end = [event async for event in self._events(Tune(request_id=0, seconds=seconds))]
        assert isinstance(end, Tuned | Failed)
        return end

    def stop_tuning(self) -> None:
        for stream in self._streams.values():
            if isinstance(stream.request, Tune) and stream.joined and self._process:
                self._process.send(pack(Cancel(request_id=stream.serial)))

    async def stop(self) -> None:
        answers = [stream for stream in self._streams.values() if isinstance(stream.request, Generate)]
        for answer in answers:
            self._cancel(answer)
            if answer.joined:
                asyncio.get_running_loop().call_later(CANCEL_GRACE_S, answer.cut_short)
            else:
                answer.cut_short()
        await asyncio.gather(*(answer.ended.wait() for answer in answers))

    async def close(self) -> None:
        for stream in self._streams.values():
            stream.cut_short()
        async with self._spawning:
            process, self._process, self._ready = self._process, None, None
            if process:
                await process.close()

    async def keep(self) -> bool:
        """Lets go of the engine, and keeps it warm for the next run. False if that was not asked for, or cannot be:
        then it is to be closed."""
        async with self._spawning:
            process, ready = self._process, self._ready
            if not (self._keep_warm_s and process and ready):
                return False
            for stream in self._streams.values():
                self._cancel(stream)
                stream.cut_short()
            from engine.protocol import kept_engines

            pid, name = process.pid, kept_engines.name_of(self.options, self._environment)
            if not (released := process.release()):
                return False
            self._process = self._ready = None
            sock, unread = released
            with sock:  # if it cannot be kept, it ends, since nobody holds its socket
                kept_engines.keep(name, sock, kept_engines.Kept(pid, ready, unread), self._keep_warm_s)
            return True

    # --- streams ---------------------------------------------------------------------------------------

    async def _events(self, request: Request | None) -> AsyncGenerator[Event, None]:
        """The events of a request, or of a start."""
        # Requests get new ids on the socket, so that a late event of an answer that was cut short finds no stream.
        stream = _Stream(next(self._serials), request, self._ready.load_ms if self._ready else 0.0)
        self._streams[stream.serial] = stream
        try:
            frame = _encoded(replace(request, request_id=stream.serial)) if request else b""
            if isinstance(frame, Failed):
                stream.put(frame)
            elif len(frame) > LONG_BYTES:
                stream.joining = asyncio.ensure_future(self._join_in_turn(stream, frame))
            else:
                await self._join(stream, frame)
            del frame  # the answer may take long
            async for event in stream:
                yield event
        finally:
            if stream.joining:
                stream.joining.cancel()
            if not stream.ended.is_set():
                self._cancel(stream)
            del self._streams[stream.serial]
            trim_log(self.log_path)
            if request is None and self._ready is None and not self._streams and self._process:
                self._process.kill()

    async def _join_in_turn(self, stream: _Stream, frame: bytes) -> None:
        """Sends a long request after those before it. The worker reads one request after the other: a short one would
        wait for all that have been sent."""
        assert isinstance(stream.request, Generate)
        async with self._long.turn(address_of(stream.request.client)):
            await self._join(stream, frame)
            if self._process:
                await self._process.read()

    async def _join(self, stream: _Stream, frame: bytes) -> None:
        """Connects `stream` to the process, which it starts if there is none, and sends the frame of its request to the
        process."""
        async with self._spawning:
            if self._process and not self._process.alive:
                await self._process.wait_ended()
                self._process = self._ready = None
            if stream.ended.is_set():
                return
            try:
                if self._process is None:
                    self._process = await self._spawn()
            except OSError as error:
                message = f"The engine process could not be started: {error.strerror}."
                stream.put(Failed(kind="backend", message=message, hint=start_hint(error)))
                return
            except UnicodeEncodeError:
                message = "The model's path is not valid UTF-8."
                stream.put(Failed(kind="model", message=message, hint="Rename the file."))
                return
            stream.joined = True
            if self._ready and stream.request is None:
                stream.put(self._ready)
            if self._taken:
                ready, self._taken = self._taken, None
                self._receive(ready)
            if frame:
                self._process.send(frame)

    async def _spawn(self) -> EngineProcess:
        load = pack(Load(options=self.options))
        self._cancelled.clear()
        if self._keep_warm_s is not None and (taken := await self._take()):
            end_launched()
            return taken
        process = await EngineProcess.spawn(self._command, self._environment, self.log_path, self._receive)
        process.send(load)
        return process

    async def _take(self) -> EngineProcess | None:
        """An engine that an earlier run kept warm. Others are ended: they would take the memory."""
        from engine.protocol import kept_engines

        if not kept_engines.are_any():
            return None
        name = kept_engines.name_of(self.options, self._environment)
        kept_engines.stop(other_than=name)
        if not (taken := kept_engines.take(name)):
            return None
        kept, sock = taken
        self._taken = replace(kept.ready, load_ms=0.0, start=())
        return await EngineProcess.adopt(kept.pid, sock, kept.unread, self.log_path, self._receive)

    def _cancel(self, stream: _Stream) -> None:
        if stream.joined and stream.request and self._process:
            self._process.send(pack(Cancel(request_id=stream.serial)))
            if self._ready:  # while it loads, it answers nothing
                self._cancelled.add(stream.serial)
                loop = asyncio.get_running_loop()
                loop.call_later(DEAF_S, self._replace_if_deaf, self._process, stream.serial)

    def _replace_if_deaf(self, process: EngineProcess, serial: int) -> None:
        """Kills a process that hangs or was stopped, so that the next request starts another one."""
        if process is not self._process or serial not in self._cancelled:
            return
        silent_s = time.monotonic() - self._heard_s
        if silent_s < DEAF_S:
            later = asyncio.get_running_loop().call_later
            later(DEAF_S - silent_s, self._replace_if_deaf, process, serial)
        else:
            process.kill()

    def _receive(self, event: Event) -> None:
        self._heard_s = time.monotonic()
        if isinstance(event, Ready) and self._keep_warm_s:
            event = replace(event, keep_warm_s=self._keep_warm_s)
        self.on_event(event)
        if isinstance(event, Slots):
            return
        if isinstance(event, Failed) and event.kind == "internal" and not event.hint:
            event = replace(event, hint=f"{LOG_IS} {self.log_path}")
        request_id: int | None = getattr(event, "request_id", None)
        if request_id is not None:
            if isinstance(event, Finished | Measured | KernelProfile | Failed):
                self._cancelled.discard(request_id)
            if stream := self._streams.get(request_id):
                stream.put(event)
            return
        if isinstance(event, Ready):
            self._ready = event
        elif isinstance(event, Failed):
            died_when_ready = (  # rather than saying why it ends
                self._ready is not None and self._process is not None and self._process.has_ended
            )
            self._ready = None
            if self._process:
                self._process.kill()
            for stream in self._streams.values():
                # One that is not joined yet waits for a process, and is sent when there is one.
                if died_when_ready and stream.joined and stream.may_be_sent_again:
                    stream.joined, stream.may_be_sent_again = False, False
                    assert stream.request
                    frame = pack(replace(stream.request, request_id=stream.serial))
                    stream.joining = asyncio.ensure_future(self._join(stream, frame))
        for stream in self._streams.values():
            if stream.joined:
                stream.put(event)


async def leave(engine: Engine) -> None:
    """Ends an engine at the end of the program, or keeps it warm if it was made so."""
    if not (isinstance(engine, Keepable) and await engine.keep()):
        await engine.close()


class _Stream(EventStream):
    """The events of one call of `generate`, `measure`, `profile`, `tune` or `start` (which has no request)."""

    def __init__(self, serial: int, request: Request | None, load_ms: float) -> None:
        super().__init__(Failed, _LAST_EVENT[type(request)])
        self.serial = serial
        self.request = request
        self.joined = False  # whether it gets the events of the process
        self.joining: asyncio.Future[None] | None = None  # the task, if it does not join at once
        self.may_be_sent_again = isinstance(request, Generate)  # nothing was answered, and it was sent once
        self._stats: AnswerStats | None = None
        if isinstance(request, Generate):
            self._stats = AnswerStats(request, load_ms, seed=request.sampling.seed or 0)

    def put(self, event: Event) -> None:
        if self._stats and not self.ended.is_set():
            match event:
                case Token():
                    self._stats.count_token()
                case Prefilling():
                    self._stats.prompt_n, self._stats.cached_n = event.total, event.cached
                case Ready():
                    self._stats.load_ms = event.load_ms
        if self.request and getattr(event, "request_id", None) is not None:
            self.may_be_sent_again = False
            event = replace(event, request_id=self.request.request_id)
        super().put(event)

    def cut_short(self) -> None:
        """Ends the stream now, unless it has ended: the answer with the tokens that have come."""
        if self._stats:
            self.put(self._stats.finished("cancelled"))
        elif self.request is None:
            self.put(Failed(kind="backend", message="The engine was closed before it was ready."))
        else:
            self.put(Failed(kind="backend", message="The engine was closed while it measured.", request_id=0))


_LAST_EVENT: dict[type, type[Event]] = {
    Generate: Finished, Measure: Measured, Profile: KernelProfile, Tune: Tuned, type(None): Ready,
}  # fmt: skip


def _encoded(request: Request) -> bytes | Failed:
    """The frame of a request, or why the worker could not decode it. Nobody else is answered meanwhile."""
    try:
        frame = pack(request)
        command_decoder.decode(memoryview(frame)[4:])
    except UnicodeEncodeError:
        message = "The prompt holds characters that are not valid Unicode."
        hint = "Type or paste it again, or save the file it comes from as UTF-8."
    except (FrameError, msgspec.MsgspecError, ValueError, TypeError, OverflowError) as error:
        message, hint = f"The request is not valid: {error}", ""
    else:
        return frame
    return Failed(kind="usage", message=message, hint=hint, request_id=request.request_id)
