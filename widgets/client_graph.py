"""The pane of a server's throughput, stacked by client."""

from __future__ import annotations

from widgets.client_lines import ClientThroughput, lines
from widgets.pane import Line, Pane


class ClientGraph(Pane[ClientThroughput]):
    BORDER_TITLE = "throughput, last minute"

    def draw(self, data: ClientThroughput, width: int, height: int) -> list[Line]:
        return lines(data, width, height)
