"""Speeds on a time axis: samples with their times, and their means in the columns of a graph."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import floor

_PAUSE_S = 1.0  # between two samples, at most: a longer one separates two answers
_CELL = 2  # columns of dots
_SLIVER = 1e-6  # of a column: a rounding error of times, and no time


@dataclass(frozen=True)
class Sample:
    """The speed over the `seconds` before `at_s`, a time of the session's clock. A decoded token reads
    `bytes_per_token` (0: not known, or prefill). `copy_gbps` is the measured bandwidth of the engine's device, where
    it is not that of the engine in use."""

    tokens_per_s: float
    bytes_per_token: int = 0
    is_prefill: bool = False
    at_s: float = 0.0
    seconds: float = 0.25
    copy_gbps: float | None = None

    @property
    def gbps(self) -> float | None:
        """The modelled bandwidth: the bytes that the tokens must read, by time."""
        return self.tokens_per_s * self.bytes_per_token / 1e9 if self.bytes_per_token else None

    def limit_gbps(self, copy_gbps: float | None) -> float | None:
        """The measured bandwidth, `copy_gbps` for the engine in use; None if it is not known."""
        return (copy_gbps if self.copy_gbps is None else self.copy_gbps) or None

    def roofline(self, copy_gbps: float | None) -> float | None:
        """The tokens/s that the bandwidth allows."""
        limit = self.limit_gbps(copy_gbps)
        return limit * 1e9 / self.bytes_per_token if limit and self.bytes_per_token else None


@dataclass(frozen=True)
class Mark:
    """An event on the axis: `symbol` is one character, `kind` the word for it ("prompt"), `text` says which one it
    was, "" if `kind` says all."""

    at_s: float
    symbol: str
    kind: str
    text: str = ""


@dataclass
class _Sums:
    seconds: float = 0.0
    tokens: float = 0.0
    bytes: float = 0.0

    def add(self, sample: Sample, seconds: float) -> None:
        tokens = sample.tokens_per_s * seconds
        self.seconds += seconds
        self.tokens += tokens
        self.bytes += tokens * sample.bytes_per_token


@dataclass(eq=False)
class _Run:
    """Samples of one prompt, or of one answer. `first` is the first of them."""

    first: Sample
    columns: dict[int, _Sums] = field(default_factory=dict)

    def mean(self, column: int) -> Sample:
        """The mean of a column or, where the run was widened, of the nearest one with samples."""
        sums = self.columns[min(self.columns, key=lambda other: abs(other - column))]
        return Sample(
            sums.tokens / sums.seconds,
            round(sums.bytes / sums.tokens) if sums.tokens else 0,
            self.first.is_prefill,
            seconds=sums.seconds,
            copy_gbps=self.first.copy_gbps,
        )


@dataclass(frozen=True)
class TimeAxis:
    """The `seconds` up to `now_s` in `width` cells. A cell begins at a multiple of its length, so that a graph moves
    by whole cells and keeps its shape."""

    now_s: float
    seconds: float
    width: int

    @cached_property
    def cell_s(self) -> float:
        return self.seconds / self.width

    @cached_property
    def first(self) -> int:
        """The number of the first cell, counted from the clock's zero."""
        return floor(self.now_s / self.cell_s) - self.width + 1

    def cell(self, at_s: float) -> int:
        """The cell of a time, counted from the left; it may be outside."""
        return floor(at_s / self.cell_s) - self.first

    def ago_s(self, cell: int) -> float:
        """The time from the middle of a cell to now."""
        return max(0.0, self.now_s - (self.first + cell + 0.5) * self.cell_s)

    def shows(self, event: Sample | Mark) -> bool:
        return 0 <= self.cell(event.at_s) < self.width

    def place(self, marks: Sequence[Mark]) -> dict[int, list[Mark]]:
        """The marks of each cell, of which the first is shown. One whose cell is taken by a later one goes to the cell
        before, if that is free."""
        placed: dict[int, list[Mark]] = {}
        for mark in reversed(marks):
            if self.shows(mark):
                cell = self.cell(mark.at_s)
                cell -= cell in placed and cell - 1 not in placed and cell > 0
                placed.setdefault(cell, []).append(mark)
        return placed

    def columns(self, samples: Iterable[Sample]) -> list[Sample | None]:
        """The means of `samples`, oldest first, in two columns of dots a cell; None where the engine was idle.

        A column is of decode or of prefill, of which took longer. Each answer and each prompt gets the columns of a
        whole cell, even if it was shorter, unless others leave it no room.
        """
        runs = self._runs(samples)
        owners: list[_Run | None] = [None] * (_CELL * self.width)
        for run in runs:
            for column, sums in run.columns.items():
                owner = owners[column]
                if owner is None or sums.seconds > owner.columns[column].seconds:
                    owners[column] = run
        for run in sorted(runs, key=lambda run: run.first.is_prefill):  # answers first
            _widen(run, owners)
        return [None if run is None else run.mean(column) for column, run in enumerate(owners)]

    def _runs(self, samples: Iterable[Sample]) -> list[_Run]:
        runs: list[_Run] = []
        column_s, first = self.cell_s / _CELL, self.first * _CELL
        before: Sample | None = None
        for sample in samples:
            start, end = (sample.at_s - sample.seconds) / column_s, sample.at_s / column_s
            if end <= first:
                continue
            if before is None or _is_other_run(before, sample):
                runs.append(_Run(sample))
            before = sample
            for column in range(max(first, floor(start)), min(first + _CELL * self.width, floor(end) + 1)):
                share = min(end, column + 1) - max(start, column)
                if share > _SLIVER:
                    runs[-1].columns.setdefault(column - first, _Sums()).add(sample, share * column_s)
        return [run for run in runs if run.columns]


def _is_other_run(before: Sample, sample: Sample) -> bool:
    return (
        sample.is_prefill != before.is_prefill
        or sample.copy_gbps != before.copy_gbps
        or sample.at_s - sample.seconds - before.at_s > _PAUSE_S
    )


def _widen(run: _Run, owners: list[_Run | None]) -> None:
    """Gives a short run both columns of a cell. They were idle, or a longer run can spare them: a prompt gets the cell
    before its answer, an answer the cell after its prompt. Where there is no such cell, it gets idle columns there."""
    owned = [column for column in run.columns if owners[column] is run]
    if len(owned) >= _CELL:
        return
    beside, step = (min(run.columns) - 1, -1) if run.first.is_prefill else (max(run.columns) + 1, 1)
    for column in (*owned, beside, min(run.columns)):
        first = column // _CELL * _CELL
        cell = range(first, first + _CELL)
        if 0 <= column < len(owners) and all(
            owners[at] in (None, run) or owners.count(owners[at]) >= 2 * _CELL for at in cell
        ):
            owners[first : first + _CELL] = [run] * _CELL
            return
    for column in range(beside, beside + step * (_CELL - len(owned)), step):
        if 0 <= column < len(owners) and owners[column] is None:
            owners[column] = run
