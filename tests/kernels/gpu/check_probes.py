"""The probes of a GPU's rates."""

from unittest import mock

from tinygrad import Device, dtypes

from engine.kernels.device_memory import device_zeros
from engine.targets.nvidia import calibration, probes
from engine.targets.nvidia.kernels.kernel_sequence import KernelSequence

_SIZE = 1 << 14


def check_probes():
    with (
        mock.patch.multiple(calibration, _COPIED=_SIZE, _BLOCKS=1, _ROUNDS=1, _LINKS=2),
        mock.patch.object(probes, "_STEPS", 2),
    ):
        rates = calibration.measured(1)
    assert all(rate > 0 for rate in (rates.copy_gbps, rates.link_us, rates.latency_us, rates.tensor_tflops))
    place, zeros = device_zeros(1, dtypes.uint32), device_zeros(_SIZE, dtypes.uint32)
    for turn in (1, 2):  # the second chase begins where the first one ended
        sequence = KernelSequence()
        sequence.add(probes.chase(_SIZE), place=place, zeros=zeros)
        sequence.capture()()
        Device[Device.DEFAULT].synchronize()
        assert place.item() == turn * probes.CHASED * probes._APART % _SIZE
