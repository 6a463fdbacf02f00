import pytest

from engine.targets.cpu.kernels.thread_pool import ThreadPool


@pytest.fixture(scope="session")
def pool() -> ThreadPool:
    return ThreadPool(2)


@pytest.fixture(scope="module", autouse=True)
def _as_for_users(optimizing_compiler: None) -> None:
    """Other tests have kernels that are not optimized."""
