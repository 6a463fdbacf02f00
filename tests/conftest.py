"""tinygrad reads its device and compiler from the environment, so they are set before any test imports it."""

import os
import shutil
from pathlib import Path

import pytest

from engine.backends import prepare
from engine.events import EngineOptions

prepare(EngineOptions(model_path="", backend=os.environ.get("DEV", "CPU")))

ROOT = Path(__file__).resolve().parents[1]
SHARED = Path(os.environ.get("ORIN_SHARED", ROOT.parent / "shared"))


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of test data beside the checkout: oracles, vocabularies, the maker of full-size models."""
    if not SHARED.is_dir():
        pytest.skip(f"there is no test data at {SHARED} (ORIN_SHARED names another place)")
    return SHARED


@pytest.fixture(scope="session")
def llama_server() -> str:
    """The path of a real llama-server."""
    found = shutil.which(os.environ.get("LLAMA_SERVER") or "llama-server")
    if not found:
        pytest.skip("there is no llama-server on PATH (LLAMA_SERVER names another place)")
    return found
