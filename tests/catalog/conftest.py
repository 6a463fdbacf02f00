import pytest

from engine.catalog.names import HubModel
from tests.catalog.fake_hub import FakeHub
from tests.catalog.fixtures import fake_hub, isolate_hub

__all__ = ["fake_hub"]


@pytest.fixture
def home(tmp_path, monkeypatch):
    """An empty home with empty caches."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)
    isolate_hub(tmp_path, monkeypatch)
    return tmp_path


@pytest.fixture
def model():
    return HubModel(FakeHub.repository, "Q8_0")
