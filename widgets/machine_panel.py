"""The pane of the machine: its counters, and one sentence on what slows the engine down."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

from textual.geometry import Size

from engine.events import Counter
from widgets.pane import Line, Pane
from widgets.plot import bar
from widgets.text import one_line

_NAME, _VALUE, _BAR = 16, 19, 8  # cells of the columns


@dataclass(frozen=True)
class MachineState:
    """`slowdown` is a sentence, "" if there is none."""

    counters: tuple[Counter, ...] = ()
    slowdown: str = ""


class MachinePanel(Pane[MachineState]):
    """Is as high as its lines are many."""

    BORDER_TITLE = "machine"

    def draw(self, data: MachineState, width: int, height: int) -> list[Line]:
        return lines(data, width)

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return _height(self.data, width)

    def watch_data(self, before: MachineState | None, after: MachineState | None) -> None:
        if _height(before, self.size.width) != _height(after, self.size.width):
            self.refresh(layout=True)


def _height(state: MachineState | None, width: int) -> int:
    return 0 if state is None else len(lines(state, width))


def lines(state: MachineState, width: int) -> list[Line]:
    """Counters that are absent come last: a low pane does not show them."""
    present = [_line(counter, width) for counter in state.counters if not counter.absent]
    absent = [line for counter in state.counters if counter.absent for line in _absent(counter, width)]
    slowdown = textwrap.wrap(f"⚠ {one_line(state.slowdown)}", max(8, width)) if state.slowdown else []
    return [*([(line, "warning")] for line in slowdown), *present, *absent]


def _line(counter: Counter, width: int) -> Line:
    if counter.value is None:
        return [_name(counter), (one_line(counter.text), "")]
    value = _number(counter.value, counter.unit)
    if counter.maximum and counter.unit != "%":
        value += f" of {_number(counter.maximum)}"
    line: Line = [_name(counter), (f"{value} {counter.unit}"[:_VALUE].ljust(_VALUE), "")]
    rest = width - _NAME - _VALUE
    if counter.maximum and rest >= _BAR:
        line.append((bar(counter.value / counter.maximum, _BAR), "value"))
    elif counter.parts and rest >= _BAR:
        line.append((one_line(", ".join(counter.parts))[:rest], "dim"))
    return line


def _absent(counter: Counter, width: int) -> list[Line]:
    """Why there is no value, on two lines at most."""
    reason = f"not available: {one_line(counter.absent)}"
    first, *more = textwrap.wrap(reason, max(16, width - _NAME), max_lines=2, placeholder="…")
    return [[_name(counter), (first, "dim")], *([(" " * _NAME + line, "dim")] for line in more)]


def _name(counter: Counter) -> tuple[str, str]:
    return f"{one_line(counter.name)[: _NAME - 1]:<{_NAME}}", "dim"


def _number(value: float, unit: str = "") -> str:
    return f"{value:.1f}" if unit in ("GB", "W") and value < 100 else f"{value:,.0f}"
