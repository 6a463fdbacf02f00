import pytest

from engine.kernels.cpu.thread_pool import ThreadPool


@pytest.fixture(scope="session")
def pool() -> ThreadPool:
    return ThreadPool(2)
