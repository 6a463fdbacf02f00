"""The first lines of a server's screen: where it listens, what it serves, and how much it has done."""

import textwrap
from dataclasses import dataclass

from widgets.dashboard.pane import FittedPane, Line
from widgets.text import counted, one_line


@dataclass(frozen=True)
class ServerState:
    """`engine` are phrases on the model and its engine, or on its start. `warnings` are sentences. `ending`: how the
    server ends; "" while it serves. `others`: the other models that it serves, in words."""

    address: str
    engine: tuple[str, ...] = ()
    requests: int = 0
    refused: int = 0
    prompt_tokens: int = 0
    reply_tokens: int = 0
    warnings: tuple[str, ...] = ()
    ending: str = ""
    others: tuple[str, ...] = ()


class ServerHead(FittedPane[ServerState]):
    BORDER_TITLE = "orin-chat serve"
    BORDER_SUBTITLE = "F9 one pane · Ctrl+C ends"

    def draw(self, data: ServerState, width: int, height: int) -> list[Line]:
        """What matters most comes first: low terminals show the first lines."""
        figures = (
            counted(data.requests, "request"),
            f"{data.refused:,} refused",
            f"{data.prompt_tokens:,} prompt tokens",
            f"{data.reply_tokens:,} reply tokens",
        )
        texts = (
            (data.ending, "warning"),
            (data.address, "strong"),
            *((f"⚠ {one_line(warning)}", "warning") for warning in data.warnings),
            (" · ".join(one_line(part) for part in data.engine if part), ""),
            (f"other models: {', '.join(map(one_line, data.others))}" if data.others else "", "dim"),
            (" · ".join(figures), "dim"),
        )
        return [[(line, style)] for text, style in texts for line in textwrap.wrap(text, max(8, width))]

    def rows(self, data: ServerState, width: int) -> int:
        return len(self.draw(data, width, 0))
