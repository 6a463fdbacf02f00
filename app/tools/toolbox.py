"""The tools of a chat, by MCP (https://modelcontextprotocol.io): the servers of settings.toml, and calls of tools.

The servers and the library `mcp` are in a process of their own (`host`), which begins when the tools are needed first.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import json
import re
import signal
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec

import msgspec

from app.tools.messages import (
    LINE_BYTES,
    Call,
    Cancel,
    Command,
    Down,
    Event,
    Listed,
    ListedTool,
    Result,
    Server,
    Start,
    decode_event,
    encode,
)
from engine.system.child_process import how_it_ended, module_command, module_environment, signal_group
from engine.system.invocation import pip_install
from widgets.text import clean, counted, one_line

START_S = 35.0
"""The host names a server that does not begin in a shorter time."""
GRACE_S = 5.0
"""The host ends a call that takes too long. If it is so late, it hangs itself."""
NAME_CHARS = 64
NONE = "There are no tools. A table [mcp.NAME] in settings.toml names a server of them, by its command or its url."
_SEQUENCES = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[PX^_][^\x1b]*(?:\x1b\\)?|[ -/]*[0-~])"
    r"|\x9b[0-?]*[ -/]*[@-~]"
)


@dataclass(frozen=True)
class Tool:
    """`name` is SERVER.TOOL, unlike every other. `definition` changes when the server or the tool does."""

    name: str
    server: str
    listed: ListedTool
    definition: str

    @property
    def about(self) -> str:
        """The description, cleaned."""
        return clean(without_sequences(self.listed.description))


@dataclass
class ServerState:
    """`problem` goes on after the name of the server; "" while it starts and while it runs."""

    server: Server
    problem: str = ""
    note: str = ""
    tools: tuple[Tool, ...] = ()
    is_listed: bool = False

    @property
    def text(self) -> str:
        if self.problem:
            return self.problem
        if not self.is_listed:
            return "not started yet"
        return ", ".join(filter(None, [counted(len(self.tools), "tool"), self.note]))


@dataclass(frozen=True)
class Returned:
    """What a call gave, cleaned. `left_out` counts the characters that `text` lacks at its end."""

    text: str
    is_error: bool = False
    left_out: int = 0


@dataclass
class Toolbox:
    """The tools of `servers`, by name. Without servers nothing is ever started."""

    servers: Mapping[str, Server]
    states: dict[str, ServerState] = field(init=False)
    _host: Process | None = None
    _reader: asyncio.Task[None] | None = None
    _begins: asyncio.Lock = field(default_factory=asyncio.Lock)
    _change: asyncio.Event = field(default_factory=asyncio.Event)
    _ids: itertools.count[int] = field(default_factory=itertools.count)
    _calls: dict[int, asyncio.Future[Returned]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.states = {name: ServerState(server) for name, server in self.servers.items()}

    @property
    def tools(self) -> dict[str, Tool]:
        return {tool.name: tool for state in self.states.values() for tool in state.tools}

    @property
    def starting(self) -> list[str]:
        """The servers that have said nothing yet."""
        return [name for name, state in self.states.items() if not state.is_listed and not state.problem]

    async def start(self) -> None:
        """Starts the servers, and waits until each has listed its tools or is known not to run."""
        async with self._begins:
            if self.servers and self._host is None:
                await self._begin()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(START_S):
                while self._host and self.starting:
                    self._change.clear()
                    await self._change.wait()
        for name in self.starting:
            self.states[name].problem = "did not answer in time"

    async def again(self) -> None:
        """Starts the servers anew that do not run."""
        down = [name for name, state in self.states.items() if state.problem]
        for name in down:
            self.states[name] = ServerState(self.servers[name])
        if self._host is not None:
            await self._send(Start(servers={name: self.servers[name] for name in down}))
        await self.start()

    def shown(self) -> str:
        """What the model is shown of the tools: `Chat.tools`; "" if there are none."""
        functions = [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.about,
                    "parameters": json.loads(tool.listed.schema),
                },
            }
            for tool in self.tools.values()
        ]
        return json.dumps(functions, ensure_ascii=False) if functions else ""

    async def call(self, tool: Tool, arguments: str) -> Returned:
        """Calls a tool. Ends in words, whatever happens. If this is cancelled, so is the call."""
        state = self.states[tool.server]
        if state.problem:
            return Returned(f"{tool.server} {state.problem}.", True)
        if self._host is None:
            await self.start()
        id = next(self._ids)
        future: asyncio.Future[Returned] = asyncio.get_running_loop().create_future()
        self._calls[id] = future
        try:
            await self._send(Call(id=id, server=tool.server, tool=tool.listed.name, arguments=arguments))
            async with asyncio.timeout(state.server.timeout_s + GRACE_S):
                return await future
        except TimeoutError:
            await self._kill()
            return Returned(
                f"{tool.server} did not answer, and the process of the servers hung: it was ended.", True
            )
        except asyncio.CancelledError:
            await self._send(Cancel(id=id))
            raise
        finally:
            self._calls.pop(id, None)

    async def close(self) -> None:
        """Ends all servers."""
        if (host := self._host) is None:
            return
        assert host.stdin
        host.stdin.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(host.wait(), GRACE_S)
        await self._kill()

    # --- the process of the servers -------------------------------------------------------------------------

    async def _begin(self) -> None:
        if find_spec("mcp") is None:
            for state in self.states.values():
                state.problem = f"needs the library mcp: {pip_install('mcp')}"
            return
        for name in self.servers:
            self.states[name] = ServerState(self.servers[name])
        self._host = await asyncio.create_subprocess_exec(
            *module_command("app.tools.host"),
            stdin=PIPE,
            stdout=PIPE,
            stderr=DEVNULL,
            env=module_environment(),
            limit=LINE_BYTES,
            start_new_session=True,  # Ctrl+C is for the chat
        )
        self._reader = asyncio.ensure_future(self._read(self._host))
        await self._send(Start(servers=dict(self.servers)))

    async def _send(self, command: Command) -> None:
        if self._host and self._host.stdin:
            with contextlib.suppress(OSError):
                self._host.stdin.write(encode(command) + b"\n")
                await self._host.stdin.drain()

    async def _read(self, host: Process) -> None:
        assert host.stdout
        with contextlib.suppress(ValueError):  # a line that is too long
            while line := await host.stdout.readline():
                with contextlib.suppress(msgspec.MsgspecError):
                    self._take(decode_event(line))
        signal_group(host.pid, signal.SIGKILL)  # Process.kill would take the exit status
        code = await host.wait()
        if self._host is host:
            self._host = None
            self._lost(f"was lost: the process of the servers ended with {how_it_ended(code)}")

    def _lost(self, problem: str) -> None:
        for state in self.states.values():
            state.problem, state.tools = state.problem or problem, ()
        for future in self._calls.values():
            if not future.done():
                future.set_result(Returned(f"The server {problem}.", True))
        self._change.set()

    async def _kill(self) -> None:
        host, self._host = self._host, None
        if host is not None:
            signal_group(host.pid, signal.SIGKILL)
            self._lost("was ended")  # before another one may begin
            await host.wait()
        if self._reader is not None:
            self._reader.cancel()

    def _take(self, event: Event) -> None:
        match event:
            case Listed():
                state = self.states[event.server]
                state.tools = _named(event.server, state.server, event.tools)
                state.is_listed, state.problem, state.note = True, "", one_line(event.note)
            case Down():
                state = self.states[event.server]
                state.problem, state.tools = one_line(without_sequences(event.problem)) or "ended", ()
            case Result():
                future = self._calls.get(event.id)
                if future and not future.done():
                    text = clean(without_sequences(event.text))
                    left_out = max(0, event.chars - len(event.text))
                    future.set_result(Returned(text, event.is_error, left_out))
        self._change.set()


def without_sequences(text: str) -> str:
    """A text without the sequences that terminals obey. `clean` would leave what follows their first character."""
    return _SEQUENCES.sub("", text)


def _named(server: str, settings: Server, tools: tuple[ListedTool, ...]) -> tuple[Tool, ...]:
    """The tools under names that no other tool has, of ASCII letters, so that none looks like another."""
    named: dict[str, Tool] = {}
    for tool in tools:
        plain = re.sub(r"[^A-Za-z0-9_-]", "_", tool.name)[:NAME_CHARS] or "_"
        names = (f"{server}.{plain}{f'_{n}' if n > 1 else ''}" for n in itertools.count(1))
        name = next(name for name in names if name not in named)
        source = msgspec.json.encode((server, settings, tool), order="sorted")
        named[name] = Tool(name, server, tool, hashlib.sha256(source).hexdigest()[:24])
    return tuple(named.values())
