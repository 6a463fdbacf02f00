"""orin-chat doctor on machines that are folders, and on this one."""

import getpass
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from app.chat.settings import Settings
from app.cli import doctor
from engine.devices import cuda_driver
from engine.doctor import Section, backend_checks, bad, good, jetson
from engine.doctor.backend_checks import run_check
from engine.doctor.checks import CheckResult
from engine.errors import UsageError
from tests.doctor import machines
from tests.paths import ROOT
from tests.protocol.conftest import running
from tests.thorough import thorough
from tests.waiting import wait_until

VARIABLES = ("CUDA_PATH", "CUDA_HOME", "CUDA_INCLUDE_PATH", "NVRTC_PATH", "LD_LIBRARY_PATH")


@pytest.fixture(autouse=True)
def nothing_of_this_machine(monkeypatch, tmp_path):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("engine.devices.cuda_toolkit.shutil.which", lambda name: None)
    monkeypatch.setattr("engine.devices.cuda_toolkit._packages", lambda: [])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(backend_checks, "unusable_because", lambda backend: "")


def works(backend):
    return CheckResult(backend=backend, ok=True, text="works", device="here")


def fails(backend):
    return CheckResult(backend=backend, ok=False, text="broken", advice="mend it")


def examined(root, check=works):
    """The report, and its findings by topic."""
    report = doctor.examine(Settings(), root, check=check)
    return report, {f.topic: f for section in report.sections for f in section.findings}


def test_a_jetson_in_order_needs_nothing_but_clocks(tmp_path, monkeypatch):
    monkeypatch.setattr("engine.doctor.jetson.ctypes.util.find_library", lambda name: "libatomic.so.1")
    report, found = examined(machines.jetson(tmp_path))
    assert [trial.backend for trial in report.trials] == ["CPU", "CUDA", "NV"] and report.works
    assert [s.title for s in report.sections] == ["Machine", "Jetson", "NVIDIA", "Environment", "Backends"]
    assert found["board"].text == "NVIDIA Jetson AGX Orin Developer Kit"
    assert found["L4T"].state == "good" and "r36.4.4" in found["L4T"].text
    assert found["/dev/nvmap"].state == found["/dev/nvgpu/igpu0/ctrl"].state == "good"
    assert found["libatomic"].state == found["libnvrtc"].state == "good"
    assert "tinygrad alone would not find them" in found["headers"].text  # the last of two findings
    assert found["GPU clock"].text == "306 of 1300 MHz now" and "jetson_clocks" in found["GPU clock"].advice
    assert found["temperature"].text == "41 °C"
    assert "root only" in found["EMC clock"].text  # not 0
    assert "Ubuntu 22.04.5 LTS, kernel 5.15.148-tegra" in found["system"].text
    assert "12 cores" in found["processor"].text


@pytest.mark.parametrize(
    "mode, state, says",
    [("MAXN", "good", "MAXN"), ("MODE_30W", "fair", "nvpmodel -m 0"), (None, "note", "does not answer")],
)
def test_power_modes(mode, state, says, tmp_path, monkeypatch):
    programs = tmp_path / "bin"
    programs.mkdir()
    if mode:
        (programs / "nvpmodel").write_text(f"#!/bin/sh\necho 'NV Power Mode: {mode}'\necho 0\n")
        (programs / "nvpmodel").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/bin:/usr/bin")
    found = {f.topic: f for f in jetson.examine(machines.jetson(tmp_path / "root"))}
    assert found["power mode"].state == state
    assert says in found["power mode"].text + found["power mode"].advice


def test_a_jetson_whose_user_is_in_no_group(tmp_path):
    findings = jetson.examine(
        machines.jetson(tmp_path), access=lambda path: False, has_libatomic=lambda: False
    )
    found = {f.topic: f for f in findings}
    assert found["/dev/nvmap"].state == "bad" and "no permission" in found["/dev/nvmap"].text
    assert "usermod -aG" in found["/dev/nvmap"].advice and "video" in found["/dev/nvmap"].advice
    assert found["libatomic"].advice == "sudo apt install libatomic1"


@pytest.mark.parametrize(
    "release, state",
    [
        ("# R36 (release), REVISION: 4.4, GCID: 1", "good"),
        ("# R36 (release), REVISION: 5.0, GCID: 1", "fair"),
        ("# R39 (release), REVISION: 2.0, GCID: 1", "fair"),
        ("# R35 (release), REVISION: 4.1, GCID: 1", "bad"),
        ("no release", "note"),
    ],
)
def test_releases(release, state, tmp_path):
    found = {f.topic: f for f in jetson.examine(machines.jetson(tmp_path, release))}
    assert found["L4T"].state == state
    assert found["L4T"].advice or state == "good"


def test_jetpack_7_2(tmp_path, monkeypatch):
    cuda, nvidia = "usr/local/cuda-13.2/targets/sbsa-linux", "usr/lib/aarch64-linux-gnu/nvidia"
    root = machines.jetson(tmp_path, "# R39 (release), REVISION: 2.0, GCID: 1")
    shutil.rmtree(root / "usr/local/cuda-12.6")
    _, found = examined(root)
    assert "cuda-toolkit-13-2" in found["libnvrtc"].advice and "JetPack 7.2" in found["L4T"].text
    machines.write(root, {
        f"{cuda}/lib/libnvrtc.so.13": "",
        f"{cuda}/include/cuda_fp16.h": "",
        f"{cuda}/include/cuda.h": "#define CUDA_VERSION 13020\n",
        f"{nvidia}/libcuda.so.1": "",
    })  # fmt: skip
    _, found = examined(root)
    assert found["libnvrtc"].state == found["libcuda"].state == "good"
    assert found["headers"].text == "tinygrad alone would not find them; orin-chat tells it where they are"
    monkeypatch.setenv("LD_LIBRARY_PATH", "/own")
    assert cuda_driver.search_path(root) == f"/own:/{nvidia}"


def test_a_node_that_a_container_was_not_given(tmp_path):
    root = machines.jetson(tmp_path)
    (root / "dev/nvmap").unlink()
    found = {f.topic: f for f in jetson.examine(root)}
    assert found["/dev/nvmap"].state == "bad" and "--device /dev/nvmap" in found["/dev/nvmap"].advice


def test_a_desktop_tries_nv_too(tmp_path):
    report, found = examined(machines.desktop(tmp_path))
    assert [trial.backend for trial in report.trials] == ["CPU", "CUDA", "NV"]
    assert found["GPU"].text == "NVIDIA GeForce RTX 4090" and found["driver"].text == "580.105.08"
    assert found["libnvrtc"].state == "bad" and "pip install nvidia-cuda-nvrtc" in found["libnvrtc"].advice
    assert found["headers"].state == "bad" and "board" not in found


def test_nv_is_never_tried_on_hopper(tmp_path):
    report, found = examined(machines.desktop(tmp_path, "NVIDIA H200"))
    assert [trial.backend for trial in report.trials] == ["CPU", "CUDA"]
    assert "not tried" in found["NV"].text and "Hopper" in found["NV"].text


def test_a_bare_machine_has_its_cpu(tmp_path):
    report, found = examined(machines.bare(tmp_path, free_kb=900_000))
    assert [trial.backend for trial in report.trials] == ["CPU"] and report.works
    assert [s.title for s in report.sections] == ["Machine", "Environment", "Backends"]
    assert found["CUDA"].state == found["NV"].state == "note"
    assert found["memory"].state == "fair" and "0.9 of 65.5 GB free" in found["memory"].text


def test_headers_of_another_release_are_told(tmp_path):
    root = machines.jetson(tmp_path)
    headers = root / "usr/local/cuda-12.6/targets/aarch64-linux/include/cuda.h"
    headers.write_text("#define CUDA_VERSION 11040\n")
    _, found = examined(root)
    assert found["headers"].state == "fair" and "CUDA_INCLUDE_PATH" in found["headers"].advice


# --- checks of backends ------------------------------------------------------------------------------------


def program(code):
    return (sys.executable, "-c", code)


def assert_gone(*pids):
    """Soon."""
    wait_until(lambda: not any(map(running, pids)))


def test_a_check_that_hangs_is_ended_with_what_it_started(tmp_path):
    pids = tmp_path / "pids"
    code = "import os, subprocess, sys, time; child = subprocess.Popen(['sleep', '600']); "
    code += f"open({str(pids)!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}'); time.sleep(600)"
    result = run_check("NV", timeout_s=1.5, command=program(code))
    assert not result.ok and "no answer" in result.text and "dmesg" in result.advice
    assert_gone(*map(int, pids.read_text().split()))


def test_a_check_ends_with_a_doctor_that_is_killed():
    check = "from engine.doctor.checks import end_with_parent; import os, time; end_with_parent(); "
    check += "os.write(2, b'up'); time.sleep(60)"
    doctor = "from engine.doctor.backend_checks import _started; import os, sys, time\n"
    doctor += f"with _started([sys.executable, '-c', {check!r}]) as check:\n"
    doctor += "    check.stderr.read(2); print(check.pid, flush=True); time.sleep(60)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-c", doctor], stdout=subprocess.PIPE, env=environment)
    with process:
        pid = int(process.stdout.readline())
        process.kill()
    assert_gone(pid)


@pytest.mark.parametrize(
    "code, says",
    [
        ("import os; os.kill(os.getpid(), 11)", "signal 11"),
        ("raise SystemExit('the driver is gone')", "exit status 1: the driver is gone"),
        ("print('{}')", "exit status 0"),
    ],
)
def test_a_check_that_ends_without_an_answer(code, says):
    result = run_check("CUDA", command=program(code))
    assert not result.ok and says in result.text and "report" in result.advice


def test_a_check_that_cannot_be_started():
    result = run_check("CUDA", command=["/no/python"])
    assert not result.ok and "No such file" in result.text and result.advice


def test_a_backend_that_is_not_there_says_so():
    result = run_check("CUDA") if not Path("/dev/nvidiactl").exists() else None
    if result is None:
        pytest.skip("this machine has CUDA")
    assert not result.ok and "libcuda.so.1" in result.text


# --- what is written -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["report.json", "report.txt"])
def test_a_report_holds_nothing_private(name, tmp_path, monkeypatch):
    home = tmp_path / "home/a-person"
    home.mkdir(parents=True)
    for variable, value in {
        "HOME": home,
        "USER": "a-person",
        "HF_TOKEN": "hf_secret",
        "OPENAI_API_KEY": "sk-secret",
        "CUDA_PATH": f"{home}/cuda",
        "LD_LIBRARY_PATH": "/media/a-person/lib",
    }.items():
        monkeypatch.setenv(variable, str(value))
    monkeypatch.delenv("XDG_CACHE_HOME")
    report, _ = examined(machines.jetson(tmp_path / "root"), fails)
    doctor.write(report, tmp_path / name)
    text = (tmp_path / name).read_text()
    for secret in ("a-person", "secret", str(home)):
        assert secret not in text
    assert "~/cuda" in text and "/media/<user>/lib" in text and "broken" in text and "mend it" in text
    if name.endswith("json"):
        read = json.loads(text)
        assert [trial["backend"] for trial in read["trials"]] == ["CPU", "CUDA", "NV"]
    assert getpass.getuser() == "root" or getpass.getuser() not in text


def test_a_report_that_cannot_be_written(tmp_path):
    report, _ = examined(machines.bare(tmp_path))
    with pytest.raises(UsageError, match="cannot be written"):
        doctor.write(report, tmp_path / "no folder/report.json")


@pytest.mark.parametrize("outcome, code", [(works, 0), (fails, 1)])
def test_the_exit_code_says_whether_a_chat_is_possible(outcome, code, monkeypatch, capsys, tmp_path):
    examine, root = doctor.examine, machines.bare(tmp_path / "root")
    monkeypatch.setattr(
        doctor, "examine", lambda settings, **told: examine(settings, root, check=outcome, **told)
    )
    assert doctor.run(["--report", str(tmp_path / "r.txt")], Settings()) == code
    out = capsys.readouterr().out
    assert ("A chat is possible" in out) == (code == 0)
    assert "Backends" in out and (tmp_path / "r.txt").exists()


@pytest.mark.parametrize("encoding, signs", [("utf-8", "✓✗→"), ("ascii", "+x>")])
def test_good_and_bad_differ_on_every_terminal(encoding, signs):
    terminal = io.TextIOWrapper(io.BytesIO(), encoding, errors="replace")
    section = Section(title="Backends", findings=[good("CPU", "works"), bad("NV", "not", "mend it")])
    console = Console(file=terminal, width=80, force_terminal=True, color_system=None)
    doctor.show(section, console)
    terminal.seek(0)
    shown = terminal.read()
    assert [sign for sign in signs if sign in shown] == list(signs) and "?" not in shown
    doctor.show(section, Console(file=(pipe := io.StringIO()), width=20))
    assert pipe.getvalue() == "\nBackends\n  ✓ CPU: works\n  ✗ NV: not\n      mend it\n"


def test_the_command_tries_the_cpu_for_real_beside_a_folder_of_the_users_named_engine(tmp_path):
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine/__init__.py").write_text("raise SystemExit('imported from the current folder')")
    run = subprocess.run(
        [sys.executable, "-P", "-m", "app", "doctor", "--report", "report.json"],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert "A chat is possible" in run.stdout and "tinygrad" in run.stdout
    trials = json.loads((tmp_path / "report.json").read_text())["trials"]
    [cpu] = [trial for trial in trials if trial["backend"] == "CPU"]
    assert cpu["ok"] and "works on" in cpu["text"]
    assert cpu["copy_gbps"] and cpu["first_kernel_s"] and cpu["launch_us"]


# --- a Jetson's drivers, simulated -----------------------------------------------------------------------


def test_drivers_that_speak_our_language():
    from engine.doctor import checks
    from tests.driver.simulate import simulated

    with simulated() as kernel:
        result = checks.driver("nvgpu")
        assert kernel.leaks() == []
    assert (
        result.ok
        and "has the interface of r36.4: ga10b, sm_87, " in result.text
        and "multiprocessors" in result.text
    )


def test_drivers_that_speak_another(monkeypatch, capsys):
    import errno

    from engine.doctor import checks
    from engine.tegra import driver
    from tests.driver.simulate import simulated

    with simulated() as kernel:

        def refused(fd, number, argument):
            raise OSError(errno.ENOTTY, "Inappropriate ioctl for device")

        monkeypatch.setattr(driver.system, "ioctl", refused)
        checks.write_result("nvgpu", checks.driver)
        assert kernel.leaks() == []
    said = json.loads(capsys.readouterr().out)
    assert not said["ok"] and "ENOTTY" in said["text"] and "another version" in said["advice"]


def test_clocks_of_a_desktop_gpu(monkeypatch):
    from engine.doctor import nvidia
    from engine.protocol.events import Counter

    class Nvml:
        def __init__(self, module):
            pass

        def read(self):
            yield Counter(name="GPU clock", value=1980, unit="MHz", maximum=2520)
            yield Counter(name="GPU load", value=3, unit="%")
            yield Counter(name="power", absent="NVML: Not Supported")
            yield Counter(name="throttled", text="too hot", parts=("too hot",))

    assert [f.text for f in nvidia._counters("no such module")] == [
        "the package nvidia-ml-py is not installed"
    ]
    monkeypatch.setattr(nvidia, "NvmlCounters", Nvml)
    found = {f.topic: f for f in nvidia._counters()}
    assert found["GPU clock"].text == "1980 of 2520 MHz" and found["power"].text == "NVML: Not Supported"
    assert found["throttled"].state == "fair" and "GPU load" not in found


@thorough
def test_checks_on_a_simulated_jetson():
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.doctor.on_a_simulated_board"]
    run = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr[-2000:]
    tried, endured = map(json.loads, run.stdout.splitlines())
    assert tried["ok"] and "8 multiprocessors" in tried["text"] and tried["arch"] == "sm_87", tried
    assert endured["ok"] and "none lost" in endured["text"], endured
