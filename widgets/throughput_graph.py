"""The pane of the speed: decode, prefill and modelled bandwidth over time, against the roofline of the memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from widgets.pane import Line, Pane
from widgets.plot import Column, cells, nice_top, short_number

_AXIS = 5  # cells of an axis label and the gap beside it
_SAMPLE_DOTS = (64, 48, 32, 24, 16, 12, 8, 6, 4, 2, 1)
"""Widths of a sample in dots. Few of them, so that the scale of the graph seldom changes."""
MIN_GRAPH_ROWS = 3


@dataclass(frozen=True)
class Sample:
    """The speed over a short time. A decoded token reads `bytes_per_token` (0: not known, or prefill)."""

    tokens_per_s: float
    bytes_per_token: int = 0
    is_prefill: bool = False

    @property
    def gbps(self) -> float | None:
        """The modelled bandwidth: the bytes that the tokens must read, by time."""
        return self.tokens_per_s * self.bytes_per_token / 1e9 if self.bytes_per_token else None

    def roofline(self, copy_gbps: float | None) -> float | None:
        """The tokens/s that the copy bandwidth allows."""
        return copy_gbps * 1e9 / self.bytes_per_token if copy_gbps and self.bytes_per_token else None


GAP = Sample(0.0)
"""Stands between two answers, and is drawn as an empty column."""


@dataclass(frozen=True)
class Throughput:
    """`samples` are oldest first. `current`, `median`, `best` (decode) and `prefill` (of the last prompt) are in
    tokens/s. `copy_gbps` is the measured bandwidth of the device: of a copy or of reading, as `measured` says.
    `share` is the reached part of the roofline, which may be above 1 where weights stay in caches (`is_cached`).
    `memory` is a phrase about the load of the memory controller. None: not known yet."""

    samples: tuple[Sample, ...] = ()
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


class ThroughputGraph(Pane[Throughput]):
    BORDER_TITLE = "throughput"

    def draw(self, data: Throughput, width: int, height: int) -> list[Line]:
        return lines(data, width, height)


def lines(data: Throughput, width: int, height: int) -> list[Line]:
    """The figures, the graph of the speeds and, where there is room, the graph of the bandwidth."""
    figures = _figures(data)
    if height - len(figures) < MIN_GRAPH_ROWS:
        figures = figures[:2]
    rows = height - len(figures)
    if rows < 2 or width < 4 * _AXIS or not data.samples:
        return figures[:height]
    samples = _widened(data.samples, 2 * (width - 2 * _AXIS))
    if rows < 7 or all(sample.gbps is None for sample in data.samples):
        return figures + _speed_graph(samples, data.copy_gbps, width, rows)
    upper = (rows - 1) // 2
    title: Line = [(_bandwidth_title(data, width), "dim")]
    lower = _bandwidth_graph(samples, data.copy_gbps, width, rows - upper - 1)
    return [*figures, *_speed_graph(samples, data.copy_gbps, width, upper), title, *lower]


def _figures(data: Throughput) -> list[Line]:
    current, median, best, prefill = map(_number, (data.current, data.median, data.best, data.prefill))
    share = "" if data.share is None else f"  {data.share:.0%} of roofline"
    share += ", cached" if data.is_cached else ""
    return [
        [(f"{current} tok/s", "strong"), (share, "")],
        [(f"median {median}  best {best}  prefill {prefill}", "dim")],
        *([[(data.memory, "dim")]] if data.memory else []),
    ]


def _bandwidth_title(data: Throughput, width: int) -> str:
    title = f"{_number(data.gbps)} GB/s modelled"
    if data.copy_gbps is None:
        return title
    title += f" · {data.measured} {short_number(data.copy_gbps)}"
    return f"{title} measured" if len(title) + 9 <= width else title


def _number(value: float | None) -> str:
    return "–" if value is None else short_number(value)


def _widened(samples: Sequence[Sample], dots: int) -> list[Sample]:
    """The last samples that fit into `dots` columns, each repeated as often as it is wide. A few samples are drawn
    wide, so that one answer is a graph already; the graph zooms out as their number grows."""

    def width(sample: Sample, sample_dots: int) -> int:
        return min(2, sample_dots) if sample is GAP else sample_dots  # a gap is one cell

    fitting = (n for n in _SAMPLE_DOTS if sum(width(sample, n) for sample in samples) <= dots)
    sample_dots = next(fitting, 1)
    return [sample for sample in samples for _ in range(width(sample, sample_dots))][-dots:]


def _speed_graph(samples: list[Sample], copy_gbps: float | None, width: int, height: int) -> list[Line]:
    """Decode solid against the left axis, prefill hatched against the right axis, the roofline as a line."""
    decode = max((s.tokens_per_s for s in samples if not s.is_prefill), default=0.0)
    prefill = max((s.tokens_per_s for s in samples if s.is_prefill), default=0.0)
    rooflines = [sample.roofline(copy_gbps) for sample in samples]
    top, prefill_top = _axis_top(decode, max((r for r in rooflines if r), default=0.0)), nice_top(prefill)
    columns = [
        Column(None)
        if sample is GAP
        else Column(
            sample.tokens_per_s / (prefill_top if sample.is_prefill else top),
            _line_at(roofline, top),
            sample.is_prefill,
        )
        for sample, roofline in zip(samples, rooflines, strict=True)
    ]
    left = (short_number(top) if decode else "", "tok/s")
    return _framed(columns, width, height, left, short_number(prefill_top) if prefill else "")


def _bandwidth_graph(samples: list[Sample], copy_gbps: float | None, width: int, height: int) -> list[Line]:
    """The modelled bandwidth, with the measured one as a line."""
    top = _axis_top(max((s.gbps for s in samples if s.gbps is not None), default=0.0), copy_gbps or 0.0)
    columns = [
        Column(None) if sample.gbps is None else Column(sample.gbps / top, _line_at(copy_gbps, top))
        for sample in samples
    ]
    return _framed(columns, width, height, (short_number(top), "GB/s"), "")


def _axis_top(value: float, limit: float) -> float:
    """Where an axis ends: above `limit` too, unless that would press the values to the bottom."""
    return nice_top(max(value, limit if limit <= 8 * value else 0.0))


def _line_at(value: float | None, top: float) -> float | None:
    return value / top if value is not None and value <= top else None


def _framed(columns: list[Column], width: int, height: int, left: tuple[str, str], right: str) -> list[Line]:
    """The plot between its axes. `left` is the label of the top and the unit, `right` the top of prefill."""
    plot_width = width - 2 * _AXIS
    framed = []
    for y, row in enumerate(cells(columns, plot_width, height)):
        label = left[0] if y == 0 else "0" if y == height - 1 else left[1] if y == 1 else ""
        line: Line = [(f"{label:>{_AXIS - 1}} "[:_AXIS], "dim")]
        line += [
            ("".join(cell.text for cell in run), kind) for kind, run in groupby(row, lambda cell: cell.kind)
        ]
        line.append((f" {right if y == 0 else 'prf' if y == 1 and right else '':<{_AXIS - 1}}", "hatched"))
        framed.append(line)
    return framed
