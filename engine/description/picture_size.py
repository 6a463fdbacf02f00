"""To which size a picture is brought for an encoder: the rules of the published processors, in pixels.

Sources, in transformers: `smart_resize` (qwen2_vl), `get_aspect_ratio_preserving_size` (gemma4),
`get_resize_output_image_size` (pixtral), `image_size` (gemma3), and
`_resize_output_size_rescale_to_max_len` (idefics3). All stretch the picture to that size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

MAX_RATIO = 200
"""A side counts as at least this part of the other, so that the area stays bounded (`smart_resize` refuses others)."""


@dataclass(frozen=True)
class SizeRule:
    """Sides become multiples of `align`. "square": both `most`. "area": the nearest ones with an area of `least` to
    `most` pixels. "tokens": the largest with at most `most` squares of `align`, none longer than `longest`. "sides":
    none longer than `most`, and then up to the next multiples."""

    how: Literal["square", "area", "tokens", "sides"]
    align: int
    most: int
    least: int = 0
    longest: int = 0

    def __call__(self, width: int, height: int) -> tuple[int, int]:
        """(width, height) of a picture of `width` x `height` pixels."""
        align, most = self.align, self.most
        if self.how == "square":
            return most, most
        if self.how == "area":
            return _fit(width, height, align, self.least, most)
        if self.how == "tokens":
            f = math.sqrt(most * align * align / (width * height))
            columns, rows = math.floor(f * width / align), math.floor(f * height / align)
            if columns == 0:
                columns, rows = 1, min(height // width, most)
            elif rows == 0:
                columns, rows = min(width // height, most), 1
            across, down = (min(n * align, self.longest) for n in (columns, rows))
            return across, down
        r = max(width / most, height / most, 1.0)
        sides = (max(math.floor(side / r), 1) if r > 1 else side for side in (width, height))
        across, down = (-(-side // align) * align for side in sides)
        return across, down

    @property
    def most_tokens(self) -> int:
        """The most squares of `align` that a picture has."""
        match self.how:
            case "area":
                return self.most // self.align**2
            case "tokens":
                return self.most
        return (-(-self.most // self.align)) ** 2


@dataclass(frozen=True)
class TileRule:
    """A picture becomes square tiles of `side` pixels, of which the first ones are read, if these are no multiple of
    patches. "longest": its longer side becomes so long, and both sides then go up to the next multiples. "shape":
    `least` to `most` tiles, in rows and columns whose shape is nearest to the picture's."""

    side: int
    how: Literal["longest", "shape"]
    longest: int = 0
    least: int = 1
    most: int = 0

    def __call__(self, width: int, height: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """(width, height) of a picture before its sides go up, and the rows and columns of its tiles."""
        ratio = width / height
        if self.how == "shape":
            columns, rows = self._nearest(width, height)
            return (columns * self.side, rows * self.side), (rows, columns)
        if width >= height:
            size = self.longest, max(_even(self.longest / ratio), 2)
        else:
            size = max(_even(self.longest * ratio), 2), self.longest
        columns, rows = (-(-side // self.side) for side in size)
        return size, (rows, columns)

    def _nearest(self, width: int, height: int) -> tuple[int, int]:
        """Of shapes that are as near, that of more tiles if the picture has half of their pixels or more."""
        counts = range(1, self.most + 1)
        shapes = [(c, r) for c in counts for r in counts if self.least <= c * r <= self.most]
        best, least = (1, 1), math.inf
        for c, r in sorted(shapes, key=lambda shape: shape[0] * shape[1]):
            apart = abs(width / height - c / r)
            if apart < least or (apart == least and width * height > 0.5 * self.side**2 * c * r):
                best, least = (c, r), apart
        return best

    @property
    def most_tiles(self) -> int:
        """With the whole picture as one more."""
        count = self.most if self.how == "shape" else (-(-self.longest // self.side)) ** 2
        return count + 1


def _even(side: float) -> int:
    """A side in whole pixels, up to the next even number."""
    return int(side) + int(side) % 2


def _fit(width: int, height: int, align: int, least: int, most: int) -> tuple[int, int]:
    longer = max(width, height)
    width, height = (max(side, -(-longer // MAX_RATIO)) for side in (width, height))
    w, h = (max(align, round(side / align) * align) for side in (width, height))
    if w * h > most:
        b = math.sqrt(width * height / most)
        w, h = (max(align, math.floor(side / b / align) * align) for side in (width, height))
    elif w * h < least:
        b = math.sqrt(least / (width * height))
        w, h = (math.ceil(side * b / align) * align for side in (width, height))
    return w, h
