"""Downloads one file completely: resumes after interruptions, verifies the hash, one process at a time."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.catalog import hub
from engine.catalog.hub import DownloadError
from engine.catalog.names import public_address
from engine.catalog.progress import Meter
from engine.formats.gguf import printable
from engine.system.whole_file import free_bytes, open_to_append, read_file, write_whole

LOCK_S = 0.3
SPARE_BYTES = 64 << 20  # of disk space that a download leaves free
BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class Target:
    """A file to download, and what the server states about it. `size_bytes` None and `digest` "": not stated. A
    digest is a SHA-256 or git's SHA-1 of a file, in hexadecimal."""

    name: str
    url: str
    path: Path
    size_bytes: int | None
    digest: str
    on_hub: bool

    @property
    def incomplete_path(self) -> Path:
        """Holds the bytes that have arrived, until the file is complete."""
        return self.path.with_name(f"{self.path.name}.incomplete")

    @property
    def version_path(self) -> Path:
        """Holds the ETag of the incomplete file, if there is no digest to tell versions of the file apart."""
        return self.path.with_name(f"{self.path.name}.version")


class _DamagedError(Exception):
    """The bytes that arrived are not those that the server states."""


def fetch(target: Target, lock: Path, meter: Meter) -> None:
    """Makes `target.path` the complete and verified file, or leaves no file of that name.

    Raises DownloadError, Cancelled and, for the disk, OSError. The bytes that arrived until then are kept."""
    with _locked(lock, target, meter):
        if target.path.exists():
            with contextlib.suppress(_DamagedError):
                _verify(target, meter)
                meter.finish_file(target.path.stat().st_size)
                return
            target.path.unlink()
        for is_last_try in (False, True):  # the damage may be in bytes that an earlier download left
            try:
                _download(target, meter)
                break
            except _DamagedError as damage:
                target.incomplete_path.unlink(missing_ok=True)
                if is_last_try:
                    raise DownloadError(
                        f"{printable(target.name)} arrived damaged twice: {damage}.",
                        "Nothing of it was kept. Try again later, or get it from another repository.",
                    ) from None
        meter.finish_file(target.incomplete_path.stat().st_size)
        target.incomplete_path.replace(target.path)
        target.version_path.unlink(missing_ok=True)


@contextlib.contextmanager
def _locked(lock: Path, target: Target, meter: Meter) -> Iterator[None]:
    """Holds the lock of a file. Shows the progress of another process while that has the lock."""
    while True:
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(hub.lock(str(lock), LOCK_S))
            except TimeoutError:
                have = target.incomplete_path.stat().st_size if target.incomplete_path.exists() else 0
                meter.show(have, "another program is downloading it")
                continue
            yield
            return


def _verify(target: Target, meter: Meter) -> None:
    """Raises _DamagedError if the file at `target.path` is not the one that the server states."""
    size = target.path.stat().st_size
    if target.size_bytes is not None and size != target.size_bytes:
        raise _DamagedError("its size is wrong")
    hash, done = _new_hash(target.digest, size), 0
    for block in _blocks(target.path) if hash else ():
        hash.update(block)
        meter.show(done := done + len(block), "verifying")
    _check_digest(hash, target.digest)


def _download(target: Target, meter: Meter) -> None:
    """Completes and verifies `target.incomplete_path`. Tries again after an interruption: as often as necessary while
    each try brings bytes that no try has brought before, else `hub.RETRIES` times."""
    failures = 0
    with _PartialFile(target, meter) as partial:
        _check_free_space(target, partial.size_bytes, partial.have)
        furthest = partial.have  # a server that ignores ranges begins anew each time
        while not partial.is_complete:
            cut: Exception = ConnectionError("the server ends the transfer early")
            try:
                partial.fetch()
            except hub.http_errors() as error:
                cut = error
            if partial.is_complete:
                break
            failures = 1 if partial.have > furthest else failures + 1
            furthest = max(furthest, partial.have)
            delay = hub.retry_after_s(cut, failures)
            if delay is None:
                name = printable(target.name if target.on_hub else public_address(target.url))
                hub.raise_download_error(cut, name, on_hub=target.on_hub, has_arrived=partial.have > 0)
            if failures > 1 or hub.http_status(cut):
                meter.wait(delay, partial.have, f"interrupted; trying again in {delay:.0f} s")
        partial.verify()


class _PartialFile:
    """A file that is being downloaded: `have` bytes of it are on the disk, and `hash` is theirs. Within `with` it is
    open for appending."""

    def __init__(self, target: Target, meter: Meter) -> None:
        self.target, self.meter = target, meter
        self.size_bytes = target.size_bytes
        self.have = 0
        self.hash = _new_hash(target.digest, target.size_bytes)
        self.file = open_to_append(target.incomplete_path)
        self._ended = False  # a response without a stated size was received to its end

    def __enter__(self) -> _PartialFile:
        try:
            self._resume()
        except BaseException:
            self.file.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):  # a full disk was reported by a write before
            self.file.close()

    def _resume(self) -> None:
        """Continues what an earlier download left, if it is a part of this file."""
        size = self.file.tell()
        if self.target.digest:
            if size > (self.size_bytes or size):
                self._start_over()
        elif not self._version:
            self._start_over()
        for block in _blocks(self.target.incomplete_path):
            self._add(block)
            self.meter.show(self.have, "verifying the part that is here")

    @property
    def is_complete(self) -> bool:
        return self._ended if self.size_bytes is None else self.have == self.size_bytes

    @property
    def _version(self) -> str:
        """The ETag or date of the version that the bytes on the disk are from; "" if there is none."""
        with contextlib.suppress(FileNotFoundError, UnicodeDecodeError):
            return _as_header(read_file(self.target.version_path).decode().strip())
        return ""

    def fetch(self) -> None:
        """Downloads the missing bytes, or as many as arrive. Raises hub.http_errors(), Cancelled, _DamagedError."""
        headers = {}
        if self.have:
            headers["Range"] = f"bytes={self.have}-"
            if not self.target.digest:
                headers["If-Range"] = self._version
        try:
            with hub.open_url(self.target.url, headers, on_hub=self.target.on_hub) as response:
                self._read_headers(response)
                for block in response.iter_raw():
                    self._write(block)
                self._ended = True
        except hub.http_errors() as error:
            if hub.http_status(error) == 416:  # range not satisfiable
                raise _DamagedError("the server has less of it than arrived before") from None
            raise
        finally:
            self.file.flush()

    def verify(self) -> None:
        """Raises _DamagedError if the hash is not the stated one."""
        os.fsync(self.file.fileno())
        _check_digest(self.hash, self.target.digest)

    def _read_headers(self, response: Any) -> None:
        """Checks where the response's body begins and which size it states, and stores its version."""
        start, _, total = response.headers.get("Content-Range", "").removeprefix("bytes ").partition("/")
        version = _version_in(response.headers)
        if response.status_code != 206:
            self._start_over()  # the server sends the whole file
        elif start.partition("-")[0] != str(self.have):
            raise _DamagedError("the server sends another part than it was asked for")
        elif not self.target.digest and _are_different(self._version, version):
            raise _DamagedError("the server has another version of it than arrived before")
        if not self.target.digest and not self.have:
            write_whole(self.target.version_path, version.encode())
        stated = total if response.status_code == 206 else response.headers.get("Content-Length", "")
        if not (stated.isdecimal() and len(stated) < 19):
            return
        if self.size_bytes is None:
            self.size_bytes = self.meter.total_bytes = int(stated)
            _check_free_space(self.target, self.size_bytes, self.have)
        elif int(stated) != self.size_bytes:
            raise _DamagedError(f"the server sends {stated} bytes and states {self.size_bytes}")

    def _start_over(self) -> None:
        self.file.truncate(0)
        self.have, self.hash = 0, _new_hash(self.target.digest, self.size_bytes)

    def _write(self, block: bytes) -> None:
        if self.size_bytes is not None and self.have + len(block) > self.size_bytes:
            raise _DamagedError(f"the server sends more than the {self.size_bytes} bytes that it states")
        self.file.write(block)
        self._add(block)
        self.meter.show(self.have)

    def _add(self, block: bytes) -> None:
        self.have += len(block)
        if self.hash is not None:
            self.hash.update(block)


def _version_in(headers: Mapping[str, str]) -> str:
    """A response's ETag or, without one that tells all versions apart, its date; "" if it has neither."""
    etag, date = _as_header(headers.get("ETag", "")), _as_header(headers.get("Last-Modified", ""))
    return date if etag.startswith("W/") else etag or date


def _as_header(text: str) -> str:
    """`text`, or "" if no request can have it in its head."""
    return text if text.isascii() and text.isprintable() else ""


def _are_different(one: str, other: str) -> bool:
    """Whether two versions differ, as far as they can be compared: both are ETags, or both are dates."""
    return bool(one and other) and one.startswith('"') == other.startswith('"') and one != other


def _check_free_space(target: Target, size_bytes: int | None, have: int) -> None:
    """Raises DownloadError if the disk cannot hold the missing bytes."""
    need = (size_bytes or 0) - have + SPARE_BYTES
    free = free_bytes(target.path.parent)
    if free is not None and need > free:
        raise DownloadError(
            f"{printable(target.name)} needs {need / 1e9:.2f} GB more, and {target.path.parent} has room for "
            f"{free / 1e9:.2f} GB.",
            "Free some space, or set HF_HUB_CACHE to a folder with more.",
        )


def _new_hash(digest: str, size_bytes: int | None) -> Any:
    """A new hash of the digest's kind: SHA-256, or the SHA-1 that git gives a file; None without a digest."""
    if len(digest) == 64:
        return hashlib.sha256()
    if len(digest) == 40 and size_bytes is not None:
        return hashlib.sha1(b"blob %d\0" % size_bytes, usedforsecurity=False)
    return None


def _check_digest(hash: Any, digest: str) -> None:
    if hash is not None and hash.hexdigest() != digest:
        raise _DamagedError(f"its hash is {hash.hexdigest()[:12]}… and should be {digest[:12]}…")


def _blocks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            yield block
