"""The models on this machine: the hub's cache, shared with every other program that uses it, and our own
folder for files from other addresses.

The hub's cache holds a repository as `models--user--repository`: in `blobs` the files, each named by its
hash, in `snapshots/<commit>` links to them under their own names, in `refs` which commit a branch is at.
https://huggingface.co/docs/huggingface_hub/guides/manage-cache
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from engine.catalog.files import choices, pick
from engine.catalog.names import DEFAULT_REVISION, HubModel, WebFile

URL_NOTE = "url"  # beside a file from the web: where it is from


@dataclass(frozen=True)
class Installed:
    """A whole model that was downloaded. `paths` are its parts, in order."""

    source: HubModel | WebFile
    paths: tuple[Path, ...]

    @property
    def path(self) -> Path:
        """The one to open."""
        return self.paths[0]

    @property
    def size_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.paths)


def hub_folder() -> Path:
    """The hub's cache, as its own library finds it."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    default = Path(os.environ.get("HF_HOME") or Path(home, "huggingface"), "hub")
    given = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or str(default)
    return Path(os.path.expandvars(given)).expanduser()


def web_folder() -> Path:
    return platformdirs.user_cache_path("orin-chat", appauthor=False) / "models"


def repository_folder(repository: str) -> Path:
    return hub_folder() / f"models--{repository.replace('/', '--')}"


def web_file(source: WebFile) -> Path:
    """Where the file of an address is kept."""
    return web_folder() / hashlib.sha256(source.url.encode()).hexdigest()[:16] / source.file


def find(source: HubModel | WebFile) -> Path | None:
    """The file to open, if this model is here as a whole."""
    if isinstance(source, WebFile):
        path = web_file(source)
        return path if path.is_file() else None
    for snapshot in _snapshots(repository_folder(source.repository), source.revision):
        if choice := pick(source, choices(_files(snapshot))):
            return snapshot / choice.file
    return None


def installed() -> list[Installed]:
    """Every model that is here as a whole, by name."""
    found = [*_installed_from_hub(), *_installed_from_web()]
    return sorted(found, key=lambda model: str(model.source).lower())


def remove(model: Installed) -> int:
    """Deletes a model, with what was left of an unfinished download of it, and returns how many bytes that
    freed. Files that other snapshots of the repository need stay. Raises OSError."""
    if isinstance(model.source, WebFile):
        size = model.size_bytes
        shutil.rmtree(model.path.parent)
        return size
    folder = repository_folder(model.source.repository)
    names = {path.relative_to(_snapshot_of(path, folder)) for path in model.paths}
    links = [snapshot / name for snapshot in _snapshots(folder) for name in names]
    blobs = {link.parent / link.readlink() for link in links if link.is_symlink()}
    freed = sum(link.stat().st_size for link in links if link.is_file() and not link.is_symlink())
    for link in links:
        link.unlink(missing_ok=True)
    needed = {os.path.normpath(link.parent / link.readlink()) for link in _links(folder)}
    for blob in {Path(os.path.normpath(blob)) for blob in blobs}:
        if str(blob) in needed:
            continue
        with contextlib.suppress(FileNotFoundError):
            freed += 0 if blob.is_symlink() else blob.stat().st_size  # a link leads to the hub's shared store
            blob.unlink()
        blob.with_name(f"{blob.name}.incomplete").unlink(missing_ok=True)
    _tidy(folder)
    return freed


# --- the hub's cache -----------------------------------------------------------------------------------


def _installed_from_hub() -> Iterator[Installed]:
    for folder in hub_folder().glob("models--*--*"):
        repository = folder.name.removeprefix("models--").replace("--", "/", 1)
        seen: set[str] = set()
        for snapshot in _snapshots(folder):
            offered = choices(_files(snapshot))
            for choice in offered:
                if choice.file in seen:
                    continue
                seen.add(choice.file)
                source = HubModel(repository, choice.quantization)
                if not choice.quantization or pick(source, offered) != choice:
                    source = HubModel(repository, file=choice.file)
                yield Installed(source, tuple(snapshot / file for file in choice.files))


def _snapshots(folder: Path, revision: str = DEFAULT_REVISION) -> list[Path]:
    """The snapshots of a repository that `revision` may mean: for the default one all of them, the one that
    the branch is at first, then by age."""
    root = folder / "snapshots"
    try:
        commit = (folder / "refs" / revision).read_text().strip()
    except (OSError, UnicodeDecodeError):
        commit = revision
    if revision != DEFAULT_REVISION:
        return [root / commit] if (root / commit).is_dir() else []
    try:
        found = [(each.name != commit, -each.stat().st_mtime, each) for each in root.iterdir()]
    except OSError:
        return []
    return [snapshot for *_, snapshot in sorted(found)]


def _files(snapshot: Path) -> Iterator[str]:
    """The GGUF files of a snapshot, relative to it: links that lead nowhere and empty files left out."""
    for path in snapshot.rglob("*.gguf"):
        with contextlib.suppress(OSError):
            if path.stat().st_size and path.is_file():
                yield path.relative_to(snapshot).as_posix()


def _links(folder: Path) -> Iterator[Path]:
    return (path for path in (folder / "snapshots").rglob("*") if path.is_symlink())


def _snapshot_of(path: Path, folder: Path) -> Path:
    return folder / "snapshots" / path.relative_to(folder / "snapshots").parts[0]


def _tidy(folder: Path) -> None:
    """Removes folders that are empty; the whole repository where nothing of it is left."""
    for parent, _, _ in os.walk(folder / "snapshots", topdown=False):
        with contextlib.suppress(OSError):
            Path(parent).rmdir()
    if not (folder / "snapshots").exists():
        shutil.rmtree(folder)
        shutil.rmtree(hub_folder() / ".locks" / folder.name, ignore_errors=True)


# --- files from other addresses ------------------------------------------------------------------------


def _installed_from_web() -> Iterator[Installed]:
    for note in web_folder().glob(f"*/{URL_NOTE}"):
        with contextlib.suppress(OSError, UnicodeDecodeError):
            source = WebFile(note.read_text().strip())
            if (path := find(source)) is not None:
                yield Installed(source, (path,))
