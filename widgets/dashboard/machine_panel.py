"""The pane of the machine: its counters, and one sentence on what slows the engine down."""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest

from engine.protocol.events import Counter
from widgets.dashboard.pane import FittedPane, Line
from widgets.labels import LABELS
from widgets.plot import bar, blocks
from widgets.text import longest_fitting, one_line

_NAME, _VALUE, _BAR = 16, 19, 8  # cells of the columns, one counter a line
_GAP = 2  # cells between two counters of a line


@dataclass(frozen=True)
class MachineState:
    """`slowdown` is a sentence, "" if there is none. `history` has the last values of each counter by name, oldest
    first."""

    counters: tuple[Counter, ...] = ()
    slowdown: str = ""
    history: Mapping[str, Sequence[float]] = field(default_factory=dict)


class MachinePanel(FittedPane[MachineState]):
    """Is as high as its short lines are many. With the whole screen, it shows one counter a line."""

    BORDER_TITLE = "machine"
    LABELS = LABELS["machine"]

    def draw(self, data: MachineState, width: int, height: int) -> list[Line]:
        in_full = lines(data, width)
        return in_full if len(in_full) <= height else short_lines(data, width)

    def rows(self, data: MachineState, width: int) -> int:
        return len(short_lines(data, width))


def lines(state: MachineState, width: int) -> list[Line]:
    """One counter a line. Counters that are absent come last: a low pane does not show them."""
    present = [
        line
        for counter in state.counters
        if not counter.absent
        for line in _line(counter, width, state.history.get(counter.name, ()))
    ]
    absent = [line for counter in state.counters if counter.absent for line in _absent(counter, width)]
    return [*_slowdown(state, width), *present, *absent]


def short_lines(state: MachineState, width: int) -> list[Line]:
    """Two counters a line, and all that are absent in the last one. As `lines` where two columns are too narrow. What
    slows the engine down takes the place of the last lines, so that nothing below moves when it comes."""
    column = (width - _GAP) // 2
    present = [counter for counter in state.counters if not counter.absent]
    cells = [_cell(counter, column) for counter in present]
    slowdown = _slowdown(state, width)
    if any(sum(len(text) for text, _ in cell) > column for cell in cells):
        in_full = lines(replace(state, slowdown=""), width)
        return [*slowdown, *in_full][: max(len(slowdown), len(in_full))]
    half, none = (len(cells) + 1) // 2, Line()
    pairs = zip_longest(cells[:half], cells[half:], fillvalue=none)
    rows: list[Line] = [[*left, (" " * _GAP, ""), *right] for left, right in pairs]
    absent = [counter for counter in state.counters if counter.absent]
    if absent:
        names = ", ".join(one_line(counter.name) for counter in absent)
        reasons = ", ".join(f"{one_line(counter.name)} ({one_line(counter.absent)})" for counter in absent)
        texts = [f"not available: {reasons}", f"not available: {names}"]
        rows.append([(longest_fitting(texts, width), "dim")])
    return [*slowdown, *rows][: max(len(slowdown), len(rows))]


def _slowdown(state: MachineState, width: int) -> list[Line]:
    sentence = f"⚠ {one_line(state.slowdown)}" if state.slowdown else ""
    return [[(line, "warning")] for line in textwrap.wrap(sentence, max(8, width))]


def _cell(counter: Counter, width: int) -> Line:
    """The name at the left and the value at the right of `width` cells, as long as there is room for."""
    full_name = one_line(counter.name)
    names = [full_name, full_name.replace("memory ", "mem. ").replace(" memory", " mem.")]
    pairs = [(name, value) for value in _values(counter) for name in names]
    name, value = next((pair for pair in pairs if sum(map(len, pair)) < width), pairs[-1])
    room = max(1, width - len(name) - 1)
    if counter.value is None and len(value) > room:
        value = f"{value[: room - 1]}…"
    return [(name, "dim"), (f" {value:>{room}}", "")]


def _values(counter: Counter) -> list[str]:
    """The value in ever fewer cells."""
    if counter.value is None:
        return [one_line(counter.text)]
    value, unit = _number(counter.value, counter.unit), counter.unit
    texts = [f"{value} {unit}", f"{value}{unit}"]
    if unit == "MHz" and counter.value >= 1000:
        texts.append(f"{counter.value / 1e3:.1f}GHz")
    if counter.maximum and unit != "%":
        maximum = _number(counter.maximum, unit)
        shared = [f"{value} of {maximum} {unit}", f"{value}/{maximum} {unit}"]
        if unit == "MHz" and counter.value >= 1000:
            shared.append(f"{counter.value / 1e3:.2f}/{counter.maximum / 1e3:.2f} GHz")
        texts = [*shared, *texts]
    return texts


def _line(counter: Counter, width: int, history: Sequence[float]) -> list[Line]:
    """The value with its last minutes and, where there is room for another line, what it consists of."""
    if counter.value is None:
        return [[_name(counter), (one_line(counter.text), "")]]
    value = _number(counter.value, counter.unit)
    if counter.maximum and counter.unit != "%":
        value += f" of {_number(counter.maximum, counter.unit)}"
    rest = width - _NAME - _VALUE
    text = f"{value} {counter.unit}"[:_VALUE]
    line: Line = [_name(counter), (text.ljust(_VALUE) if rest >= _BAR else text, "")]
    top = counter.maximum or max((*history, counter.value)) or 1.0
    if rest >= _BAR:
        line.append((bar(counter.value / top, _BAR) if counter.maximum else " " * _BAR, "value"))
    if (room := rest - _BAR - _GAP) >= _BAR and len(history) > 1:
        line.append((" " * _GAP + blocks(history[-room:], top), "line"))
    parts = one_line(", ".join(counter.parts))
    return [line, *([[(" " * _NAME + parts[: max(0, width - _NAME)], "dim")]] if parts else [])]


def _absent(counter: Counter, width: int) -> list[Line]:
    """Why there is no value, on two lines at most."""
    reason = f"not available: {one_line(counter.absent)}"
    first, *more = textwrap.wrap(reason, max(16, width - _NAME), max_lines=2, placeholder="…")
    return [[_name(counter), (first, "dim")], *([(" " * _NAME + line, "dim")] for line in more)]


def _name(counter: Counter) -> tuple[str, str]:
    return f"{one_line(counter.name)[: _NAME - 1]:<{_NAME}}", "dim"


def _number(value: float, unit: str = "") -> str:
    return f"{value:.1f}" if unit in ("GB", "W", "tok/J") and value < 100 else f"{value:,.0f}"
