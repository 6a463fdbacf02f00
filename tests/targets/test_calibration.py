"""The rates of a GPU are measured once, kept, and left out where something fails. The probes themselves run in
tests/kernels/gpu/check_probes.py."""

from __future__ import annotations

import functools
from dataclasses import replace
from types import SimpleNamespace

import pytest

from engine.targets.nvidia import calibration
from engine.targets.nvidia.kernels.device import Chip
from engine.targets.nvidia.kernels.rates import H200, Rates, estimated


@pytest.fixture
def kept(monkeypatch):
    """What is kept, of a GPU that CUDA runs; a chip whose driver tells what an H200's would."""
    found: dict[int, Rates] = {}
    known = functools.cache(lambda: Chip("sm_90", 132, own_rates=estimated(132)))
    device = SimpleNamespace(is_own_cuda=lambda: True, multiprocessors=lambda: 132, chip=known)
    monkeypatch.setattr(calibration, "device", device)
    monkeypatch.setattr(calibration, "kept_rates", found.get)
    monkeypatch.setattr(calibration, "keep_rates", lambda rates, count: found.update({count: rates}))
    return found


def test_a_gpu_is_measured_once(kept, monkeypatch):
    """What is near to the driver's word stays as that."""
    results = [replace(H200, copy_gbps=3000.0, link_us=H200.link_us * 1.1), H200]
    monkeypatch.setattr(calibration, "measured", lambda chip: results.pop(0))
    calibration.calibrate()
    calibration.calibrate()
    assert kept == {132: replace(H200, copy_gbps=3000.0)} and results == [H200]


def test_a_measurement_that_fails_is_said_and_leaves_nothing(kept, monkeypatch, capsys):
    def fail(chip: object) -> Rates:
        raise MemoryError("no memory on the GPU")

    monkeypatch.setattr(calibration, "measured", fail)
    calibration.calibrate()
    assert not kept and "not measured: no memory on the GPU" in capsys.readouterr().err


@pytest.mark.parametrize("name, factor", [("copy_gbps", 0.1), ("link_us", 20.0), ("latency_us", 0.0)])
def test_rates_that_no_such_gpu_has_are_not_kept(kept, monkeypatch, capsys, name, factor):
    odd = replace(H200, **{name: getattr(H200, name) * factor})
    monkeypatch.setattr(calibration, "measured", lambda chip: odd)
    calibration.calibrate()
    assert not kept and "disturbed" in capsys.readouterr().err


def test_other_devices_are_not_measured(monkeypatch):
    monkeypatch.setattr(calibration, "measured", None)
    calibration.calibrate()  # tests run on a CPU
