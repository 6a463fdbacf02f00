"""tinygrad reads its device and compiler from the environment, so they are set before any test imports it."""

import functools
import gc
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
from hypothesis import settings
from hypothesis.internal import charmap
from hypothesis.internal.conjecture import providers
from hypothesis.internal.intervalsets import IntervalSet

from engine.backends import prepare
from engine.devices import kept_clang
from engine.protocol.events import EngineOptions
from tests import environment as tests_environment
from tests.fork_server import SERVER, _forked_processes, fork_server, forked_engines, started_processes
from tests.paths import ROOT, SHARED
from tests.processes import pytest_addoption, pytest_runtestloop
from tests.thorough import THOROUGH, thorough

__all__ = [
    "_forked_processes",
    "fork_server",
    "forked_engines",
    "pytest_addoption",
    "pytest_runtestloop",
    "started_processes",
]

tests_environment.enter()
tests_environment.shorten_vectors()
gc.set_threshold(1_000_000, 10, 10)  # graphs of kernels are many objects, and no garbage
os.environ["PARALLEL"] = "0"  # a process that computes for many tests has no compilers of its own
prepare(EngineOptions(model_path="", backend=os.environ.get("DEV", "CPU")))

# How long an example takes says nothing about it.
settings.register_profile("any machine", deadline=None, max_examples=100 if THOROUGH else 20)
settings.load_profile("any machine")
if not THOROUGH:  # it parses a thousand modules for numbers and texts to try, a twentieth of some 20 examples
    providers.is_local_module_file = lambda path: False

# It encodes and decodes each character to know which texts UTF-8 has, 1.4 s in each process: all but surrogates.
_UTF_8 = IntervalSet(((0, 0xD7FF), (0xE000, sys.maxunicode)))
_intervals_from_codec = charmap.intervals_from_codec
charmap.intervals_from_codec = lambda codec: (
    (_UTF_8, IntervalSet(())) if codec == "utf-8" else _intervals_from_codec(codec)
)

# asyncio asks for them at each handler that it adds or removes, of which a screen has fifty.
signal.valid_signals = functools.cache(signal.valid_signals)

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in the background of a script; children inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Files that take longest, in the order in which they start: then all processes end at about the same time.
LONGEST = (
    "kernels/gpu/test_numbers.py",
    "targets/test_cpu.py",
    "targets/test_graph.py",
    "kernels/cpu/test_attention.py",
    "kernels/cpu/test_product.py",
    "soak/test_soak.py",
    "app/cli/test_cli_engines.py",  # before others whose engines have its kernels
    "targets/test_cpu_runner.py",  # after `test_cpu.py`, whose kernels it has
    "driver/test_decode.py",
    "model/test_llama_cpp.py",
    "app/screens/test_dashboard.py",
    "targets/test_graph_runner.py",
    "app/screens/test_snapshots.py",
    "fixes/test_platform_fixes.py",
    "runtime/test_scheduler.py",
    "app/screens/test_comparing.py",
    "app/screens/test_chat_app.py",
    "kernels/test_quantized_matrix.py",
    "fixes/test_early_launch.py",
    "runtime/test_prefixes.py",
    "fixes/test_search_trials.py",
    "app/test_main.py",
    "doctor/test_doctor.py",
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    common = [item for item in items if THOROUGH or thorough.mark not in item.own_markers]
    if common:  # else each says why it is skipped, which takes a millisecond
        config.hook.pytest_deselected(items=[*{*items} - {*common}])
        items[:] = common
    place = {ROOT / "tests" / name: i for i, name in enumerate(LONGEST)}
    assert all(path.exists() for path in place), "LONGEST names files that are not there"
    items.sort(key=lambda item: place.get(item.path, len(LONGEST)))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Kernels that one process has compiled are known to all others, as they are from one run of the engine to the
    next. Where there are many tests, the processes that run them share the process that forks, whose start takes most
    of a second."""
    if len(session.items) > 1000 and not session.config.option.collectonly:
        SERVER.start()
    if "tinygrad" in sys.modules:
        from engine.fixes import (
            compiler_output,
            graph_nodes,
            graph_rewrites,
            index_lowering,
            program_cache,
            slice_shapes,
        )

        compiler_output.apply()
        graph_nodes.apply()
        graph_rewrites.apply()
        index_lowering.apply()
        program_cache.apply()
        slice_shapes.apply()
        tests_environment.lower_attention()


@pytest.fixture(scope="module", autouse=True)
def _kept_clang() -> None:
    """A model that has started ends what has compiled for it."""
    kept_clang.keep()


@pytest.fixture(scope="module", autouse=True)
def _survivors() -> None:
    """Collections of garbage leave out all that earlier tests have left, also their garbage unless it is much: to find
    that of screens, 25 MB of a file of tests, takes a fourteenth of their time."""
    if gc.get_count()[0] > 500_000:
        gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _survivors_of_screens() -> Iterator[None]:
    """A screen that ends does not make them visible again: it takes seconds to look at a million graphs."""
    from app.screens import garbage  # which keeps the thresholds that it finds

    stock = {name: getattr(gc, name) for name in ("set_threshold", "get_count", "collect")}
    with mock.patch.object(
        garbage, "gc", SimpleNamespace(**stock, freeze=lambda: None, unfreeze=lambda: None)
    ):
        yield


@pytest.fixture(scope="module")
def optimizing_compiler() -> Iterator[None]:
    """Kernels of a CPU that no test before has compiled are optimized: for what is run often, or looked at."""
    with mock.patch.dict(os.environ, CC=str(tests_environment.OPTIMIZING)):
        yield


@pytest.fixture(scope="module")
def plain_graphs() -> Iterator[None]:
    """Tensor graphs become plain loops, which are half the work to compile. They compute the same."""
    from tinygrad.helpers import Context

    with Context(NOOPT=int(not THOROUGH)):
        yield


def pytest_unconfigure() -> None:
    gc.freeze()  # pytest collects garbage five times at its end: seconds of a million objects
    tests_environment.leave()


@pytest.fixture(autouse=True)
def home() -> Iterator[Path]:
    """An empty home folder. The environment is as it was after the test, whatever the test made of it."""
    path, stock = tests_environment.empty_home(), os.environ["HOME"]
    os.environ["HOME"] = str(path)
    encoded: dict[bytes, bytes] = os.environ._data  # type: ignore[attr-defined]
    before = encoded.copy()  # to compare these takes a twentieth of the time
    yield path
    if encoded != before:
        for name in encoded.keys() - before.keys():
            os.unsetenv(name)
        for name in [name for name, value in before.items() if encoded.get(name) != value]:
            os.putenv(name, before[name])
        encoded.clear()
        encoded.update(before)
    os.environ["HOME"] = stock
    tests_environment.leave_home(path)


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
