from pathlib import Path

import pytest

from app.chat.history import History


@pytest.fixture(autouse=True)
def _quick_and_alone(monkeypatch):
    """Textual's pilot looks every 20 ms whether the application is idle; 4 ms will do. And nothing of the
    terminal that the tests are run from shows in them."""
    monkeypatch.setattr("textual._wait.SLEEP_GRANULARITY", 0.004)
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
def history(tmp_path: Path):
    history = History(tmp_path / "history.sqlite3")
    yield history
    history.close()
