"""Where the KV cache of conversations is kept on disk (`prefix_store`), and how much of it."""

from __future__ import annotations

from pathlib import Path

import platformdirs

from engine.system.whole_file import free_bytes

_DEFAULT_BYTES = 4 << 30
_SMALL_DISK_BYTES = 40 << 30


def folder() -> Path:
    return platformdirs.user_cache_path("orin-chat", appauthor=False) / "prefixes"


def clear() -> None:
    """Deletes all files: they hold the tokens of conversations. Raises OSError."""
    for path in folder().glob("*"):
        path.unlink(missing_ok=True)


def default_limit_bytes() -> int:
    """The most bytes to keep if the user does not say: none where less than 40 GiB are free."""
    place = folder()
    while not place.exists():
        place = place.parent
    return _DEFAULT_BYTES if (free_bytes(place) or 0) >= _SMALL_DISK_BYTES else 0
