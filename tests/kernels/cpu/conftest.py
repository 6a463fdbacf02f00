import pytest

from engine.kernels.cpu.thread_pool import Cores


@pytest.fixture(scope="session")
def cores() -> Cores:
    return Cores(2)
