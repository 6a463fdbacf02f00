"""Merges words in a process of its own, which is made ready while this one loads a model.

To build the library's object takes about half a second for a vocabulary of 150,000 tokens, and keeps all other Python
code of the process waiting meanwhile: also the code that opens a GPU. So this module imports the library only in that
process, or if it fails.

`python -m engine.formats.tokens.merging MODEL` reads and writes lines of JSON. The first is the `Merges.warning`; then
each line of words is answered by one of their token ids. It ends when nobody writes to it any more.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from engine.system.child_process import kill, module_command, module_environment

if TYPE_CHECKING:
    from engine.formats.tokens.merges import Merges


class MergingProcess:
    """Implements `tokenizer.Merge` for a model file. The process starts now and ends with this object. If it does not
    start, or dies, its work is done in this process from then on."""

    def __init__(self, model: str | Path) -> None:
        self._model, self._lock = model, Lock()
        self._own: Merges | None = None
        self._warning: str | None = None
        self._process: subprocess.Popen[str] | None = None
        with suppress(OSError):  # no memory for a process
            self._process = subprocess.Popen(
                module_command("engine.formats.tokens.merging", str(Path(model).absolute())),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                encoding="ascii",
                env=module_environment(),
            )
            weakref.finalize(self, kill, self._process)

    @property
    def warning(self) -> str:
        """As `Merges.warning`. Waits for the process."""
        with self._lock:
            return self._ready()

    def __call__(self, words: Sequence[str]) -> list[list[int]]:
        with self._lock:
            self._ready()
            if self._own is None:
                with suppress(OSError, ValueError):  # the process has died, in the middle of a line perhaps
                    self._write(words)
                    ids: list[list[int]] = self._read()
                    return ids
            return self._in_this_process(words)

    def _ready(self) -> str:
        if self._warning is None:
            with suppress(OSError, ValueError):
                self._warning = str(self._read())
            if self._warning is None:
                self._in_this_process([])
        return self._warning or ""

    def _in_this_process(self, words: Sequence[str]) -> list[list[int]]:
        if self._own is None:
            self._own = _merges(self._model)
            self._warning = self._own.warning
        return self._own(words)

    def _write(self, words: Sequence[str]) -> None:
        if self._process is None or self._process.stdin is None:
            raise OSError
        self._process.stdin.write(json.dumps(words) + "\n")
        self._process.stdin.flush()

    def _read(self) -> Any:
        """The next line. Raises OSError or ValueError if the process has died."""
        if self._process is None or self._process.stdout is None:
            raise OSError
        return json.loads(self._process.stdout.readline())


def _merges(model: str | Path) -> Merges:
    from engine.formats.gguf import GGUF
    from engine.formats.tokens.merges import Merges
    from engine.formats.tokens.vocabulary import Vocabulary

    with GGUF(model) as file:
        return Merges(file, Vocabulary(file))


def main() -> None:
    gc.disable()  # what is made stays alive
    merges = _merges(sys.argv[1])
    print(json.dumps(merges.warning), flush=True)
    for line in sys.stdin:
        print(json.dumps(merges(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
