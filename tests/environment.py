"""The environment that all tests run in: home folder, caches, terminal and locale are not the user's."""

import os
import shlex
import shutil
import sys
import tempfile
from pathlib import Path
from unittest import mock

from engine.devices.clang import zig_clang
from engine.system.whole_file import write_whole
from engine.targets.cpu.kernels import lanes
from tests.paths import ROOT
from tests.tier import THOROUGH

# Variables that change what the program shows, where it writes, or how tinygrad computes. PYTHONDONTWRITEBYTECODE is
# one of them: each process would compile the program anew.
_REMOVED = (
    "XDG_", "HF_", "HUGGINGFACE_", "LC_", "LANG", "TERM", "COLORTERM", "COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR",
    "CLICOLOR", "TEXTUAL", "TMUX", "SSH_", "BEAM", "JITBEAM", "DEBUG", "CACHE", "PARALLEL", "MV_", "NOOPT",
    "PYTHONDONTWRITEBYTECODE",
)  # fmt: skip
FOLDER = "ORIN_TESTS_FOLDER"
"""The variable that has the path of the folder of all tests of a run."""
_OWNER = "ORIN_TESTS_FOLDER_OWNER"  # the id of the process that made it
KERNELS = ROOT / "build/test-kernels"
OPTIMIZING = KERNELS / "clang"
"""Compiles kernels of a CPU as for users, but for unrolled loops. The fixture `optimizing_compiler` takes it."""
QUICK = KERNELS / "quick-clang"
"""Leaves code as it is written: nearly no work, and the same numbers, only later."""
_homes: list[Path] = []  # of earlier tests, as they were given


def shorten_vectors() -> None:
    """Models run on a CPU with vectors of 8 elements, which are less to compile than the 16 of AVX-512. Some tests take
    16, and engines in processes of their own what the CPU has. To be called before models are imported."""
    assert "engine.targets.cpu.memory" not in sys.modules
    lanes.register_lanes = lambda: 8


def lower_attention() -> None:
    """Attention on a CPU accumulates 4 vectors at a time from now on, in more steps of the same loops: a third of the
    work to compile. `tests/kernels/cpu/test_attention.py` has the users' 16 too, and with ORIN_THOROUGH all have."""
    from engine.targets.cpu.kernels import attention

    if not THOROUGH:
        attention.MAX_SUMS = 4


def enter() -> None:
    """Replaces the user's environment by one in a temporary folder. Processes that tests start inherit it.

    Compiled kernels stay for all tests and for the next run: `engine.cache.disk_cache` finds them by all that they
    follow from. A part of that is the compiler's path; what `lower_attention` changes is not."""
    if FOLDER in os.environ:
        return
    for name in [name for name in os.environ if name.startswith(_REMOVED)]:
        del os.environ[name]
    folder = tempfile.mkdtemp(prefix="orin-tests-")
    places = {"HOME": folder, "XDG_CACHE_HOME": f"{folder}/.cache"}
    private = {"TMPDIR": f"{folder}/tmp", "XDG_RUNTIME_DIR": f"{folder}/run"}
    os.environ |= {
        FOLDER: folder,
        _OWNER: str(os.getpid()),
        "TERM": "xterm-256color",
        "LANG": "C.UTF-8",
        "OPENBLAS_NUM_THREADS": "1",  # numpy's threads wait for small products by computing
        **places,
        **private,
    }
    for place in private.values():
        Path(place).mkdir(0o700)
    tempfile.tempdir = None  # what it was before
    kept, cache = KERNELS / ("cpu-thorough" if THOROUGH else "cpu"), Path(folder, ".cache/orin-chat")
    kept.mkdir(parents=True, exist_ok=True)
    cache.mkdir(parents=True)
    (cache / "kernels").symlink_to(kept)
    if clang := _clang():
        _write_script(OPTIMIZING, clang, "-fno-unroll-loops")  # a fifth less work, and the same numbers
        _write_script(QUICK, clang, "-O0")
        os.environ["CC"] = str(OPTIMIZING if THOROUGH else QUICK)


def _clang() -> str | None:
    with mock.patch.dict(os.environ, XDG_CACHE_HOME=str(KERNELS)):
        return shutil.which("clang") or zig_clang()


def _write_script(script: Path, clang: str, option: str) -> None:
    write_whole(script, f'#!/bin/sh\nexec {shlex.quote(clang)} "$@" {option}\n'.encode(), 0o755)


def empty_home() -> Path:
    """A home folder, for one test. Compiled kernels are not in it, but in the cache that all tests share."""
    if _homes:
        return _homes.pop()
    return Path(tempfile.mkdtemp(prefix="home-", dir=os.environ[FOLDER]))


def leave_home(home: Path) -> None:
    """Most tests write nothing there. Then the next one has it, which is quicker than to delete it."""
    try:
        is_empty = not os.listdir(home)  # noqa: PTH208 (a third of the time)
    except OSError:
        is_empty = False
    if is_empty:
        _homes.append(home)
    else:
        shutil.rmtree(home, ignore_errors=True)


def leave() -> None:
    """Deletes the folder, if this process has made it. Others, such as pytest run by a test, only inherit it."""
    if os.environ[_OWNER] == str(os.getpid()):
        shutil.rmtree(os.environ[FOLDER], ignore_errors=True)
