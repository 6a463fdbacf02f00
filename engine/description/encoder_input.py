"""Pixels as an encoder of pictures reads them (`engine.description.vision`): sized, cut into patches, and what follows
from the place of each patch. Patches are in the order of tokens, those of a token row by row of their square. Tokens
are row by row, or in an encoder with windows, window by window."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from engine.description.picture_size import Cut, Size
from engine.description.sublayers import Vector
from engine.description.vision import FixedRow, Norm, OwnQueries, Positions, VisionSpec
from engine.formats.templates.prompt_pictures import Part

if TYPE_CHECKING:
    from PIL import Image

Floats = NDArray[np.float32]
Shares = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Grid:
    """The rows and columns of tokens that a picture, or a part of it, becomes."""

    rows: int
    columns: int

    @classmethod
    def of(cls, spec: VisionSpec, width: int, height: int) -> Grid:
        """The shape of `width` x `height` pixels, which are the size of an encoder."""
        side = spec.patch * spec.merge
        return cls(height // side, width // side)

    def tokens(self, spec: VisionSpec) -> int:
        """Embeddings of the picture, with what stands among them."""
        count, ends = spec.queries or self.rows * self.columns, spec.ends
        if ends is None:
            return count
        lines = self.rows - (ends.end is None) if ends.line else 0
        return count + lines + sum(end is not None for end in (ends.begin, ends.end_of(self.rows)))


@dataclass(frozen=True)
class Places:
    """What follows from the places of a picture's patches. To the product of each are added rows of the encoder's table
    of positions, `rows` int32 (n, terms), times `shares`, float32 (n, terms). `cos` and `sin` of the rotations: float32
    (n, head_dim / 2) each (None: none). `windows`: the first patch of its window and the one after the last, int32
    (n, 2) (None: none)."""

    rows: NDArray[np.int32]
    shares: Floats
    cos: Floats | None
    sin: Floats | None
    windows: NDArray[np.int32] | None


@dataclass(frozen=True)
class EncoderInput:
    """What an encoder computes embeddings of: `patches` float32 (n, 3 patch²), `added` to their products float32 (n,
    dim) (None: nothing), and `cos`, `sin` and `windows` as in `Places`."""

    patches: Floats
    added: Floats | None
    cos: Floats | None
    sin: Floats | None
    windows: NDArray[np.int32] | None


_CUBIC_TERMS = 64  # of a table whose sides are up to 1.6 times those of what it becomes
_ROUNDING = 1e-7  # of a number of rows or columns that is whole
_MOST_PADDED = 8000
"""The side of a picture that is made square. One of 65,535 x 1 pixels would take 13 GB."""


def layout(spec: VisionSpec, width: int, height: int) -> tuple[Grid, tuple[Part, ...]]:
    """The grid of a picture of `width` x `height` pixels, if it is not cut, and its parts, in the order in which a
    model reads them."""
    grid = Grid.of(spec, *spec.size(width, height))
    cut, whole = spec.cut(width, height), Part(grid.tokens(spec))
    if cut is None:
        return grid, (whole,)
    if spec.page:
        page = Part(len(_kept_of_page(spec, cut, width, height)), (1, 1))
        return grid, (whole, page) if spec.whole_first else (page, whole)
    if cut.rows * cut.columns == 1:
        return grid, (whole,)
    tokens = Grid.of(spec, *_tile_of(spec, cut)).tokens(spec)
    tiles = [Part(tokens, (row + 1, column + 1)) for row, column in np.ndindex(cut.rows, cut.columns)]
    return grid, (whole, *tiles) if spec.whole_first else (*tiles, whole)


def kept_embeddings(spec: VisionSpec, width: int, height: int) -> Ints | None:
    """Which of the embeddings that an encoder makes of a picture of `width` x `height` pixels are read: those of a
    padding around it are not. None: all."""
    cut = spec.cut(width, height)
    if cut is None or not spec.page or not cut.padded:
        return None
    whole = Grid.of(spec, *spec.size(width, height)).tokens(spec)
    return np.concatenate([np.arange(whole), whole + _kept_of_page(spec, cut, width, height)])


def _kept_of_page(spec: VisionSpec, cut: Cut, width: int, height: int) -> Ints:
    """The same of the grid of all tiles, with the ends of its rows."""
    grid = Grid.of(spec, *_tile_of(spec, cut))
    down, across = grid.rows * cut.rows, grid.columns * cut.columns
    rows, columns = range(down), range(across)
    if cut.padded and width * down > height * across:
        off = (down - math.floor(height * across / width + _ROUNDING)) // 2
        rows = range(off, down - off)
    elif cut.padded:
        off = (across - math.floor(width * down / height + _ROUNDING)) // 2
        columns = range(off, across - off)
    return np.array([row * (across + 1) + column for row in rows for column in (*columns, across)], np.int64)


def resized(spec: VisionSpec, rgb: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], ...]:
    """The parts of a picture, uint8 (height, width, 3), at the sizes of its encoder, in the order of `layout`. As
    Pillow's filters with antialiasing: first across, then down."""
    from PIL import Image, ImageOps

    def sized(picture: Image.Image, size: Size) -> Image.Image:
        return picture.resize((size[0], picture.height), how).resize(size, how)

    def whole(picture: Image.Image) -> NDArray[np.uint8]:
        if spec.padding and picture.width != picture.height:
            side = full[0] if spec.padding.at_last else min(max(picture.size), _MOST_PADDED)
            picture = ImageOps.pad(picture, (side, side), how, spec.padding.colour)
        return _cropped(np.asarray(picture if picture.size == full else sized(picture, full)), size)

    match spec.kind:
        case "gemma3" | "gemma3nv" | "lfm2" | "phi4" | "llama4" | "youtuvl" | "step3vl":
            how = Image.Resampling.BILINEAR
        case "idefics3" | "muse-glimmer":
            how = Image.Resampling.LANCZOS
        case _:
            how = Image.Resampling.BICUBIC
    picture, size = Image.fromarray(rgb), spec.size(rgb.shape[1], rgb.shape[0])
    tile = spec.tiles.side if spec.tiles and spec.size.how == "square" else 0
    full = (
        (tile, tile) if 0 <= tile - size[0] < spec.size.align else size
    )  # whose last pixels are of no patch
    if (cut := spec.cut(rgb.shape[1], rgb.shape[0])) is None:
        return (whole(picture),)
    if cut.padded == "corner":
        stretched = sized(picture, cut.sizes[0]).crop((0, 0, *cut.sizes[1]))
        stretched = functools.reduce(sized, cut.sizes[2:], stretched)
    else:
        padded = _padded(picture, cut.sizes[0], sized) if cut.padded else picture
        stretched = functools.reduce(sized, cut.sizes, padded)
    if spec.page:
        page = np.asarray(stretched)
        return (whole(picture), page) if spec.whole_first else (page, whole(picture))
    across, down = stretched.width // cut.columns, stretched.height // cut.rows
    tiles = np.asarray(stretched).reshape(cut.rows, down, cut.columns, across, 3).transpose(0, 2, 1, 3, 4)
    parts = [_cropped(tile, _tile_of(spec, cut)) for tile in tiles.reshape(-1, down, across, 3)]
    if len(parts) == 1:
        return (parts[0],)
    is_from_tiles = len(cut.sizes) > 1 and not cut.padded
    last = whole(stretched if is_from_tiles else picture)
    return (last, *parts) if spec.whole_first else (*parts, last)


def _padded(
    picture: Image.Image, size: Size, sized: Callable[[Image.Image, Size], Image.Image]
) -> Image.Image:
    """A picture that keeps its shape in the middle of one of `size`, with black around it."""
    from PIL import Image

    scale = min(size[0] / picture.width, size[1] / picture.height)
    inner = min(math.ceil(picture.width * scale), size[0]), min(math.ceil(picture.height * scale), size[1])
    whole = Image.new("RGB", size)
    whole.paste(sized(picture, inner), ((size[0] - inner[0]) // 2, (size[1] - inner[1]) // 2))
    return whole


def _cropped(rgb: NDArray[np.uint8], size: Size) -> NDArray[np.uint8]:
    """The first pixels of a picture."""
    return np.ascontiguousarray(rgb[: size[1], : size[0]])


def _tile_of(spec: VisionSpec, cut: Cut) -> Size:
    """The pixels of a tile that are read: whole tokens."""
    side = spec.patch * spec.merge
    across, down = cut.sizes[-1]
    return across // cut.columns // side * side, down // cut.rows // side * side


def position_table(spec: VisionSpec, vector: Callable[[Vector], Floats]) -> Floats | None:
    """The encoder's positions, float32 (rows, dim), if it has some. `vector` reads one. With a summary, the first rows
    are all of it but a bias, since its product is zero."""
    if spec.positions is None:
        return None
    table = vector(spec.positions.table).reshape(-1, spec.dim)
    if spec.summary is None:
        return table
    own, n = vector(spec.summary).reshape(-1, spec.dim), spec.summary_rows
    own = own - vector(spec.bias) if spec.bias else own
    match spec.positions.of_summary:
        case "first":
            own, table = own + table[:n], table[n:]
        case "last":
            own, table = own + table[-n:], table[:-n]
    return np.concatenate([own, table])


def encoder_input(
    spec: VisionSpec, rgb: NDArray[np.uint8], vector: Callable[[Vector], Floats]
) -> EncoderInput:
    """The input for a picture that `resized` gave. `vector` reads one of the encoder's."""
    p, m, k, table = spec.patch, spec.merge, spec.square, position_table(spec, vector)
    grid = Grid(rgb.shape[0] // (p * m), rgb.shape[1] // (p * m))
    mean, std = (np.asarray(of, np.float32) for of in (spec.mean, spec.std))
    x = (arranged(spec, rgb).astype(np.float32) / np.float32(255) - mean) / std
    squares = x.reshape(grid.rows, m // k, k, p, grid.columns, m // k, k, p, 3)
    squares = squares.transpose(0, 4, 1, 5, 2, 6, *((3, 7, 8) if spec.colours_last else (8, 3, 7)))
    places = places_of(spec, grid, 0 if table is None else len(table))
    added: Floats | None = None
    if table is not None:
        added = np.zeros((len(places.rows), table.shape[1]), np.float32)
        for shares, rows in zip(places.shares.T, places.rows.T, strict=True):
            added += shares[:, None] * table[rows]
    patches = np.ascontiguousarray(squares.reshape(-1, 3 * p * p))
    if spec.pixel_norm:
        patches = normed(patches, spec.pixel_norm, vector)
    if spec.summary:
        patches = np.pad(patches, ((0, spec.summary_rows), (0, 0)))
    return EncoderInput(patches, added, places.cos, places.sin, places.windows)


def normed(x: Floats, norm: Norm, vector: Callable[[Vector], Floats]) -> Floats:
    """Rows after a norm."""
    x = x - x.mean(-1, keepdims=True) if norm.centred else x
    if norm.eps is not None:
        squares = np.einsum("...i,...i->...", x, x)[..., None] / np.float32(x.shape[-1])
        x = x / np.sqrt(squares + np.float32(norm.eps))
    x = x * vector(norm.weight) if norm.weight else x
    return x + vector(norm.bias) if norm.bias else x


def arranged(spec: VisionSpec, rgb: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """A picture that `resized` gave, whose squares are in the order of tokens."""
    side = spec.patch * spec.merge
    grid = Grid(rgb.shape[0] // side, rgb.shape[1] // side)
    if not spec.window:
        return rgb
    squares = rgb.reshape(grid.rows, side, grid.columns, side, 3).transpose(0, 2, 1, 3, 4)
    squares = squares.reshape(-1, side, side, 3)[_order(spec.window, grid)[0]]
    picture = squares.reshape(grid.rows, grid.columns, side, side, 3).transpose(0, 2, 1, 3, 4)
    return np.ascontiguousarray(picture).reshape(rgb.shape)


def places_of(spec: VisionSpec, grid: Grid, n: int) -> Places:
    """The places of a picture of `grid`, for an encoder whose table of positions has `n` rows. See `Positions`."""
    m, k = spec.merge, spec.square
    down, across = grid.rows * m, grid.columns * m
    ys, xs = (_in_order(of, grid, m, k) for of in np.mgrid[:down, :across])
    windows = None
    if spec.reduction:
        of_square = np.arange(len(ys), dtype=np.int32) // k**2 * k**2
        windows = np.stack([of_square, of_square + k**2], 1)
    if spec.window:
        order, lengths = _order(spec.window, grid)
        ys, xs = (of.reshape(-1, m * m)[order].ravel() for of in (ys, xs))
        ends = np.cumsum(lengths) * (m * m)
        windows = np.stack([ends - lengths * (m * m), ends], 1).repeat(lengths * (m * m), 0).astype(np.int32)
    cos, sin = spec.turns(ys, xs) if spec.rotations else (None, None)
    match spec.positions and spec.positions.how:
        case None:
            rows, shares = np.zeros((len(ys), 0), int), np.zeros((len(ys), 0))
        case "patch":
            rows, shares = (ys * across + xs)[:, None], np.ones((len(ys), 1))
        case "column and row":
            rows, shares = np.stack([xs, n // 2 + ys], 1), np.ones((len(ys), 2))
        case "nearest":
            side = math.isqrt(n)
            rows, shares = (ys * side // down * side + xs * side // across)[:, None], np.ones((len(ys), 1))
        case "stretched":
            rows, shares = _stretched(math.isqrt(n), ys, xs, (down, across))
        case _:
            assert spec.positions
            rows, shares = _resized(spec.positions, math.isqrt(n - spec.summary_rows), ys, xs, (down, across))
            room = (0, 0), (0, position_terms(spec, n) - rows.shape[1])
            rows, shares = np.pad(rows, room), np.pad(shares, room)
    if k := spec.summary_rows:
        own = np.arange(k)[:, None].repeat(rows.shape[1], 1)  # the first term is all of it
        first = np.zeros((k, rows.shape[1]))
        first[:, 0] = 1
        rows, shares = np.concatenate([rows + k, own]), np.concatenate([shares, first])
        cos = None if cos is None else np.pad(cos, ((0, k), (0, 0)), constant_values=1)
        sin = None if sin is None else np.pad(sin, ((0, k), (0, 0)))
    return Places(rows.astype(np.int32), shares.astype(np.float32), cos, sin, windows)


def position_terms(spec: VisionSpec, n: int) -> int:
    """How many rows of a table of positions, of `n`, are added to a patch's product (`Places`)."""
    match spec.positions and spec.positions.how:
        case None:
            return 0
        case "patch" | "nearest":
            return 1
        case "column and row":
            return 2
        case "bicubic":
            return 16
        case "smoothed bicubic":
            return _CUBIC_TERMS
        case "smoothed":  # a picture has a quarter of the table's places or more: see vision_reader
            return max(2 * math.isqrt(n), 36)
    return 4


def row_by_row(spec: VisionSpec, embeddings: Floats, grid: Grid) -> Floats:
    """The embeddings of a picture's tokens, (rows * columns, width), which are window by window if there are some."""
    if not spec.window:
        return embeddings
    by_rows = np.empty_like(embeddings)
    by_rows[_order(spec.window, grid)[0]] = embeddings
    return by_rows


def as_read(spec: VisionSpec, embeddings: Floats, grid: Grid, fixed: Callable[[FixedRow], Floats]) -> Floats:
    """`with_ends` of `row_by_row`."""
    return with_ends(spec, row_by_row(spec, embeddings, grid), grid, fixed)


def with_ends(
    spec: VisionSpec, embeddings: Floats, grid: Grid, fixed: Callable[[FixedRow], Floats]
) -> Floats:
    """A picture's embeddings, (rows * columns, width), row by row, with the encoder's `ends`. `fixed` gives one of
    them."""
    if (ends := spec.ends) is None:
        return embeddings
    joined = _with_lines(embeddings, grid.rows, fixed(ends.line)) if ends.line else embeddings
    begin = [fixed(ends.begin)[None]] if ends.begin else []
    end = [fixed(last)[None]] if (last := ends.end_of(grid.rows)) else []
    return np.concatenate([*begin, joined if end or not ends.line else joined[:-1], *end])


def as_page(tiles: Sequence[Floats], rows: int, columns: int, line: Floats) -> Floats:
    """The embeddings of tiles, each a square row by row, (tokens, width), as one grid: line by line, with `line` after
    each. If this is of one projector, it is the same in all parts of an embedding."""
    n, width = math.isqrt(len(tiles[0])), tiles[0].shape[1]
    squares = np.stack(tiles).reshape(rows, columns, n, n, width).transpose(0, 2, 1, 3, 4)
    return _with_lines(squares.reshape(-1, width), rows * n, np.tile(line, width // len(line)))


def _with_lines(embeddings: Floats, rows: int, line: Floats) -> Floats:
    lines, size = embeddings.reshape(rows, -1, len(line)), len(line)
    return np.concatenate([lines, np.broadcast_to(line, (rows, 1, size))], axis=1).reshape(-1, size)


def queries_of(
    queries: OwnQueries, dim: int, patches: int, vector: Callable[[Vector], Floats]
) -> tuple[Floats, Floats, Floats, Floats]:
    """The queries of a picture of so many patches, (patches, dim); of all rows, patches and queries, cosines and sines
    (rows, head_dim / 2); and what is added to scores, (rows, rows): 0 or -inf."""
    tables = [vector(table).reshape(-1, dim) for table in queries.tables]
    own = next(table for table in tables if len(table) == patches)
    at = np.arange(2 * patches)
    angles = np.outer(at, queries.rates)
    sees = at <= np.maximum(at[:, None], patches - 1)
    hidden = np.where(sees, 0, -np.inf).astype(np.float32)
    return own, np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32), hidden


def waves(grid: Grid, size: int) -> Floats:
    """Sines and cosines of the columns of a picture's patches and of their rows, at falling rates: float32
    (patches, size)."""
    places = np.mgrid[: grid.rows, : grid.columns].reshape(2, -1)
    rates = 10000.0 ** -(np.arange(size // 4) / (size // 4))
    angles = [np.outer(of, rates) for of in reversed(places)]
    return np.concatenate([f(of) for of in angles for f in (np.sin, np.cos)], axis=1, dtype=np.float32)


@functools.lru_cache(maxsize=8)
def _order(window: int, grid: Grid) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """The tokens of a picture window by window, row by row in each, and how many each window has."""
    down, across = np.mgrid[: grid.rows, : grid.columns].reshape(2, -1) // window
    of = down * grid.columns + across
    return np.argsort(of, kind="stable"), np.unique(of, return_counts=True)[1]


def _in_order(of: Ints, grid: Grid, m: int, k: int) -> Ints:
    """A number of each patch, (rows * m, columns * m), in the order of tokens, with those of squares of k x k patches
    next to each other."""
    squares = of.reshape(grid.rows, m // k, k, grid.columns, m // k, k)
    return squares.transpose(0, 3, 1, 4, 2, 5).ravel()


def _stretched(n: int, ys: Ints, xs: Ints, shape: tuple[int, int]) -> tuple[Ints, Shares]:
    """The four rows of a table of n x n places around each patch of a picture of `shape`, and their shares."""

    def axis(count: int, of: Ints) -> tuple[list[Ints], list[Shares]]:
        at = np.linspace(0, n - 1, count) if count > 1 else np.zeros(1)
        low = np.minimum(at.astype(int), n - 1)
        share = (at - low)[of]
        return [low[of], np.minimum(low + 1, n - 1)[of]], [1 - share, share]

    (rows, down), (columns, right) = axis(shape[0], ys), axis(shape[1], xs)
    corners = [(i, j) for i in (0, 1) for j in (0, 1)]
    return (
        np.stack([rows[i] * n + columns[j] for i, j in corners], 1),
        np.stack([down[i] * right[j] for i, j in corners], 1),
    )


def _resized(positions: Positions, n: int, ys: Ints, xs: Ints, shape: tuple[int, int]) -> tuple[Ints, Shares]:
    """The rows of a table of n x n places that the filter of `positions` reads for each patch of a picture of `shape`,
    and their shares: torch.nn.functional.interpolate, without aligned corners."""
    is_cubic, is_smoothed = "bicubic" in positions.how, "smoothed" in positions.how

    def axis(count: int, of: Ints) -> tuple[Ints, Shares]:
        at = (np.arange(count) + 0.5) * n / (count + positions.more) - 0.5
        wide = max(n / count, 1.0) if is_smoothed else 1.0
        reach = math.ceil(2 * wide if is_cubic else wide)
        taps = np.floor(at).astype(int)[:, None] + np.arange(1 - reach, reach + 1)
        apart = np.abs(taps - at[:, None]) / wide
        shares = _cubic(apart, -0.5 if is_smoothed else -0.75) if is_cubic else np.maximum(1 - apart, 0)
        if is_smoothed or positions.how == "faded":
            shares *= (taps >= 0) & (taps < n)
        if is_smoothed:
            shares /= shares.sum(1, keepdims=True)
        used = np.abs(shares).max(0) > 0
        return np.clip(taps, 0, n - 1)[:, used][of], shares[:, used][of]

    (rows, down), (columns, right) = axis(shape[0], ys), axis(shape[1], xs)
    count = len(ys)
    return (
        (rows[:, :, None] * n + columns[:, None]).reshape(count, -1),
        (down[:, :, None] * right[:, None]).reshape(count, -1),
    )


def resized_table(table: Floats, side: int, count: int) -> Floats:
    """A table of side x side places, (side², dim), for count x count of them: cubic, with antialiasing."""
    ys, xs = np.mgrid[:count, :count].reshape(2, -1)
    places = Positions(Vector("", 0), "smoothed bicubic")
    rows, shares = _resized(places, side, ys, xs, (count, count))
    out = np.zeros((count * count, table.shape[1]), np.float32)
    for of, row in zip(shares.T.astype(np.float32), rows.T, strict=True):
        out += of[:, None] * table[row]
    return out


def _cubic(x: Shares, a: float) -> Shares:
    """The cubic convolution of distances `x`, with PyTorch's `a`."""
    near, far = ((a + 2) * x - (a + 3)) * x * x + 1, ((x - 5) * x + 8) * x * a - 4 * a
    return np.where(x <= 1, near, np.where(x < 2, far, 0))
