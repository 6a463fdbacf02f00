"""The rates of a GPU are measured, kept, and left out where something fails. The probes themselves run in
tests/kernels/gpu/check_probes.py."""

from __future__ import annotations

import functools
from dataclasses import replace
from types import SimpleNamespace

import pytest

from engine.targets.nvidia import calibration
from engine.targets.nvidia.kernels.device import Chip
from engine.targets.nvidia.kernels.rates import H200, Kept, Rates, estimated


@pytest.fixture
def kept(monkeypatch):
    """What is kept, of a GPU that CUDA runs; a chip whose driver tells what an H200's would."""
    found: dict[int, Kept] = {}
    known, told = (
        functools.cache(lambda: Chip("sm_90", 132, own_rates=estimated(132))),
        lambda: estimated(132),
    )
    device = SimpleNamespace(
        is_own_cuda=lambda: True, multiprocessors=lambda: 132, chip=known, told_rates=told
    )
    monkeypatch.setattr(calibration, "device", device)
    monkeypatch.setattr(calibration, "kept_rates", found.get)
    monkeypatch.setattr(calibration, "keep_rates", lambda rates, count: found.update({count: rates}))
    return found


def measures(monkeypatch: pytest.MonkeyPatch, *results: Rates) -> int:
    """Starts one time more often than there are results; returns how many of these were not asked for."""
    left = [*results]
    monkeypatch.setattr(calibration, "measured", lambda chip: left.pop(0))
    for _ in range(len(results) + 1):
        calibration.calibrate()
    return len(left)


def test_a_gpu_that_is_as_its_driver_tells_is_measured_once(kept, monkeypatch):
    assert measures(monkeypatch, replace(H200, link_us=H200.link_us * 1.1), H200) == 1
    assert kept == {132: Kept(H200, 1)}


def test_a_gpu_that_another_program_had_is_measured_again(kept, monkeypatch):
    disturbed, right = (
        replace(H200, copy_gbps=2000.0, link_us=H200.link_us * 1.1),
        replace(H200, copy_gbps=3900.0),
    )
    assert measures(monkeypatch, disturbed, right, H200) == 1
    assert kept == {132: Kept(H200, 2)}


def test_the_fastest_of_three_measurements_counts_where_a_gpu_is_another(kept, monkeypatch):
    slow = replace(H200, copy_gbps=2000.0)
    assert measures(monkeypatch, slow, replace(slow, copy_gbps=3000.0, latency_us=2.0), slow, H200) == 1
    assert kept == {132: Kept(replace(H200, copy_gbps=3000.0), 3)}


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
