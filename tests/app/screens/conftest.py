import pytest


@pytest.fixture(autouse=True)
def quick_frames(monkeypatch):
    """Frames follow each other ten times as fast, and what waits for a time without keys or prompts begins soon."""
    monkeypatch.setattr("app.screens.frame_pacer.FRAME_S", 0.02)
    monkeypatch.setattr("app.screens.chat_app.TICK_S", 0.005)
    monkeypatch.setattr("app.screens.frame_pacer.TICK_S", 0.005)
    monkeypatch.setattr("app.screens.frame_pacer.MAX_SHARE", 1.0)
    monkeypatch.setattr("app.screens.frame_pacer.TYPING_S", 0.0)
    monkeypatch.setattr("app.screens.dashboard.FRAME_S", 0.02)
    monkeypatch.setattr("app.screens.dashboard.COUNTERS_S", 0.05)
    monkeypatch.setattr("app.chat.idle_profiler.IDLE_S", 0.05)
