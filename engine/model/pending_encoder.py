"""A model file and what makes prompts of texts, made beside other work. Nothing here needs a device."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from engine.description.architectures import check_architecture
from engine.description.file_kind import check_is_model
from engine.formats.gguf import GGUF, printable
from engine.formats.templates.prompt import PromptEncoder
from engine.formats.tokens.tokenizer import Merge
from engine.formats.tokens.vocabulary import check_tokenizer
from engine.measure.timeline import timeline


class PendingEncoder:
    """A model file, and its `PromptEncoder`. A thread opens the one and then makes the other, from now on."""

    def __init__(self, path: str | Path, merge: Merge | None = None) -> None:
        """`merge`: see `Tokenizer`."""
        thread = ThreadPoolExecutor(1, "tokenizer")
        opened = thread.submit(_open, path)
        self._file, self._encoder = opened.result, thread.submit(_encoder_of, opened, merge).result
        thread.shutdown(wait=False)

    def file(self) -> GGUF:
        """The file, which has a tokenizer of a known kind. Waits for it. Raises ModelFileError."""
        return self._file()

    def encoder(self) -> PromptEncoder:
        """Waits for it. Raises ModelFileError."""
        return self._encoder()


def _open(path: str | Path) -> GGUF:
    with timeline.span("header"):
        file = GGUF(path)
        check_is_model(file)
        check_architecture(file.get("general.architecture", str), printable(file.path.name))
        check_tokenizer(file)
        return file


def _encoder_of(opened: Future[GGUF], merge: Merge | None) -> PromptEncoder:
    file = opened.result()
    with timeline.span("tokenizer"):
        return PromptEncoder(file, merge)
