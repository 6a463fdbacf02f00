"""tinygrad reads its device and compiler from the environment, so they are set before any test imports it."""

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

from engine.backends import prepare
from engine.events import EngineOptions

os.environ.setdefault("PARALLEL", "0")  # a process that computes for many tests has no compilers of its own
prepare(EngineOptions(model_path="", backend=os.environ.get("DEV", "CPU")))

settings.register_profile("any machine", deadline=None)  # how long an example takes says nothing about it
settings.load_profile("any machine")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in the background of a script; children inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

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


@pytest.fixture
def children() -> Callable[[], set[str]]:
    """Tells the processes that this test has started and that are not gone."""

    def now() -> set[str]:
        return set(Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split())

    before = now()
    return lambda: now() - before
