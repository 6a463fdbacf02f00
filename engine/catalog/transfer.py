"""One file from the network, whole and right: through cuts, verified, and by one process at a time."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.catalog import hub
from engine.catalog.hub import DownloadError
from engine.catalog.progress import Meter
from engine.formats.gguf import shown

LOCK_S = 0.3
SPARE_BYTES = 64 << 20  # of disk, beyond the download
BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class Wanted:
    """A file to be had: from where, to where, and what is stated of it. `size_bytes` None and `digest` "" are
    not stated; a digest is a SHA-256 or git's SHA-1 of a file, in hexadecimal."""

    name: str
    url: str
    path: Path
    size_bytes: int | None
    digest: str
    on_hub: bool

    @property
    def incomplete(self) -> Path:
        return self.path.with_name(f"{self.path.name}.incomplete")

    @property
    def version(self) -> Path:
        """Beside an incomplete file without a digest: which version of the file it is a part of."""
        return self.path.with_name(f"{self.path.name}.version")


class _Damaged(Exception):
    """What arrived is not what the server states."""


def bring(wanted: Wanted, lock: Path, meter: Meter) -> None:
    """Makes `wanted.path` the whole and right file, or leaves no file of that name.

    Raises DownloadError, Cancelled and, for the disk, OSError; what arrived until then is kept."""
    with _locked(lock, wanted, meter):
        if wanted.path.exists():
            with contextlib.suppress(_Damaged):
                _check(wanted, meter)
                meter.file_is_done(wanted.path.stat().st_size)
                return
            wanted.path.unlink()
        for is_last_try in (False, True):  # what was left here by an earlier download may be the bad part
            try:
                _receive(wanted, meter)
                break
            except _Damaged as damage:
                wanted.incomplete.unlink(missing_ok=True)
                if is_last_try:
                    raise DownloadError(
                        f"{shown(wanted.name)} arrived damaged twice: {damage}.",
                        "Nothing of it was kept. Try again later, or get it from another repository.",
                    ) from None
        meter.file_is_done(wanted.incomplete.stat().st_size)
        wanted.incomplete.replace(wanted.path)
        wanted.version.unlink(missing_ok=True)


@contextlib.contextmanager
def _locked(lock: Path, wanted: Wanted, meter: Meter) -> Iterator[None]:
    """Holds the lock of a file. While another process has it, its progress is shown."""
    while True:
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(hub.lock(str(lock), LOCK_S))
            except TimeoutError:
                have = wanted.incomplete.stat().st_size if wanted.incomplete.exists() else 0
                meter.show(have, "another program is downloading it")
                continue
            yield
            return


def _check(wanted: Wanted, meter: Meter) -> None:
    """Raises _Damaged where the file that is here is not the one that is wanted."""
    size = wanted.path.stat().st_size
    if wanted.size_bytes is not None and size != wanted.size_bytes:
        raise _Damaged("its size is wrong")
    hash, done = _hash(wanted.digest, size), 0
    for block in _blocks(wanted.path) if hash else ():
        hash.update(block)
        meter.show(done := done + len(block), "verifying")
    _compare(hash, wanted.digest)


def _receive(wanted: Wanted, meter: Meter) -> None:
    """Completes `wanted.incomplete` and verifies it, through as many cuts as bring something each time."""
    failures = 0
    with _Partial(wanted, meter) as partial:
        _check_room(wanted, partial.size_bytes, partial.have)
        while not partial.is_whole:
            before = partial.have
            cut: Exception = ConnectionError("the server ends the transfer early")
            try:
                partial.fetch()
            except hub.http_errors() as error:
                cut = error
            if partial.is_whole:
                break
            failures = 1 if partial.have > before else failures + 1
            delay = hub.retry_after_s(cut, failures)
            if delay is None:
                hub.fail(cut, shown(wanted.name if wanted.on_hub else wanted.url), on_hub=wanted.on_hub)
            if failures > 1 or hub.status(cut):
                meter.wait(delay, partial.have, f"interrupted; trying again in {delay:.0f} s")
        partial.verify()


class _Partial:
    """A file on its way, and the hash of what there is of it. As a context it is open for writing."""

    def __init__(self, wanted: Wanted, meter: Meter) -> None:
        self.wanted, self.meter = wanted, meter
        self.size_bytes = wanted.size_bytes
        self.have = 0
        self.hash = _hash(wanted.digest, wanted.size_bytes)
        self.file = wanted.incomplete.open("ab")
        self._ended = False  # a body came to its end, by its own account

    def __enter__(self) -> _Partial:
        try:
            self._resume()
        except BaseException:
            self.file.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):  # a full disk has been told of
            self.file.close()

    def _resume(self) -> None:
        """Goes on from what an earlier download left, if it is a part of this file."""
        size = self.file.tell()
        if self.wanted.digest:
            if size > (self.size_bytes or size):
                self._start_over()
        elif not self._version:
            self._start_over()
        for block in _blocks(self.wanted.incomplete):
            self._take(block)
            self.meter.show(self.have, "verifying what there is of it")

    @property
    def is_whole(self) -> bool:
        return self._ended if self.size_bytes is None else self.have == self.size_bytes

    @property
    def _version(self) -> str:
        """What the server calls this version of the file, where no digest tells it from others."""
        with contextlib.suppress(FileNotFoundError):
            return self.wanted.version.read_text().strip()
        return ""

    def fetch(self) -> None:
        """What is missing, or as much of it as arrives. Raises hub.http_errors(), Cancelled, _Damaged."""
        headers = {"Accept-Encoding": "identity"}
        if self.have:
            headers["Range"] = f"bytes={self.have}-"
            if not self.wanted.digest:
                headers["If-Range"] = self._version
        try:
            with hub.opened(self.wanted.url, headers, on_hub=self.wanted.on_hub) as response:
                self._heed(response)
                for block in response.iter_raw():
                    self._write(block)
                self._ended = True
        except hub.http_errors() as error:
            if hub.status(error) == 416:
                raise _Damaged("the server has less of it than arrived before") from None
            raise
        finally:
            self.file.flush()

    def verify(self) -> None:
        """Raises _Damaged where the hash is not the one that is stated."""
        os.fsync(self.file.fileno())
        _compare(self.hash, self.wanted.digest)

    def _heed(self, response: Any) -> None:
        """Takes from an answer's headers where its body begins, and what else they say of the file."""
        start, _, total = response.headers.get("Content-Range", "").removeprefix("bytes ").partition("/")
        if self.have and (response.status_code != 206 or start.partition("-")[0] != str(self.have)):
            self._start_over()  # it is the whole file again
        stated = total if response.status_code == 206 else response.headers.get("Content-Length", "")
        if stated.isdecimal() and self.size_bytes is None:
            self.size_bytes = self.meter.total_bytes = int(stated)
            _check_room(self.wanted, self.size_bytes, self.have)
        elif stated.isdecimal() and int(stated) != self.size_bytes:
            raise _Damaged(f"the server sends {stated} bytes and states {self.size_bytes}")
        if not self.wanted.digest and not self.have:
            etag = response.headers.get("ETag", "")
            dated = response.headers.get("Last-Modified", "")
            self.wanted.version.write_text(dated if etag.startswith("W/") else etag or dated)

    def _start_over(self) -> None:
        self.file.truncate(0)
        self.have, self.hash = 0, _hash(self.wanted.digest, self.size_bytes)

    def _write(self, block: bytes) -> None:
        if self.size_bytes is not None and self.have + len(block) > self.size_bytes:
            raise _Damaged(f"there is more of it than the {self.size_bytes} bytes that the server states")
        self.file.write(block)
        self._take(block)
        self.meter.show(self.have)

    def _take(self, block: bytes) -> None:
        self.have += len(block)
        if self.hash is not None:
            self.hash.update(block)


def _check_room(wanted: Wanted, size_bytes: int | None, have: int) -> None:
    """Raises DownloadError where the disk cannot hold what is missing."""
    need = (size_bytes or 0) - have + SPARE_BYTES
    free = shutil.disk_usage(wanted.path.parent).free
    if need > free:
        raise DownloadError(
            f"{shown(wanted.name)} needs {need / 1e9:.2f} GB more, and {wanted.path.parent} has room for "
            f"{free / 1e9:.2f} GB.",
            "Free some of it, or set HF_HUB_CACHE to a folder with more.",
        )


def _hash(digest: str, size_bytes: int | None) -> Any:
    """A fresh hash of the kind that `digest` is, or None: SHA-256, or git's of a file."""
    if len(digest) == 64:
        return hashlib.sha256()
    if len(digest) == 40 and size_bytes is not None:
        return hashlib.sha1(b"blob %d\0" % size_bytes, usedforsecurity=False)
    return None


def _compare(hash: Any, digest: str) -> None:
    if hash is not None and hash.hexdigest() != digest:
        raise _Damaged(f"its hash is {hash.hexdigest()[:12]}… and should be {digest[:12]}…")


def _blocks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            yield block
