"""A server's process and its standard streams, with bounds that the transport of the library `mcp` lacks: on the length
of a message, and on what is kept of its error output. Says how the process ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.client.stdio import get_default_environment
from mcp.shared.message import SessionMessage
from mcp_types import JSONRPCMessage, jsonrpc_message_adapter

from app.tools.checked_stream import NoMessageError, Received
from app.tools.messages import Server
from engine.formats.tokens.half_characters import without_half_characters
from engine.system.child_process import how_it_ended, signal_group

Streams = tuple[MemoryObjectReceiveStream[Received], MemoryObjectSendStream[SessionMessage]]

MESSAGE_BYTES = 8 << 20
"""The longest message of a server. Whoever sends more is ended."""
_ERRORS_CHARS = 2000
_END_S = 2.0  # for a process to end after its input was closed, and after SIGTERM


class StdioServer:
    """`streams` is the transport for the library. `over` is set when the server has ended or broken the rules; then
    `problem` says which."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._errors = ""  # the last lines of its error output
        self.over = asyncio.Event()
        self.problem = ""
        self._is_to_be_killed = False

    @contextlib.asynccontextmanager
    async def streams(self) -> AsyncIterator[Streams]:
        """Starts the process, and ends it with all that it started. Raises OSError."""
        server = self._server
        program, *arguments = server.words
        process = await asyncio.create_subprocess_exec(
            os.path.expanduser(program),  # noqa: PTH111 (a word without a slash is looked for on the PATH)
            *arguments,
            stdin=PIPE,
            stdout=PIPE,
            stderr=PIPE,
            env=get_default_environment() | server.env,
            cwd=Path(server.folder).expanduser() if server.folder else None,
            start_new_session=True,
            limit=MESSAGE_BYTES,
        )
        to_session, received = anyio.create_memory_object_stream[Received](0)
        outgoing, from_session = anyio.create_memory_object_stream[SessionMessage](0)
        tasks = [
            asyncio.ensure_future(work)
            for work in (
                self._read(process, to_session),
                self._write(process, from_session),
                self._read_errors(process),
            )
        ]
        try:
            yield received, outgoing
        finally:
            with anyio.CancelScope(shield=True):
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                await _end(process, at_once=self._is_to_be_killed)
                for stream in (to_session, received, outgoing, from_session):
                    await stream.aclose()

    async def _read(self, process: Process, to_session: MemoryObjectSendStream[Received]) -> None:
        async with to_session:
            with contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
                while line := await self._line(process):
                    try:
                        message = _message(line)
                    except ValueError:  # some servers print
                        await to_session.send(NoMessageError())
                        continue
                    await to_session.send(SessionMessage(message))
            if not self.problem:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(process.wait(), _END_S)
                code = process.returncode
                self.problem = "closed its output" if code is None else f"ended: {how_it_ended(code)}"
                if last := self._errors.strip().rpartition("\n")[2]:
                    self.problem += f", {last[:200]}"
            self.over.set()

    async def _line(self, process: Process) -> bytes:
        """The next line; nothing at the end, or if it is too long."""
        assert process.stdout
        try:
            return await process.stdout.readline()
        except ValueError:
            self.problem = f"sent a message of more than {MESSAGE_BYTES >> 20} MiB and was ended"
            self._is_to_be_killed = True
            return b""

    async def _write(self, process: Process, from_session: MemoryObjectReceiveStream[SessionMessage]) -> None:
        assert process.stdin
        with contextlib.suppress(OSError):
            async for message in from_session:
                text = message.message.model_dump_json(by_alias=True, exclude_unset=True)
                process.stdin.write(text.encode("utf-8", "replace") + b"\n")
                await process.stdin.drain()

    async def _read_errors(self, process: Process) -> None:
        assert process.stderr
        while piece := await process.stderr.read(65536):
            self._errors = (self._errors + piece.decode("utf-8", "replace"))[-_ERRORS_CHARS:]


def _message(line: bytes) -> JSONRPCMessage:
    """Raises ValueError for what is no message."""
    try:
        return jsonrpc_message_adapter.validate_json(line, by_name=False)
    except ValueError:
        text = line.decode("utf-8", "replace").encode()
        return jsonrpc_message_adapter.validate_json(without_half_characters(text), by_name=False)


async def _end(process: Process, *, at_once: bool) -> None:
    """Closes the input of a server, which is to end then; else it is ended, with all processes of its group."""
    assert process.stdin
    process.stdin.close()
    try:
        for number in (signal.SIGKILL,) if at_once else (None, signal.SIGTERM, signal.SIGKILL):
            if number:
                signal_group(process.pid, number)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), _END_S)
                break
    finally:  # also when the program ends meanwhile
        signal_group(process.pid, signal.SIGKILL)  # what the server has left behind
