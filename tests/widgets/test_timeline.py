"""Samples become the columns of a graph: means over time, idle columns, and what is too short to be seen otherwise."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from widgets.dashboard.timeline import Mark, Sample, TimeAxis

# A cell is two seconds wide, the last one begins with now.
MINUTE = TimeAxis(now_s=100.0, seconds=60, width=30)


def answer(began, seconds, rate=100.0, sample_s=0.25, **fields):
    count = round(seconds / sample_s)
    return [Sample(rate, at_s=began + (i + 1) * sample_s, seconds=sample_s, **fields) for i in range(count)]


def prompt(began, seconds, rate=800.0):
    return [Sample(rate, is_prefill=True, at_s=began + seconds, seconds=seconds)]


def shape(columns):
    """P, D and . for a column of prefill, of decode, and an idle one."""
    return "".join("." if c is None else "P" if c.is_prefill else "D" for c in columns)


def test_a_column_is_the_mean_of_its_time_and_an_idle_one_is_empty():
    columns = MINUTE.columns([*answer(90.0, 0.5, 100.0), *answer(90.5, 1.5, 60.0)])
    assert shape(columns) == "." * 48 + "DD" + "." * 10
    assert [round(c.tokens_per_s) for c in columns if c] == [80, 60]


def test_a_slow_token_is_as_long_as_it_took():
    assert shape(MINUTE.columns([Sample(0.25, at_s=96.0, seconds=4.0)])) == "." * 50 + "DDDD" + "." * 6


def test_bytes_are_a_mean_of_tokens_and_the_limit_is_that_of_the_engine_of_then():
    samples = [Sample(30.0, 100, at_s=90.5, seconds=0.5), Sample(10.0, 200, at_s=91.0, seconds=0.5)]
    [column] = {c for c in MINUTE.columns(samples) if c}
    assert (column.tokens_per_s, column.bytes_per_token) == (20, 125)
    before, now = MINUTE.columns([*answer(70.0, 1.0, copy_gbps=40.0), *answer(98.0, 1.0)])[28:58:28]
    assert (before.limit_gbps(120.0), now.limit_gbps(120.0)) == (40, 120)
    assert Sample(1.0, copy_gbps=0.0).limit_gbps(120.0) is None, "it was not measured then"


@pytest.mark.parametrize(("began", "first"), [(90.0, 46), (91.0, 48), (91.9, 48), (92.0, 48)])
def test_a_prompt_shorter_than_a_column_gets_a_cell_before_its_answer(began, first):
    drawn = shape(MINUTE.columns([*prompt(began, 0.05), *answer(began + 0.05, 6.0)]))
    assert drawn.index("P") == first and drawn.strip(".").startswith("PPDDDDD")


@given(
    now_s=st.floats(100, 150),
    seconds=st.floats(0.01, 5.0),
    width=st.integers(12, 150),
    span=st.sampled_from([60, 300]),
)
def test_an_answer_is_a_whole_cell_at_least(now_s, seconds, width, span):
    columns = TimeAxis(now_s, span, width).columns([Sample(100.0, at_s=100.0, seconds=seconds)])
    assert shape(columns).strip(".").count("D") >= 2


@given(
    now_s=st.floats(105, 130),
    read_s=st.floats(0.01, 5.0),
    seconds=st.floats(0.01, 5.0),
    width=st.integers(12, 150),
)
def test_a_prompt_and_its_answer_are_both_seen_a_cell_later(now_s, read_s, seconds, width):
    samples = [*prompt(100.0 - seconds - read_s, read_s), Sample(100.0, at_s=100.0, seconds=seconds)]
    drawn = shape(TimeAxis(now_s, 60, width).columns(samples)).strip(".")
    assert "P" in drawn and drawn.count("D") >= 2


@pytest.mark.parametrize("seconds", [60, 300])
@pytest.mark.parametrize("width", [10, 39, 150])
def test_a_graph_moves_by_whole_cells_and_keeps_its_shape(seconds, width):
    samples = [s for began in (61.0, 70.3, 84.9) for s in (*prompt(began, 0.4), *answer(began + 0.4, 3.1))]
    early = TimeAxis(90.1, seconds, width)
    late = TimeAxis(90.1 + 2 * early.cell_s, seconds, width)
    assert early.columns(samples)[4:] == late.columns(samples)[:-4]
    assert early.columns(samples) == TimeAxis(
        (early.first + width - 0.5) * early.cell_s, seconds, width
    ).columns(samples)


RATES = st.floats(0, 1e6).map(lambda rate: round(rate, 3))
STEPS = st.tuples(st.floats(0, 30), st.floats(0, 20), RATES, st.booleans())


@given(steps=st.lists(STEPS, max_size=40), width=st.integers(1, 90), seconds=st.sampled_from([1, 60, 300]))
def test_any_samples_make_two_columns_a_cell_within_their_range(steps, width, seconds):
    samples, at = [], 1000.0
    for pause, length, rate, is_prefill in steps:
        at += pause + length
        samples.append(Sample(rate, 0 if is_prefill else 1000, is_prefill, at_s=at, seconds=length))
    columns = TimeAxis(at, seconds, width).columns(samples)
    assert len(columns) == 2 * width
    for is_prefill in (False, True):
        rates = [s.tokens_per_s for s in samples if s.is_prefill is is_prefill]
        for column in columns:
            if column is not None and column.is_prefill is is_prefill:
                assert min(rates) * (1 - 1e-9) <= column.tokens_per_s <= max(rates) * (1 + 1e-9)


def test_answers_too_many_for_a_cell_each_stay_in_their_places():
    samples = [s for i in range(40) for s in (*prompt(42.0 + i * 1.4, 0.2), *answer(42.2 + i * 1.4, 1.0))]
    drawn = shape(MINUTE.columns(samples))
    assert "D" in drawn[:6] and "D" in drawn[-6:] and "..." not in drawn[2:-2]


def test_the_cells_of_times():
    assert [MINUTE.cell(at_s) for at_s in (41.9, 42.0, 98.0, 100.0, 102.0)] == [-1, 0, 28, 29, 30]
    assert (MINUTE.ago_s(28), MINUTE.ago_s(29)) == (1, 0)


def test_a_mark_whose_cell_is_taken_goes_before_the_later_one():
    marks = [
        Mark(42.0, "P", "prompt"),
        Mark(90.0, "S", "search"),
        Mark(90.1, "E", "engine"),
        Mark(120.0, "P", "prompt"),
    ]
    placed = MINUTE.place(marks)
    assert {cell: [mark.symbol for mark in there] for cell, there in placed.items()} == {
        0: ["P"],
        23: ["S"],
        24: ["E"],
    }
    crowd = MINUTE.place([Mark(90.0, symbol, "x") for symbol in "ABCD"])
    assert {cell: "".join(mark.symbol for mark in there) for cell, there in crowd.items()} == {
        24: "DBA",
        23: "C",
    }
