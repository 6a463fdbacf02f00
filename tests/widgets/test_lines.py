"""The status line, the activity line and the context meter at all widths."""

from __future__ import annotations

import dataclasses

import pytest
from msgspec.structs import replace
from textual.app import App, ComposeResult

from tests.app.fake_engine import READY
from widgets.chat.activity_line import ActivityLine, status_text
from widgets.chat.status_line import StatusLine, context_meter
from widgets.engine_status import EngineStatus, Phase
from widgets.plot import Column, bar, cells

STATUS = EngineStatus(
    phase=Phase.READY,
    ready=replace(READY, model=replace(READY.model, name="Qwen2.5 Coder 1.5B Instruct", quantization="Q4_K")),
    tokens_per_s=1234.56,
    first_token_s=0.2143,
    context_used=1234,
    context_length=32768,
)


@pytest.mark.parametrize("used", [None, 0, 1, 1234, 32767, 32768, 40000])
def test_the_meter_fits_and_says_how_full_it_is(used):
    for width in range(4, 80):
        meter = context_meter(used, 32768, width)
        assert meter.cell_length <= width
        if used is not None:
            share = f"{min(1, used / 32768):.0%}"
            assert share in meter.plain or f"{used:,}" in meter.plain, width


def test_the_meter_warns_in_words():
    assert "nearly full" in context_meter(7000, 8192, 50).plain
    assert context_meter(8192, 8192, 50).plain.endswith("8,192/8,192 tokens 100% full")
    assert "full" not in context_meter(4000, 8192, 50).plain
    assert context_meter(1, 8192, 50).plain[0] in "╸━", "something is never nothing"


class Lines(App[None]):
    def compose(self) -> ComposeResult:
        yield ActivityLine()
        yield StatusLine()


async def test_the_status_line_has_what_must_be_seen_at_every_width():
    app = Lines()
    async with app.run_test(size=(120, 5)) as pilot:
        line = app.query_one(StatusLine)
        line.warning = "not saved"
        for status in (
            STATUS,
            dataclasses.replace(STATUS, tokens_per_s=None, context_used=None),
            EngineStatus(),
        ):
            line.status = status
            for width in range(40, 130, 7):
                await pilot.resize_terminal(width, 5)
                while line.size.width != width - 4:
                    await pilot.pause()
                shown = line.render().plain
                assert len(shown) <= line.size.width
                assert "tok/s" in shown
                assert "⚠" in shown
                if status.ready.model.name:
                    assert all(fact in shown for fact in ("Q", "Q4_K", "CUDA"))
                if width >= 61:
                    assert "not saved" in shown
                    assert "Qwen" in shown or not status.ready.model.name
                if status.context_used:
                    assert "%" in shown or "1,234/32,768" in shown
        line.warning = ""
        line.status = STATUS
        assert "checkpoints" not in str(line.tooltip)
        with_states = replace(STATUS.ready, checkpoints=8, states_bytes=450_000_000)
        line.status = dataclasses.replace(STATUS, ready=with_states)
        assert "up to 8 checkpoints of it (450 MB)" in str(line.tooltip)
        await pilot.resize_terminal(120, 5)
        await pilot.pause()
        shown = " ".join(line.render().plain.split())
        assert shown.startswith("Qwen2.5 Coder 1.5B Instruct Q4_K · CUDA 1,235 tok/s · first token 214 ms ")
        assert line.render().plain.endswith("1,234/32,768 tokens 4%")


def test_what_an_engine_does_in_words():
    say = lambda phase, **changes: status_text(dataclasses.replace(STATUS, phase=phase, **changes))
    assert say(Phase.LOADING, done=5 * 10**8, total=10**9, seconds_left=3.4) == (
        "loading · 500 MB of 1.00 GB · 50% · 3.4 s left"
    )
    assert say(Phase.WARMING, done=3, total=48) == "preparing kernels · 3 of 48"
    assert say(Phase.WARMING, done=3, total=0) == "preparing kernels · 3"
    assert say(Phase.WARMING, done=3, total=48, cached=2) == "preparing kernels · 3 of 48 · 2 from the cache"
    assert say(Phase.WARMING, done=3, total=5, cached=2, searching="o Q6_K 2048x2048", seconds_left=14) == (
        "searching · o Q6_K 2048x2048 · 3 of 5 products · 2 from the cache · at most 14 s left"
    )
    assert say(Phase.PREFILLING, done=0, total=0) == "reading the prompt"
    assert say(Phase.PREFILLING, done=1024, total=4096, seconds_left=75) == (
        "reading the prompt · 1,024 of 4,096 tokens · 25% · 1 min 15 s left"
    )
    assert say(Phase.GENERATING, tokens=1200, elapsed_s=12.3) == "answering · 1,200 tokens · 12 s"
    assert say(Phase.GENERATING, tokens=1, elapsed_s=0.1) == "answering · 1 token · 0.10 s"
    assert say(Phase.WARMING, done=0, total=1, searching="o") == "searching · o · 0 of 1 product"
    assert all(say(phase) for phase in Phase)


async def test_a_notice_is_plain_text_and_has_the_room_it_needs():
    app = Lines()
    async with app.run_test(size=(30, 5)) as pilot:
        line = app.query_one(ActivityLine)
        line.status, line.hint = STATUS, "F1 keys"
        await pilot.pause()
        assert line.render().plain == "· ready            F1 keys"
        line.notice = "[b]no[/b] markup\x1b[31m, and too long"
        await pilot.pause()
        assert line.render().plain == "· [b]no[/b] markup[31m, and too long"
        assert line.size.height == 2
        line.is_warning = True
        assert line.render().plain.startswith("⚠ ")


def test_a_console_without_braille_gets_blocks(monkeypatch):
    monkeypatch.setattr("widgets.plot.IS_CONSOLE", True)
    rows = cells([Column(share / 8) for share in range(9)], 5, 2)
    assert {cell.text for row in rows for cell in row} <= set(" ▀▄█")
    assert set(bar(0.3, 10)) <= set(" ▌█")
