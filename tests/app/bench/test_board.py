"""orin-chat board: the plan and the figures of before; runs that work, fail, hang, and are gone on with."""

import json
import subprocess
import sys

import pytest
from rich.console import Console

from app.bench import board_command, board_file, board_run
from app.bench.board_plan import BoardModel, Lengths, load
from app.bench.board_run import BoardRun
from app.bench.results import KernelRow, Result, to_json
from app.chat.settings import Settings
from app.cli import doctor
from engine.doctor import Section, backend_checks, good
from engine.doctor.backend_checks import stress_check
from engine.doctor.checks import CheckResult
from engine.errors import UsageError
from presets.loader import parse
from tests import generated_model
from tests.paths import ROOT
from tests.thorough import thorough

CPU = CheckResult(backend="CPU", ok=True, text="works")


@pytest.fixture(autouse=True)
def a_healthy_cpu(monkeypatch):
    """The doctor and the stress check have tests of their own."""
    report = doctor.Report(
        orin_chat="1", at="now", sections=[Section(title="Machine", findings=[])], trials=[CPU], variables={}
    )
    monkeypatch.setattr(board_command.doctor, "examine", lambda settings, **told: report)
    monkeypatch.setattr(board_command, "stress_check", lambda backend: [good(backend, "endures")])
    monkeypatch.setattr(board_command, "kernel_log", lambda: ["nvgpu: all is well"])
    monkeypatch.delenv("LLAMA_SERVER", raising=False)


def test_the_plan_is_the_users_tables():
    planned = load()
    assert [model.name for model in planned.models if not model.at_hand] == [
        "llama3.2:1b",
        "qwen3:0.6b",
        "qwen3:1.7b",
    ]
    by_backend = {
        backend: {setup.name.partition("-")[2] for setup in planned.setups if setup.backend == backend}
        for backend in ("NV", "CUDA", "CPU")
    }
    assert by_backend["NV"] == by_backend["CUDA"] == {"fused", "heuristic", "jitbeam2", "jitbeam4"}
    assert not by_backend["CPU"]
    for setup in planned.setups:
        preset = parse(setup.preset())
        assert (preset.backend, preset.kernels, preset.search_width) == (
            setup.backend,
            setup.kernels,
            setup.jitbeam,
        )
    assert Lengths().names == ["tg128", "pp32", "pp128", "pp256", "pp512"]
    figures = planned.figures["llama3.2:1b"]
    assert figures["nv-jitbeam4"]["tg128"] == 36.71 and figures["llama.cpp"]["tg128"] == 25.62
    names = {setup.name for setup in planned.setups} | {"llama.cpp"}
    for of_model in planned.figures.values():
        assert set(of_model) <= names
        assert all(test in Lengths().names for tests in of_model.values() for test in tests)


def test_a_setup_that_does_not_exist():
    with pytest.raises(UsageError, match="warp"):
        load(setups=["warp"])


ARGUMENTS = ["--setup", "cpu", "-p", "16", "-n", "4", "-r", "1"]


def measured(tmp_path, *more):
    return board_command.run(["--folder", str(tmp_path / "out"), *ARGUMENTS, *more], Settings())


@thorough
def test_a_run_is_measured_once_and_a_broken_one_is_told(tmp_path, capsys, monkeypatch):
    model = generated_model.write(tmp_path / "noise.gguf", layers=1)
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF, but not really")
    both = ("--model", str(broken), "--model", str(model))
    assert measured(tmp_path, *both) == 0
    said = capsys.readouterr().out
    assert (
        "1/2 broken.gguf, CPU, quantized kernels: " in said and "2/2 noise.gguf" in said and ": done" in said
    )
    out = tmp_path / "out"
    text = (out / "orin-board.md").read_text()
    assert text in said, "it is shown before it is written"
    for part in ("## Endurance", "| pp16 |", "| tg4 |", "nvgpu: all is well", "## Kernels"):
        assert part in text
    assert "## Not measured\n\n- a model of the user's own, CPU, quantized kernels: MODEL" in text
    for private in ("noise", "broken", str(tmp_path), "orin-tests"):
        assert private not in text
    data = json.loads(text.rpartition("```json")[2].rpartition("```")[0])
    assert {r["n_prompt"] or r["n_gen"] for r in data} == {16, 4}
    assert {r["model_filename"] for r in data} == {"a model of the user's own (llama Q8_0)"}

    monkeypatch.setattr(board_run, "_run", lambda *_: pytest.fail("it is done"))
    assert measured(tmp_path, *both) == 0  # nothing is done twice
    tried = []
    monkeypatch.setattr(board_run, "_run", lambda command, *_: tried.append(command) or 4)
    measured(tmp_path, *both, "--retry")
    assert len(tried) == 1 and str(broken) in tried[0]


def test_what_cannot_be_started_is_left_for_later(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(board_run, "_run", lambda *_: pytest.fail("not to be started"))
    model = str(generated_model.write(tmp_path / "noise.gguf", layers=1))
    arguments = ["--folder", str(tmp_path / "out"), "--model", model, "--model", str(tmp_path / "none.gguf")]
    assert board_command.run([*arguments, "--setup", "nv-fused"], Settings()) == 1
    said = capsys.readouterr().out
    assert "noise.gguf, NV, quantized kernels: NV does not work here" in said
    assert "none.gguf, NV, quantized kernels: There is no file" in said
    assert not list((tmp_path / "out").glob("*.failed.txt"))  # it is tried again next time


def test_the_time_is_over_before_the_last_run(tmp_path, capsys, monkeypatch):
    clock = iter([0, 0, 0, 70, 70, 70, 70])
    monkeypatch.setattr(board_command.time, "monotonic", lambda: float(next(clock)))
    monkeypatch.setattr(board_run, "_run", lambda *_: 0)
    models = [str(generated_model.write(tmp_path / f"{n}.gguf", layers=1)) for n in "ab"]
    measured(tmp_path, "--model", models[0], "--model", models[1], "--minutes", "1")
    assert "b.gguf, CPU, quantized kernels: the 1 minutes were over" in capsys.readouterr().out


def test_figures_of_before_stand_beside(tmp_path, capsys):
    folder = tmp_path / "out"
    folder.mkdir()
    plan = load(setups=["nv-jitbeam4"])
    run = BoardRun(folder, plan.models[0], plan.setups[0])
    result = Result(engine="orin-chat", n_gen=128, median_ts=123.4, samples_ts=[123.4])
    peer = Result(engine="llama.cpp", n_gen=128, median_ts=30.0, samples_ts=[30.0])
    (folder / f"{run.name}.json").write_text(to_json([result, peer]))
    table = board_command._table(plan, plan.models[0], [run], Lengths())
    cells = {
        row: [column._cells[i] for column in table.columns] for i, row in enumerate(table.columns[0]._cells)
    }
    assert cells["NV, graphs, JITBEAM=4"][:2] == ["NV, graphs, JITBEAM=4", "123 (36.7)"]
    assert cells["llama.cpp"][1:3] == ["30.0 (25.6)", "– (574)"]


def test_published_figures_stand_beside_ours(tmp_path):
    plan = load(setups=["cuda-fused"], present=["qwen3:8b"])
    assert [model.name for model in plan.models][-1] == "qwen3:8b"
    run = BoardRun(tmp_path, plan.models[2], plan.setups[0])
    result = Result(
        engine="orin-chat", n_gen=128, median_ts=130.0, samples_ts=[130.0], model_type="qwen3 Q4_K_M",
        model_n_params=2_030_000_000, gpu_mhz=612, gpu_max_mhz=1300, below_full="Below full speed: a clock.",
        power_mode="15W", watts=12, kernels=(KernelRow("head_Q6_K", "head", 1, 900.0, 180.0),),
    )  # fmt: skip
    (tmp_path / f"{run.name}.json").write_text(to_json([result]))
    report = board_command.doctor.examine(Settings())
    text = board_file.board_text(report, plan, [run], [])
    assert "Qwen3 1.7B: 101 tokens a second are published for an AGX Orin (W4A16); here 130" in text
    assert "power mode 15W, GPU 0.6 of 1.3 GHz" in text and "- ! Below full speed: a clock." in text
    assert "| head_Q6_K | head | 1 | 900.0 | 100.0% | 180.0 |" in text
    assert text.count("published for") == 1, "others are of other models"


def test_paths_of_the_user_are_cut():
    told = "see ~/models/a.gguf, /home/ann/x/libnvrtc.so.12 and /dev/nvgpu/igpu0/ctrl: 1/2 of http://a.b/c/d"
    assert board_file.without_paths(told) == (
        "see a.gguf, libnvrtc.so.12 and /dev/nvgpu/igpu0/ctrl: 1/2 of http://a.b/c/d"
    )


def test_a_user_who_says_no_keeps_the_file_unwritten(tmp_path, monkeypatch, capsys):
    path = tmp_path / "b.md"
    for stream in (sys.stdin, sys.stdout):
        monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)
    for answer, written in (("n", False), ("", True)):
        monkeypatch.setattr("builtins.input", lambda _, answer=answer: answer)
        board_command._write("all", path, Console())
        assert path.exists() == written


# --- runs of their own -----------------------------------------------------------------------------------


def a_run(tmp_path, setup=0, model="m"):
    plan = load(setups=["nv-fused", "cuda-fused"])
    return BoardRun(tmp_path, BoardModel(name=model, title=model), plan.setups[setup])


def program(monkeypatch, code):
    """Runs of a board are this instead of a benchmark; its last argument but one names the file for results."""
    stock = board_run._run

    def run(command, *rest):
        return stock([sys.executable, "-c", code, command[command.index("--save") + 1]], *rest)

    monkeypatch.setattr(board_run, "_run", run)


WRITES = f"import sys; open(sys.argv[1], 'w').write('''{to_json([Result(n_gen=4, samples_ts=[1.0])])}''');"


def test_a_run_that_hangs_keeps_what_it_had(tmp_path, monkeypatch):
    program(
        monkeypatch,
        "import signal, sys, time\n"
        f"def end(*_):\n    {WRITES} raise SystemExit(143)\n"
        "signal.signal(signal.SIGTERM, end); time.sleep(600)",
    )
    run = a_run(tmp_path)
    assert not run.measure(tmp_path / "m.gguf", Lengths(), "", timeout_s=5)
    assert run.is_done and "longer than" in run.failure and len(run.results()) == 1
    run.delete_failure()
    assert not run.is_done


@pytest.mark.parametrize(
    "code, says",
    [
        (
            "import sys; print('warming', file=sys.stderr); sys.exit('orin-chat: The GPU is gone. Restart.')",
            "The GPU is",
        ),
        ("import os, sys; print('driver: oops', file=sys.stderr, flush=True); os.abort()", "driver: oops"),
        ("raise SystemExit(4)", "exit code 4"),
    ],
)
def test_a_run_that_fails_says_why(code, says, tmp_path, monkeypatch):
    program(monkeypatch, code)
    run = a_run(tmp_path)
    assert run.measure(tmp_path / "m.gguf", Lengths(), "", timeout_s=120)
    assert says in run.failure and not run.results()


def test_a_folder_of_the_users_named_app_is_not_imported(tmp_path, monkeypatch):
    (tmp_path / "app").mkdir()
    (tmp_path / "app/__init__.py").write_text("raise SystemExit('imported from the current folder')")
    monkeypatch.chdir(tmp_path)
    run = a_run(tmp_path)
    assert run.measure(tmp_path / "m.gguf", Lengths(), "", timeout_s=120)
    assert run.failure.startswith("There is no file"), run.failure


def test_where_a_backend_hung_its_other_runs_come_last(tmp_path):
    nv, cuda = ([a_run(tmp_path, setup, name) for name in "ab"] for setup in (1, 0))
    assert nv[0].setup.backend == "NV"
    order = []
    for run in board_run.hung_backends_last([*nv, *cuda]):
        order.append(run)
        if run is nv[0]:
            run.failure_path.write_text("it took longer than 2 minutes")
    assert order == [nv[0], *cuda, nv[1]]


@thorough  # tests/doctor has the same board
def test_the_file_of_a_simulated_jetson(tmp_path):
    command = [sys.executable, "-m", "tests.app.bench.on_a_simulated_jetson", str(tmp_path / "board.md")]
    subprocess.run(command, cwd=ROOT, check=True)
    text = (tmp_path / "board.md").read_text()
    assert "L4T: r39.2.0 (JetPack 7.2)" in text
    assert "- power mode MODE_30W, jetson_clocks off, GPU 0.6 of 1.3 GHz, memory 2.1 of 3.2 GHz" in text
    assert "- ! Below full speed: the GPU clock was 612 of 1,300 MHz" in text and "sudo jetson_clocks" in text
    assert "| 22.8 |" in text, "19 V times 1.2 A"


# --- the stress check ---------------------------------------------------------------------------------


def test_the_stress_check_goes_on_after_a_process_that_is_killed(monkeypatch):
    endless = [sys.executable, "-c", "import time; time.sleep(600)"]
    monkeypatch.setattr(backend_checks, "run_check", lambda *_: CPU)
    monkeypatch.setattr(backend_checks, "_command", lambda *_: endless)
    monkeypatch.setattr(backend_checks, "_KILL_AFTER_S", 0.05)
    found = stress_check("CPU")
    assert [finding.state for finding in found] == ["good", "good"] and "killed" in found[1].text
    endless[2] = "pass"
    monkeypatch.setattr(backend_checks, "_KILL_AFTER_S", 60.0)
    assert [finding.state for finding in stress_check("CPU")] == ["good", "bad"]


@thorough
def test_the_stress_check_of_the_cpu(monkeypatch):
    monkeypatch.setattr(backend_checks, "_KILL_AFTER_S", 4.0)
    found = stress_check("CPU")
    assert [finding.state for finding in found] == ["good", "good"], found
    assert "10,000 dependent kernels, none lost" in found[0].text and "killed" in found[1].text


def test_the_stress_check_sees_lost_kernels(monkeypatch):
    from engine.doctor import checks as child

    monkeypatch.setattr(child, "install", lambda dev: None)
    monkeypatch.setattr(child, "prepare", lambda options: "CPU")
    monkeypatch.setattr(child, "lost_kernels", lambda n: 2)
    result = child.stress("CPU")
    assert not result.ok and "2 of 10,000" in result.text
    monkeypatch.setattr(child, "lost_kernels", lambda n: 0)
    monkeypatch.setattr(child, "hold_buffers", lambda n_bytes, each: (each * 3, 1))
    assert not child.stress("CPU").ok
