"""A search that meets candidates that fault and hang, with tinygrad's own timing and with the fix."""

import os
import subprocess
import sys

import pytest

import engine.fixes
from engine.errors import BackendError
from engine.fixes import search_trials
from tests.paths import ROOT
from tests.thorough import rarely, thorough

SEARCH = """
import math, sys, time
import tinygrad.codegen.opt.search as search
from tinygrad import Tensor
how, fixed = sys.argv[1:3]
stock, met = search.time_call, []
def time_call(call, *args, **options):
    if "float4" in call.src[0].src[2].arg:
        met.append(call)
        if how == "hangs":
            print("hangs", file=sys.stderr, flush=True)
            time.sleep(60)
        raise RuntimeError("CUDA Error 700")
    return stock(call, *args, **options)
search.time_call = time_call
if fixed == "fixed":
    from engine.fixes import search_trials
    search_trials.LIMIT_S = float(sys.argv[3])
    search_trials.apply()
    if how == "spoils":
        search_trials.device_works = lambda device: False
a = Tensor([float(i) for i in range(512)]).contiguous().realize()
print((a * 2 + 1).sum().item(), len(met))
"""


LIMIT_S = 1.0


def start(how, fixed, cache, code=SEARCH):
    env = {"BEAM": "1", "PARALLEL": "0", "DEV": "CPU", "CACHELEVEL": "0", "BEAM_UPCAST_MAX": "4"}
    return subprocess.Popen(
        [sys.executable, "-c", code, how, fixed, str(LIMIT_S)],
        env={**os.environ, **env, "XDG_CACHE_HOME": str(cache)},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(*arguments, **options):
    """(exit status, standard output, standard error)"""
    with start(*arguments, **options) as process:
        out, err = process.communicate(timeout=60)
        return process.returncode, out, err


@thorough
def test_without_it_a_search_waits_for_ever(tmp_path):
    with start("hangs", "stock", tmp_path) as process:
        assert process.stderr.readline() == "hangs\n"
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1.5 * LIMIT_S)
        process.kill()


@pytest.mark.parametrize("how", [rarely("hangs"), rarely("spoils")])
def test_each_candidate_that_hangs_or_spoils_the_device_costs_a_process_and_is_not_met_again(tmp_path, how):
    restarts = 0
    while (end := run(how, "fixed", tmp_path))[0] == os.EX_TEMPFAIL:
        restarts += 1
        assert restarts < 12
    _, out, err = end
    assert restarts > 0 and out.split() == ["262144.0", "0"], err[-2000:]


@thorough
def test_one_that_only_fails_is_left_out_at_once(tmp_path):
    value, met = run("fails", "fixed", tmp_path)[1].split()
    assert (value, met != "0") == ("262144.0", True)
    assert run("fails", "fixed", tmp_path)[1].split() == ["262144.0", "0"]


TWICE = """
import tinygrad.codegen.opt.search as search
from engine.fixes import program_cache, search_trials
program_cache.apply()
search_trials.apply()
stock, searched = search.beam_search, []
search.beam_search = lambda *a, **k: searched.append(a) or stock(*a, **k)
from tinygrad import Tensor
a = Tensor([float(i) for i in range(512)]).contiguous().realize()
print((a * 2 + 1).sum().item(), len(searched))
"""


@thorough
def test_what_was_searched_is_not_searched_again(tmp_path):
    first, second = (run("", "", tmp_path, code=TWICE)[1].split() for _ in range(2))
    assert first[0] == second[0] == "262144.0"
    assert int(first[1]) > 0 == int(second[1])


def test_another_tinygrad_is_refused(monkeypatch):
    monkeypatch.setattr(engine.fixes, "TINYGRAD", "0.13.0")
    with pytest.raises(BackendError):
        search_trials.apply()
