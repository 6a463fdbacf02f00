"""Speed and bandwidth over time, against what the device's memory allows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from widgets.pane import Line, Pane
from widgets.plot import Column, cells, figure, nice_top

_AXIS = 5  # cells of an axis figure with the gap behind it
_WIDTHS = (64, 48, 32, 24, 16, 12, 8, 6, 4, 2)  # dots of a sample; few, so that the picture seldom changes
LEAST_ROWS = 3  # of a graph, for which other lines go


@dataclass(frozen=True)
class Sample:
    """A short while of work; a decoded token had to read `bytes_per_token` (0: not known, or prefill)."""

    tokens_per_s: float
    bytes_per_token: int = 0
    is_prefill: bool = False

    @property
    def gbps(self) -> float | None:
        """Modelled: the bytes that the tokens had to read, by time."""
        return self.tokens_per_s * self.bytes_per_token / 1e9 if self.bytes_per_token else None

    def roofline(self, copy_gbps: float | None) -> float | None:
        """Tokens a second that the copy bandwidth allows."""
        return copy_gbps * 1e9 / self.bytes_per_token if copy_gbps and self.bytes_per_token else None


GAP = Sample(0.0)
"""Stands between two answers: a column with nothing in it."""


@dataclass(frozen=True)
class Throughput:
    """`samples` oldest first. `current`, `median`, `best` decode speed in tok/s, `prefill` the last prompt's;
    None: none yet. `copy_gbps` is the device's measured bandwidth, of what `measured` says: a copy on a GPU, reading
    on a CPU. `share` is that of the roofline that is reached; above it where weights stay in caches, which `is_cached`
    says. `memory` is what the memory controller itself tells, in words, or why it does not."""

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
    figures = _figures(data, width)
    if height - len(figures) < LEAST_ROWS:
        figures = figures[:2]  # the machine panel says of the memory what there is to say
    rows = height - len(figures)
    if rows < 2 or width < 4 * _AXIS or not data.samples:
        return figures[:height]
    if rows < 7 or all(sample.gbps is None for sample in data.samples):
        return figures + _speeds(data, width, rows)
    upper = (rows - 1) // 2
    middle: Line = [(_gbps_title(data, width), "dim")]
    return [*figures, *_speeds(data, width, upper), middle, *_bandwidths(data, width, rows - upper - 1)]


def _figures(data: Throughput, width: int) -> list[Line]:
    def said(value: float | None) -> str:
        return "–" if value is None else figure(value)

    share = "" if data.share is None else f"  {data.share:.0%} of roofline"
    share += ", cached" if data.is_cached else ""
    figures: list[Line] = [
        [(f"{said(data.current)} tok/s", "strong"), (share, "")],
        [(f"median {said(data.median)}  best {said(data.best)}  prefill {said(data.prefill)}", "dim")],
    ]
    if data.memory:
        figures.append([(data.memory, "dim")])
    return figures


def _gbps_title(data: Throughput, width: int) -> str:
    now = "–" if data.gbps is None else figure(data.gbps)
    modelled = f"{now} GB/s modelled"
    if data.copy_gbps is None:
        return modelled
    most = f"{modelled} · {data.measured} {figure(data.copy_gbps)}"
    return f"{most} measured" if len(most) + 9 <= width else most


def _columns(samples: Sequence[Sample], most: int) -> list[Sample]:
    """The last samples that fit into `most` columns of dots, each as often as it is wide. Where there are few they
    are wide, so that one answer is a picture already, and the picture zooms out as there are more."""
    fitting = (wide for wide in _WIDTHS if sum(_dots(sample, wide) for sample in samples) <= most)
    wide = next(fitting, 1)
    return [sample for sample in samples for _ in range(_dots(sample, wide))][-most:]


def _dots(sample: Sample, wide: int) -> int:
    """A gap is narrow: a cell, so that samples keep to whole cells."""
    return min(2, wide) if sample is GAP else wide


def _speeds(data: Throughput, width: int, height: int) -> list[Line]:
    """Decode solid against the left axis, prefill hatched against the right one, the roofline dotted."""
    room = width - 2 * _AXIS
    shown = _columns(data.samples, 2 * room)
    decode = max((s.tokens_per_s for s in shown if not s.is_prefill), default=0.0)
    prefill = max((s.tokens_per_s for s in shown if s.is_prefill), default=0.0)
    rooflines = [s.roofline(data.copy_gbps) for s in shown]
    roofline = max((r for r in rooflines if r is not None), default=0.0)
    # A roofline far above would press the speeds to the bottom: it is left out of the picture then.
    top = nice_top(max(decode, roofline if roofline <= 8 * decode else 0.0))
    right = nice_top(prefill)
    columns = [
        Column(None)
        if s is GAP
        else Column(
            s.tokens_per_s / (right if s.is_prefill else top),
            r / top if r is not None and r <= top else None,
            s.is_prefill,
        )
        for s, r in zip(shown, rooflines, strict=True)
    ]
    left = figure(top) if decode else ""
    return _framed(columns, room, height, (left, "tok/s"), figure(right) if prefill else "")


def _bandwidths(data: Throughput, width: int, height: int) -> list[Line]:
    room = width - 2 * _AXIS
    shown = _columns(data.samples, 2 * room)
    most = max((s.gbps for s in shown if s.gbps is not None), default=0.0)
    copy = data.copy_gbps
    top = nice_top(max(most, copy if copy is not None and copy <= 8 * most else 0.0))
    line = copy / top if copy is not None and copy <= top else None
    columns = [
        Column(None if s.gbps is None else s.gbps / top, None if s.gbps is None else line) for s in shown
    ]
    return _framed(columns, room, height, (figure(top), "GB/s"), "")


def _framed(columns: list[Column], room: int, height: int, left: tuple[str, str], right: str) -> list[Line]:
    """The plot between its axes: top figure and unit at the left, prefill's top figure at the right."""
    framed = []
    for y, row in enumerate(cells(columns, room, height)):
        label = left[0] if y == 0 else "0" if y == height - 1 else left[1] if y == 1 else ""
        line: Line = [(f"{label:>{_AXIS - 1}} "[:_AXIS], "dim")]
        start = 0
        for x in range(1, room + 1):
            if x == room or row[x].kind != row[start].kind:
                line.append(("".join(cell.text for cell in row[start:x]), row[start].kind))
                start = x
        line.append((f" {right if y == 0 else 'prf' if y == 1 and right else '':<{_AXIS - 1}}", "hatched"))
        framed.append(line)
    return framed
