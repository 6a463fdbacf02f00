import pytest

from app.chat.history import History
from tests.pilots import quick_pilot

__all__ = ["quick_pilot"]


@pytest.fixture(autouse=True)
def _quick_engines(forked_engines):
    """Synthetic engines start in milliseconds."""


@pytest.fixture
def history():
    """As a file has it, but in memory: to make a file takes longer than to show a chat."""
    history = History(":memory:")
    yield history
    history.close()
