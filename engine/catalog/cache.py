"""The models on this machine: in the Hugging Face hub's cache, which other programs share, and in a folder of our own
for files from other URLs.

The hub's cache has a folder `models--user--repository` for each repository. `blobs` holds the files, named by their
hashes; `snapshots/<commit>` holds links to them under their names; `refs` says which commit a branch is at.
https://huggingface.co/docs/huggingface_hub/guides/manage-cache
"""

import contextlib
import hashlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import platformdirs

from engine.catalog.encoders import is_encoder
from engine.catalog.files import models_among, pick
from engine.catalog.names import DEFAULT_REVISION, HubModel, WebFile
from engine.system.whole_file import read_file

URL_FILE = "url"  # holds the address of the model file beside it, without secrets


@dataclass(frozen=True)
class Installed:
    """A downloaded model that is complete. `paths`: its parts, in order."""

    source: HubModel | WebFile
    paths: tuple[Path, ...]

    @property
    def path(self) -> Path:
        """The file to open."""
        return self.paths[0]

    @property
    def size_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.paths)


def hub_folder() -> Path:
    """The hub's cache, where the library huggingface_hub has it."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    default = Path(os.environ.get("HF_HOME") or Path(home, "huggingface"), "hub")
    folder = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or str(default)
    return Path(os.path.expandvars(folder)).expanduser()


def web_folder() -> Path:
    return platformdirs.user_cache_path("orin-chat", appauthor=False) / "models"


def repository_folder(repository: str) -> Path:
    return hub_folder() / f"models--{repository.replace('/', '--')}"


def web_path(source: WebFile) -> Path:
    """Where the file of a URL is stored. A query tells files apart."""
    parts = urlsplit(source.url)
    url = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
    return web_folder() / hashlib.sha256(url.encode()).hexdigest()[:16] / source.file


def find(source: HubModel | WebFile) -> Path | None:
    """The file to open, if the complete model is on this machine; else None."""
    if isinstance(source, WebFile):
        path = web_path(source)
        listed = (model.path for model in _installed_from_web() if str(model.source) == source.url)
        return path if path.is_file() else next(listed, None)
    for snapshot in _snapshots(repository_folder(source.repository), source.revision):
        if model := pick(source, models_among(_files(snapshot))):
            return snapshot / model.file
    return None


def installed() -> list[Installed]:
    """All complete models on this machine, sorted by name."""
    models = [*_installed_from_hub(), *_installed_from_web()]
    return sorted(models, key=lambda model: str(model.source).lower())


def remove(model: Installed) -> int:
    """Deletes a model, and what an unfinished download of it left; returns the bytes freed. With the last model of a
    repository, its encoders go. Files that other snapshots of the repository use stay, and so does what lies outside
    the cache. Raises OSError."""
    if isinstance(model.source, WebFile):
        size = model.size_bytes
        shutil.rmtree(model.path.parent)
        return size
    folder = repository_folder(model.source.repository)
    root = folder / "snapshots"
    names = {path.relative_to(root / path.relative_to(root).parts[0]) for path in model.paths}
    links = [snapshot / name for snapshot in _snapshots(folder) for name in names]
    present = {snapshot / name for snapshot in _snapshots(folder) for name in _files(snapshot)}
    if not models_among(link.relative_to(root).as_posix() for link in present.difference(links)):
        links += [link for link in present.difference(links) if is_encoder(link.name)]
    blobs = {link.parent / link.readlink() for link in links if link.is_symlink()}
    freed = sum(link.stat().st_size for link in links if link.is_file() and not link.is_symlink())
    for link in links:
        link.unlink(missing_ok=True)
    in_use = {
        os.path.normpath(link.parent / link.readlink()) for link in root.rglob("*") if link.is_symlink()
    }
    store = os.path.normpath(folder / "blobs")
    for blob in {Path(os.path.normpath(blob)) for blob in blobs}:
        if str(blob) in in_use or str(blob.parent) != store:
            continue
        with contextlib.suppress(FileNotFoundError):
            if not blob.is_symlink():  # else its bytes are in a store that several caches share
                freed += blob.stat().st_size
            blob.unlink()
        blob.with_name(f"{blob.name}.incomplete").unlink(missing_ok=True)
    _remove_empty_folders(folder)
    return freed


# --- the hub's cache -----------------------------------------------------------------------------------


def _installed_from_hub() -> Iterator[Installed]:
    for folder in hub_folder().glob("models--*--*"):
        repository = folder.name.removeprefix("models--").replace("--", "/", 1)
        seen: set[str] = set()
        for snapshot in _snapshots(folder):
            models = models_among(_files(snapshot))
            for model in models:
                if model.file in seen:
                    continue
                seen.add(model.file)
                source = HubModel(repository, model.quantization)
                if not model.quantization or pick(source, models) != model:
                    source = HubModel(repository, file=model.file)
                yield Installed(source, tuple(snapshot / file for file in model.files))


def _snapshots(folder: Path, revision: str = DEFAULT_REVISION) -> list[Path]:
    """The snapshots of a repository that `revision` names. For the default revision all of them: first the one that
    the branch is at, then the newest."""
    root = folder / "snapshots"
    try:
        commit = read_file(folder / "refs" / revision).decode().strip()
    except (OSError, ValueError):  # not there, damaged, or no name of a file
        commit = revision
    if revision != DEFAULT_REVISION:
        return [root / commit] if commit == Path(commit).name and (root / commit).is_dir() else []
    try:
        ranked = [(each.name != commit, -each.stat().st_mtime, each) for each in root.iterdir()]
    except OSError:
        return []
    return [snapshot for *_, snapshot in sorted(ranked)]


def _files(snapshot: Path) -> Iterator[str]:
    """The GGUF files of a snapshot, relative to it, without broken links and empty files."""
    for path in snapshot.rglob("*.gguf"):
        with contextlib.suppress(OSError):
            if path.stat().st_size and path.is_file():
                yield path.relative_to(snapshot).as_posix()


def _remove_empty_folders(folder: Path) -> None:
    """Removes empty folders of a repository, and the whole repository if it has no snapshot left."""
    for parent, _, _ in os.walk(folder / "snapshots", topdown=False):
        with contextlib.suppress(OSError):
            Path(parent).rmdir()
    if not (folder / "snapshots").exists():
        shutil.rmtree(folder)
        shutil.rmtree(hub_folder() / ".locks" / folder.name, ignore_errors=True)


# --- files from other URLs ----------------------------------------------------------------------------


def _installed_from_web() -> Iterator[Installed]:
    for url_file in web_folder().glob(f"*/{URL_FILE}"):
        with contextlib.suppress(OSError, ValueError):
            url = read_file(url_file).decode().strip()
            source = WebFile(url)
            if url.isprintable() and url and (path := url_file.with_name(source.file)).is_file():
                yield Installed(source, (path,))
