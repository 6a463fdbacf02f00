"""Reads the files of a prompt, with their tokens. What was read stays until its file changes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self

from msgspec.structs import replace

from app.chat import files
from app.chat.mention import Mention, current_folder
from engine.errors import OrinError, PictureError
from engine.protocol.events import EngineOptions
from widgets.chat.turn import Attachment, PictureFile

if TYPE_CHECKING:
    from engine.formats.picture import Pixels

_KEPT = 100  # files
_UNSEEN = "this model sees no pictures"
THUMBNAIL = 48, 32
"""The pixels into which a small picture fits."""


class ModelFiles(NamedTuple):
    """The file of a model and, if it sees, of its encoder ("": it does not)."""

    model: str
    encoder: str = ""

    @classmethod
    def of(cls, options: EngineOptions) -> Self:
        return cls(options.model_path, options.mmproj)


class TokenCounter:
    """Counts the tokens of files with the tokenizer, and those of pictures with the encoder, of the model that `model`
    returns (None: there is none). Reads it when it is needed, which takes up to a second. May be used in threads."""

    def __init__(self, model: Callable[[], ModelFiles | None]) -> None:
        self.model, self._lock = model, threading.Lock()
        self._count: tuple[ModelFiles, Callable[[Attachment], int | None]] | None = None

    def __call__(self, file: Attachment) -> int | None:
        """None if the tokens cannot be counted."""
        model = self.model()
        if model is None:
            return None
        with self._lock, suppress(OrinError, OSError):
            if self._count is None or self._count[0] != model:
                self._count = model, _counter(model)
            return self._count[1](file)
        return None


def _counter(files: ModelFiles) -> Callable[[Attachment], int | None]:
    """Raises OrinError. The merges are in a process of their own, since to build them holds up this one."""
    from app.chat.picture_tokens import picture_counter
    from engine.formats.gguf import GGUF
    from engine.formats.tokens.merging import MergingProcess
    from engine.formats.tokens.tokenizer import Tokenizer

    path = Path(files.model)
    with GGUF(path) as file:
        tokenizer = Tokenizer(file, MergingProcess(path))
    special = partial(tokenizer.encode, special=True)
    of_picture = picture_counter(Path(files.encoder), special) if files.encoder else None

    def count(file: Attachment) -> int | None:
        if file.picture is None:
            return len(tokenizer.encode(file.quoted))
        return of_picture(file.picture.width, file.picture.height) if of_picture else None

    return count


def with_thumbnail(file: Attachment) -> Attachment:
    """A picture with its size and a small one of it. Raises PictureError."""
    assert file.picture
    try:
        pixels = made_to_fit(file.picture, THUMBNAIL)
    except PictureError as error:
        raise PictureError(f"{file.name}: {error.message}", error.hint) from None
    width, height = pixels.full
    picture = replace(
        file.picture,
        width=width,
        height=height,
        is_animated=pixels.is_animated,
        thumbnail=pixels.rgb.tobytes(),
        thumbnail_width=pixels.rgb.shape[1],
    )
    return replace(file, picture=picture)


def made_to_fit(picture: PictureFile, within: tuple[int, int]) -> Pixels:
    """The pixels of a picture within a width and a height. Raises PictureError."""
    from engine.formats.picture import PictureDecoder  # imports numpy

    decoder = PictureDecoder()
    try:
        return decoder.decode(picture.data, within)
    finally:
        decoder.close()


def _path(path: Path) -> str:
    return str(path.absolute())


class Takes(NamedTuple):
    """What the model in use takes: pictures if it `sees`, and so many tokens of files as its context has `room` for
    (0: not known)."""

    sees: bool = True
    room: int = 0


_ALL = Takes()


class FileReader:
    """Reads the files of prompts. May be used in threads."""

    def __init__(self, count: TokenCounter) -> None:
        self._count, self._lock = count, threading.Lock()
        self._kept: dict[tuple[ModelFiles | None, Mention, str], Attachment | PictureError] = {}
        self._sent: dict[tuple[str, int, int], Attachment] = {}  # by path and lines

    def remember(self, sent: Sequence[Attachment]) -> None:
        """Files of an earlier prompt. They can be named again when they are gone."""
        self._sent |= {(file.path, file.first, file.last): file for file in sent}

    def keep(self, data: bytes) -> str:
        """Keeps a picture that has no file. Returns the name by which a prompt can have it. Raises PictureError."""
        paths = (current_folder() / f"pasted-{n}.png" for n in count(1))
        path = next(path for path in paths if not path.exists() and (str(path), 0, 0) not in self._sent)
        file = Attachment(name=path.name, path=str(path), text="", picture=PictureFile(data=data))
        self.remember([with_thumbnail(file)])
        return path.name

    def read(self, mention: Mention) -> Attachment:
        """The file with its tokens, or a picture with a small one of it. Raises OrinError."""
        stamp = files.stamp(mention.path)
        if not stamp and (sent := self._sent.get((_path(mention.path), mention.first, mention.last))):
            return sent
        key = self._count.model(), mention, stamp  # other models have other tokens
        kept = self._kept.get(key) or self._read(mention)
        if isinstance(kept, Attachment) and kept.tokens is None:
            kept = replace(kept, tokens=self._count(kept))
        with self._lock:
            while len(self._kept) >= _KEPT:
                self._kept.pop(next(iter(self._kept)))
            self._kept[key] = kept
        if isinstance(kept, PictureError):
            raise kept.with_traceback(None)
        return kept

    def _read(self, mention: Mention) -> Attachment | PictureError:
        """The file, or what is wrong with a picture: to try again takes long."""
        read = files.read(mention)
        try:
            return with_thumbnail(read) if read.picture else read
        except PictureError as error:
            return error

    def read_all(self, prompt: str, room: int = 0) -> tuple[Attachment, ...]:
        """The files that `prompt` names. `room`: tokens that the context has for them (0: not known). Raises
        UsageError, also if they do not fit."""
        read = tuple(map(self.read, self._mentions(prompt)))
        files.require_room(read, sum(file.tokens or 0 for file in read), room)
        return read

    def missing(self, prompt: str) -> str:
        """A sentence on what `prompt` mentions and what is no file; "" if there is none."""
        return files.said_missing(files.missing(prompt, known=self._is_known))

    def _mentions(self, prompt: str) -> list[Mention]:
        return files.mentions(prompt, known=self._is_known)

    def _is_known(self, path: Path) -> bool:
        return any(_path(path) == sent for sent, _, _ in [*self._sent])  # another thread may add to it

    def chips(self, prompt: str, takes: Takes = _ALL) -> list[tuple[str, bool]]:
        """A few words on each file that `prompt` names, and whether it can be read and sent to a model."""
        shown = []
        try:
            named = self._mentions(prompt)
        except OrinError as error:
            return [(error.message, False)]
        tokens = 0
        for mention in named:
            try:
                file = self.read(mention)
                tokens += file.tokens or 0
                problem = _UNSEEN if file.picture and not takes.sees else ""
                if 0 < takes.room < tokens:
                    problem = f"the context has room for {takes.room:,}"
                shown.append((f"{file.label}: {problem}" if problem else file.label, not problem))
            except OrinError as error:
                shown.append((error.message, False))
        return shown
