"""What the pane of the machine draws, line by line."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.protocol.events import Counter
from widgets.dashboard import machine_panel
from widgets.dashboard.machine_panel import MachinePanel, MachineState


def text(lines):
    return ["".join(part for part, _ in line) for line in lines]


def test_the_machine_says_what_is_absent_last_and_why():
    counters = (
        Counter(name="EMC activity", absent="no permission for /debug/cactmon/mc_all"),
        Counter(name="GPU clock", value=1300, unit="MHz", maximum=1300),
        Counter(name="power mode", text="MAXN\x1b[31m"),
    )
    lines = text(machine_panel.lines(MachineState(counters, "12% below the best: hot"), 70))
    assert lines[0] == "⚠ 12% below the best: hot"
    assert lines[1].startswith("GPU clock       1,300 of 1,300 MHz") and "████" in lines[1]
    assert "MAXN[31m" in lines[2], "no control characters"
    assert lines[3].endswith("not available: no permission for /debug/cactmon/mc_all")


def test_why_a_figure_is_absent_is_said_in_two_lines_of_a_narrow_pane():
    absent = Counter(name="temperature", absent="there are no sensors (a virtual machine?)")
    lines = text(machine_panel.lines(MachineState((absent,)), 50))
    assert lines == ["temperature     not available: there are no", " " * 16 + "sensors (a virtual machine?)"]
    assert [len(line) <= 36 for line in text(machine_panel.lines(MachineState((absent,)), 36))] == [True] * 2
    assert len(machine_panel.lines(MachineState((absent,)), 100)) == 1


HOT = Counter(name="temperature", value=61, unit="°C", maximum=None)
NAMED = (
    Counter(name="GPU load", value=97, unit="%", maximum=100),
    Counter(name="memory activity", value=71, unit="%", maximum=100),
    Counter(name="GPU clock", value=1755, unit="MHz", maximum=1980),
    Counter(name="memory", value=12.4, unit="GB", maximum=64.3),
    HOT,
    Counter(name="power mode", text="MAXN_SUPER"),
    Counter(name="CPU clock", absent="this machine does not tell"),
    Counter(name="EMC activity", absent="debugfs shows no EMC"),
)


def test_the_machine_shows_what_was_and_what_a_counter_consists_of():
    busy = Counter(name="other load", value=50, unit="%", maximum=100, parts=("cc1 40 %", "sh 10 %"))
    state = MachineState((busy,), history={"other load": (0, 25, 50, 100, 50)})
    first, second = text(machine_panel.lines(state, 70))
    assert first.endswith("▁▃▅█▅") and second.strip() == "cc1 40 %, sh 10 %"
    assert not any(mark in text(machine_panel.lines(state, 40))[0] for mark in "▁▃")


def test_a_wide_machine_has_two_counters_a_line_and_the_absent_ones_in_one():
    lines = text(machine_panel.short_lines(MachineState(NAMED, "12% below the best: hot"), 62))
    assert [line.split() for line in lines] == [
        ["⚠", "12%", "below", "the", "best:", "hot"],
        ["GPU", "load", "97", "%", "memory", "12.4", "of", "64.3", "GB"],
        ["memory", "activity", "71", "%", "temperature", "61", "°C"],
        ["GPU", "clock", "1,755", "of", "1,980", "MHz", "power", "mode", "MAXN_SUPER"],
    ]
    quiet = text(machine_panel.short_lines(MachineState(NAMED), 62))
    assert quiet[:3] == lines[1:] and len(quiet) == len(lines), "nothing below moves"
    assert quiet[3].split() == ["not", "available:", "CPU", "clock,", "EMC", "activity"]
    reasons = text(machine_panel.short_lines(MachineState(NAMED), 90))[-1]
    assert reasons.endswith("CPU clock (this machine does not tell), EMC activity (debugfs shows no EMC)")


@pytest.mark.parametrize(
    ("width", "says"),
    [
        (62, "1,755 of 1,980 MHz"),
        (49, "1.75/1.98 GHz"),
        (40, "1,755 MHz"),
        (36, "1.8GHz"),
        (34, "1,755 of 1,980 MHz"),
    ],
)
def test_figures_of_two_counters_a_line_get_shorter_until_there_is_one_a_line(width, says):
    lines = text(machine_panel.short_lines(MachineState(NAMED), width))
    assert says in "\n".join(lines)
    assert (len(lines) == 4) == (width >= 36)


@pytest.mark.parametrize("width", [44, 49, 62, 80])
def test_the_machine_has_one_counter_a_line_where_there_is_height_for_all(width):
    panel, state = MachinePanel(), MachineState(NAMED)
    assert panel.draw(state, width, 30) == machine_panel.lines(state, width)
    low = panel.draw(state, width, 4)
    assert low == machine_panel.short_lines(state, width) and len(low) == 4


@given(width=st.integers(8, 130), counters=st.lists(st.sampled_from(NAMED)), slowdown=st.text(max_size=60))
def test_two_counters_a_line_are_no_wider_than_the_pane_nor_more_lines_than_one_a_line(
    width, counters, slowdown
):
    state = MachineState(tuple(counters), slowdown)
    lines, in_full = machine_panel.short_lines(state, width), machine_panel.lines(state, width)
    assert len(lines) <= len(in_full)
    if lines != in_full[: len(lines)]:
        assert all(len(line) <= width for line in text(lines)[:-1])  # the pane cuts the last one
