import pytest

from app.chat.history import History
from tests.pilots import quick_pilot

__all__ = ["quick_pilot"]


@pytest.fixture(autouse=True)
def _quick_engines(forked_engines):
    """Synthetic engines start in milliseconds."""


@pytest.fixture(autouse=True)
def _any_terminal(monkeypatch):
    """Nothing of the terminal that the tests are run from shows in them."""
    for name in ("TMUX", "NO_COLOR", "SSH_CONNECTION", "TEXTUAL_THEME"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def home(tmp_path, monkeypatch):
    """An empty home folder, so that no test reads or writes the user's settings, state and history."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture
def history():
    """As a file has it, but in memory: to make a file takes longer than to show a chat."""
    history = History(":memory:")
    yield history
    history.close()
