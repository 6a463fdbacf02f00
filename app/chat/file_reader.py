"""Reads the files of a prompt, with their tokens. What was read stays until its file changes."""

import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from msgspec.structs import replace

from app.chat import files
from engine.errors import OrinError
from widgets.turn import Attachment

_KEPT = 100  # files


class TokenCounter:
    """Counts the tokens of texts with the tokenizer of the model file that `model` returns (None: there is none). Reads
    the file when it is needed, which takes up to a second. May be used in threads."""

    def __init__(self, model: Callable[[], Path | None]) -> None:
        self._model, self._lock = model, threading.Lock()
        self._count: tuple[Path, Callable[[str], int]] | None = None

    def __call__(self, text: str) -> int | None:
        """None if the tokens cannot be counted."""
        path = self._model()
        if path is None:
            return None
        with self._lock, suppress(OrinError, OSError):
            if self._count is None or self._count[0] != path:
                self._count = path, _counter(path)
            return self._count[1](text)
        return None


def _counter(path: Path) -> Callable[[str], int]:
    """Raises OrinError. The merges are in a process of their own, since to build them holds up this one."""
    from engine.formats.gguf import GGUF
    from engine.formats.merging import MergingProcess
    from engine.formats.tokenizer import Tokenizer

    with GGUF(path) as file:
        tokenizer = Tokenizer(file, MergingProcess(path))
    return lambda text: len(tokenizer.encode(text))


class FileReader:
    def __init__(self, count: Callable[[str], int | None]) -> None:
        self._count = count
        self._kept: dict[tuple[files.Mention, str], Attachment] = {}

    def read(self, mention: files.Mention) -> Attachment:
        """The file with its tokens. Raises UsageError."""
        key = mention, files.stamp(mention.path)
        if key not in self._kept:
            read = files.read(mention)
            while len(self._kept) >= _KEPT:
                self._kept.pop(next(iter(self._kept)))
            self._kept[key] = replace(read, tokens=self._count(read.quoted))
        elif (kept := self._kept[key]).tokens is None:
            self._kept[key] = replace(kept, tokens=self._count(kept.quoted))
        return self._kept[key]

    def read_all(self, prompt: str, room: int = 0) -> tuple[Attachment, ...]:
        """The files that `prompt` names. `room`: tokens that the context has for them (0: not known). Raises
        UsageError, also if they do not fit."""
        read = tuple(map(self.read, files.mentions(prompt)))
        files.require_room(read, sum(file.tokens or 0 for file in read), room)
        return read

    def chips(self, prompt: str) -> list[tuple[str, bool]]:
        """A few words on each file that `prompt` names, and whether it can be read."""
        shown = []
        try:
            named = files.mentions(prompt)
        except OrinError as error:
            return [(error.message, False)]
        for mention in named:
            try:
                shown.append((self.read(mention).label, True))
            except OrinError as error:
                shown.append((error.message, False))
        return shown
