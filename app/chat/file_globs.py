"""The files that a pattern finds: *, ?, [abc], and ** for folders at any depth."""

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path

from engine.errors import UsageError
from widgets.text import one_line

MOST_ENTRIES = 50_000
"""The patterns of a prompt go through at most so many entries of folders: a tenth of a second. One may name /, or a
folder that links to itself."""
_WILD = re.compile(r"[*?\[]")


def is_glob(text: str) -> bool:
    return _WILD.search(text) is not None


def matching(pattern: Path, entries_left: Iterator[int]) -> Iterator[Path]:
    """The files that an absolute pattern finds, in any order; some may come twice. As in a shell, names that begin with
    a dot are found by patterns that do, and ** does not go through links. `entries_left` gives a number for each entry
    of a folder that may still be gone through, by this pattern and others.

    Raises UsageError if there are more."""
    todo = [(Path(pattern.anchor), pattern.parts[1:])]
    while todo:
        folder, parts = todo.pop()
        if not parts:
            with suppress(OSError):  # it may not be read, or has a name that is too long
                if folder.is_file():
                    yield folder
            continue
        part, rest = parts[0], parts[1:]
        if not is_glob(part):
            todo.append((folder / part, rest))
            continue
        if part == "**":
            while rest[:1] == ("**",):
                rest = rest[1:]
            parts = part, *rest
            todo.append((folder, rest))
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    if next(entries_left, None) is None:
                        raise UsageError(
                            f"@{one_line(str(pattern))} goes through more than {MOST_ENTRIES:,} files.",
                            "Name a smaller folder.",
                        )
                    is_hidden = entry.name.startswith(".") and not part.startswith(".")
                    if is_hidden or not fnmatchcase(entry.name, part):
                        continue
                    is_deeper = part == "**" and entry.is_dir(follow_symlinks=False)
                    if is_deeper or part != "**" or not rest:
                        todo.append((folder / entry.name, parts if is_deeper else rest))
        except OSError:  # no folder, or one that may not be read
            continue
