"""Schedules and compiled kernels, kept from one run of a model to the next.

tinygrad keeps compiled code on disk, but works its way from tensors to that code anew in every process: for a
small model that is most of the start. Both of its tables that hold results of this work are keyed by their
inputs' content, so they can be saved as they are.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import platform
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import platformdirs
from tinygrad import Device
from tinygrad.codegen import to_program_cache
from tinygrad.schedule import schedule_cache

import engine
from engine.fixes import TINYGRAD
from engine.formats.gguf import GGUF
from engine.measure.machine import device_name

KEPT_FILES = 32  # the last used; others are deleted
# What else the results depend on: the device and its code generation are chosen by these.
VARIABLES = (
    "DEV", "CC", "BEAM", "JITBEAM", "JIT_BATCH_SIZE", "ALLOW_HALF8", "NOOPT",
    "MV", "MV_BLOCKSIZE", "MV_THREADS_PER_ROW", "MV_ROWS_PER_THREAD",
)  # fmt: skip


@contextmanager
def results_kept(file: GGUF) -> Iterator[None]:
    """Within it, what was worked out before for models of this shape on this machine is known already; what
    is new is saved at the end. A cache that cannot be read or written is one that is not there."""
    folder = platformdirs.user_cache_path("orin-chat", appauthor=False) / "kernels"
    path = folder / f"{_key(file)}.pickle"
    with suppress(Exception):  # damaged, or from a Python that pickles otherwise
        # Pickle runs what it reads: the folder is the user's own and closed to others.
        programs, schedules = pickle.loads(path.read_bytes())
        to_program_cache.update(programs)
        schedule_cache.update(schedules)
        path.touch()
    before = len(to_program_cache), len(schedule_cache)
    yield
    if (len(to_program_cache), len(schedule_cache)) != before:
        with suppress(Exception):
            _write(path, pickle.dumps((to_program_cache, schedule_cache)))


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(data)
    Path(file.name).replace(path)
    kept = sorted(path.parent.glob("*.pickle"), key=lambda p: p.stat().st_mtime, reverse=True)
    for old in kept[KEPT_FILES:]:
        old.unlink(missing_ok=True)


def _key(file: GGUF) -> str:
    """Changes with everything that the results depend on: this program, tinygrad, the machine, the model."""
    parts = [
        TINYGRAD,
        sys.version,
        platform.platform(),
        str(Device.DEFAULT),
        device_name(str(Device.DEFAULT)),
    ]
    parts += [f"{name}={os.environ.get(name)}" for name in VARIABLES]
    parts += [f"{tensor.name} {tensor.type} {tensor.shape}" for tensor in file.tensors.values()]
    digest = hashlib.sha256("\n".join(parts).encode())
    for source in sorted(Path(engine.__file__).parent.rglob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:32]
