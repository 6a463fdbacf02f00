"""The names of files in prompts and on the command line: notes.txt, or some of its lines as notes.txt:10-40."""

import os
import re
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from widgets.text import one_line

LINES = re.compile(r":(\d{1,9})(?:-(\d{1,9}))?$")


class Mention(NamedTuple):
    """A file that a prompt names: its `path`, and its lines from `first` to `last` (0: all)."""

    path: Path
    first: int = 0
    last: int = 0

    @property
    def name(self) -> str:
        lines = (
            f":{self.first}-{self.last}" if self.last > self.first else f":{self.first}" if self.first else ""
        )
        return one_line(shown(self.path)) + lines


def meanings(text: str) -> list[Mention]:
    """What a name may mean: a file with all of it as its name, then lines of a file."""
    whole = Mention(Path(text))
    if not (lines := LINES.search(text)):
        return [whole]
    return [whole, Mention(Path(text[: lines.start()]), int(lines[1]), int(lines[2] or lines[1]))]


def argument(text: str) -> Mention | None:
    """The file that an argument of the command line names; None if it names none."""
    with suppress(OSError, ValueError):  # a long prompt is no name of a file
        return next((mention for mention in meanings(text) if mention.path.is_file()), None)
    return None


def current_folder() -> Path:
    """Where the program runs. If that was deleted meanwhile, its name, below which there is nothing."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        return Path(os.environ.get("PWD") or "/")


def shown(path: Path) -> str:
    """A path as short as it can be named from here: relative to the current folder, or to the home folder."""
    for base, prefix in ((current_folder(), ""), (Path.home(), "~/")):
        if path.is_relative_to(base) and path != base:
            return prefix + str(path.relative_to(base))
    return str(path)
