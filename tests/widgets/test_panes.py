"""What the panes of the dashboard draw, line by line: nothing is wider than its pane or taller."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.events import Counter
from tests.app.fake_engine import profile
from widgets import kernel_table, machine_panel, throughput_graph
from widgets.kernel_table import GAPS, GROUPS, Kernels, ordered, summary
from widgets.machine_panel import Machine
from widgets.throughput_graph import GAP, Sample, Throughput

SAMPLES = tuple(Sample(90.0 + i % 7, 500_000_000) for i in range(100))


def text(lines):
    return ["".join(part for part, _ in line) for line in lines]


def view(**changes):
    figures = {
        "samples": SAMPLES,
        "current": 96.0,
        "median": 93.0,
        "best": 97.0,
        "prefill": 812.0,
        "gbps": 48.0,
    }
    return Throughput(**{**figures, "copy_gbps": 100.0, "share": 0.48, **changes})


def test_the_graph_shows_figures_axes_and_the_roofline():
    lines = text(throughput_graph.lines(view(memory="memory 71 % busy, measured"), 60, 20))
    whole = "\n".join(lines)
    for said in ("96 tok/s  48% of roofline", "median 93  best 97  prefill 812", "memory 71 % busy", " 200 ",
                 "48 GB/s modelled · copy 100 measured"):  # fmt: skip
        assert said in whole
    kinds = {kind for line in throughput_graph.lines(view(), 60, 20) for _, kind in line}
    assert {"value", "line", "dim", "strong"} <= kinds


def test_prefill_has_its_own_axis_and_another_look():
    samples = (Sample(12_000.0, is_prefill=True),) * 6 + SAMPLES[:20] + (GAP,)
    lines = throughput_graph.lines(view(samples=samples), 60, 12)
    assert any(kind == "hatched" and part.strip(" ⠀") for line in lines for part, kind in line)
    assert "15k" in "\n".join(text(lines))


def test_a_roofline_far_above_does_not_flatten_the_graph():
    lines = text(throughput_graph.lines(view(copy_gbps=4300.0, share=0.01), 60, 20))
    assert "100 " in "\n".join(lines) and "8.6k" not in "\n".join(lines)


def test_a_graph_of_nothing():
    assert "– tok/s" in text(throughput_graph.lines(Throughput(), 40, 12))[0]


@given(width=st.integers(1, 90), height=st.integers(0, 40))
def test_the_graph_keeps_to_its_height(width, height):
    assert len(throughput_graph.lines(view(), width, height)) <= max(height, 2)


def test_the_summary_adds_up_to_the_wall_time():
    of = profile()
    shares = summary(of)
    assert [share.name for share in shares] == [*GROUPS, GAPS]
    assert sum(share.us for share in shares) == pytest.approx(of.wall_us)
    assert sum(share.share for share in shares) == pytest.approx(1)


def test_kernels_that_take_longer_alone_than_together():
    from msgspec.structs import replace

    of = replace(profile(), wall_us=100.0)
    assert sum(share.share for share in summary(of)) == pytest.approx(1)
    assert summary(of)[-1].us == 0
    assert "overlap 8,090" in text(kernel_table.header(of, Kernels(), 80))[0]


@pytest.mark.parametrize("sort", kernel_table.SORTS)
def test_sorting_loses_no_kernel(sort):
    kernels = profile().kernels
    assert sorted(k.name for k in ordered(kernels, sort)) == sorted(k.name for k in kernels)


@pytest.mark.parametrize("width", [30, 38, 57, 58, 75, 76, 120, 200])
def test_rows_fit_under_their_titles(width):
    of = profile()
    *_, titles = text(kernel_table.header(of, Kernels(copy_gbps=120), width))
    for kernel in of.kernels:
        [row] = text([kernel_table.row(of, kernel, 120.0, width)])
        assert len(row) == len(titles)
        assert len(row) <= max(width, 38)


def test_the_machine_says_what_is_absent_last_and_why():
    counters = (
        Counter(name="EMC activity", absent="no permission for /debug/cactmon/mc_all"),
        Counter(name="GPU clock", value=1300, unit="MHz", most=1300),
        Counter(name="power mode", text="MAXN\x1b[31m"),
    )
    lines = text(machine_panel.lines(Machine(counters, "12% below the best: hot"), 70))
    assert lines[0] == "⚠ 12% below the best: hot"
    assert lines[1].startswith("GPU clock       1,300 of 1,300 MHz") and "████" in lines[1]
    assert "MAXN[31m" in lines[2], "no control characters"
    assert lines[3].endswith("not available: no permission for /debug/cactmon/mc_all")
