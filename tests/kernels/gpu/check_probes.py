"""The probes of a GPU's rates."""

from dataclasses import astuple
from unittest import mock

from tinygrad import Device, dtypes

from engine.kernels.device_memory import device_zeros
from engine.targets.nvidia import calibration, probes
from engine.targets.nvidia.kernels.device import Chip
from engine.targets.nvidia.kernels.kernel_sequence import KernelSequence
from engine.targets.nvidia.kernels.rates import H200

_SIZE = 1 << 14


def check_probes():
    with (
        mock.patch.multiple(calibration, _COPIED=_SIZE, _BLOCKS=1, _ROUNDS=1, _LINKS=2),
        mock.patch.object(probes, "_STEPS", 2),
    ):
        rates = calibration.measured(Chip("none", 1), at_most_s=1e3)
    assert all(0 < new != old for new, old in zip(astuple(rates), astuple(H200), strict=True))
    place, zeros = device_zeros(1, dtypes.uint32), device_zeros(_SIZE, dtypes.uint32)
    for turn in (1, 2):  # the second chase begins where the first one ended
        sequence = KernelSequence()
        sequence.add(probes.chase(_SIZE), place=place, zeros=zeros)
        sequence.capture()()
        Device[Device.DEFAULT].synchronize()
        assert place.item() == turn * probes.CHASED * probes._APART % _SIZE
