"""Which GPUs NV is for: stock NV stays for a GPU of one's own, and never touches one of a data centre."""

import pytest

from engine import backends
from engine.devices import nvidia
from engine.errors import BackendError
from engine.protocol.events import EngineOptions


def machine(root, *names):
    for i, name in enumerate(names):
        folder = root / f"proc/driver/nvidia/gpus/0000:{i:02}:00.0"
        folder.mkdir(parents=True)
        (folder / "information").write_text(f"Model: \t\t {name}\nIRQ:   \t\t 43\nGPU UUID: \t GPU-1\n")
    return root


@pytest.mark.parametrize(
    "name, reason",
    [
        ("NVIDIA GeForce RTX 4090", ""),
        ("NVIDIA RTX A6000", ""),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", ""),
        ("NVIDIA H200", "Hopper"),
        ("NVIDIA H100 80GB HBM3", "Hopper"),
        ("NVIDIA GH200 480GB", "Hopper"),
        ("NVIDIA A100-SXM4-80GB", "data centres"),
        ("NVIDIA L40S", "data centres"),
        ("NVIDIA B200", "data centres"),
    ],
)
def test_gpus_that_nv_is_for(name, reason, tmp_path):
    names = nvidia.gpus(machine(tmp_path, name))
    assert names == [name]
    found = nvidia.why_not_nv(names)
    assert found == "" if not reason else (reason in found and name in found)


def test_one_of_them_is_enough_to_keep_away(tmp_path):
    names = nvidia.gpus(machine(tmp_path, "NVIDIA GeForce RTX 3060", "NVIDIA H200"))
    assert len(names) == 2 and "Hopper" in nvidia.why_not_nv(names)


def test_a_machine_that_says_nothing_has_none(tmp_path):
    assert nvidia.gpus(tmp_path) == [] and nvidia.why_not_nv([]) == ""


def test_nv_is_refused_before_it_is_opened(monkeypatch):
    monkeypatch.setenv("DEV", "NV")  # set first, so that what `prepare` writes is undone
    monkeypatch.setattr(backends, "gpus", lambda: ["NVIDIA H200"])
    for backend in ("NV", "auto"):
        with pytest.raises(BackendError, match="Hopper"):
            backends.prepare(EngineOptions(model_path="none", backend=backend))
    monkeypatch.setattr(backends.Path, "exists", lambda path: str(path) == "/dev/nvidiactl")
    assert "Hopper" in backends.unusable_because("NV")
    monkeypatch.setattr(backends, "gpus", lambda: ["NVIDIA GeForce RTX 4090"])
    assert backends.unusable_because("NV") == ""


def test_a_jetson_has_no_gpu_of_the_desktop_driver(tmp_path):
    (tmp_path / "dev/nvgpu/igpu0").mkdir(parents=True)
    (tmp_path / "dev/nvgpu/igpu0/ctrl").touch()
    assert nvidia.gpus(machine(tmp_path, "NVIDIA H200")) == []
