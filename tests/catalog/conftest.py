import random

import pytest

from engine.catalog import hub as catalog_hub
from engine.catalog.names import HubModel
from tests.catalog.fake_hub import FakeHub


@pytest.fixture
def home(tmp_path, monkeypatch):
    """An empty home with empty caches, and nobody's token."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in (
        "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE",
        "HF_ENDPOINT", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME", "XDG_DATA_HOME",
    ):  # fmt: skip
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr("huggingface_hub.constants.HF_STORED_TOKENS_PATH", str(tmp_path / "no-tokens"))
    return tmp_path


@pytest.fixture
def fake_hub(home, monkeypatch):
    """A hub with small files, which HF_ENDPOINT names; the waits between tries are short."""
    monkeypatch.setattr(catalog_hub, "FIRST_DELAY_S", 0.005)
    files = {
        "model-Q8_0.gguf": random.Random(1).randbytes(150_000),
        "model-Q4_K_M.gguf": random.Random(2).randbytes(90_000),
        "big/model-F16-00001-of-00002.gguf": random.Random(3).randbytes(50_000),
        "big/model-F16-00002-of-00002.gguf": random.Random(4).randbytes(40_000),
        "model-IQ2_XS.gguf": b"too small",
        "README.md": b"# A model\n",
    }
    with FakeHub(files) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


@pytest.fixture
def model():
    return HubModel(FakeHub.repository, "Q8_0")
