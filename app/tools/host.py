"""The process in which the MCP servers of a chat are run: python -m app.tools.host. It reads commands (`messages`) from
its standard input and writes events to its standard output, and ends all servers when its input ends.

The library `mcp` takes most of a second to be imported, and what a server sends may be large or never end: none of that
holds the screen up here.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import os
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any

import httpx2
import msgspec
from mcp import Client, MCPError
from mcp.client.streamable_http import streamable_http_client
from mcp_types import (
    INTERNAL_ERROR,
    INVALID_PARAMS,
    REQUEST_TIMEOUT,
    AudioContent,
    CallToolResult,
    ContentBlock,
    EmbeddedResource,
    ImageContent,
    ResourceLink,
    TextContent,
    TextResourceContents,
)
from pydantic import ValidationError

from app.tools.checked_stream import FLOODED, MOST_MESSAGES, CheckedStream, Flood
from app.tools.messages import (
    Call,
    Cancel,
    Down,
    Event,
    Listed,
    ListedTool,
    Result,
    Server,
    Start,
    decode_command,
    encode,
)
from app.tools.stdio import MESSAGE_BYTES, StdioServer

START_S = 30.0
"""A server has so long to begin and to list its tools. Some are downloaded at their first start."""
_LATE_S = 1.0
MOST_TOOLS = 100  # of a server
STREAM_S = 1.0
"""Between two streams of events of a server."""
LISTED_AGAIN_S = 1.0
"""A server may say that its tools have changed as often as it likes: they are listed again once in so long."""
MOST_LINES = 4 * MOST_MESSAGES
"""Of streams of events, as long as so many messages may take: an event is some lines, and comments are no messages."""
DESCRIPTION_CHARS, SCHEMA_CHARS = 1000, 20_000  # of a tool
RESULT_CHARS = 200_000
"""Of a longer result, the beginning is passed on."""


class Connection:
    """One server, from its start to its end."""

    def __init__(self, name: str, server: Server, write: Callable[[Event], None]) -> None:
        self._name, self._server, self._write = name, server, write
        self._process = StdioServer(server) if server.command else None
        self._client: Client | None = None
        self._flooded = asyncio.Event()
        self._is_listed = asyncio.Event()
        self._is_unknown = False  # whether the server did not know the session when it was last asked
        self._lost = asyncio.Event()  # set for that reason: a new session is to begin
        self._status = 0  # of the last answer over HTTP
        self._under_way = 0  # calls of the session
        self._is_idle = asyncio.Event()

    def _heard(self, status: int, in_session: bool) -> None:
        """A server over HTTP has answered with a status."""
        self._status = status
        self._is_unknown = in_session and status in (400, 404)  # 404 by the protocol, 400 by many servers

    async def run(self) -> None:
        """Runs the server until this is cancelled, or until it ends. What happens is written."""
        life = asyncio.ensure_future(self._live())
        listed = asyncio.ensure_future(self._is_listed.wait())
        try:
            await asyncio.wait((life, listed), timeout=START_S, return_when=asyncio.FIRST_COMPLETED)
            if not self._is_listed.is_set() and not life.done():
                self._write(Down(server=self._name, problem=f"did not answer within {START_S:.0f} s"))
                life.cancel()
            await life
        except asyncio.CancelledError:
            life.cancel()
            await asyncio.wait((life,))
        except Exception as error:
            self._write(Down(server=self._name, problem=self._reason(error)))
        finally:
            self._client = None
            self._is_listed.set()  # nothing comes any more
            listed.cancel()

    async def _live(self) -> None:
        """Begins a new session whenever the server does not know the last one, as the protocol has it."""
        await self._session()
        while self._lost.is_set():
            self._lost.clear()
            await self._session()

    async def _session(self) -> None:
        self._is_unknown = False
        async with AsyncExitStack() as stack:
            transport = CheckedStream(
                self._process.streams() if self._process else await self._http(stack), self._flooded
            )
            client = await stack.enter_async_context(
                Client(transport.streams(), read_timeout_seconds=START_S)
            )
            transport.version = client.protocol_version
            tools, note = await _tools(client, transport.left_out)
            self._client = client
            self._is_listed.set()
            self._write(listed := Listed(server=self._name, tools=tools, note=note))
            ends = [self._flooded, self._lost, *([self._process.over] if self._process else ())]
            waiting = [asyncio.ensure_future(end.wait()) for end in ends]
            waiting.append(asyncio.ensure_future(self._list_again(client, transport, listed)))
            try:
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for each in waiting:
                    each.cancel()
            if self._lost.is_set():
                await self._is_idle.wait()  # the other calls are told so, too
            else:
                self._write(Down(server=self._name, problem=self._reason(EOFError())))

    async def _list_again(self, client: Client, transport: CheckedStream, listed: Listed) -> None:
        """Lists the tools again whenever the server says that they have changed."""
        while True:
            await transport.tools_changed.wait()
            transport.tools_changed.clear()
            transport.left_out.clear()
            with contextlib.suppress(MCPError, TimeoutError):  # then those that are known stay
                tools, note = await _tools(client, transport.left_out)
                if (again := Listed(server=self._name, tools=tools, note=note)) != listed:
                    self._write(listed := again)
            await asyncio.sleep(LISTED_AGAIN_S)

    async def _http(self, stack: AsyncExitStack) -> Any:
        most_s = max(START_S, self._server.timeout_s)
        http = httpx2.AsyncClient(
            headers={**self._server.headers, "Accept-Encoding": "identity"},
            timeout=httpx2.Timeout(START_S, read=most_s),
            transport=_Bounded(self._flooded, most_s, self._heard),
        )
        return streamable_http_client(
            self._server.url,
            http_client=await stack.enter_async_context(http),
            max_sse_event_size=MESSAGE_BYTES,
        )

    async def call(self, call: Call) -> Result:
        """What the tool returned, or why it did not."""
        try:
            arguments = json.loads(call.arguments)
            if not isinstance(arguments, dict):
                raise ValueError("they are no JSON object")
        except (ValueError, RecursionError) as error:
            return Result(id=call.id, text=f"The arguments cannot be used: {error}.", is_error=True)
        try:
            # The library waits for ever to send what is not read.
            async with asyncio.timeout(self._server.timeout_s + _LATE_S):
                returned = await self._returned(call.tool, arguments)
        except Exception as error:
            # The reason that the server ended comes a moment later than the end of its stream.
            if self._process:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._process.over.wait(), 0.0 if _is_late(error) else 0.5)
            return Result(id=call.id, text=f"{self._name} {self._reason(error)}.", is_error=True)
        if returned is None:
            return Result(id=call.id, text=f"{self._name} is not running.", is_error=True)
        text = _text_of(returned)
        is_error = bool(returned.is_error)
        return Result(id=call.id, text=text[:RESULT_CHARS], is_error=is_error, chars=len(text))

    async def _returned(
        self, tool: str, arguments: dict[str, Any], *, is_last: bool = False
    ) -> CallToolResult | None:
        """None if the server does not run. A call that it refuses since it does not know the session is made again in
        the next one, unless it `is_last`."""
        await self._is_listed.wait()
        if (client := self._client) is None:
            return None
        self._under_way += 1
        self._is_idle.clear()
        try:
            return await client.call_tool(tool, arguments, read_timeout_seconds=self._server.timeout_s)
        except MCPError as error:
            if is_last or not (self._is_unknown and _is_refused(error)):
                raise
            if self._client is client:  # the first call that is told so
                self._client = None
                self._is_listed.clear()
                self._lost.set()
        finally:
            self._under_way -= 1
            if not self._under_way:
                self._is_idle.set()
        return await self._returned(tool, arguments, is_last=True)

    def _reason(self, error: BaseException) -> str:
        """Goes on after the server's name."""
        if self._flooded.is_set():
            return FLOODED
        if self._process and self._process.over.is_set():
            return self._process.problem
        if _is_late(error):
            return f"did not answer within {self._server.timeout_s:g} s"
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if isinstance(error, OSError) and self._process:
            program = self._server.words[0]
            hint = " (what follows the program goes into args)" if " " in program else ""
            return f"does not start: {error.strerror or error}: {program}{hint}"
        if isinstance(error, ValidationError):
            flaw = error.errors(include_url=False, include_context=False, include_input=False)[0]
            place = ".".join(map(str, (error.title, *flaw["loc"])))
            return f"sent an answer that MCP does not have: {place[:100]}: {flaw['msg'][:200]}"
        if isinstance(error, MCPError) and error.code == INTERNAL_ERROR and self._status >= 400:
            # The library does not say which.
            key = ": does it need a key, in headers?" if self._status in (401, 403) else ""
            return f"failed: it answered with the status {self._status}{key}"
        text = str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
        return f"failed: {text[:300]}"


def _is_late(error: BaseException) -> bool:
    """Some servers have the library's code for what is late as one of their own."""
    is_late = (
        isinstance(error, MCPError) and error.code == REQUEST_TIMEOUT and str(error).endswith("timed out")
    )
    return is_late or isinstance(error, TimeoutError)


def _is_refused(error: MCPError) -> bool:
    """Whether the server may have answered that it does not know the session."""
    if _is_late(error):
        return False
    # Servers have the code for a closed connection, too, so its text tells.
    return error.code != INVALID_PARAMS and str(error) != "Connection closed"


class _TooLong(Exception):
    def __str__(self) -> str:
        return f"it sent an answer of more than {MESSAGE_BYTES >> 20} MiB"


class _Compressed(Exception):
    def __str__(self) -> str:
        return "it sent a compressed answer, which nobody asked for"


class _Flooding(Exception):
    def __str__(self) -> str:
        return FLOODED


class _Bounded(httpx2.AsyncBaseTransport):
    """Ends an answer that is longer than MESSAGE_BYTES, or comes after `most_s`, when nobody waits for it. Streams of
    events, whose events are bounded, may be longer; with more than MOST_LINES the server is left, by `flooded`. A
    compressed answer is refused: a megabyte of it may be gigabytes. `heard` is called with the status of each
    answer, and whether its request was in a session. The library asks for a stream of events again at once, if the
    server says so: here it waits."""

    def __init__(self, flooded: asyncio.Event, most_s: float, heard: Callable[[int, bool], None]) -> None:
        self._flooded, self._most_s, self._heard = flooded, most_s, heard
        self._lines, self._next_stream_s = Flood(MOST_LINES), 0.0
        self._by_scheme: dict[str, httpx2.AsyncHTTPTransport] = {}

    def _transport(self, scheme: str) -> httpx2.AsyncHTTPTransport:
        """Reading the certificates takes 40 ms: they are read for https alone, to which a server may redirect."""
        if scheme not in self._by_scheme:
            self._by_scheme[scheme] = httpx2.AsyncHTTPTransport(verify=scheme != "http")
        return self._by_scheme[scheme]

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        if request.method == "GET":
            wait_s, self._next_stream_s = self._next_stream_s - time.monotonic(), time.monotonic() + STREAM_S
            await asyncio.sleep(max(0.0, wait_s))
        response = await self._transport(request.url.scheme).handle_async_request(request)
        if request.method == "POST":
            self._heard(response.status_code, "mcp-session-id" in request.headers)
        if response.headers.get("content-encoding", "identity").strip().lower() != "identity":
            await response.aclose()
            raise _Compressed
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        has_events = response.headers.get("content-type", "").startswith("text/event-stream")
        check = self._check_lines if has_events else _AnswerSize().check
        is_answer = request.method == "POST"  # what else comes, comes as long as the server runs
        end_s = time.monotonic() + self._most_s if is_answer else math.inf
        response.stream = _CheckedBytes(response.stream, check, end_s)
        return response

    async def aclose(self) -> None:
        for transport in self._by_scheme.values():
            await transport.aclose()

    def _check_lines(self, piece: bytes) -> None:
        if self._lines.has_begun(piece.count(b"\n") + piece.count(b"\r")):
            self._flooded.set()
            raise _Flooding


class _AnswerSize:
    _bytes = 0

    def check(self, piece: bytes) -> None:
        self._bytes += len(piece)
        if self._bytes > MESSAGE_BYTES:
            raise _TooLong


class _CheckedBytes(httpx2.AsyncByteStream):
    """`check` raises what ends the stream; nothing is read after `end_s`."""

    def __init__(self, stream: httpx2.AsyncByteStream, check: Callable[[bytes], None], end_s: float) -> None:
        self._stream, self._check, self._end_s = stream, check, end_s

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for piece in self._stream:
            if time.monotonic() > self._end_s:
                raise TimeoutError
            self._check(piece)
            yield piece

    async def aclose(self) -> None:
        await self._stream.aclose()


async def _tools(client: Client, invalid: Sequence[str]) -> tuple[tuple[ListedTool, ...], str]:
    """The tools of a server, and which ones are left out. `invalid` grows while they are listed."""
    tools: list[ListedTool] = []
    long: list[str] = []
    cursor: str | None = None
    for _ in range(MOST_TOOLS):  # pages
        page = await client.list_tools(cursor=cursor, cache_mode="refresh")
        for tool in page.tools:
            schema = json.dumps(tool.input_schema)
            if len(tools) >= MOST_TOOLS:
                return tuple(tools), f"it has more than {MOST_TOOLS} tools: the first are offered"
            if len(schema) > SCHEMA_CHARS or len(tool.name) > 128:
                long.append(tool.name)
                continue
            description = (tool.description or tool.title or "")[:DESCRIPTION_CHARS]
            tools.append(ListedTool(name=tool.name, description=description, schema=schema))
        cursor = page.next_cursor
        if not cursor:
            break
    reasons = {"too long to be offered": long, "not valid and left out": invalid}
    named = (
        f"{why}: {', '.join(name[:128] for name in names[:5])}" for why, names in reasons.items() if names
    )
    return tuple(tools), "; ".join(named)


def _text_of(returned: CallToolResult) -> str:
    """The content in words: other than text is named only."""
    parts = [part for block in returned.content if (part := _part(block))]
    if not parts and returned.structured_content is not None:
        parts = [json.dumps(returned.structured_content, ensure_ascii=False)]
    return "\n".join(parts)


def _part(block: ContentBlock) -> str:
    match block:
        case TextContent():
            return block.text
        case EmbeddedResource(resource=TextResourceContents() as resource):
            return f"{resource.uri}:\n{resource.text}"
        case ResourceLink():
            return f"[{block.uri}]"
        case ImageContent() | AudioContent():
            return f"[{block.mime_type}, {len(block.data) * 3 // 4:,} bytes, not shown]"
    return f"[{block.type}, not shown]"


class Host:
    def __init__(self, write: Callable[[Event], None]) -> None:
        self._write = write
        self._connections: dict[str, tuple[Connection, asyncio.Task[None]]] = {}
        self._calls: dict[int, asyncio.Task[None]] = {}

    async def obey(self, command: Start | Call | Cancel) -> None:
        match command:
            case Start(servers=servers):
                for name, server in servers.items():
                    if name in self._connections:
                        await self._end(name)
                    connection = Connection(name, server, self._write)
                    self._connections[name] = connection, asyncio.ensure_future(connection.run())
            case Call():
                self._calls[command.id] = asyncio.ensure_future(self._call(command))
            case Cancel(id=id):
                if id in self._calls:
                    self._calls.pop(id).cancel()

    async def _call(self, call: Call) -> None:
        if call.server in self._connections:
            result = await self._connections[call.server][0].call(call)
        else:
            result = Result(id=call.id, text=f"There is no server {call.server}.", is_error=True)
        if self._calls.pop(call.id, None):
            self._write(result)

    async def _end(self, name: str) -> None:
        _, task = self._connections.pop(name)
        task.cancel()
        await asyncio.wait((task,))

    async def close(self) -> None:
        for task in self._calls.values():
            task.cancel()
        await asyncio.gather(*map(self._end, list(self._connections)))


async def _serve(out: int) -> None:
    loop = asyncio.get_running_loop()
    lines: asyncio.Queue[bytes] = asyncio.Queue()

    def read() -> None:
        for line in sys.stdin.buffer:
            loop.call_soon_threadsafe(lines.put_nowait, line)
        loop.call_soon_threadsafe(lines.put_nowait, b"")

    threading.Thread(target=read, daemon=True).start()

    def write(event: Event) -> None:
        data = memoryview(encode(event) + b"\n")
        while data:
            data = data[os.write(out, data) :]

    host = Host(write)
    while line := await lines.get():
        with contextlib.suppress(msgspec.MsgspecError):
            await host.obey(decode_command(line))
    await host.close()


def main() -> None:
    logging.disable(logging.CRITICAL)  # the library logs with tracebacks
    out = os.dup(1)
    os.dup2(2, 1)  # what a library prints is no event
    with contextlib.suppress(BrokenPipeError, KeyboardInterrupt):
        asyncio.run(_serve(out))
    os._exit(0)  # the thread that reads may still wait


if __name__ == "__main__":
    main()
