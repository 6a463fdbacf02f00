"""The table of kernels: its header, groups, rows and keys."""

import pytest
from msgspec.structs import replace
from textual.app import App

from tests.app.fake_engine import profile
from tests.widgets.test_panes import SAMPLES, Panes, text, view
from widgets.dashboard import kernel_lines
from widgets.dashboard.kernel_lines import GAPS, GROUPS, KernelProfiles, ordered, summary
from widgets.dashboard.kernel_table import KernelTable
from widgets.dashboard.throughput_graph import ThroughputGraph
from widgets.dashboard.timeline import Mark


def test_the_summary_adds_up_to_the_wall_time():
    of = profile()
    shares = summary(of)
    assert [share.name for share in shares] == [*GROUPS, GAPS]
    assert sum(share.total_us for share in shares) == pytest.approx(of.wall_us)
    assert sum(share.share for share in shares) == pytest.approx(1)


@pytest.mark.parametrize("is_paused", [False, True])
def test_no_figure_of_the_steps_is_cut(is_paused):
    slow = replace(profile(), wall_us=2_345_678.0)
    for width in range(17, 80):
        line = text(kernel_lines.header(slow, KernelProfiles(), width, is_paused=is_paused))[0]
        assert "wall 2,345.7 ms" in line and (not is_paused or "paused" in line or width < 25)
        assert len(line) <= width


def test_kernels_that_take_longer_alone_than_together():
    of = replace(profile(), wall_us=7500.0)
    assert sum(share.share for share in summary(of)) == pytest.approx(1)
    assert summary(of)[-1].total_us == 0
    for width, says in (
        (36, "not known"),
        (53, "not known: 9% longer one by one"),
        (68, "not known: the kernels take 9% longer one by one"),
        (90, "not known: timed one by one, the kernels take 9% longer than the step"),
    ):
        first, *_, gaps, _titles = text(kernel_lines.header(of, KernelProfiles(), width))
        assert gaps.split(maxsplit=2) == ["launch", "gaps", says] and len(gaps) <= width
        assert "gap" not in first and "7,500" in first
        assert ("one by one 8,190" if width == 36 else "sum one by one 8,190") in first
    alike = replace(profile(), wall_us=8189.0)
    assert text(kernel_lines.header(alike, KernelProfiles(), 50))[-2].split() == ["launch", "gaps", "none"]


def names(lines):
    return [line.split("  ")[0] for line in lines[1:-1]]


def test_a_brief_header_leaves_out_groups_that_hardly_count():
    head = lambda of: text(kernel_lines.header(of, KernelProfiles(), 50, is_brief=True))
    assert names(head(profile())) == ["dequantize + matmul", "attention", GAPS]
    assert names(head(replace(profile(), wall_us=7500.0))) == ["dequantize + matmul", "attention"]
    of = replace(profile(), wall_us=8290.0)  # gaps of 1.2 %, which make 2 % with the norms and the sampling
    assert names(head(of)) == ["dequantize + matmul", "attention", "other"]
    assert " 190   2%" in head(of)[-2]
    assert sum(group.total_us for group in kernel_lines.without_small(summary(of))) == pytest.approx(8290)


async def test_a_low_table_has_a_brief_header():
    async with Table().run_test(size=(60, 14)) as pilot:
        table = pilot.app.query_one(KernelTable)
        table.data = KernelProfiles(decode=profile())
        await pilot.pause()
        assert "sampling" not in "".join(text(table.draw(table.data, 56, 9))[:5])
        assert "sampling" in "".join(text(table.draw(table.data, 56, 20))[:7])


def test_a_note_that_does_not_fit_ends_with_an_ellipsis():
    waits = KernelProfiles(note="will be measured when the engine is idle")
    heads = [text(kernel_lines.header(profile(), waits, width))[0] for width in (100, 60, 52)]
    assert heads[0].endswith("gap 1,810  will be measured when the engine is idle")
    assert heads[1].endswith("gap 1,810  will …") and heads[2].endswith("1,810")


EXPLAINED = "explains 18% of the last answer's 1,379 µs a token"


def test_a_step_that_takes_longer_than_in_the_last_answer_explains_nothing():
    data = KernelProfiles(answer_us=190.0)
    wide, narrow = (
        text(kernel_lines.header(replace(profile(), wall_us=247.0), data, width))[1] for width in (120, 60)
    )
    assert narrow == "a step takes 130% of the last answer's 190 µs a token"
    assert wide == f"{narrow}: guesses were right then, or the machine was quieter"


@pytest.mark.parametrize(
    ("width", "share", "says"),
    [
        (130, 0.45, f"{EXPLAINED}; this screen took 45% of a core, the rest is other programs or the host"),
        (90, 0.45, f"{EXPLAINED}; this screen took 45% of a core"),
        (54, 0.45, "explains 18%; this screen took 45% of a core"),
        (36, 0.45, "explains 18%; screen: 45% of a core"),
        (120, 0.05, f"{EXPLAINED}; the rest is the host, other programs or a longer context"),
    ],
)
def test_the_header_says_what_this_screen_took_of_the_processor(width, share, says):
    data = KernelProfiles(answer_us=1379.3, screen_share=share)
    assert text(kernel_lines.header(replace(profile(), wall_us=247.0), data, width))[1] == says


def test_the_header_says_how_much_of_the_last_answer_the_kernels_explain():
    for width, says in (
        (110, f"{EXPLAINED}; the rest is the host, other programs or a longer context"),
        (100, EXPLAINED),
        (48, "explains 18% of the last answer's time"),
        (36, "explains 18% of the last answer"),
        (24, "18% of last answer"),
    ):
        link = KernelProfiles(answer_us=1379.3)
        lines = text(kernel_lines.header(replace(profile(), wall_us=247.0), link, width))
        assert lines[1] == says and len(says) <= width
        assert (
            lines[2:]
            == text(kernel_lines.header(replace(profile(), wall_us=247.0), KernelProfiles(), width))[1:]
        )
        prefill = replace(profile("prefill"), wall_us=247.0)
        assert "explains" not in "".join(text(kernel_lines.header(prefill, link, width)))


@pytest.mark.parametrize("sort", kernel_lines.SORTS)
def test_sorting_loses_no_kernel(sort):
    kernels = profile().kernels
    assert sorted(k.name for k in ordered(kernels, sort)) == sorted(k.name for k in kernels)


@pytest.mark.parametrize("width", [30, 38, 57, 58, 75, 76, 120, 200])
def test_rows_fit_under_their_titles(width):
    of = profile()
    *_, titles = text(kernel_lines.header(of, KernelProfiles(copy_gbps=120), width))
    for kernel in of.kernels:
        [row] = text([kernel_lines.row(of, kernel, 120.0, width)])
        assert len(row) == len(titles)
        assert len(row) <= max(width, 38)


def test_where_a_name_would_be_cut_to_its_role_the_role_is_said_in_full_and_the_roofline_s_share():
    of = profile()
    titles = text(kernel_lines.header(of, KernelProfiles(copy_gbps=120), 50))[-1]
    assert titles.split() == ["role", "calls", "µs", "%", "GB/s", "roof"]
    [row] = text([kernel_lines.row(of, of.kernels[0], 120.0, 50)])
    assert row.startswith("QKV projection ") and row.endswith(" 65%") and "qkv" not in row
    roles = [text([kernel_lines.row(of, k, 120.0, 50)])[0][:16].rstrip() for k in of.kernels]
    assert roles[1:4] == ["attention", "attn output", "FFN gate+up"]
    [row] = text([kernel_lines.row(of, of.kernels[0], 120.0, 66)])
    assert row.startswith("QKV       qkv_Q6_K_4096x1024 ")


@pytest.mark.parametrize("width", [50, 78, 120])
def test_figures_of_a_slow_step_do_not_run_into_each_other(width):
    [kernel] = (k for k in profile("prefill").kernels if k.role == "FFN gate+up")
    slow = replace(profile("prefill"), wall_us=9e6, kernels=(replace(kernel, total_us=2_795_967.4),))
    head = text(kernel_lines.header(slow, KernelProfiles(copy_gbps=120), width))
    [row] = text([kernel_lines.row(slow, slow.kernels[0], 120.0, width)])
    assert head[1].startswith("dequantize + matmul 2,796.0  31% ")
    assert head[5].startswith("launch gaps         6,204.0  69% ")
    assert " 28  2,795.97  31%" in row


@pytest.mark.parametrize(("n_bytes", "says"), [(36_000, "cached"), (12_000, "100%"), (6_000_000_000, "150%")])
def test_a_kernel_faster_than_the_memory_is_in_a_cache_if_it_can_be(n_bytes, says):
    kernel = replace(
        profile().kernels[0], bytes=n_bytes, total_us=n_bytes / (180e3 if n_bytes > 20_000 else 120e3)
    )
    of = replace(profile(), kernels=(kernel,))
    assert text([kernel_lines.row(of, kernel, 120.0, 80)])[0].endswith(f" {says}")
    assert text(kernel_lines.header(of, KernelProfiles(copy_gbps=120), 80))[1].endswith(f" GB/s {says:>6}")


class Table(App[None]):
    def compose(self):
        yield KernelTable()


async def test_a_table_that_is_not_seen_whole_says_so():
    async with Table().run_test(size=(60, 14)) as pilot:
        table = pilot.app.query_one(KernelTable)
        table.data = KernelProfiles(decode=profile())
        await pilot.pause()
        assert text(table.draw(table.data, 56, 12))[-1] == "1–6 of 8"
        assert len(text(table.draw(table.data, 56, 15))) == 15
        assert "of 8" not in "".join(text(table.draw(table.data, 56, 15)))
        table.focus()
        await pilot.press(*["down"] * 7)
        assert text(table.draw(table.data, 56, 12))[-1] == "3–8 of 8"


async def test_only_the_lines_that_differ_are_painted():
    async with Panes().run_test(size=(60, 24)) as pilot:
        pane = pilot.app.query_one(ThroughputGraph)
        pane.data = view()
        await pilot.pause()
        painted, refresh = [], pane.refresh
        pane.refresh = lambda *regions, **options: (painted.append(regions), refresh(*regions, **options))[1]
        pane.data = view(current=97.0)
        await pilot.pause()
        assert [[region.y for region in regions] for regions in painted] == [[0]]
        shown = "".join(segment.text for segment in pane.render_line(0))
        assert shown.startswith("97.0 tok/s")
        painted.clear()
        pane.data = view(current=97.0)
        await pilot.pause()
        assert painted == []


async def test_a_name_in_the_border_is_no_markup():
    async with Panes().run_test(size=(90, 24)) as pilot:
        pane = pilot.app.query_one(ThroughputGraph)
        pane.data = view(marks=(Mark(SAMPLES[-1].at_s, "E", "engine", "mine [b]x[/b] \x1b[1m"),))
        pane.focus()
        await pilot.press("left")
        await pilot.pause()
        assert pane._border_subtitle.plain.endswith("engine mine [b]x[/b] [1m")


async def test_keys_are_told_where_they_are_heard_and_in_words_where_there_is_room():
    async with Table().run_test(size=(100, 14)) as pilot:
        table = pilot.app.query_one(KernelTable)
        pilot.app.set_focus(None)
        await pilot.pause()
        assert table.border_subtitle == "decode · by total"
        table.focus()
        await pilot.pause()
        assert table.border_subtitle.endswith("s sort  f filter  p hold  m measure again  ⏎ source")
        await pilot.resize_terminal(60, 14)
        await pilot.pause()
        assert table.border_subtitle == "decode · by total · d s f p m ⏎"
