"""Tools without a process behind them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from app.tools.messages import Listed, ListedTool, Server
from app.tools.toolbox import Returned, Tool, Toolbox

TOOLS = (
    ListedTool(name="read", description="Reads a file", schema='{"type": "object"}'),
    ListedTool(name="write", description="Writes a file", schema='{"type": "object"}'),
)


class FakeToolbox(Toolbox):
    """The server "files" with TOOLS. `answers` makes what a call returns; without it a call never ends."""

    def __init__(self, answers: Callable[[str, str], Returned] | None = None) -> None:
        super().__init__({"files": Server(command="none")})
        self.answers = answers
        self.called: list[tuple[str, str]] = []
        self.cancelled = 0

    async def start(self) -> None:
        self._take(Listed(server="files", tools=TOOLS))

    async def call(self, tool: Tool, arguments: str) -> Returned:
        self.called.append((tool.name, arguments))
        if self.answers is None:
            try:
                await asyncio.Event().wait()
            finally:
                self.cancelled += 1
        assert self.answers
        return self.answers(tool.name, arguments)
