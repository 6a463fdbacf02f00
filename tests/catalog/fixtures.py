"""Fixtures that the tests of the catalog and of the application share: a hub on loopback."""

import random

import pytest

from engine.catalog import hub as catalog_hub
from tests.catalog.fake_hub import FakeHub


def isolate_hub(home, monkeypatch):
    """The hub's cache in `home`, and nobody's token."""
    for name in (
        "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE",
        "HF_ENDPOINT",
    ):  # fmt: skip
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(home / "hf"))
    monkeypatch.setenv("HF_TOKEN_PATH", str(home / "no-token"))
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(home / "no-token"))
    monkeypatch.setattr("huggingface_hub.constants.HF_STORED_TOKENS_PATH", str(home / "no-tokens"))


@pytest.fixture
def fake_hub(home, monkeypatch):
    """A hub with small files, which HF_ENDPOINT names; the waits between tries are short."""
    isolate_hub(home, monkeypatch)
    monkeypatch.setattr(catalog_hub, "FIRST_DELAY_S", 0.005)
    files = {
        "model-Q8_0.gguf": random.Random(1).randbytes(150_000),
        "model-Q4_K_M.gguf": random.Random(2).randbytes(90_000),
        "big/model-F16-00001-of-00002.gguf": random.Random(3).randbytes(50_000),
        "big/model-F16-00002-of-00002.gguf": random.Random(4).randbytes(40_000),
        "model-Q4_0_4_4.gguf": b"too small",
        "README.md": b"# A model\n",
    }
    with FakeHub(files) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server
