"""Caches results that take long to compute on disk between runs: compiled programs, schedules, search results.

Each entry is a file. Its name is a digest of its table, its key and the environment: the device, a GPU's driver,
tinygrad and our changes to tinygrad. A file is written under a temporary name and then renamed, so several processes
can write at once. It begins with the SHA-256 digest of its content, so a damaged file is detected and deleted. If the
disk is full or read-only, the cache stays empty. The folder holds at most LIMIT_BYTES; the least recently used entries
are deleted first.
"""

import contextlib
import functools
import hashlib
import os
import pickle
import platform
import sys
import time
from pathlib import Path
from typing import Any

import platformdirs

from engine.cache.sources import source_digest
from engine.devices import cuda_driver
from engine.devices.device_name import device_name
from engine.system.invocation import installed_version
from engine.system.whole_file import open_file, write_whole

LIMIT_BYTES = 512 << 20
_DAY_S = 86400
_DIGEST_BYTES = 32
# Environment variables by which tinygrad chooses the device and how it generates code.
_VARIABLES = (
    "DEV", "CC", "JIT_BATCH_SIZE", "ALLOW_HALF8", "NOOPT",
    "MV", "MV_BLOCKSIZE", "MV_THREADS_PER_ROW", "MV_ROWS_PER_THREAD",
)  # fmt: skip


class DiskCache:
    """The entries in `folder` for one `environment`. A key may be any value whose `repr` identifies it."""

    def __init__(self, folder: Path, environment: str) -> None:
        self._folder, self.environment = folder, environment
        self._writable = True

    def get(self, table: str, key: object) -> Any:
        """The value that was put; None if there is no entry, a damaged one, or another user's."""
        path = self._path(table, key)
        try:
            with open_file(path) as file:
                data, state = file.read(), os.fstat(file.fileno())
            if state.st_uid != os.getuid():
                return None
            if hashlib.sha256(data[_DIGEST_BYTES:]).digest() != data[:_DIGEST_BYTES]:
                raise ValueError("damaged")
            # Unpickling runs code from the file. It is the user's own, also with sudo in another's home folder.
            value = pickle.loads(data[_DIGEST_BYTES:])
            if abs(time.time() - state.st_mtime) > _DAY_S:  # the clock may have been ahead
                path.touch()
        except FileNotFoundError:
            return None
        except Exception:  # damaged, or pickled by other versions of the classes
            self.delete(table, key)
            return None
        return value

    def put(self, table: str, key: object, value: object) -> None:
        """Stores `value`, which must not be None, if the disk allows it."""
        if not self._writable:
            return
        try:
            content = pickle.dumps(value)
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_whole(self._path(table, key), hashlib.sha256(content).digest() + content)
            self._trim()
        except OSError:  # the disk is full or read-only, so further attempts would only cost time
            self._writable = False

    def delete(self, table: str, key: object) -> None:
        """Deletes an entry if it exists."""
        with contextlib.suppress(OSError):
            self._path(table, key).unlink(missing_ok=True)

    def _path(self, table: str, key: object) -> Path:
        words = f"{self.environment}\n{table}\n{key!r}"
        return self._folder / hashlib.sha256(words.encode()).hexdigest()

    @functools.cache  # noqa: B019 (a process has one cache for its whole life)
    def _trim(self) -> None:
        """Deletes the oldest files beyond the limit. Once a run is enough, since a run adds little."""
        trim(self._folder, LIMIT_BYTES)


def trim(folder: Path, limit_bytes: int) -> None:
    """Deletes the least recently used files of a folder beyond so many bytes. Those of a time that is yet to come count
    as the oldest: they would stay, and all that is new would be deleted. Raises OSError."""
    files, soon = [], time.time() + _DAY_S
    for entry in os.scandir(folder):
        with contextlib.suppress(FileNotFoundError):  # another process has just renamed or deleted it
            if entry.is_file():
                files.append((entry.stat(), entry.path))
    total_bytes = 0
    files.sort(key=lambda file: (file[0].st_mtime < soon, file[0].st_mtime), reverse=True)
    for stat, path in files:
        total_bytes += stat.st_size
        if total_bytes > limit_bytes:
            Path(path).unlink(missing_ok=True)


@functools.cache
def disk_cache() -> DiskCache:
    """The cache for tinygrad's default device. Call it after `engine.backends.prepare` has set the environment."""
    return DiskCache(_folder(), _environment())


def _folder() -> Path:
    return platformdirs.user_cache_path("orin-chat", appauthor=False) / "kernels"


@functools.cache
def lasting_cache() -> DiskCache:
    """What outlives a change of driver, tinygrad and our source, or is to be asked before tinygrad is imported: which
    starts need not compile anything, and which schedules searches found. The keys or the values say what of these they
    depend on."""
    return DiskCache(_folder(), "")


def _environment() -> str:
    from tinygrad import Device

    device, python = str(Device.DEFAULT), f"{platform.machine()} {sys.version_info[:2]}"
    driver = cuda_driver.version() if device.startswith(("CUDA", "NV")) else ""
    device_parts = device, device_name(device), driver
    parts = [installed_version("tinygrad"), source_digest("fixes"), python, *device_parts]
    return "\n".join([*parts, *(f"{name}={os.environ.get(name)}" for name in _VARIABLES)])
