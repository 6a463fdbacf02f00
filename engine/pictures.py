"""Pixels as an encoder of pictures reads them (`engine.description.vision`): sized, cut into patches, and what follows
from the place of each patch. Patches are in the order of tokens, those of a token row by row of their square."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.description.vision import VisionSpec

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Grid:
    """The rows and columns of tokens that a picture becomes."""

    rows: int
    columns: int

    @classmethod
    def of(cls, spec: VisionSpec, width: int, height: int) -> Grid:
        """That of a picture of `width` x `height` pixels."""
        across, down = spec.size(width, height)
        side = spec.patch * spec.merge
        return cls(down // side, across // side)

    def tokens(self, spec: VisionSpec) -> int:
        """Embeddings of the picture, those after rows included."""
        return self.rows * self.columns + (self.rows - 1 if spec.line_end else 0)


@dataclass(frozen=True)
class EncoderInput:
    """What an encoder computes embeddings of: `patches` float32 (n, 3 patch²), `added` to their products float32 (n,
    dim) (None: nothing), and `cos` and `sin` of the rotations, float32 (n, head_dim / 2) each (None: none)."""

    patches: Floats
    added: Floats | None
    cos: Floats | None
    sin: Floats | None


def resized(spec: VisionSpec, rgb: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """A picture, uint8 (height, width, 3), at the size of its encoder. As Pillow's filters with antialiasing: first
    across, then down."""
    from PIL import Image

    across, down = spec.size(rgb.shape[1], rgb.shape[0])
    how = Image.Resampling.BILINEAR if spec.kind == "gemma3" else Image.Resampling.BICUBIC
    picture = Image.fromarray(rgb)
    return np.asarray(picture.resize((across, picture.height), how).resize((across, down), how))


def encoder_input(spec: VisionSpec, rgb: NDArray[np.uint8], table: Floats | None) -> EncoderInput:
    """The input for a picture that `resized` gave. `table`: the encoder's positions, float32 (rows, dim)."""
    p, m = spec.patch, spec.merge
    rows, columns = rgb.shape[0] // (p * m), rgb.shape[1] // (p * m)
    x = (rgb.astype(np.float32) / np.float32(255) - np.asarray(spec.mean, np.float32)) / np.asarray(
        spec.std, np.float32
    )
    squares = x.reshape(rows, m, p, columns, m, p, 3).transpose(0, 3, 1, 4, 6, 2, 5)
    ys, xs = (_in_order(of, rows, columns, m) for of in np.mgrid[: rows * m, : columns * m])
    cos, sin = spec.turns(ys, xs) if spec.rotations else (None, None)
    added = None if table is None else _added(spec, table, ys, xs, (rows * m, columns * m))
    return EncoderInput(np.ascontiguousarray(squares.reshape(-1, 3 * p * p)), added, cos, sin)


def with_line_ends(embeddings: Floats, grid: Grid, line_end: Floats | None) -> Floats:
    """A picture's embeddings, (rows * columns, out), with that which comes after each row but the last."""
    if line_end is None:
        return embeddings
    rows = embeddings.reshape(grid.rows, grid.columns, -1)
    ends = np.broadcast_to(line_end, (grid.rows, 1, len(line_end)))
    joined: Floats = np.concatenate([rows, ends], axis=1).reshape(-1, len(line_end))[:-1]
    return joined


def _in_order(of: NDArray[Any], rows: int, columns: int, m: int) -> NDArray[Any]:
    """A number of each patch, (rows * m, columns * m), in the order of tokens."""
    return of.reshape(rows, m, columns, m).transpose(0, 2, 1, 3).ravel()


def _added(
    spec: VisionSpec, table: Floats, ys: NDArray[Any], xs: NDArray[Any], shape: tuple[int, int]
) -> Floats:
    """See `Positions`."""
    assert spec.positions
    match spec.positions.how:
        case "patch":
            by_patch: Floats = table[ys * shape[1] + xs]
            return by_patch
        case "column and row":
            half = len(table) // 2
            both: Floats = table[xs] + table[half + ys]
            return both
    n = math.isqrt(len(table))
    square = table.reshape(n, n, -1)

    def axis(count: int) -> tuple[NDArray[Any], NDArray[Any], Floats]:
        at = np.linspace(0, n - 1, count) if count > 1 else np.zeros(1)
        low = np.minimum(at.astype(int), n - 1)
        return low, np.minimum(low + 1, n - 1), (at - low).astype(np.float32)

    (y0, y1, fy), (x0, x1, fx) = axis(shape[0]), axis(shape[1])
    down, right = fy[ys][:, None], fx[xs][:, None]
    upper = square[y0[ys], x0[xs]] * (1 - right) + square[y0[ys], x1[xs]] * right
    lower = square[y1[ys], x0[xs]] * (1 - right) + square[y1[ys], x1[xs]] * right
    stretched: Floats = upper * (1 - down) + lower * down
    return stretched
