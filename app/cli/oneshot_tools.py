"""Tools in a single answer: only those run that the command line allows, since there is nobody to ask."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import msgspec
from msgspec.structs import replace

from app.chat.settings import Settings
from app.chat.tool_use import Permissions, ToolUse, with_tools
from app.chat.view import View
from app.cli.progress import say
from app.tools.form import form_of
from app.tools.toolbox import Toolbox
from engine.errors import UsageError
from engine.protocol.client import Engine
from engine.protocol.events import Chat, Event, Failed, Generate, Thinking, Token
from widgets.chat.call_text import call_line
from widgets.chat.turn import Call, Turn


def tools_for(settings: Settings, allowed: Sequence[str], model: str, *, as_json: bool) -> OneShotTools:
    """The servers that `allowed` (--allow-tools) names, for a model file ("": a server of --engine). Raises
    UsageError."""
    heads = [pattern.partition(".")[0] for pattern in allowed]
    servers = {
        name: server
        for name, server in settings.mcp.items()
        if any(head == "all" or fnmatchcase(name, head) for head in heads)
    }
    if not servers:
        named = ", ".join(settings.mcp) or "none"
        raise UsageError(
            "--allow-tools names no server of settings.toml.", f"Those that it has in [mcp.NAME]: {named}."
        )
    tools = ToolUse(Toolbox(servers), Permissions(allowed), View())
    tools.form = lambda: form_of(Path(model) if model else None)
    return OneShotTools(tools, _show_as_json if as_json else lambda call: say(sys.stderr, call_line(call)))


class OneShotTools:
    def __init__(self, tools: ToolUse, show_call: Callable[[Call], None]) -> None:
        self._tools, self._show_call = tools, show_call

    async def answer(self, engine: Engine, request: Generate, show: Callable[[Event], None]) -> int:
        """Shows the events of an answer, for which the model may call tools. Returns the exit code."""
        tools = self._tools
        while True:
            offered = await tools.offer()
            for name, state in tools.toolbox.states.items():
                if state.problem:
                    say(sys.stderr, f"{name} {state.problem}.")
            reply = Turn("assistant")
            async for event in tools.without_calls(engine.generate(with_tools(request, offered or ""))):
                show(event)
                if isinstance(event, Failed):
                    return event.exit_code
                if isinstance(event, Thinking):
                    reply.thinking += event.text
                elif isinstance(event, Token):
                    reply.content += event.text
            reply.calls = tools.calls
            if not reply.calls:
                return 0
            problem = await tools.run(reply, 0)
            for call in reply.calls:
                self._show_call(call)
            if problem:
                say(sys.stderr, f"{problem.partition(' · ')[0]}: the answer ends here.")
                return 1
            assert isinstance(request.prompt, Chat)
            messages = *request.prompt.messages, *reply.messages
            request = replace(request, prompt=replace(request.prompt, messages=messages))

    async def close(self) -> None:
        await self._tools.toolbox.close()


def _show_as_json(call: Call) -> None:
    fields = {"event": "call"} | msgspec.to_builtins(call)
    print(json.dumps(fields).replace("\x7f", "\\u007f"), flush=True)
