"""The pane of a server's throughput: tokens a second of replies, stacked by client, each with a pattern of its own."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from widgets.dashboard.pane import Line, Pane
from widgets.plot import nice_top, short_number
from widgets.text import as_latency, longest_fitting, one_line

BIN_S = 0.5
WINDOW_S = 60.0
RATE_S = 2.0
"""The time that the figures "now" are the mean of."""
MARGIN = 5  # cells of the labels at the left
MIN_GRAPH_ROWS = 2
_PATTERNS = ("█", "░", "▓", "▒", "▚", "╳")
_STYLES = ("value", "line", "hatched", "warning", "strong", "dim")
_OTHERS = "others"
_NAME = 24  # cells of a client's name


@dataclass(frozen=True)
class ClientThroughput:
    """`bins`: by number, oldest first, the tokens of each client in the `BIN_S` seconds from number * `BIN_S` of the
    clock on. `last` is the number of the last bin that is over. `prefill` are the prompt tokens a second of the last
    `RATE_S`. Requests that got their first token in the last minute waited `first_p50_s` and `first_p99_s` seconds for
    it (median and 99th percentile; 0: there were none)."""

    bins: Mapping[int, Mapping[str, int]] = field(default_factory=dict)
    last: int = 0
    prefill: float = 0.0
    first_p50_s: float = 0.0
    first_p99_s: float = 0.0

    def rates(self) -> dict[str, float]:
        """Tokens a second of each client in the last `RATE_S`."""
        since = self.last - round(RATE_S / BIN_S)
        sums = Counter[str]()
        for number, tokens in self.bins.items():
            if since < number <= self.last:
                sums.update(tokens)
        return {client: count / RATE_S for client, count in sums.items()}


class ClientGraph(Pane[ClientThroughput]):
    BORDER_TITLE = "throughput, last minute"

    def draw(self, data: ClientThroughput, width: int, height: int) -> list[Line]:
        """The total, the graph of the last minute where there is room, and the clients with their patterns."""
        rates = data.rates()
        total, prefill = f"{_figure(sum(rates.values()))} tok/s", f"  prefill {_figure(data.prefill)} tok/s"
        first = longest_fitting(_first_token(data), width - len(total) - len(prefill))
        head: Line = [(total, "strong"), (prefill, "dim"), (first, "dim")]
        clients = _clients(data)
        legend = _legend(clients, _named(rates, clients), width)
        shown = height - 2 - MIN_GRAPH_ROWS
        if 0 < shown < len(legend):  # the graph comes before the last clients
            legend = [*legend[: shown - 1], [*legend[shown - 1], (" …", "dim")]]
        rows = height - 1 - len(legend) - 1
        if rows < MIN_GRAPH_ROWS or width < 3 * MARGIN:
            return [head, *legend][:height]
        return [head, *_graph(data, clients, width, rows), _axis(width), *legend]


def client_name(client: str) -> str:
    """A name from the network in characters that have one cell each, at most `_NAME` of them."""
    name = "".join(c if c.isascii() and c.isprintable() else "?" for c in one_line(client)) or "unknown"
    return name if len(name) <= _NAME else f"{name[: _NAME - 1]}…"


def _first_token(data: ClientThroughput) -> list[str]:
    """How long requests wait for their first token, the longest phrase first."""
    if not data.first_p99_s:
        return [""]
    p50, p99 = as_latency(data.first_p50_s), as_latency(data.first_p99_s)
    return [f"  first token p50 {p50}, p99 {p99}", f"  first token p50 {p50}", ""]


def _clients(data: ClientThroughput) -> list[str]:
    """The names in the order in which they came; those for which there is no pattern are one, the last."""
    names = list(dict.fromkeys(client_name(client) for tokens in data.bins.values() for client in tokens))
    return names if len(names) <= len(_PATTERNS) else [*names[: len(_PATTERNS) - 1], _OTHERS]


def _named(values: Mapping[str, float], clients: Sequence[str]) -> dict[str, float]:
    """`values` by what the legend calls the clients."""
    named = dict.fromkeys(clients, 0.0)
    for client, value in values.items():
        name = client_name(client)
        named[name if name in named else _OTHERS] += value
    return named


def _legend(clients: Sequence[str], rates: Mapping[str, float], width: int) -> list[Line]:
    """Patterns, names and speeds, as many on a line as fit."""
    legend, room = list[Line](), 0
    for i, client in enumerate(clients):
        text = f" {client} {_figure(rates[client])} tok/s"
        if not legend or len(text) + 3 > room:
            legend, room = [*legend, []], width
        gap = "  " if legend[-1] else ""
        legend[-1] += [(gap + _PATTERNS[i], _STYLES[i]), (text, "")]
        room -= len(gap) + 1 + len(text)
    return legend


def _graph(data: ClientThroughput, clients: Sequence[str], width: int, height: int) -> list[Line]:
    cells = width - MARGIN
    columns = _columns(data, clients, cells)
    top = nice_top(max((sum(column.values()) for column in columns), default=0.0))
    labels = {height - 1: "0", 0: short_number(top)}
    stacks = [_stack(column, clients, top, height) for column in columns]
    graph = []
    for y in range(height):
        row = [stack[height - 1 - y] for stack in stacks]
        line: Line = [(f"{labels.get(y, ''):>{MARGIN - 1}} ", "dim")]
        for i, run in groupby(row):
            pattern = " " if i is None else _PATTERNS[i]
            line.append((pattern * len(list(run)), "" if i is None else _STYLES[i]))
        graph.append(line)
    return graph


def _columns(data: ClientThroughput, clients: Sequence[str], cells: int) -> list[dict[str, float]]:
    """Tokens a second by name in each cell of the last minute. A bin counts in each cell for the time that it has in
    it. Cells begin at multiples of their length, so that the graph keeps its shape when it moves."""
    cell_s = WINDOW_S / cells
    first = int((data.last + 1) * BIN_S / cell_s) - cells
    columns = [dict.fromkeys(clients, 0.0) for _ in range(cells)]
    for number, tokens in data.bins.items():
        if number > data.last:
            continue
        start, end = number * BIN_S / cell_s - first, (number + 1) * BIN_S / cell_s - first
        named = _named(tokens, clients)
        for cell in range(max(0, int(start)), min(cells, int(end) + 1)):
            share = (min(end, cell + 1) - max(start, cell)) / (end - start)
            for name, count in named.items():
                columns[cell][name] += count * max(0.0, share) / cell_s
    return columns


def _stack(column: Mapping[str, float], clients: Sequence[str], top: float, height: int) -> list[int | None]:
    """For each row from the bottom, the number of the client whose part covers most of it. Any speed has a row."""
    rows: list[int | None] = [None] * height
    total, done = sum(column.values()), 0.0
    if total <= 0:
        return rows
    scale = height / top
    used = min(height, max(1, round(total * scale)))
    for i, client in enumerate(clients):
        start = round(done / total * used)
        done += column[client]
        for row in range(start, min(used, round(done / total * used))):
            rows[row] = i
    return rows


def _axis(width: int) -> Line:
    start, end = f"-{WINDOW_S:g} s ", " now"
    return [(start + "─" * max(0, width - len(start) - len(end)) + end, "dim")]


def _figure(rate: float) -> str:
    return short_number(rate) if rate else "0"
