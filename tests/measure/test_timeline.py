"""What a process does while it starts."""

import time

from app.cli.start_lines import start_lines
from engine.measure.timeline import Timeline
from engine.protocol.events import Span


def test_spans_count_from_the_start_of_the_process_and_come_in_order():
    timeline = Timeline()
    with timeline.span("outer"), timeline.span("inner"):
        time.sleep(0.01)
    timeline.until_now("process")
    process, outer, inner = timeline.spans
    assert [process.name, outer.name, inner.name] == ["process", "outer", "inner"]
    assert process.start_ms == 0 and process.took_ms >= outer.start_ms
    assert outer.took_ms >= inner.took_ms >= 10
    assert timeline.age_ms >= outer.start_ms + outer.took_ms


def test_a_failing_span_is_there():
    timeline = Timeline()
    try:
        with timeline.span("fails"):
            raise OSError
    except OSError:
        pass
    assert [span.name for span in timeline.spans] == ["fails"]


def test_lines_have_one_scale():
    spans = [Span(name="process", start_ms=0, took_ms=300), Span(name="weights", start_ms=300, took_ms=900)]
    process, weights, ready = start_lines(spans, with_program=False)
    assert process.split() == ["process", "0.00", "s", "+0.30", "=" * 8]
    assert weights.endswith("+0.90  " + " " * 8 + "=" * 22)
    assert ready == "ready     1.20 s"
    assert start_lines(spans)[0].startswith("this program")
    assert not start_lines([])
