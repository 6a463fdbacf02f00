import pytest


@pytest.fixture(autouse=True)
def _quick_and_alone(monkeypatch):
    """Textual's pilot looks every 20 ms whether the application is idle; 4 ms will do. And nothing of the
    terminal that the tests are run from shows in them."""
    monkeypatch.setattr("textual._wait.SLEEP_GRANULARITY", 0.004)
    for name in ("TMUX", "NO_COLOR", "SSH_CONNECTION", "TEXTUAL_THEME"):
        monkeypatch.delenv(name, raising=False)
