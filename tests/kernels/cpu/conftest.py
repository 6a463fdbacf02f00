import pytest

from engine.kernels.cpu.cores import Cores


@pytest.fixture(scope="session")
def cores() -> Cores:
    return Cores(2)
