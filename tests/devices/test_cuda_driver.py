import threading
from unittest import mock

from engine.devices import cuda_driver


def test_a_driver_that_does_not_start_is_waited_for_once(monkeypatch):
    ended = threading.Event()
    library = mock.Mock(cuInit=lambda _: ended.wait() and 0)
    monkeypatch.setattr(cuda_driver, "library", lambda: library)
    monkeypatch.setattr(cuda_driver, "START_S", 0.02)
    monkeypatch.setattr(cuda_driver, "_is_hanging", False)
    assert cuda_driver.unusable_because() == cuda_driver.NO_ANSWER
    assert cuda_driver.memory_bytes() == 0 and cuda_driver.device_names() == []
    assert sum(thread.name == "cuInit" for thread in threading.enumerate()) == 1
    ended.set()
