"""Writes small files whole or not at all: a full disk or a crash leaves what was there before."""

from __future__ import annotations

import tempfile
from pathlib import Path


def write_whole(path: Path, content: bytes) -> None:
    """Replaces a file by one that only its owner can read. Makes its folder. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}-", delete=False) as file:
        new = Path(file.name)
        try:
            file.write(content)
            file.flush()
            new.replace(path)
        except BaseException:
            new.unlink(missing_ok=True)
            raise
