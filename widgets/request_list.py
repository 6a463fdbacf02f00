"""The pane of the requests that a server has answered last. It shows nothing of what was asked and said."""

from __future__ import annotations

from dataclasses import dataclass

from widgets.client_lines import client_name
from widgets.pane import Line, Pane
from widgets.plot import short_number
from widgets.text import counted, one_line


@dataclass(frozen=True)
class Request:
    """`time` is of the clock on the wall. `tokens` of the reply came at `rate` a second (0: not known). `problem` says
    why there is no reply."""

    time: str
    client: str
    path: str
    status: int
    tokens: int = 0
    rate: float = 0.0
    problem: str = ""


class RequestList(Pane[tuple[Request, ...]]):
    """`data` has the last request first."""

    BORDER_TITLE = "last requests"

    def draw(self, data: tuple[Request, ...], width: int, height: int) -> list[Line]:
        return [_line(request, width) for request in data[:height]] or [[("none yet", "dim")]]


def _line(request: Request, width: int) -> Line:
    """Narrow lines leave out the path, then the client."""
    rate = f", {short_number(request.rate)} tok/s" if request.rate else ""
    what = one_line(request.problem) or f"{counted(request.tokens, 'token')}{rate}"
    status = (f"{request.status} ", "" if request.status == 200 else "warning")
    client, path = f"{client_name(request.client):<15} ", f"{client_name(request.path)} "
    time = f"{request.time} "
    for parts in ((time, client, path), (time, client), (time,)):
        if sum(map(len, parts)) + len(status[0]) + len(what) <= width:
            break
    return [*((part, "dim" if part != client else "") for part in parts), status, (what, "")]
