"""Getting a model: into the hub's cache, or our own folder for files from other addresses.

The hub library's own hf_hub_download throws away what it has when a download is cut, and does not check
hashes, so files are fetched by `transfer` here. They lie in the hub's cache under its names and locks, so
that it finds them and nothing is stored twice. A file is called what it is only when all of it is there and
its hash is right; until then it is `<hash>.incomplete`.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from engine.catalog import cache, hub
from engine.catalog.files import choices, must_pick
from engine.catalog.hub import DownloadError, RemoteFile
from engine.catalog.names import HubModel, WebFile
from engine.catalog.progress import Meter, Progress
from engine.catalog.transfer import Wanted, bring
from engine.errors import ModelFileError
from engine.formats.gguf import GGUF, shown
from engine.model.config import check_architecture


def download(
    source: HubModel | WebFile,
    report: Callable[[Progress], None] = lambda _: None,
    cancelled: Callable[[], bool] = lambda: False,
) -> Path:
    """Brings a model here and returns the file to open. From the hub it is the newest version; what is here
    already is verified, and fetched again where it is damaged.

    Blocks; `report` is called from the calling thread, ten times a second. Raises DownloadError,
    ModelFileError and UsageError, and Cancelled soon after `cancelled` says so.
    """
    try:
        if isinstance(source, HubModel):
            return _from_hub(source, report, cancelled)
        return _from_web(source, report, cancelled)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DownloadError(
                "The disk is full.", "Free some of it and try again: what was downloaded is kept."
            ) from error
        raise DownloadError(
            f"{shown(str(error.filename or cache.hub_folder()))} cannot be used: {error.strerror or error}.",
            "Mend that, or set HF_HUB_CACHE to another folder.",
        ) from error


@dataclass(frozen=True)
class Offer:
    """What would be downloaded, as the hub states it."""

    commit: str
    quantization: str
    files: tuple[RemoteFile, ...]

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes or 0 for file in self.files)


def offer(model: HubModel) -> Offer:
    """Asks the hub for a model. Raises DownloadError, ModelFileError where it cannot run, UsageError."""
    repository = hub.repository(model)
    choice = must_pick(model, choices(repository.files))
    if repository.architecture:
        check_architecture(repository.architecture, str(model))
    files = tuple(repository.files[name] for name in choice.files)
    return Offer(repository.commit, choice.quantization, files)


def _from_hub(model: HubModel, report: Callable[[Progress], None], cancelled: Callable[[], bool]) -> Path:
    report(Progress(str(model), 0, 0, note="asking the hub"))
    offered = offer(model)
    folder = cache.repository_folder(model.repository)
    snapshot = folder / "snapshots" / offered.commit
    locks = cache.hub_folder() / ".locks" / folder.name
    (folder / "blobs").mkdir(parents=True, exist_ok=True)
    locks.mkdir(parents=True, exist_ok=True)
    meter = Meter(offered.files[0].name, offered.size_bytes, report, cancelled)
    for file in offered.files:
        if not re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", file.digest):
            raise DownloadError(
                f"The hub states no hash for {shown(file.name)}.", "Choose another repository."
            )
        url = hub.file_url(model, offered.commit, file.name)
        blob = folder / "blobs" / file.digest
        wanted = Wanted(file.name, url, blob, file.size_bytes, file.digest, on_hub=True)
        bring(wanted, locks / f"{file.digest}.lock", meter)
        _link(snapshot / file.name, blob)
    if model.revision != offered.commit:  # where those look who cannot ask the hub
        _replace(folder / "refs" / model.revision, lambda new: new.write_text(offered.commit))
    return snapshot / offered.files[0].name


def _from_web(source: WebFile, report: Callable[[Progress], None], cancelled: Callable[[], bool]) -> Path:
    path = cache.web_file(source)
    path.parent.mkdir(parents=True, exist_ok=True)
    (path.parent / cache.URL_NOTE).write_text(f"{source.url}\n")
    wanted = Wanted(source.file, source.url, path, size_bytes=None, digest="", on_hub=False)
    bring(wanted, path.parent / "lock", Meter(source.file, 0, report, cancelled))
    try:
        GGUF(path).close()  # no hash was stated; a file that is cut short, or is none, shows here
    except ModelFileError:
        path.unlink()
        raise
    return path


def _link(link: Path, blob: Path) -> None:
    target = os.path.relpath(blob, link.parent)
    if not link.is_symlink() or str(link.readlink()) != target:
        _replace(link, lambda new: new.symlink_to(target))


def _replace(path: Path, make: Callable[[Path], object]) -> None:
    """Puts what `make` makes in the place of `path`, so that nobody sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    make(temporary)
    temporary.replace(path)
