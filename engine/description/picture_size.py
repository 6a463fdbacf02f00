"""To which sizes a picture is brought for an encoder, and how it is cut: the rules of the published processors, in
pixels.

Sources, in transformers: `smart_resize` (qwen2_vl), `get_aspect_ratio_preserving_size` (gemma4),
`get_resize_output_image_size` (pixtral), `image_size` (gemma3), `_resize_output_size_rescale_to_max_len` (idefics3),
`crop_image_to_patches` (lfm2_vl), `select_best_resolution` (llava_next), `get_best_fit` (llama4). Those of MiniCPM-V
are `find_best_resize` and `get_sliced_grid` beside its models.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

_STEPS = 50
Size = tuple[int, int]
"""Width and height."""
MAX_RATIO = 200
"""A side counts as at least this part of the other, so that the area stays bounded (`smart_resize` refuses others)."""


@dataclass(frozen=True)
class SizeRule:
    """Sides become multiples of `align`. "square": both `most`. "area": the nearest ones with an area of `least` to
    `most` pixels. "tokens": the largest with at most `most` squares of `align`, none longer than `longest`. "sides":
    none longer than `most`, and then up to the next multiples. "mean": the nearest ones to an area of `most` x
    `most`. "shape": of the multiples below and above the sides of a picture, or of its sides at an area of `most`
    squares of `align` if it is larger, those with at most `most` squares whose shape is nearest. "up": the next
    multiples, of sides that shrink by steps of a fiftieth until there are at most `most` squares of `align`."""

    how: Literal["square", "area", "tokens", "sides", "mean", "shape", "up"]
    align: int
    most: int
    least: int = 0
    longest: int = 0

    def __call__(self, width: int, height: int) -> Size:
        """The size for a picture of `width` x `height` pixels."""
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
        if self.how == "up":
            return _shrunk(width, height, align, most)
        if self.how == "shape":
            columns, rows = _of_nearest_shape(width, height, align, most)
            return columns * align, rows * align
        if self.how == "mean":
            most_ratio = min(MAX_RATIO, (most / align) ** 2)  # the shorter side is a square or more
            ratio = min(max(width / height, 1 / most_ratio), most_ratio)
            down = int(most / math.sqrt(ratio))
            across, down = (max(round(side / align) * align, align) for side in (int(down * ratio), down))
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
            case "tokens" | "shape" | "up":
                return self.most
            case "mean":  # each side may go up by half a square
                n = -(-self.most // self.align)
                return n * n + n * (math.isqrt(MAX_RATIO) + 2) // 2
        return (-(-self.most // self.align)) ** 2


class Cut(NamedTuple):
    """A picture is stretched to `sizes`, one after the other, and then cut into `rows` x `columns` tiles. If it is
    `padded`, it keeps its shape, with black around it, or is stretched to the first of the sizes, with black from its
    right and lower edges to the second one's ("corner"). One tile is the whole picture."""

    sizes: tuple[Size, ...]
    rows: int
    columns: int
    padded: Literal["", "around", "corner"] = ""


@dataclass(frozen=True)
class TileRule:
    """How a picture is cut into tiles, of which the first pixels are read, if a side is no multiple of patches. Of the
    sides of square tiles, `side` is one. "longest": the longer side becomes so long, and both sides then go up to the
    next multiples. "shape": `least` to `most` tiles, in rows and columns whose shape is nearest to the picture's, if
    the picture has more than `area` pixels. "mean": as many as have the picture's area, `most` at most, in rows and
    columns whose shape is about that of the picture; the tiles have the shape that is left, and the area of a square.
    "choices": of these sizes of all tiles, that in which most of the picture's pixels are kept, and least are black.
    "canvas": the smallest of those of `most` tiles or fewer in which the picture is not made smaller, or little; it is
    not made larger, but for one tile. "windows": squares of `side` pixels of a picture whose sides are `longest` at
    most, or of its shorter side if that is less and the picture long; it is not cut if its sides have at most `area`
    pixels and are about as long. A picture whose sides have at most `whole` pixels is not cut, nor one that would
    be a single tile, unless that counts `alone`."""

    side: int
    how: Literal["longest", "shape", "mean", "choices", "canvas", "windows"]
    longest: int = 0
    least: int = 1
    most: int = 0
    area: int = 0
    align: int = 1
    choices: tuple[Size, ...] = ()
    whole: int = 0
    alone: bool = False

    def __call__(self, width: int, height: int) -> Cut | None:
        """The tiles of a picture of `width` x `height` pixels; None if it is not cut."""
        side = self.side
        if max(width, height) <= self.whole:
            return None
        match self.how:
            case "longest":
                ratio = width / height
                if width >= height:
                    size = self.longest, max(_even(self.longest / ratio), 2)
                else:
                    size = max(_even(self.longest * ratio), 2), self.longest
                columns, rows = (-(-of // side) for of in size)
                cut = Cut((size, (columns * side, rows * side)), rows, columns)
            case "shape":
                columns, rows = self._nearest(width, height)
                cut = Cut(((columns * side, rows * side),), rows, columns)
                if _area(width, height, self.align) <= self.area:
                    return None
            case "mean":
                columns, rows = self._sliced(width, height)
                tile = (max(round(of / n), 1) for of, n in ((width, columns), (height, rows)))
                across, down = SizeRule("mean", self.align, side)(*tile)
                cut = Cut(((across * columns, down * rows),), rows, columns)
            case "choices":
                size = self._chosen(width, height)
                columns, rows = (of // side for of in size)
                cut = Cut((size,), rows, columns, "around")
            case "canvas":
                return self._on_canvas(width, height)
            case "windows":
                if (found := self._windows(width, height)) is None:
                    return None
                cut, rows, columns = found, found.rows, found.columns
        return cut if rows * columns > 1 or self.alone else None

    def _on_canvas(self, width: int, height: int) -> Cut:
        """The cut of "canvas", also of one tile."""
        side, counts = self.side, range(1, self.most + 1)
        shapes = [(c, r) for c in counts for r in counts if c * r <= self.most]
        scales = {shape: min(shape[0] * side / width, shape[1] * side / height) for shape in shapes}
        larger = [scale for scale in scales.values() if scale >= 1]
        scale = min(larger) if larger else max(scales.values())
        columns, rows = min((s for s in shapes if scales[s] == scale), key=lambda s: s[0] * s[1])
        full = columns * side, rows * side
        across, down = (min(max(of, side), most) for of, most in zip((width, height), full, strict=True))
        if across / width < down / height:
            down = max(min(height * across // width, down), 1)
        else:
            across = max(min(width * down // height, across), 1)
        return Cut(((across, down), full), rows, columns, "corner")

    def _windows(self, width: int, height: int) -> Cut | None:
        longer, shorter = max(width, height), min(width, height)
        scale = min(self.longest / longer, 1.0)
        longer, shorter = (max(int(of * scale), 1) for of in (longer, shorter))
        if (shorter < _THIN and longer > _LONG * shorter) or (
            longer <= self.area and longer <= _OBLONG * shorter
        ):
            return None
        window = self.side if longer <= _LONG * shorter else min(shorter, self.side)
        window = window if longer > self.area else shorter
        most_a_side = self.most if shorter <= window else math.isqrt(self.most)
        window = max(window, -(-longer // most_a_side))
        sides = []
        for of in (width, height):
            n = int(of * scale) / window
            sides.append(
                round(window * (int(n) + (n % 1 > _ONE_MORE)) if n >= 1 else max(int(of * scale), 1))
            )
        columns, rows = (-(-side // window) for side in sides)
        canvas, full = ((columns * of, rows * of) for of in (window, self.side))
        return Cut(((sides[0], sides[1]), canvas, full), rows, columns, "corner")

    def _chosen(self, width: int, height: int) -> Size:
        def rank(size: Size) -> tuple[int, int]:
            scale = min(size[0] / width, size[1] / height)
            kept = min(int(width * scale) * int(height * scale), width * height)
            return kept, kept - size[0] * size[1]

        return max(self.choices, key=rank)

    def _nearest(self, width: int, height: int) -> tuple[int, int]:
        """The (columns, rows) of tiles whose shape is nearest the picture's. Of several that are as near, those of more
        tiles if the picture has half of their pixels or more."""
        counts = range(1, self.most + 1)
        shapes = [(c, r) for c in counts for r in counts if self.least <= c * r <= self.most]
        best, least = (1, 1), math.inf
        for c, r in sorted(shapes, key=lambda shape: shape[0] * shape[1]):
            apart = abs(width / height - c / r)
            if apart < least or (apart == least and width * height > 0.5 * self.side**2 * c * r):
                best, least = (c, r), apart
        return best

    def _sliced(self, width: int, height: int) -> tuple[int, int]:
        """One more or one less is taken if its shape is nearer."""
        n = min(math.ceil(width * height / self.side**2), self.most)
        counts = [count for count in (n - 1, n, n + 1) if 1 < count <= self.most] if n > 1 else []
        shapes = [(c, count // c) for count in counts for c in range(1, count + 1) if count % c == 0]
        ratio = math.log(width / height)
        return min(shapes, key=lambda shape: abs(ratio - math.log(shape[0] / shape[1])), default=(1, 1))

    @property
    def most_tiles(self) -> int:
        """The largest number of tiles, of which the whole picture is one."""
        count = (-(-self.longest // self.side)) ** 2 if self.how == "longest" else self.most
        return count + 1


_THIN, _LONG, _OBLONG, _ONE_MORE = 32, 4, 1.5, 0.2
"""Of "windows": pixels, ratios of sides, and the part of a window for which there is one more (Step3-VL)."""


def _area(width: int, height: int, align: int) -> int:
    """The area in pixels, once both sides are the nearest multiples."""
    across, down = (max(round(side / align) * align, 1) for side in (width, height))
    return across * down


def _even(side: float) -> int:
    """A side in whole pixels, up to the next even number."""
    return int(side) + int(side) % 2


def _of_nearest_shape(width: int, height: int, align: int, most: int) -> tuple[int, int]:
    """Columns and rows of squares for "shape" (`SizeRule`); of shapes that are as near, those with the most squares."""
    across, down = width / align, height / align
    if across * down > most:
        across, down = math.sqrt(most * width / height), math.sqrt(most * height / width)
    sides = ((math.floor(side), math.ceil(side)) for side in (across, down))
    found = [(c, r) for c, r in itertools.product(*sides) if c >= 1 <= r and c * r <= most]
    if not found:  # longer than all squares in a row
        return max(1, min(round(across), most)), max(1, min(round(down), most))
    return min(found, key=lambda of: (abs(of[1] / of[0] - height / width), -of[0] * of[1]))


def _shrunk(width: int, height: int, align: int, most: int) -> Size:
    """For "up" (`SizeRule`). A picture for which no step is small enough becomes all squares in a row."""
    for step in range(_STEPS):
        scale = 1 - step / _STEPS
        across, down = (max(1, math.ceil(side * scale / align)) for side in (width, height))
        if across * down <= most:
            return across * align, down * align
    return (most * align, align) if width > height else (align, most * align)


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
