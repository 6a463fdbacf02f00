import pytest


@pytest.fixture
def home(tmp_path, monkeypatch):
    """An empty home folder, so that no test reads or writes the user's settings, state and history."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path
