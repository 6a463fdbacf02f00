import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine import backends
from engine.devices import clang
from engine.errors import BackendError, UsageError
from engine.protocol.events import EngineOptions


def prepare(backend="CPU"):
    return backends.prepare(EngineOptions(model_path="none", backend=backend))


@pytest.fixture
def bare(monkeypatch, tmp_path):
    """A machine with Python and /bin/sh, without GPU, clang, CC and DEV. Returns its only folder on PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    # Set first, so that what `prepare` writes over it is undone as well.
    for name, value in {"CC": "", "DEV": "", "PATH": folder, "XDG_CACHE_HOME": tmp_path / "a cache"}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(backends.cuda_driver, "unusable_because", lambda: "there is no GPU in this test")
    return folder


def program(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_a_kernel_compiles_and_runs_without_a_clang_on_path(bare, tmp_path):
    pytest.importorskip("ziglang", reason="the extra `cpu` is not installed")
    code = (
        "from engine.backends import prepare; from engine.protocol.events import EngineOptions\n"
        "assert prepare(EngineOptions(model_path='none')) == 'CPU'\n"
        "from tinygrad import Tensor, Device\n"
        "print(Device.DEFAULT, (Tensor([1.0, 2.0, 3.0]) * 7).sum().item())"
    )
    cache = {"CACHEDB": str(tmp_path / "empty.db")}  # tinygrad must not find the kernel compiled
    env = {**os.environ, **cache}
    result = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert result.stdout.split() == ["CPU", "42.0"], result.stderr


def test_an_environment_without_a_path(bare, monkeypatch):
    monkeypatch.setattr(backends, "find_clang", lambda: "/bin/clang")
    monkeypatch.delenv("PATH")
    prepare()
    assert os.environ["PATH"] == os.defpath


def test_variables_of_other_programs_do_not_count(bare, monkeypatch):
    monkeypatch.setattr(backends, "find_clang", lambda: "/bin/clang")
    for name, value in {"DEV": "true", "PARALLEL": "many"}.items():
        monkeypatch.setenv(name, value)
    assert prepare("auto") == "CPU" and int(os.environ["PARALLEL"]) >= 0
    monkeypatch.setenv("DEV", "TEGRA+NV")
    assert backends._own_device() == "TEGRA+NV"


def test_a_disk_without_room_for_the_script_is_a_reason(monkeypatch):
    def full() -> str:
        raise BackendError("The compiler's script cannot be written to /x: No space left on device.")

    monkeypatch.setattr(backends, "find_clang", full)
    reason = "the compiler's script cannot be written to /x: No space left on device"
    assert backends.unusable_because("CPU") == reason


def test_the_script_is_kept_and_mended(bare, tmp_path):
    pytest.importorskip("ziglang", reason="the extra `cpu` is not installed")
    prepare()
    script = Path(os.environ["CC"])
    assert script.parent == tmp_path / "a cache" / "orin-chat" and list(script.parent.iterdir()) == [script]
    before, text = script.stat(), script.read_text()
    prepare()
    now = script.stat()
    assert (now.st_ino, now.st_mtime_ns) == (before.st_ino, before.st_mtime_ns), "not written again"
    script.write_text("damaged")
    prepare()
    assert script.read_text() == text


def test_a_clang_on_path_is_taken_over_a_cc_that_is_none(bare, monkeypatch):
    on_path = program(bare / "clang", "echo clang version 18.1")
    for cc in ("", program(bare / "gcc", "echo gcc 13.2"), "no-such-program", "clang -O3"):
        monkeypatch.setenv("CC", cc)
        prepare()
        assert os.environ["CC"] == on_path


def test_the_users_own_clang_comes_first(bare, monkeypatch):
    program(bare / "clang", "echo clang version 18.1")
    own = program(bare / "own", "echo Ubuntu clang version 19.1")
    monkeypatch.setenv("CC", "own")
    prepare()
    assert os.environ["CC"] == own


def test_no_compiler_at_all(bare, monkeypatch):
    monkeypatch.setattr(clang, "zig_clang", lambda: None)
    with pytest.raises(BackendError, match="pip install ziglang"):
        prepare()
    assert prepare("NV") == "NV", "which can do without"


def test_a_cache_folder_that_cannot_be_written(bare, monkeypatch):
    pytest.importorskip("ziglang", reason="the extra `cpu` is not installed")
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc")
    with pytest.raises(BackendError, match="XDG_CACHE_HOME"):
        prepare()


def test_which_device(bare, monkeypatch):
    program(bare / "clang", "echo clang version 18.1")
    assert prepare("auto") == prepare("cpu") == os.environ["DEV"] == "CPU"
    with pytest.raises(BackendError, match=r"CUDA .* there is no GPU in this test"):
        prepare("CUDA")
    with pytest.raises(UsageError, match=r"'TPU'.*auto or one of CPU, CUDA, NV"):
        prepare("TPU")
    monkeypatch.setattr(backends.cuda_driver, "unusable_because", lambda: "")
    monkeypatch.delenv("DEV")
    assert prepare("auto") == prepare("cuda") == os.environ["DEV"] == "CUDA"
    monkeypatch.setenv("DEV", "CPU:LLVM")
    assert prepare("auto") == os.environ["DEV"] == "CPU:LLVM", "the user's own"
    assert prepare("NV") == os.environ["DEV"] == "NV", "unless asked for another"


def test_a_gpu_stands_in_for_an_earlier_one(bare, monkeypatch):
    program(bare / "clang", "echo clang version 18.1")
    as_chip = lambda chip, backend="CUDA": backends.prepare(
        EngineOptions(model_path="", backend=backend, chip=chip)
    )
    monkeypatch.setattr(backends.cuda_driver, "unusable_because", lambda: "")
    monkeypatch.setattr(backends.cuda_driver, "compute_capability", lambda: (9, 0))
    monkeypatch.delenv("DEV")
    assert as_chip("sm_87") == as_chip("sm_87", "auto") == os.environ["DEV"] == "CUDA:CUDA:sm_87"
    with pytest.raises(BackendError, match=r"cannot stand in for sm_100: its compute capability is 9\.0"):
        as_chip("sm_100")
    for chip, backend in (("orin", "CUDA"), ("sm_87; DEV=CPU", "CUDA"), ("sm_87", "CPU")):
        monkeypatch.delenv("DEV")
        with pytest.raises(UsageError, match="stand in"):
            as_chip(chip, backend)
        monkeypatch.setenv("DEV", "")


def test_kernels_are_compiled_by_all_cores_unless_candidates_are_timed_on_them(bare, monkeypatch):
    program(bare / "clang", "echo clang version 18.1")
    monkeypatch.setattr(backends.os, "sched_getaffinity", lambda _: {0, 1, 2}, raising=False)

    def compilers(**options):
        monkeypatch.delenv("PARALLEL", raising=False)
        backends.prepare(EngineOptions(model_path="", **options))
        return os.environ["PARALLEL"]

    assert (
        compilers(backend="CPU")
        == compilers(backend="CPU", kernels="fused")
        == compilers(backend="NV")
        == "3"
    )
    assert compilers(backend="CPU", kernels="graph") == "0"
    with monkeypatch.context() as container:
        container.setattr(backends, "_LOCKS", str(bare / "none"))
        assert compilers(backend="CPU") == "0"
    monkeypatch.setattr(backends.os, "sched_getaffinity", lambda _: {0}, raising=False)
    assert compilers(backend="CPU") == "0"


def test_the_driver_is_asked():
    """Whatever this machine has: the answer is empty or a reason."""
    flaw = backends.cuda_driver.unusable_because()
    assert flaw == "" or "NVIDIA driver" in flaw
