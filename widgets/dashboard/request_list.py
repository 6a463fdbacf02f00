"""The pane of the requests that a server has answered last. It shows nothing of what was asked and said."""

from dataclasses import dataclass

from engine.protocol.events import Finished, decode_rate
from widgets.dashboard.client_graph import client_name
from widgets.dashboard.pane import Line, Pane
from widgets.plot import short_number
from widgets.text import counted, one_line


@dataclass(frozen=True)
class Handled:
    """A request for a completion that has ended, at `time` of the clock on the wall. `finished` is None if there was no
    answer, or no end of it; `problem` says why. `note`: which part of the request was ignored. `model`: the one that
    answered, of several. It holds nothing of what was asked and said."""

    time: str
    client: str
    path: str
    status: int
    finished: Finished | None = None
    problem: str = ""
    note: str = ""
    model: str = ""


class RequestList(Pane[tuple[Handled, ...]]):
    """`data` has the last request first."""

    BORDER_TITLE = "last requests"

    def draw(self, data: tuple[Handled, ...], width: int, height: int) -> list[Line]:
        return [_line(request, width) for request in data[:height]] or [[("none yet", "dim")]]


def _line(request: Handled, width: int) -> Line:
    """Narrow lines leave out the path, then the client."""
    what = one_line(request.problem)
    if end := request.finished:
        rate = decode_rate(end.predicted_n, end.predicted_ms)
        what = f"{counted(end.predicted_n, 'token')}{f', {short_number(rate)} tok/s' if rate else ''}"
        what = what if end.predicted_n else f"{counted(end.prompt_n, 'token')} read"
    status = (f"{request.status} ", "" if request.status == 200 else "warning")
    client, path = f"{client_name(request.client):<15} ", f"{client_name(request.path)} "
    time = f"{request.time} "
    for parts in ((time, client, path), (time, client), (time,)):
        if sum(map(len, parts)) + len(status[0]) + len(what) <= width:
            break
    return [*((part, "dim" if part != client else "") for part in parts), status, (what, "")]
