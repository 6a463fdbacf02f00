"""The pictures of a prompt: runs of embeddings among its tokens.

Each embedding has a token id of its own, a negative number that follows from the picture's pixels and its place in the
picture. So the tree of known texts tells pictures apart as it tells texts, in memory and on disk.

In models whose rotary embeddings have a grid (`Rope.sections`), a token's position is three numbers, or four. Those of
a text are the same: one more than the last. Those of a picture at p are p, p + its row, p + its column; and the text
after it goes on at p + the larger side. So positions are behind the places in the KV cache from the first picture on.

Those of a picture that is no grid, as it was cut, are as those of a text.

Those of a picture that is framed, whose rows have ends, are the place, the column, the row, and 0. What stands around
all of it counts as text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from engine.formats.templates.prompt_pictures import PlacedPicture, SizedPicture

Floats = NDArray[np.float32]
Pixels = NDArray[np.uint8]


class PictureRoom(NamedTuple):
    """What a runner needs for pictures. `whole`: the most tokens of one, if a layer's tokens see those after them in
    the same picture, so that it has to be in one step; else 0."""

    whole: int


class Progress(NamedTuple):
    """`done` of `total` parts of the work on a picture are done, or while it `compiles`, kernels for its size."""

    done: int
    total: int
    compiles: bool = False


_BEGUN = Progress(0, 1)


class PictureEncoder(Protocol):
    """Computes embeddings on a device, in the runner's thread."""

    def encode(self, rgbs: Sequence[Pixels]) -> Generator[Progress, None, Floats]:
        """The embeddings of a picture's parts at the encoder's sizes, uint8 (height, width, 3): float32 (tokens, dim).
        Gives its progress after each piece of the work."""
        ...

    def preparations(self) -> Sequence[Callable[[], None]]:
        """What compiles the kernels for pictures of each size, those first that are asked for first. They may be called
        at any time between two parts, and raise what the device raises, and PreemptedError (`interruptible`)."""
        ...


def part_by_part(works: Sequence[Generator[Progress, None, Floats]]) -> Generator[Progress, None, Floats]:
    """The embeddings of a picture's parts, one after the other."""
    count, parts = len(works), []
    for i, work in enumerate(works):
        while True:
            try:
                done, total, compiles = next(work)
            except StopIteration as end:
                parts.append(end.value)
                break
            yield Progress(done, total, True) if compiles else Progress(i * total + done, count * total)
    return np.concatenate(parts) if count > 1 else parts[0]


@dataclass(eq=False)
class Encoding:
    """A picture, and the embeddings of its tokens as far as they are computed, zeros where they are those of texts."""

    picture: SizedPicture
    work: Generator[Progress, None, Floats]
    embeddings: Floats | None = None
    progress: Progress = _BEGUN

    def step(self) -> None:
        """Computes the next part. Raises what the device raises."""
        try:
            self.progress = next(self.work)
        except StopIteration as end:
            self.progress = Progress(self.progress.total, self.progress.total)
            read = end.value if self.picture.kept is None else end.value[self.picture.kept]
            self.embeddings = read
            of_texts = np.array(self.picture.ids) >= 0
            if of_texts.any():
                self.embeddings = np.zeros((len(of_texts), read.shape[1]), np.float32)
                self.embeddings[~of_texts] = read
            assert len(self.embeddings) == len(self.picture.ids)


class Pictures:
    """The pictures of one prompt. `encodings`: what is known of each, once it is needed. `reported`: those that were
    reported as done. `ends`: the places after their last tokens. `took_s`: to encode them."""

    def __init__(self, placed: Sequence[PlacedPicture], whole: int = 0) -> None:
        """`whole`: the most tokens of a piece, if it has to have whole pictures; else 0."""
        self.placed, self._whole = tuple(placed), whole
        self.reported = set[int]()
        self.took_s = 0.0
        self.encodings: list[Encoding | None] = [None] * len(self.placed)
        self._first = [at.first for at in placed]
        self.ends = [at.first + len(at.picture.ids) for at in placed]

    def within(self, first: int, end: int) -> list[int]:
        """The numbers of the pictures that have tokens among those from `first` to `end` - 1."""
        return [i for i in range(len(self.placed)) if self._first[i] < end and first < self.ends[i]]

    def end_of_piece(self, first: int, end: int) -> int:
        """Where a piece from `first` on ends that should end at `end`: in no picture that has to be whole, but before
        one that does not fit, or after it."""
        for i in self.within(first, end) if self._whole else ():
            if self.ends[i] > end:
                return self.ends[i] if self.ends[i] - first <= self._whole else max(self._first[i], first + 1)
        return end

    def embeddings(self, first: int, n: int) -> Floats | None:
        """The embeddings of the tokens from `first` on, float32 (n, dim), zeros where there is none; None if there is
        none at all. All pictures among them are encoded."""
        out: Floats | None = None
        for i in self.within(first, first + n):
            encoding = self.encodings[i]
            assert encoding and encoding.embeddings is not None
            rows = encoding.embeddings
            begin, end = max(first, self._first[i]), min(first + n, self.ends[i])
            if out is None:
                out = np.zeros((n, rows.shape[1]), np.float32)
            out[begin - first : end - first] = rows[begin - self._first[i] : end - self._first[i]]
        return out

    def seen(self, first: int, n: int) -> NDArray[np.int32]:
        """How many tokens each of those from `first` on sees, if those of a picture see all of it: int32 (n,)."""
        seen = np.arange(first + 1, first + n + 1, dtype=np.int32)
        for i in self.within(first, first + n):
            seen[max(self._first[i] - first, 0) : self.ends[i] - first] = self.ends[i]
        return seen

    def positions(self, first: int, n: int) -> NDArray[np.int32]:
        """The four positions of the tokens from `first` on, int32 (4, n)."""
        places = np.arange(first, first + n)
        out = np.broadcast_to(places, (4, n)).copy()
        for at, end in zip(self.placed, self.ends, strict=True):
            picture = at.picture
            if not picture.columns:
                continue
            if picture.framed:
                inside = (places > at.first) & (places < end - 1)
                rows, columns = np.divmod(places[inside] - at.first - 1, picture.columns + 1)
                out[1:, inside] = [columns, rows, np.zeros_like(rows)]
                continue
            length = end - at.first
            out[:, places >= end] -= length - max(picture.rows, picture.columns)
            inside = (places >= at.first) & (places < end)
            rows, columns = np.divmod(places[inside] - at.first, picture.columns)
            # `out` is behind by the pictures before: what is the first token's position
            begin = out[0, inside] - (places[inside] - at.first)
            out[:, inside] = [begin, begin + rows, begin + columns, begin]
        return out.astype(np.int32)


class WholeText(Pictures):
    """A prompt of `n` tokens that all see all of it, so that it is read in one piece, as a picture may be."""

    def __init__(self, n: int) -> None:
        super().__init__(())
        self._n = n

    def end_of_piece(self, first: int, end: int) -> int:
        return self._n

    def seen(self, first: int, n: int) -> NDArray[np.int32]:
        return np.full(n, self._n, np.int32)


def positions_of(pictures: Pictures | None, first: int, n: int) -> NDArray[np.int32]:
    """`Pictures.positions`, also of a text without pictures."""
    return (pictures or Pictures([])).positions(first, n)


def picture_ids(key: str, n: int) -> tuple[int, ...]:
    """The token ids of a picture's n embeddings, negative int32. `key`: of what the encoder makes of its pixels."""
    digest = hashlib.shake_256(key.encode()).digest(4 * n)
    ids = np.frombuffer(digest, np.int32) | np.int32(-(1 << 31))
    return tuple(ids.tolist())
