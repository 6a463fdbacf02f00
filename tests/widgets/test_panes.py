"""What the panes of the dashboard draw, line by line: nothing is wider than its pane or taller."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from textual.app import App
from textual.color import Color

from widgets.dashboard import expert_strip, throughput_lines
from widgets.dashboard.expert_strip import ExpertUse
from widgets.dashboard.preset_bar import BarOption, PresetBar, PresetBarData
from widgets.dashboard.throughput_graph import ThroughputGraph
from widgets.dashboard.throughput_lines import HEAT_STEPS, Throughput
from widgets.dashboard.timeline import Mark, Sample

SAMPLES = tuple(Sample(90.0 + i % 7, 500_000_000, at_s=1000.0 + i / 4) for i in range(100))
MARKS = (Mark(1000.0, "P", "prompt", "of 96 tokens"), Mark(1010.0, "E", "engine", "cuda-beam2"))
HEATS = {f"heat{step}" for step in range(HEAT_STEPS)}


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
    figures |= {"copy_gbps": 100.0, "share": 0.48, **changes}
    return Throughput(**{"now_s": max((s.at_s for s in figures["samples"]), default=0.0), **figures})


def test_the_graph_shows_figures_axes_and_the_roofline():
    lines = text(throughput_lines.lines(view(memory="memory 71 % busy, measured"), 60, 20))
    whole = "\n".join(lines)
    for said in ("96.0 tok/s  48% of roofline", "median 93.0  best 97.0  prefill 812", "memory 71 % busy", " 200 ",
                 "48.0 GB/s modelled · copy 100 measured"):  # fmt: skip
        assert said in whole
    kinds = {kind for line in throughput_lines.lines(view(), 60, 20) for _, kind in line}
    assert {"line", "dim", "strong"} <= kinds and kinds & HEATS


def test_prefill_has_its_own_axis_and_another_look():
    samples = (Sample(12_000.0, is_prefill=True, at_s=999.7, seconds=2.0), *SAMPLES[:20])
    lines = throughput_lines.lines(view(samples=samples), 60, 12)
    assert any(kind == "hatched" and part.strip(" ⠀") for line in lines for part, kind in line)
    assert "15k" in "\n".join(text(lines))


@pytest.mark.parametrize(
    ("top", "half"), [(100, "50"), (800, "400"), (1000, "0.5k"), (1500, ""), (5000, "2.5k"), (15e3, "7.5k")]
)
def test_an_axis_has_one_unit(top, half):
    assert throughput_lines._half(top) == half


def test_an_axis_says_nothing_before_there_is_a_speed():
    prompt = view(samples=(Sample(3_900.0, is_prefill=True, at_s=9.0),), current=None, median=None, best=None)
    top = text(throughput_lines.lines(prompt, 60, 7))[2]
    assert top.split()[-1] == "4.0k" and top.startswith("     ")


def test_a_roofline_far_above_does_not_flatten_the_graph():
    lines = text(throughput_lines.lines(view(copy_gbps=4300.0, share=0.01), 60, 20))
    assert "100 " in "\n".join(lines) and "8.6k" not in "\n".join(lines)


def test_a_share_above_all_of_the_roofline_says_why_within_the_narrowest_pane_beside_a_chat():
    lines = text(throughput_lines.lines(view(current=1700.0, share=1.38, is_cached=True), 36, 20))
    assert lines[0] == "1,700 tok/s 138% of roofline, cached"


@pytest.mark.parametrize(("width", "title"), [(38, "48.0 GB/s modelled · copy 100 measured"),
                                              (37, "48.0 GB/s modelled · copy 100")])  # fmt: skip
def test_the_title_of_bandwidths_ends_with_a_word(width, title):
    assert title in text(throughput_lines.lines(view(), width, 20))


FEW = SAMPLES[:1]
ANSWERS = (Sample(9_000.0, is_prefill=True, at_s=999.7), *SAMPLES[:8], *SAMPLES[40:52])


def drawn(lines, kinds):
    """The cells from the left that each line has of `kinds`, where it has any."""
    rows = []
    for line in lines:
        flags = [kind in kinds and part.strip() != "" for part, kind in line for _ in part]
        rows.append([x for x, flag in enumerate(flags) if flag])
    return [row for row in rows if row]


@pytest.mark.parametrize("samples", [FEW, ANSWERS, SAMPLES])
@pytest.mark.parametrize("width", [36, 54, 160])
@pytest.mark.parametrize("seconds", [60, 300])
def test_both_graphs_show_the_same_time_one_below_the_other(samples, width, seconds):
    lines = throughput_lines.lines(view(samples=samples), width, 20, seconds)
    zeros = [y for y, line in enumerate(text(lines)) if line.startswith("   0 ")]
    speeds, bandwidths = (drawn([lines[y]], HEATS)[0] for y in zeros)
    assert speeds == bandwidths and speeds[-1] in (width - 7, width - 6)


@pytest.mark.parametrize(("width", "seconds"), [(49, 60), (100, 60), (100, 300)])
def test_a_cell_is_as_long_as_the_time_it_stands_for(width, seconds):
    lines = throughput_lines.lines(view(), width, 20, seconds)
    bottom = drawn(lines, HEATS)[-1]
    assert len(bottom) == pytest.approx(25 / seconds * (width - 10), abs=2)


def test_what_was_idle_between_answers_stays_empty():
    *_, bottom = drawn(throughput_lines.lines(view(samples=ANSWERS), 160, 20), HEATS)
    missing = sorted({*range(bottom[0], bottom[-1])} - {*bottom})
    assert len(missing) == pytest.approx(8 / 0.4, abs=2) and missing == [*range(missing[0], missing[-1] + 1)]


@pytest.mark.parametrize(
    ("width", "seconds", "says"),
    [
        (49, 60, "-60 s ─E────────────── -30 s ─────────────── now"),
        (49, 300, "-5 min ── -4 min ─────── -2 min ────E─────── now"),
        (90, 60, "-60 s ───E───── -50 s ─────── -40 s ────── -30 s ────── -20 s ─────── -10 s ───────── now"),
    ],
)
def test_the_axis_says_when_and_has_the_marks(width, seconds, says):
    of = view(marks=MARKS[1:], now_s=1066.0)
    assert text(throughput_lines.lines(of, width, 20, seconds))[-1].rstrip() == says


def test_a_tick_stands_for_a_time_that_a_mark_leaves_no_room_for():
    of = view(marks=(Mark(1028.0, "P", "prompt"),), now_s=1060.0)
    line = text(throughput_lines.lines(of, 49, 20))[-1]
    assert "-30 s" not in line and 0 < line.index("┴") - line.index("P") < 4


@pytest.mark.parametrize("seconds", [60, 300])
def test_what_the_symbols_mean_is_said_while_they_are_seen(seconds):
    of = view(marks=MARKS)
    assert throughput_lines.legend(of, 49, seconds) == "E engine  P prompt"
    assert throughput_lines.legend(view(marks=MARKS, now_s=1065.0), 49, seconds) == (
        "E engine" if seconds == 60 else "E engine  P prompt"
    )
    assert throughput_lines.legend(view(), 49, seconds) == ""


def test_the_figures_of_a_cell():
    of = view(samples=(Sample(800.0, is_prefill=True, at_s=999.75, seconds=2.0), *SAMPLES), marks=MARKS)
    time = throughput_lines.axis(of, 49, 60)
    says = lambda at_s: throughput_lines.readouts(of, 49, 60, time.cell(at_s))
    assert says(1020.0)[0] == "4 s ago · decode 93.0 tok/s, 46.5 GB/s"
    assert says(1010.0)[0] == "15 s ago · decode 93.1 tok/s, 46.6 GB/s · engine cuda-beam2"
    assert says(1010.0)[-1] == "15 s ago · decode 93.1 tok/s"
    assert says(999.0)[0] == "26 s ago · prefill 800 tok/s"
    assert says(1000.0)[0].endswith("GB/s · prompt of 96 tokens")
    assert says(990.0)[0] == "35 s ago · idle"
    long = throughput_lines.readouts(of, 49, 300, throughput_lines.axis(of, 49, 300).cell(900.0))
    assert long[0] == "2 min 1 s ago · idle"


def test_a_chosen_cell_is_marked_without_colours_too():
    lines = throughput_lines.lines(view(), 49, 20, 60, 30)
    assert text(lines)[-1][35] == "▲"
    at = [line[35] for line in text(lines)[2:-1]]
    assert at.count("┊") >= 4 and "selected" in {kind for line in lines for _, kind in line}


def test_rows_get_hotter_upwards():
    lines = throughput_lines.lines(view(copy_gbps=None), 60, 23)
    rows = [sorted(HEATS & {kind for _, kind in line}) for line in lines]
    heats = [int(kinds[0].removeprefix("heat")) for kinds in rows if kinds]
    graphs = [heats[: heats.index(0) + 1], heats[heats.index(0) + 1 :]]
    assert all(
        len(graph) >= 7 and graph == sorted(graph, reverse=True) and graph[-1] == 0 for graph in graphs
    )


def test_the_graphs_of_a_text_are_as_long_as_the_samples():
    lines = text(throughput_lines.whole_lines(view(samples=SAMPLES[:30], marks=MARKS[:1]), 60, 14))
    assert len(lines) == 14 and lines[-2].startswith("-8 s ") and lines[-1].split() == ["P", "prompt"]
    *_, bottom = drawn(throughput_lines.whole_lines(view(samples=SAMPLES[:30]), 60, 14), HEATS)
    assert len(bottom) >= 45


def test_a_graph_of_nothing():
    assert "– tok/s" in text(throughput_lines.lines(Throughput(), 40, 12))[0]


EXPERTS = ExpertUse(((0, 40, 60, 20), (24, 36, 6, 54)), 2)


def test_experts_are_blocks_scaled_to_the_most_chosen_and_told_in_words():
    said = "4 experts in each of 2 layers, 2 a token · most chosen by 100 % of"
    assert text(expert_strip.strip(EXPERTS, 110)) == [
        f"{said} a layer's tokens · 1 of 8 never chosen",
        "▃█▇█",
    ]
    assert text(expert_strip.strip(EXPERTS, 90)) == [f"{said} tokens · 1 of 8 never", "▃█▇█"]
    assert text(expert_strip.strip(EXPERTS, 4))[-1] == "▃█▇█"
    assert text(expert_strip.strip(EXPERTS, 3))[-2:] == ["▃█", "▇█"]
    assert text(expert_strip.by_layer(EXPERTS, 30, 2)) == ["  0 ·▆█▃", "  1 ▄▆▁█"]
    assert text(expert_strip.by_layer(EXPERTS, 30, 1)) == ["2 more layers: no room"]
    none = text(expert_strip.strip(ExpertUse(((0,) * 4,), 2), 60))
    assert none == ["4 experts, 2 a token · none chosen", "····"]


@given(width=st.integers(1, 150), height=st.integers(1, 40))
def test_experts_keep_to_the_width_and_height(width, height):
    lines = expert_strip.by_layer(ExpertUse(((1, 0) * 64,) * 30, 8), width, height)
    assert len(lines) <= height and (width < 30 or max(map(len, text(lines))) <= width)


TIMES = st.floats(0, 1000)


@given(
    width=st.integers(1, 90),
    height=st.integers(0, 40),
    seconds=st.sampled_from([1, 60, 300]),
    chosen=st.none() | st.integers(0, 100),
    steps=st.lists(st.tuples(TIMES, st.floats(0, 1e7), st.sampled_from([0, 10**6, 10**12]), st.booleans())),
    marks=st.lists(st.builds(Mark, TIMES, st.sampled_from("PES"), st.just("prompt"))),
)
def test_the_graph_keeps_to_its_width_and_height(width, height, seconds, chosen, steps, marks):
    samples = tuple(Sample(rate, n, is_prefill, at_s) for at_s, rate, n, is_prefill in sorted(steps))
    of = view(samples=samples, marks=tuple(sorted(marks, key=lambda mark: mark.at_s)), now_s=1000.0)
    lines = text(throughput_lines.lines(of, width, height, seconds, chosen))
    assert len(lines) <= max(height, 2)
    assert all(len(line) <= width for line in lines[2:])  # the pane cuts the figures
    assert len(text(throughput_lines.whole_lines(of, width, height))) <= max(height, 2) + 1


class Panes(App[None]):
    def compose(self):
        yield ThroughputGraph()


@pytest.mark.parametrize("theme", ["textual-dark", "textual-light"])
async def test_every_style_is_readable_on_its_background(theme):
    app = Panes()
    async with app.run_test() as pilot:
        app.theme = theme
        await pilot.pause()
        pane = app.query_one(ThroughputGraph)
        pane.data = view()
        assert len({str(pane.styles_by_name()[kind].color) for kind in HEATS}) > HEAT_STEPS / 2
        for kind in ("", "strong", "dim", "value", "hatched", "line", "warning", *HEATS):
            style = pane.styles_by_name()[kind]
            background = app.screen.background_colors[1]
            color = background.blend(Color.from_rich_color(style.color), 1.0)
            assert contrast(color, background) >= 3.0, kind


@pytest.mark.parametrize("setting", ["NO_COLOR", "ansi-dark"])
async def test_without_colours_to_blend_a_graph_has_one(setting, monkeypatch):
    if setting == "NO_COLOR":
        monkeypatch.setenv("NO_COLOR", "1")
    app = Panes()
    async with app.run_test() as pilot:
        if setting != "NO_COLOR":
            app.theme = setting
        await pilot.pause()
        styles = app.query_one(ThroughputGraph).styles_by_name()
        assert {styles[kind] for kind in HEATS} == {styles["value"]}


def contrast(a: Color, b: Color) -> float:
    """WCAG 2.1, 1.4.3: 3 is the least for graphics and large text."""

    def luminance(color: Color) -> float:
        linear = [(c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4) for c in color.normalized]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    darker, lighter = sorted((luminance(a), luminance(b)))
    return (lighter + 0.05) / (darker + 0.05)


def test_a_low_graph_has_the_room_of_what_is_said_of_the_memory():
    of = view(memory="memory 71 % busy, measured")
    low, high = (text(throughput_lines.lines(of, 60, height)) for height in (6, 7))
    assert "busy" not in "".join(low) and len(low) == 6 and low[-1].startswith("-60 s")
    assert "busy" in "".join(high) and len(high) == 7 and high[-1].startswith("-60 s")


class BarApp(App[None]):
    def compose(self):
        yield PresetBar()


@pytest.mark.parametrize(
    ("width", "says"), [(90, "NV: there is no NVIDIA driver"), (54, "F8 says why"), (40, "")]
)
async def test_why_a_backend_cannot_be_had_is_said_whole_or_elsewhere(width, says):
    async with BarApp().run_test(size=(width, 6)) as pilot:
        bar = pilot.app.query_one(PresetBar)
        bar.data = PresetBarData(
            "cpu",
            (BarOption("NV", problem="there is no NVIDIA driver"), BarOption("CPU", True)),
            (BarOption("0"),),
        )
        await pilot.pause()
        assert bar.render().plain.endswith(f"F7 BEAM 0   {says}" if says else "F7 BEAM 0")


@pytest.mark.parametrize(
    ("width", "says"),
    [
        (70, "decode 20,013, prefill 12,627 tok/s (2026-11-22)"),
        (54, "decode 20,013 tok/s (2026-11-22)"),
        (36, "decode 20,01…"),
    ],
)
async def test_the_evidence_of_a_preset_is_said_in_the_words_that_there_is_room_for(width, says):
    phrasings = "decode 20,013, prefill 12,627 tok/s (2026-11-22)", "decode 20,013 tok/s (2026-11-22)"

    async with BarApp().run_test(size=(width, 6)) as pilot:
        bar = pilot.app.query_one(PresetBar)
        bar.data = PresetBarData("cuda-beam2", speeds=phrasings)
        await pilot.pause()
        assert bar.render().plain.splitlines()[0].startswith(f"cuda-beam2  {says[:-1]}")
        assert ("…" in bar.render().plain) == says.endswith("…")
