"""The tools in a chat: what the model is offered, its calls in a reply, who may run them, and what they return."""

from __future__ import annotations

import asyncio
import secrets
import string
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from msgspec.structs import replace

from app.chat.settings import remember, remembered
from app.chat.view import Permission, View
from app.tools.toolbox import Tool, Toolbox
from engine.errors import OrinError, UsageError
from engine.formats.tools.calls import FunctionCall, ToolCallParser
from engine.formats.tools.forms import ToolForm
from engine.protocol.events import Chat, Event, Finished, Generate, Thinking, Token
from widgets.chat.turn import Call, CallState, Turn

MOST_CALLS = 24
"""In a row, before the user is asked whether to go on."""
RESULT_SHARE = 1.5
"""A result may have so many characters for each token of the context: about half of the context."""
REFUSED = "The user did not allow this call."
_ALWAYS = "always-tools"  # the name under which the definitions of these tools are kept
_ID = string.ascii_letters + string.digits
_T = TypeVar("_T")


class Permissions:
    """Which tools run without being asked. `patterns` are those of the command line: "files", "files.read_*", "all"."""

    def __init__(self, patterns: Sequence[str] = ()) -> None:
        self._patterns = patterns
        self._in_chat: set[str] = set()

    def allow(self, tool: Tool) -> bool:
        return (
            tool.definition in self._in_chat
            or tool.definition in self._always()
            or any(p in ("all", tool.server) or fnmatchcase(tool.name, p) for p in self._patterns)
        )

    def grant(self, tool: Tool, permission: Permission) -> None:
        if permission == "chat":
            self._in_chat.add(tool.definition)
        elif permission == "always":
            # A tool that changes its description or its server asks again.
            remember(_ALWAYS, " ".join(sorted({*self._always(), tool.definition})))

    def new_chat(self) -> None:
        self._in_chat.clear()

    def _always(self) -> set[str]:
        return set(remembered(_ALWAYS).split())


class _StoppedError(Exception):
    """The user has stopped what was waited for."""


class ToolUse:
    """Follows the replies of a session. `doing` says what is waited for, "" if nothing is."""

    def __init__(self, toolbox: Toolbox, permissions: Permissions, view: View) -> None:
        self.toolbox, self.permissions = toolbox, permissions
        # How the model in use writes calls; in a thread.
        self.form: Callable[[], ToolForm | None] = lambda: None
        self.doing = ""
        self.calls: tuple[Call, ...] = ()  # of the last reply
        self._view = view
        self._parser: ToolCallParser | None = None
        self._task: asyncio.Task[Any] | None = None
        self._n_calls = 0
        self._told: set[str] = set()

    async def offer(self) -> str | None:
        """The tools for the next reply (`Chat.tools`), "" without any; None if the user has stopped waiting for
        them."""
        self._parser, self.calls = None, ()
        if not self.toolbox.servers:
            return ""
        try:
            form = await self._until_stopped("", asyncio.to_thread(self.form))
        except UsageError as error:
            self._tell(str(error))
            return ""
        except OrinError:  # the engine says what is wrong with its file
            return ""
        except _StoppedError:
            return None
        if form is None:
            self._tell("The model in use is offered no tools: its context is too short for them")
            return ""
        names = ", ".join(self.toolbox.starting)
        try:
            await self._until_stopped(f"starting tools: {names}" if names else "", self.toolbox.start())
        except _StoppedError:
            return None
        problems = [f"{name} {state.problem}" for name, state in self.toolbox.states.items() if state.problem]
        if problems:
            self._tell(f"Tools: {'; '.join(problems)} · /mcp again starts what is down")
        shown = self.toolbox.shown()
        if not shown:
            return ""
        self._parser = ToolCallParser(form, shown)
        return shown

    def _tell(self, problem: str) -> None:
        """Once, while it is the same."""
        if problem not in self._told:
            self._told.add(problem)
            self._view.notice(problem, warning=True)

    async def without_calls(self, events: AsyncIterator[Event]) -> AsyncIterator[Event]:
        """The events of a reply. Each call in its text becomes one of `calls`."""
        async for event in events:
            parser = self._parser
            if parser and isinstance(event, Thinking):
                parser.think(event.text)
            elif parser and isinstance(event, Token):
                event = replace(event, text=self._texts(parser.feed(event.text)))
            elif parser and isinstance(event, Finished) and (rest := self._texts(parser.flush())):
                yield Token(request_id=event.request_id, id=-1, text=rest)
            yield event

    def _texts(self, parts: Iterator[str | FunctionCall]) -> str:
        texts = []
        for part in parts:
            if isinstance(part, FunctionCall):
                id = "".join(secrets.choice(_ID) for _ in range(9))
                self.calls += (Call(id=id, name=part.name, arguments=part.arguments),)
            else:
                texts.append(part)
        return "".join(texts)

    def begin(self) -> None:
        """The user has sent a prompt, or goes on."""
        self._n_calls = 0

    async def run(self, turn: Turn, context_length: int) -> str:
        """Runs the calls of a reply, one after the other, each if it may. Returns why not all of them have ended, or
        ""."""
        for index, call in enumerate(turn.calls):
            if call.is_over:
                continue
            if self._n_calls >= MOST_CALLS:
                return f"{MOST_CALLS} calls of tools in a row · Ctrl+G goes on"
            try:
                await self._until_stopped(f"calling {call.name}", self._run(turn, index, context_length))
            except _StoppedError:
                return "stopped · Ctrl+G goes on"
        return ""

    async def _run(self, turn: Turn, index: int, context_length: int) -> None:
        call = turn.calls[index]
        self._n_calls += 1
        try:
            tool = self.toolbox.tools.get(call.name)
            if tool is None:
                await self._set(turn, index, "failed", f"There is no tool {call.name}.")
            elif not await self._may_run(turn, index, tool):
                await self._set(turn, index, "refused", REFUSED)
            else:
                await self._set(turn, index, "running")
                returned = await self.toolbox.call(tool, call.arguments)
                most = int(RESULT_SHARE * context_length) or len(returned.text)
                left_out = returned.left_out + max(0, len(returned.text) - most)
                rest = f"\n[{left_out:,} more characters are left out]" if left_out else ""
                state: CallState = "failed" if returned.is_error else "returned"
                await self._set(turn, index, state, returned.text[:most] + rest or "(nothing)")
        finally:
            if not turn.calls[index].is_over:
                await self._set(turn, index, "open")

    async def _may_run(self, turn: Turn, index: int, tool: Tool) -> bool:
        if self.permissions.allow(tool):
            return True
        await self._set(turn, index, "asked")
        answer = await self._view.may_run(turn.calls[index])
        self.permissions.grant(tool, answer)
        return answer != "no"

    async def _set(self, turn: Turn, index: int, state: CallState, result: str = "") -> None:
        changed = replace(turn.calls[index], state=state, result=result)
        turn.calls = (*turn.calls[:index], changed, *turn.calls[index + 1 :])
        await self._view.changed(turn)

    async def _until_stopped(self, doing: str, work: Coroutine[Any, Any, _T]) -> _T:
        """What `work` returns. Raises what it raises, and _StoppedError if `stop` ends it."""
        self.doing = doing
        self._task = task = asyncio.ensure_future(work)
        try:
            await asyncio.wait((task,))
            if task.cancelled():
                raise _StoppedError
            return task.result()
        finally:
            task.cancel()
            self.doing, self._task = "", None

    def stop(self) -> bool:
        """Ends what is waited for. Whether there was anything."""
        if self._task is not None:
            self._task.cancel()
        return self._task is not None


def with_tools(request: Generate, tools: str) -> Generate:
    assert isinstance(request.prompt, Chat)
    return replace(request, prompt=replace(request.prompt, tools=tools)) if tools else request
