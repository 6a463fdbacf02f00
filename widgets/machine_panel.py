"""What the machine's counters say, and in one line what slows it down."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

from textual.geometry import Size

from engine.events import Counter
from widgets.pane import Line, Pane
from widgets.plot import bar
from widgets.text import one_line

_NAME, _FIGURE, _BAR = 16, 19, 8


@dataclass(frozen=True)
class MachineState:
    """`verdict` is a sentence, "" while there is nothing to say."""

    counters: tuple[Counter, ...] = ()
    verdict: str = ""


class MachinePanel(Pane[MachineState]):
    BORDER_TITLE = "machine"

    def draw(self, data: MachineState, width: int, height: int) -> list[Line]:
        return lines(data, width)

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return 0 if self.data is None else len(lines(self.data, width))

    def watch_data(self, before: MachineState | None, data: MachineState | None) -> None:
        def rows(data: MachineState | None) -> int:
            return 0 if data is None else len(lines(data, self.size.width))

        if rows(before) != rows(data):
            self.refresh(layout=True)


def lines(data: MachineState, width: int) -> list[Line]:
    """What is there comes first: where the room is short, what is absent goes."""
    there = [counter for counter in data.counters if not counter.absent]
    absent = [counter for counter in data.counters if counter.absent]
    verdict = textwrap.wrap(f"⚠ {one_line(data.verdict)}", max(8, width)) if data.verdict else []
    said: list[Line] = [[(line, "warning")] for line in verdict]
    said += [_line(counter, width) for counter in there]
    return said + [line for counter in absent for line in _absent(counter, width)]


def _absent(counter: Counter, width: int) -> list[Line]:
    """Why there is no figure, in two lines where one does not do."""
    reason = f"not available: {one_line(counter.absent)}"
    first, *more = textwrap.wrap(reason, max(16, width - _NAME), max_lines=2, placeholder="…")
    return [[(_name(counter), "dim"), (first, "dim")], *([(" " * _NAME + line, "dim")] for line in more)]


def _name(counter: Counter) -> str:
    return f"{one_line(counter.name)[: _NAME - 1]:<{_NAME}}"


def _line(counter: Counter, width: int) -> Line:
    name = _name(counter)
    if counter.value is None:
        return [(name, "dim"), (one_line(counter.text), "")]
    value = _figure(counter.value, counter.unit)
    if counter.maximum and counter.unit != "%":
        value += f" of {_figure(counter.maximum, '').strip()}"
    line: Line = [(name, "dim"), (f"{value} {counter.unit}"[:_FIGURE].ljust(_FIGURE), "")]
    rest = width - _NAME - _FIGURE
    if counter.maximum and rest >= _BAR:
        line.append((bar(counter.value / counter.maximum, _BAR), "value"))
    elif counter.parts and rest >= _BAR:
        line.append((one_line(", ".join(counter.parts))[:rest], "dim"))
    return line


def _figure(value: float, unit: str) -> str:
    return f"{value:.1f}" if unit in ("GB", "W") and value < 100 else f"{value:,.0f}"
