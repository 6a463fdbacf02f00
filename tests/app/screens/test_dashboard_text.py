"""The dashboard as text: everything that the panes show, and nothing that only a terminal understands."""

import io

import pytest

from app.screens.dashboard_text import run
from engine.protocol.events import Failed
from tests.app.fake_engine import CHOICES, WITH_EXPERTS, FakeEngine, MeasuredEngine, reply


class Terminal(io.StringIO):
    def isatty(self):
        return True


async def once(engine):
    out, messages = io.StringIO(), io.StringIO()
    return await run(engine, out, messages), out.getvalue(), messages.getvalue()


async def test_it_prints_all_panes():
    engine = MeasuredEngine(reply("word " * 80))
    code, out, messages = await once(engine)
    assert (code, messages, engine.closed) == (0, "", 1)
    for said in (
        "Qwen3 0.6B, Q6_K, on CUDA (NVIDIA H200)", "100 tok/s  43% of roofline", "143 kernels · sum 8,190",
        "512 tokens", "launch gaps", "FFN gate+up", "CPU load",
    ):  # fmt: skip
        assert said in out, said
    assert "\x1b" not in out and max(map(len, out.splitlines())) <= 130
    assert engine.profiles == ["decode", "prefill"]
    assert all(request.fresh and request.ignore_eos for request in engine.requests)


async def test_it_prints_how_often_experts_were_chosen():
    events = reply("word " * 80)
    _, out, _ = await once(MeasuredEngine([*events[:-1], CHOICES, events[-1]], start=[WITH_EXPERTS]))
    assert "128 experts in each of 24 layers, 8 a token · most chosen by" in out and "█" in out


async def test_an_engine_that_does_not_measure_itself():
    code, out, _ = await once(FakeEngine(reply("word " * 80)))
    assert code == 0 and "fake cannot measure its kernels." in out and "100 tok/s" in out


async def test_an_engine_that_does_not_start():
    failed = Failed(kind="backend", message="There is no driver.", hint="Choose CPU.")
    engine = FakeEngine(start=[failed])
    code, out, messages = await once(engine)
    assert (code, out, engine.closed) == (4, "", 1)
    assert messages == "orin-chat: There is no driver. Choose CPU.\n"


@pytest.mark.parametrize(("columns", "width"), [(60, 60), (36, 36), (20, 34), (200, 100)])
async def test_it_is_as_wide_as_the_terminal(monkeypatch, columns, width):
    monkeypatch.setenv("COLUMNS", str(columns))
    out = Terminal()
    code = await run(MeasuredEngine(reply("word " * 80)), out, io.StringIO())
    lines = out.getvalue().partition("machine\n")[0].splitlines()
    assert code == 0 and width - 12 <= max(map(len, lines)) <= width
    assert " ".join(lines).startswith("Qwen3 0.6B, Q6_K, on CUDA (NVIDIA H200), context of 8,192 tokens")
