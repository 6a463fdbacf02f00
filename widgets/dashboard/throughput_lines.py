"""The lines of the pane of the speed: figures, two graphs over one time axis, and what they say of a time."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import ceil

from widgets.dashboard.pane import Line
from widgets.dashboard.timeline import Mark, Sample, TimeAxis
from widgets.plot import Column, cells, nice_top, short_number
from widgets.text import as_duration, as_rate, longest_fitting, one_line

MARGIN = 5  # cells at each side of a graph: a label and the gap beside it
MIN_GRAPH_ROWS = 3
HEAT_STEPS = 12
"""Styles "heat0" to "heat11" colour the rows of a graph, from the lowest to the highest."""
_MIN_TICK_CELLS = 12
_TICKS_S = (0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300)


@dataclass(frozen=True)
class Throughput:
    """`samples` and `marks` are oldest first, with times up to `now_s`. `current`, `median`, `best` (decode) and
    `prefill` (of the last prompt) are in tokens/s. `copy_gbps` is the measured bandwidth of the device: of a copy or
    of reading, as `measured` says. `share` is the reached part of the roofline, which may be above 1 where weights
    stay in caches (`is_cached`). `memory` is a phrase about the load of the memory controller, `guesses` one about
    the guesses of next tokens in the last answer. None: not known yet."""

    samples: tuple[Sample, ...] = ()
    marks: tuple[Mark, ...] = ()
    now_s: float = 0.0
    current: float | None = None
    median: float | None = None
    best: float | None = None
    prefill: float | None = None
    gbps: float | None = None
    copy_gbps: float | None = None
    measured: str = "copy"
    share: float | None = None
    is_cached: bool = False
    memory: str = ""
    guesses: str = ""


def axis(data: Throughput, width: int, seconds: float) -> TimeAxis:
    """The time axis of a pane of `width` cells."""
    return TimeAxis(data.now_s, seconds, max(1, width - 2 * MARGIN))


def lines(
    data: Throughput, width: int, height: int, seconds: float = 60, chosen: int | None = None
) -> list[Line]:
    """The figures, the graph of the speeds and, where there is room, that of the bandwidth. The graphs show the last
    `seconds`. The cell `chosen` of the axis is marked."""
    figures = _figures(data, width)
    if height - len(figures) <= MIN_GRAPH_ROWS:  # the axis comes before the load of the memory
        figures = figures[:2]
    rows = height - len(figures)
    if rows < 2 or width < 4 * MARGIN:
        return figures[:height]
    time = axis(data, width, seconds)
    columns = time.columns(data.samples)
    foot = [_axis_line(time, data.marks, chosen)] if rows > MIN_GRAPH_ROWS else []
    rows -= len(foot)
    if rows < 2 * MIN_GRAPH_ROWS + 1 or all(sample.gbps is None for sample in data.samples):
        return [*figures, *_speed_graph(columns, data.copy_gbps, width, rows, chosen), *foot]
    upper = rows // 2
    title: Line = [(_bandwidth_title(data, width), "dim")]
    return [
        *figures,
        *_speed_graph(columns, data.copy_gbps, width, upper, chosen),
        title,
        *_bandwidth_graph(columns, data.copy_gbps, width, rows - upper - 1, chosen),
        *foot,
    ]


def whole_lines(data: Throughput, width: int, height: int) -> list[Line]:
    """The lines with a time axis as long as the samples, and what the symbols on it mean."""
    if not data.samples:
        return lines(data, width, height)
    end_s = data.samples[-1].at_s
    seconds = nice_top(end_s - min(sample.at_s - sample.seconds for sample in data.samples))
    data = replace(data, now_s=end_s)
    meaning: Line = [(" " * MARGIN + legend(data, width, seconds), "dim")]
    return [*lines(data, width, height - 1, seconds), meaning]


def _figures(data: Throughput, width: int) -> list[Line]:
    current, median, best, prefill = map(as_rate, (data.current, data.median, data.best, data.prefill))
    share = "" if data.share is None else f"{data.share:.0%} of roofline"
    share += ", cached" if data.is_cached else ""
    speed = f"{current} tok/s"
    gap = "  " if len(speed + share) + 2 <= width else " "
    return [
        [(speed, "strong"), (gap + share if share else "", "")],
        [(f"median {median}  best {best}  prefill {prefill}", "dim")],
        *([[(phrase, "dim")] for phrase in (data.guesses, data.memory) if phrase]),
    ]


def _bandwidth_title(data: Throughput, width: int) -> str:
    title = f"{as_rate(data.gbps)} GB/s modelled"
    limit = "" if data.copy_gbps is None else f"{data.measured} {as_rate(data.copy_gbps)}"
    titles = [f"{title} · {limit} measured", f"{title} · {limit}"] if limit else []
    return longest_fitting([*titles, title, f"{as_rate(data.gbps)} GB/s"], width)


# --- graphs --------------------------------------------------------------------------------------------


def _speed_graph(
    columns: Sequence[Sample | None], copy_gbps: float | None, width: int, height: int, chosen: int | None
) -> list[Line]:
    """Decode solid against the left axis, prefill hatched against the right axis, the roofline as a line."""
    samples = [sample for sample in columns if sample is not None]
    decode = max((s.tokens_per_s for s in samples if not s.is_prefill), default=0.0)
    prefill = max((s.tokens_per_s for s in samples if s.is_prefill), default=0.0)
    rooflines = [sample.roofline(copy_gbps) if sample else None for sample in columns]
    top, prefill_top = _axis_top(decode, max((r for r in rooflines if r), default=0.0)), nice_top(prefill)
    drawn = [
        Column(None)
        if sample is None
        else Column(
            sample.tokens_per_s / (prefill_top if sample.is_prefill else top),
            _line_at(roofline, top),
            sample.is_prefill,
        )
        for sample, roofline in zip(columns, rooflines, strict=True)
    ]
    right = short_number(prefill_top) if prefill else ""
    return _framed(drawn, width, height, top if decode else None, "tok/s", right, chosen)


def _bandwidth_graph(
    columns: Sequence[Sample | None], copy_gbps: float | None, width: int, height: int, chosen: int | None
) -> list[Line]:
    """The modelled bandwidth, with the measured one as a line."""
    gbps = [sample.gbps if sample else None for sample in columns]
    limits = [
        sample.limit_gbps(copy_gbps) if sample and value is not None else None
        for sample, value in zip(columns, gbps, strict=True)
    ]
    highest = max((value for value in gbps if value is not None), default=0.0)
    top = _axis_top(highest, max((limit for limit in limits if limit), default=0.0))
    drawn = [
        Column(None) if value is None else Column(value / top, _line_at(limit, top))
        for value, limit in zip(gbps, limits, strict=True)
    ]
    return _framed(drawn, width, height, top if highest else None, "GB/s", "", chosen)


def _axis_top(value: float, limit: float) -> float:
    """Where an axis ends: above `limit` too, unless that would press the values to the bottom."""
    return nice_top(max(value, limit if limit <= 8 * value else 0.0))


def _line_at(value: float | None, top: float) -> float | None:
    return value / top if value is not None and value <= top else None


def _framed(
    columns: list[Column],
    width: int,
    height: int,
    top: float | None,
    unit: str,
    right: str,
    chosen: int | None,
) -> list[Line]:
    """The plot between its axes. `top` is the value at the upper end of the left axis, `right` the label of the
    right one."""
    labels = {1: unit}
    if top is not None:
        labels |= {0: short_number(top)} | ({height // 2: _half(top)} if height >= 6 else {})
    labels[height - 1] = "0"
    framed = []
    for y, row in enumerate(cells(columns, width - 2 * MARGIN, height)):
        heat = f"heat{(height - 1 - y) * (HEAT_STEPS - 1) // max(1, height - 1)}"
        pieces = [(cell.text, heat if cell.kind == "value" else cell.kind) for cell in row]
        if chosen is not None and 0 <= chosen < len(pieces):
            text, kind = pieces[chosen]
            pieces[chosen] = (text, "selected") if kind else ("┊", "dim")
        line: Line = [(f"{labels.get(y, ''):>{MARGIN - 1}} "[:MARGIN], "dim")]
        line += [
            ("".join(text for text, _ in run), kind) for kind, run in groupby(pieces, lambda piece: piece[1])
        ]
        line.append((f" {right if y == 0 else 'prf' if y == 1 and right else '':<{MARGIN - 1}}", "hatched"))
        framed.append(line)
    return framed


def _half(top: float) -> str:
    """Half of what `short_number` writes for the end of an axis, in the same unit: 2.5k of 5.0k, 0.5k of 1.0k; "" if
    that has no room."""
    unit = {"k": 1e3, "M": 1e6}.get(short_number(top)[-1])
    text = short_number(top / 2) if unit is None else f"{top / 2 / unit:g}{short_number(top)[-1]}"
    return text if len(text) < MARGIN else ""


# --- the time axis -------------------------------------------------------------------------------------


def _axis_line(time: TimeAxis, marks: Sequence[Mark], chosen: int | None) -> Line:
    """The axis with times in words, the symbols of marks, and a pointer at the cell `chosen`. Where a symbol leaves no
    room for a time, a tick stands for it."""
    cells: list[tuple[str, str]] = [("─", "dim")] * time.width
    for cell, there in time.place(marks).items():
        cells[cell] = (there[0].symbol, "")
    if chosen is not None and 0 <= chosen < time.width:
        cells[chosen] = ("▲", "strong")
    start = [(character, "dim") for character in f"{_ago(time.seconds)} "[: MARGIN + time.width]]
    end = [(character, "dim") for character in f"{' now':<{MARGIN}}"]
    line = [*start, *cells[len(start) - MARGIN :], *end]
    step = next((step for step in _TICKS_S if step / time.cell_s >= _MIN_TICK_CELLS), time.seconds)
    for tick in range(1, ceil(time.seconds / step)):
        label, at = f" {_ago(tick * step)} ", MARGIN + round(time.width - tick * step / time.cell_s)
        for text, begin in ((label, at - len(label) // 2), ("┴", at)):
            if begin >= len(start) and set(line[begin : begin + len(text)]) == {("─", "dim")}:
                line[begin : begin + len(text)] = [(character, "dim") for character in text]
                break
    return [("".join(text for text, _ in run), kind) for kind, run in groupby(line, lambda piece: piece[1])]


def _ago(seconds: float) -> str:
    return f"-{seconds / 60:g} min" if seconds > 60 and seconds % 60 == 0 else f"-{seconds:g} s"


def legend(data: Throughput, width: int, seconds: float) -> str:
    """What the symbols on the axis mean: "E engine  P prompt"."""
    time = axis(data, width, seconds)
    kinds = {there[0].symbol: there[0].kind for there in time.place(data.marks).values()}
    return "  ".join(f"{symbol} {kind}" for symbol, kind in sorted(kinds.items()))


def readouts(data: Throughput, width: int, seconds: float, cell: int) -> list[str]:
    """What a cell of the axis shows, in ever fewer words."""
    time = axis(data, width, seconds)
    samples = [sample for sample in time.columns(data.samples)[2 * cell : 2 * cell + 2] if sample is not None]
    figures = [
        _speed([sample for sample in samples if sample.is_prefill is is_prefill])
        for is_prefill in sorted({sample.is_prefill for sample in samples}, reverse=True)
    ] or [("idle", "")]
    marks = time.place(data.marks).get(cell, [])
    ago_s = time.ago_s(cell)
    ago = f"{ago_s:.0f} s ago" if ago_s < 59.5 else f"{as_duration(ago_s)} ago"
    speeds = [speed for speed, _ in figures]
    in_full = [f"{mark.kind} {one_line(mark.text)}".rstrip() for mark in marks]
    all_figures = [", ".join(filter(None, pair)) for pair in figures]
    texts = (
        [*all_figures, *in_full],
        [*speeds, *in_full],
        [*speeds, *(mark.kind for mark in marks)],
        speeds[-1:],
    )
    return [" · ".join([ago, *parts]) for parts in texts]


def _speed(samples: Sequence[Sample]) -> tuple[str, str]:
    """The means of samples of one kind: their speed, and their bandwidth if it is known."""
    seconds = sum(sample.seconds for sample in samples)
    rate = sum(sample.tokens_per_s * sample.seconds for sample in samples) / seconds
    gbps = sum((sample.gbps or 0.0) * sample.seconds for sample in samples) / seconds
    speed = f"{'prefill' if samples[0].is_prefill else 'decode'} {as_rate(rate)} tok/s"
    return speed, f"{as_rate(gbps)} GB/s" if gbps else ""
