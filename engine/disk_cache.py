"""What took long to work out, kept from one run to the next: compiled programs, schedules, what a search found.

One file an entry, named by a digest of its key and of all that the entry depends on beside it: the device, its
driver, tinygrad and the changes to it. A file is written aside and then renamed, so that several processes may
write at once; it begins with a digest of its content, so that one that is damaged is found out and deleted. A
disk that is full or read-only makes a cache that remembers nothing. The folder holds LIMIT_BYTES at most: what
was not used for longest goes first.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import pickle
import platform
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import platformdirs

import engine
from engine.devices import cuda_driver
from engine.devices.device_name import device_name

LIMIT_BYTES = 512 << 20
_DAY_S = 86400
_DIGEST_BYTES = 32
# The device and its code generation are chosen by these.
_VARIABLES = (
    "DEV", "CC", "JIT_BATCH_SIZE", "ALLOW_HALF8", "NOOPT",
    "MV", "MV_BLOCKSIZE", "MV_THREADS_PER_ROW", "MV_ROWS_PER_THREAD",
)  # fmt: skip


class Kept:
    """Entries in `folder` that hold for `environment`. A key is anything whose `repr` tells it from others."""

    def __init__(self, folder: Path, environment: str) -> None:
        self._folder, self._environment = folder, environment
        self._writable = True

    def get(self, table: str, key: object) -> Any:
        """What was put there; None where there is nothing, or it is damaged."""
        path = self._path(table, key)
        try:
            with path.open("rb") as file:
                data, used = file.read(), os.fstat(file.fileno()).st_mtime
            if hashlib.sha256(data[_DIGEST_BYTES:]).digest() != data[:_DIGEST_BYTES]:
                raise ValueError("damaged")
            # Pickle runs what it reads: the folder is the user's own and closed to others.
            value = pickle.loads(data[_DIGEST_BYTES:])
            if time.time() - used > _DAY_S:
                path.touch()
        except FileNotFoundError:
            return None
        except Exception:  # damaged, or of another time
            self.forget(table, key)
            return None
        return value

    def put(self, table: str, key: object, value: object) -> None:
        """Keeps `value`, which is not None, if it can."""
        if not self._writable:
            return
        temporary = None
        try:
            content = pickle.dumps(value)
            if not self._folder.is_dir():
                self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self._folder, delete=False) as file:
                temporary = Path(file.name)
                file.write(hashlib.sha256(content).digest() + content)
            temporary.replace(self._path(table, key))
            self._trim()
        except (
            OSError
        ):  # the disk is full, or nothing may be written there: every further try would cost time
            self._writable = False
            if temporary:
                with contextlib.suppress(OSError):
                    temporary.unlink(missing_ok=True)

    def forget(self, table: str, key: object) -> None:
        with contextlib.suppress(OSError):
            self._path(table, key).unlink(missing_ok=True)

    def _path(self, table: str, key: object) -> Path:
        words = f"{self._environment}\n{table}\n{key!r}"
        return self._folder / hashlib.sha256(words.encode()).hexdigest()

    @functools.cache  # noqa: B019 (once in the life of the one store that a process has)
    def _trim(self) -> None:
        """Deletes what exceeds the limit, once a run: a run adds little."""
        files = [(entry.stat(), entry.path) for entry in os.scandir(self._folder) if entry.is_file()]
        total = 0
        for stat, path in sorted(files, key=lambda file: file[0].st_mtime, reverse=True):
            total += stat.st_size
            if total > LIMIT_BYTES:
                Path(path).unlink(missing_ok=True)


@functools.cache
def store() -> Kept:
    """What is kept for the default device. To be called when the environment is as `engine.backends.prepare`
    leaves it."""
    folder = platformdirs.user_cache_path("orin-chat", appauthor=False) / "kernels"
    return Kept(folder, _environment())


@functools.cache
def source_version(*paths: str) -> str:
    """Changes with the source below these folders and files of `engine` (none: all that kernels are made of), for
    entries whose key does not hold what was made of it."""
    digest = hashlib.sha256()
    for path in paths or ("kernels", "formats"):
        there = Path(engine.__file__).parent / path
        for file in sorted(there.rglob("*.py")) if there.is_dir() else [there]:
            digest.update(file.read_bytes())
    return digest.hexdigest()


def _environment() -> str:
    from tinygrad import Device

    device, python = str(Device.DEFAULT), f"{platform.machine()} {sys.version_info[:2]}"
    device_parts = device, device_name(device), cuda_driver.version()
    parts = [version("tinygrad"), source_version("fixes"), python, *device_parts]
    return "\n".join([*parts, *(f"{name}={os.environ.get(name)}" for name in _VARIABLES)])
