"""One roofline a device: the best that was measured, from run to run."""

from app.chat.roofline import best_gbps, keep_best


def test_the_best_measurement_of_a_device_is_kept():
    assert best_gbps("CPU x") == 0.0
    assert [keep_best("CPU x", gbps) for gbps in (41.0, 72.0, 55.0)] == [41.0, 72.0, 72.0]
    assert keep_best("CUDA y", 400.0) == 400.0
    assert best_gbps("CPU x") == 72.0
