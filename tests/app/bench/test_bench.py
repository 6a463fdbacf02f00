"""The benchmark: figures from known samples, interleaving, output in every form, and what it says of an earlier
run."""

import itertools
import json
import signal
import statistics
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from app.bench import benchmark, results
from app.bench.bench_command import run as run_command
from app.bench.benchmark import Benchmark, Case, TimedAnswer
from app.bench.results import OURS, PEER, PLAIN
from app.chat.settings import Settings
from app.chat.speed_history import preset_speeds
from engine.errors import ModelFileError, UsageError
from engine.protocol.client import LocalEngine
from engine.protocol.events import EngineOptions, Finished
from tests import generated_model, synthetic
from tests.paths import ROOT
from tests.thorough import rarely

QUICK = {"load_s": 0.0, "prefill_s": 0.01, "rate": 0, "tokens": 10_000}


@pytest.fixture
def model(tmp_path):
    return str(generated_model.write(tmp_path / "noise.gguf", context=512))


@pytest.fixture
def engines(monkeypatch):
    """Puts synthetic engines in the place of both; `engines(ours, peer)` says how they behave."""
    asked = []

    class Spy:
        def __init__(self, engine, name):
            self.engine, self.name = engine, name
            self.start, self.close = engine.start, engine.close

        @property
        def pid(self):
            return self.engine.pid

        async def generate(self, request):
            asked.append((self.name, request))
            async for event in self.engine.generate(request):
                yield event

    class Measurable(Spy):
        async def measure(self):
            return await self.engine.measure()

        async def profile(self, step="decode"):
            return await self.engine.profile(step)

    def make(ours=QUICK, peer=QUICK):
        monkeypatch.setattr(
            benchmark, "LocalEngine", lambda options: Measurable(synthetic.engine(**{**QUICK, **ours}), OURS)
        )
        monkeypatch.setattr(
            "app.bench.bench_command.LlamaServer",
            lambda options, path: Spy(synthetic.engine(**{**QUICK, **peer}), PEER),
        )
        monkeypatch.setattr("app.bench.bench_command.find_llama_server", lambda path: path or "llama-server")
        return asked

    return make


def bench(capsys, *arguments):
    code = run_command([str(argument) for argument in arguments], Settings())
    out, err = capsys.readouterr()
    return code, out, err


# --- measuring ------------------------------------------------------------------------------------------


def test_each_test_is_repeated_after_a_warm_up(engines, model, capsys):
    asked = engines()
    code, out, _ = bench(
        capsys, "--model", model, "-p", "8", "-n", "4", "-d", "0,32", "-r", "3", "-o", "json"
    )
    assert code == 0
    results = json.loads(out)
    assert [(r["n_prompt"], r["n_gen"], r["n_depth"]) for r in results] == [
        (8, 0, 0),
        (0, 4, 0),
        (8, 0, 32),
        (0, 4, 32),
    ]
    assert all(len(r["samples_ts"]) == len(r["samples_ns"]) == 3 for r in results)
    requests = [request for _, request in asked]
    assert len(requests) == 4 * (1 + 3)
    assert [len(r.prompt.ids) for r in requests] == [8] * 4 + [1] * 4 + [40] * 4 + [32] * 4
    assert [r.max_tokens for r in requests] == [1] * 4 + [5] * 4 + [1] * 4 + [5] * 4
    assert [r.fresh for r in requests] == [True] * 8 + [False] * 8
    assert all(r.ignore_eos and r.sampling.temperature == 0 for r in requests)
    depth = requests[8].prompt.ids[:32]
    assert all(r.prompt.ids[:32] == depth for r in requests[8:])
    assert len({r.prompt.ids for r in requests[8:12]}) == 4  # what follows the depth is new each time


def test_a_peer_is_measured_in_between_with_the_same_prompts(engines, model, capsys):
    asked = engines()
    code, out, _ = bench(
        capsys, "--model", model, "-p", "8", "-n", "4", "-d", "0", "-r", "2", "-o", "json", "--compare", PEER
    )
    assert code == 0
    order = [name for name, _ in asked]
    assert order == [PEER, OURS, OURS, PEER, PEER, OURS] * 2
    for (_, first), (_, second) in zip(asked[::2], asked[1::2], strict=True):
        assert first.prompt == second.prompt
    assert [(r["engine"], r["n_gen"]) for r in json.loads(out)] == [
        (OURS, 0),
        (PEER, 0),
        (OURS, 4),
        (PEER, 4),
    ]


def test_replies_with_and_without_guesses_take_turns(engines, model, capsys):
    asked = engines()
    arguments = "--model", model, "-p", "8", "-n", "4", "-d", "0", "-r", "2", "--speculate", "lookup"
    code, out, _ = bench(capsys, *arguments, "-o", "json")
    assert code == 0
    assert [request.guesses for _, request in asked] == [True] * 3 + [False, True, True, False, False, True]
    assert [(r["engine"], r["n_gen"]) for r in json.loads(out)] == [(OURS, 0), (OURS, 4), (PLAIN, 4)]
    _, out, _ = bench(capsys, *arguments)
    assert "gain" in out and "ratio" not in out


def test_figures(engines, model, capsys):
    engines({"rate": 200, "prefill_s": 0.05})
    _, out, _ = bench(capsys, "--model", model, "-p", "16", "-n", "8", "-d", "0", "-r", "3", "-o", "json")
    prompt, generation = json.loads(out)
    assert prompt["avg_ns"] == pytest.approx(statistics.fmean(prompt["samples_ns"]))
    assert prompt["stddev_ts"] == pytest.approx(statistics.stdev(prompt["samples_ts"]))
    assert prompt["first_token_ms"] >= 50
    assert prompt["avg_ts"] < 40 / 0.05  # the synthetic engine makes about two tokens of an id
    for ns, rate in zip(generation["samples_ns"], generation["samples_ts"], strict=True):
        assert rate == pytest.approx(8 / (ns / 1e9), rel=1e-3)  # nine tokens, eight timed
    assert generation["median_ts"] == statistics.median(generation["samples_ts"])
    assert generation["latency_p50_ms"] == pytest.approx(5, abs=3)
    assert generation["latency_p50_ms"] <= generation["latency_p90_ms"] <= generation["latency_p99_ms"]
    assert (generation["kernels_per_token"], generation["copy_gbps"]) == (100, 100.0)
    assert generation["roofline_share"] == pytest.approx(generation["gbps"] / 100)
    assert generation["load_ms"] > 0
    assert generation["peak_resident_bytes"] > 1_000_000
    assert prompt["latency_p50_ms"] is None and prompt["gbps"] is None


@pytest.mark.parametrize(
    ("times", "intervals"),
    [
        ([], []),
        ([5.0], []),
        ([5.0, 6.0, 8.0], [1.0, 2.0]),
        ([5.0, 8.0, 8.0, 8.0, 9.0], [1.0, 1.0, 1.0, 1.0]),  # told of together: a character of three tokens
        ([8.0, 8.0, 9.0], [1.0]),
        ([None, None], []),
    ],
)
def test_the_time_from_token_to_token(times, intervals):
    fields = dict.fromkeys(Finished.__struct_fields__, 0) | {"reason": "stop", "type": "Finished"}
    assert TimedAnswer(msgspec.convert(fields, Finished), times).intervals_ms() == intervals


def test_several_models_and_presets(engines, model, tmp_path, capsys):
    engines()
    other = generated_model.write(tmp_path / "other.gguf", context=64)
    code, out, err = bench(
        capsys,
        *("--model", model, "--model", other, "--preset", "cpu", "--preset", "safe"),
        *("-p", "100", "-n", "0", "-d", "0", "-r", "1", "-p", "8,100", "-o", "json"),
    )
    assert code == 0
    found = [(Path(r["model_filename"]).name, r["preset"], r["n_prompt"]) for r in json.loads(out)]
    assert found == [
        *(("noise.gguf", preset, n) for preset in ("cpu", "safe") for n in (8, 100)),
        *(("other.gguf", preset, 8) for preset in ("cpu", "safe")),
    ]
    assert "other.gguf has a context of 64 tokens, so these are left out: pp100." in err


def test_what_a_preset_reached_is_kept_for_where_presets_are_chosen(engines, model, capsys):
    engines()
    arguments = ("--model", model, "-p", "8,64", "-n", "64", "-d", "0,16", "-r", "2")
    assert bench(capsys, *arguments, "--beam", "2")[0] == 0
    assert not preset_speeds(Path(model))
    assert bench(capsys, *arguments, "--preset", "cpu")[0] == 0
    [(preset, speeds)] = preset_speeds(Path(model)).items()
    assert preset == "cpu"
    assert len(speeds.runs) == 2
    assert all(run.decode and run.prefill for run in speeds.runs)


@pytest.mark.parametrize(("load", "told"), [(0.1, False), (1000.0, True)])
def test_a_busy_machine_is_told_of(engines, model, capsys, monkeypatch, load, told):
    engines()
    monkeypatch.setattr("os.getloadavg", lambda: (load, 0.0, 0.0))
    _, _, err = bench(capsys, "--model", model, "-p", "8", "-n", "0", "-d", "0", "-r", "1")
    assert ("other programs had work for 1000.0 of the" in err) is told


def test_the_context_is_as_long_as_the_tests_need(model):
    options = EngineOptions(model_path=model)
    bench = Benchmark(options, [Case(100, 0, 200), Case(0, 8, 0)], vocab_size=300, repetitions=1)
    assert max(case.context for case in bench.cases) == 301
    assert [case.n_depth for case in bench.cases] == [0, 200]
    assert isinstance(bench.engines[0].engine, LocalEngine)


def test_the_file_that_is_saved(engines, model, tmp_path, capsys):
    engines()
    path = tmp_path / "run.json"
    arguments = ("--model", model, "-p", "8", "-n", "0", "-d", "0", "-r", "1")
    assert bench(capsys, *arguments, "--save", path)[0] == 0
    assert [r.test for r in results.read(path)] == ["pp8"]
    with pytest.raises(UsageError, match="cannot be written"):
        bench(capsys, *arguments, "--save", tmp_path)  # a folder
    assert "pp8" in capsys.readouterr().out  # the results are not lost


def test_the_exit_code_tells_of_a_regression(engines, model, tmp_path, capsys):
    path = tmp_path / "run.json"
    arguments = ("--model", model, "-p", "0", "-n", "16", "-d", "0", "-r", "3")
    engines({"rate": 100})
    assert bench(capsys, *arguments, "--save", path)[0] == 0
    [earlier] = json.loads(path.read_text())
    # Whatever else the machine does
    for factor, expected, verdict in ((1000, 1, "SLOWER"), (0.001, 0, "faster")):
        path.write_text(json.dumps([earlier | {"avg_ts": earlier["avg_ts"] * factor, "stddev_ts": 0.0}]))
        engines({"rate": 100})
        code, _, err = bench(capsys, *arguments, "--against", path)
        assert code == expected and verdict in err
    with pytest.raises(UsageError, match=r"has none of these tests of noise\.gguf"):
        bench(capsys, *arguments, "-n", "17", "--against", path)


# --- what goes wrong ------------------------------------------------------------------------------------


def test_a_peer_that_fails_leaves_ours_unharmed(engines, model, capsys):
    engines(peer={"load_failure": "BackendError"})
    arguments = (
        "--model",
        model,
        "-p",
        "8",
        "-n",
        "4",
        "-d",
        "0",
        "-r",
        "2",
        "--compare",
        PEER,
        "-o",
        "json",
    )
    code, out, err = bench(capsys, *arguments)
    assert code == 4
    assert [r["engine"] for r in json.loads(out)] == [OURS, OURS]
    assert "This is a BackendError" in err

    engines(peer={"failure": "RuntimeError", "fail_at": 2})
    code, out, err = bench(capsys, *arguments)
    assert code == 1
    assert [(r["engine"], r["n_gen"]) for r in json.loads(out)] == [(OURS, 0), (PEER, 0), (OURS, 4)]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), rarely(signal.SIGTERM, 143)])
def test_what_was_measured_before_it_was_interrupted_is_not_lost(model, number, code):
    script = """if True:
        import sys
        import app.bench.benchmark
        from app.main import main
        from tests import synthetic
        app.bench.benchmark.LocalEngine = lambda options, **_: synthetic.engine(load_s=0.0, prefill_s=0.01, rate=0)
        run = app.bench.benchmark.MeasuredEngine.answer

        async def told(self, *arguments, **options):
            print("a run", file=sys.stderr, flush=True)
            return await run(self, *arguments, **options)

        app.bench.benchmark.MeasuredEngine.answer = told
        sys.exit(main(["bench", *sys.argv[1:]]))"""
    arguments = ("--model", model, "-p", "8", "-n", "0", "-d", "0", "-r", "100000")
    process = subprocess.Popen(
        [sys.executable, "-c", script, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT
    )
    runs = (line for line in process.stderr if line == b"a run\n")
    assert len(list(itertools.islice(runs, 5))) == 5
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == code
    assert b"Traceback" not in err
    assert b"pp8" in out


def test_ours_that_fails(engines, model, capsys):
    engines({"load_failure": "ModelFileError"})
    code, out, err = bench(capsys, "--model", model, "-r", "1")
    assert (code, out) == (3, "")
    assert "This is a ModelFileError" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-r", "0"], "repetition"),
        (["-p", "0", "-n", "0"], "nothing to measure"),
        (["-p", "x"], "whole number"),
        (["-d", "9000"], "nothing to measure"),
        (["--llama-server", "x"], "--compare"),
        (["--compare", "vllm"], "llama.cpp"),
        (["--preset", "none-such"], "no preset"),
        (["--against", "/nowhere.json"], "cannot be read"),
        (["--save", "/nowhere/run.json"], "no folder"),
    ],
)
def test_wrong_usage(engines, model, capsys, arguments, message):
    engines()
    with pytest.raises(UsageError, match=message):
        bench(capsys, "--model", model, *arguments)


def test_no_model(capsys, tmp_path):
    with pytest.raises(ModelFileError):
        bench(capsys, "--model", tmp_path / "none.gguf")


def test_no_llama_server(model, monkeypatch, capsys):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("LLAMA_SERVER", raising=False)
    with pytest.raises(Exception, match="llama-server was not found"):
        bench(capsys, "--model", model, "--compare", PEER)


# --- the real thing -------------------------------------------------------------------------------------


def test_a_real_pair(llama_server, model, monkeypatch, capsys):
    code, out, _ = bench(
        capsys,
        *("--model", model, "--backend", "CPU", "-p", "32", "-n", "16", "-d", "0,64", "-r", "2"),
        *("-o", "json", "--compare", PEER, "--llama-server", llama_server),
    )
    assert code == 0
    results = json.loads(out)
    assert [r["engine"] for r in results] == [OURS, PEER] * 4
    for result in results:
        assert result["avg_ts"] > 0 and result["peak_resident_bytes"] > 0 and result["load_ms"] > 0
    ours, theirs = (next(r for r in results if r["n_gen"] and r["engine"] == name) for name in (OURS, PEER))
    assert ours["kernels_per_token"] > 5 and theirs["kernels_per_token"] is None
    assert ours["bytes_per_token"] == theirs["bytes_per_token"] > 50_000
    assert theirs["build_commit"]
