"""`orin-chat tune`, with an engine that only pretends to search."""

import asyncio
import os
import signal

import pytest

from app.chat.settings import Settings
from app.cli import tune
from engine.errors import UsageError
from engine.protocol.events import Failed, Search, Warming
from tests.app.fake_engine import READY


def searched(what, **changes):
    known = {"tried": 40, "total": 40, "refused": 1, "before_us": 500.0, "after_us": 480.0, "left_s": 3.0}
    return Search(what=what, choice="32 threads x 8 rows, 1 each", **{**known, **changes})


class Engine:
    name = "tinygrad"

    def __init__(self, *events, wait_at_end=False):
        self.events, self.wait, self.closed = events, wait_at_end, False

    async def start(self):
        for event in self.events:
            yield event
        if self.wait:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(10)

    async def close(self):
        self.closed = True


@pytest.fixture
def run(tmp_path, monkeypatch):
    file = tmp_path / "model.gguf"
    file.touch()

    def run(engine, *arguments):
        asked = []

        def make(options):
            asked.append(options)
            return engine

        code = tune.run(["--model", str(file), *arguments], Settings(), make=make)
        assert engine.closed
        assert all(options.search_width is None for options in asked[1:])
        return code, *asked

    return run


STEPS = (
    Warming(done=0, total=2, search=searched("o Q6_K 2048x2048", tried=3)),
    Warming(done=1, total=2, search=searched("o Q6_K 2048x2048")),
    Warming(done=2, total=2, cached=1, search=searched("head Q6_K 128256x2048", found=True)),
)


def test_what_was_found_is_listed(run, capsys):
    code, options, _proof = run(Engine(*STEPS, READY), "--seconds", "30", "--backend", "CUDA")
    assert code == 0
    assert (options.kernels, options.search_width, options.search_s, options.backend) == (
        "fused",
        16,
        30,
        "CUDA",
    )
    lines = capsys.readouterr().out.splitlines()
    o, head = (line.split() for line in lines if "Q6_K" in line)
    assert o[:3] == ["o", "Q6_K", "2048x2048"] and o[-4:] == ["40", "1", "480.0", "4.2%"]
    assert head[-1] == "known"
    assert lines[-1] == "A token takes 480 µs, 4.0 % less than before."


def test_ctrl_c_keeps_what_was_found(run, capsys):
    assert run(Engine(*STEPS[:2], wait_at_end=True))[0] == 130
    assert "480.0" in capsys.readouterr().out


def test_it_says_where_not_all_was_tried(run, capsys):
    run(Engine(Warming(done=1, total=1, search=searched("o Q6_K 2048x2048", tried=9)), READY))
    assert "9 of 40" in capsys.readouterr().out


def test_it_says_what_was_measured_with_earlier_kernels(run, capsys):
    searches = searched("o", after_us=500.0, outdated=True), searched("down", after_us=500.0)
    run(Engine(*(Warming(done=1, total=2, search=search) for search in searches), READY))
    said = "A token takes 500 µs, as before.\n1 of 2 products had schedules that were measured with earlier kernels."
    assert said in capsys.readouterr().out


def test_where_nothing_can_be_searched_it_says_so(run, capsys):
    assert run(Engine(READY))[0] == 0
    shown = capsys.readouterr()
    assert shown.out == "" and "nothing to search for on CUDA (NVIDIA H200)" in shown.err


def test_a_failure_has_its_exit_code(run, capsys):
    assert run(Engine(Failed(kind="backend", message="No\x1b[31m GPU.", hint="Get one.")))[0] == 4
    assert "No" in (err := capsys.readouterr().err) and "\x1b" not in err


@pytest.mark.parametrize("wrong", [["--seconds", "0"], ["--seconds", "x"], ["much"]])
def test_wrong_arguments_are_refused(run, wrong):
    with pytest.raises(UsageError):
        run(Engine(), *wrong)
