import pytest

from engine.catalog.names import HubModel
from tests.catalog.fake_hub import FakeHub
from tests.catalog.fixtures import fake_hub, isolate_hub

__all__ = ["fake_hub"]


@pytest.fixture
def home(home, monkeypatch):
    """An empty home with empty caches."""
    monkeypatch.delenv("XDG_CACHE_HOME")
    isolate_hub(home, monkeypatch)
    return home


@pytest.fixture
def model():
    return HubModel(FakeHub.repository, "Q8_0")
