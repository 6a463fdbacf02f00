import pytest

from engine.targets.cpu.kernels.thread_pool import ThreadPool


@pytest.fixture(scope="session")
def pool() -> ThreadPool:
    return ThreadPool(2)
