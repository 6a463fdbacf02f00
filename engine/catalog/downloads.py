"""Downloads a model: into the Hugging Face hub's cache, or into a folder of our own for files from other URLs.

`hf_hub_download` of the library huggingface_hub discards its bytes when a download is interrupted, and does not check
hashes. So `transfer` downloads the files. They are stored in the hub's cache under its names and locks, so that the
library finds them and nothing is stored twice. A file gets its name only when it is complete and its hash is right;
until then it is `<hash>.incomplete`.
"""

import contextlib
import errno
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from engine.catalog import cache, hub
from engine.catalog.encoders import encoders_among
from engine.catalog.files import models_among, must_pick
from engine.catalog.hub import DownloadError, RemoteFile
from engine.catalog.names import HubModel, WebFile
from engine.catalog.progress import Meter, Progress
from engine.catalog.transfer import LOCK_S, Target, fetch
from engine.description.architectures import check_architecture
from engine.description.encoder_kinds import FITTING
from engine.errors import ModelFileError
from engine.formats.gguf import GGUF, printable
from engine.system.whole_file import write_whole


def download(
    source: HubModel | WebFile,
    report: Callable[[Progress], None] = lambda _: None,
    cancelled: Callable[[], bool] = lambda: False,
) -> Path:
    """Downloads a model and returns the file to open. A model of the hub is brought to its newest version. Files that
    exist already are verified, and downloaded again if they are damaged.

    Blocks; `report` is called from the calling thread, ten times a second. Raises DownloadError, ModelFileError and
    UsageError, and Cancelled soon after `cancelled` returns true.
    """
    try:
        if isinstance(source, HubModel):
            return _from_hub(source, report, cancelled)
        return _from_web(source, report, cancelled)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DownloadError(
                "The disk is full.", "Free some space and try again: what was downloaded is kept."
            ) from error
        raise DownloadError(
            f"{printable(str(error.filename or cache.hub_folder()))} cannot be used: {error.strerror or error}.",
            "Fix this, or set HF_HUB_CACHE to another folder.",
        ) from error


@dataclass(frozen=True)
class RemoteModel:
    """A model on the hub, at one commit: its parts, then its encoder if it has one."""

    commit: str
    files: tuple[RemoteFile, ...]
    digests: frozenset[str]
    """The digests of all files of the repository."""

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes or 0 for file in self.files)


def find_on_hub(model: HubModel) -> RemoteModel:
    """Asks the hub for a model. Raises DownloadError, UsageError, and ModelFileError if the engine cannot run it."""
    repository = hub.fetch_repository(model)
    picked = must_pick(model, models_among(repository.files))
    if repository.architecture:
        check_architecture(repository.architecture, str(model))
    encoders = encoders_among(repository.files, picked.file) if repository.architecture in FITTING else []
    files = tuple(repository.files[name] for name in (*picked.files, *encoders[:1]))
    if empty := next((file.name for file in files if file.size_bytes == 0), ""):
        raise DownloadError(f"{printable(empty)} is empty on the hub.", "Choose another repository.")
    return RemoteModel(repository.commit, files, frozenset(file.digest for file in repository.files.values()))


def _from_hub(model: HubModel, report: Callable[[Progress], None], cancelled: Callable[[], bool]) -> Path:
    report(Progress(str(model), 0, 0, note="asking the hub"))
    remote = find_on_hub(model)
    folder = cache.repository_folder(model.repository)
    snapshot = folder / "snapshots" / remote.commit
    locks = cache.hub_folder() / ".locks" / folder.name
    (folder / "blobs").mkdir(parents=True, exist_ok=True)
    locks.mkdir(parents=True, exist_ok=True)
    meter = Meter(remote.files[0].name, remote.size_bytes, report, cancelled)
    for file in remote.files:
        if not re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", file.digest):
            raise DownloadError(
                f"The hub states no hash for {printable(file.name)}, so it cannot be verified.",
                "Choose another repository.",
            )
        url = hub.file_url(model, remote.commit, file.name)
        blob = folder / "blobs" / file.digest
        target = Target(file.name, url, blob, file.size_bytes, file.digest, on_hub=True)
        fetch(target, locks / f"{file.digest}.lock", meter)
        _link(snapshot / file.name, blob)
    _remove_outdated(folder / "blobs", locks, remote.digests)
    if model.revision != remote.commit:  # where programs that are offline look it up
        _replace(folder / "refs" / model.revision, lambda new: new.write_text(remote.commit))
    return snapshot / remote.files[0].name


def _from_web(source: WebFile, report: Callable[[Progress], None], cancelled: Callable[[], bool]) -> Path:
    path = cache.web_path(source)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path.parent / cache.URL_FILE, f"{source}\n".encode())
    target = Target(source.file, source.url, path, size_bytes=None, digest="", on_hub=False)
    fetch(target, path.parent / "lock", Meter(source.file, 0, report, cancelled))
    try:
        GGUF(path).close()  # there is no hash to verify, so a cut or wrong file is found here
    except ModelFileError:
        path.unlink()
        raise
    return path


def _remove_outdated(blobs: Path, locks: Path, digests: frozenset[str]) -> None:
    """Deletes what downloads began of files that the hub has replaced since, unless a program holds their lock."""
    for begun in blobs.glob("*.incomplete"):
        digest = begun.name.partition(".")[0]
        if digest not in digests:
            with contextlib.suppress(OSError), hub.lock(str(locks / f"{digest}.lock"), LOCK_S):
                begun.unlink()


def _link(link: Path, blob: Path) -> None:
    target = os.path.relpath(blob, link.parent)
    if not link.is_symlink() or str(link.readlink()) != target:
        _replace(link, lambda new: new.symlink_to(target))


def _replace(path: Path, make: Callable[[Path], object]) -> None:
    """Replaces `path` by what `make` creates, atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    make(temporary)
    temporary.replace(path)
