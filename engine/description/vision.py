"""The description of an encoder of pictures: data that `engine.description.vision_reader` reads from an "mmproj" file.

    x = patches @ kernels + bias + positions;  x = norm(x)
    for each sublayer:  x += post_norm(operator(norm(x)))  (and after one of them, there may be fewer rows: `Reduction`)
    for each projector:  y = x after so many sublayers;  for each of its steps:  y = step(y)

x has a row for each patch. The patches of a token follow each other, row by row of their square, so that they can be
merged at last, and so do the tokens of a window, if there are windows. A token's embedding is what all projectors make
of it, one after the other. What the products clamp, which norms there are and how heads are rotated is in the
description; the targets know no family.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.description.picture_size import Cut, SizeRule, TileRule
from engine.description.sublayers import Vector, Weight, parts_of

Activation = Literal["gelu", "exact gelu", "quick gelu", "silu", "relu2"]
"""GELU in the form with tanh, GELU with erf, x * sigmoid(1.702 x), SiLU, or the square of ReLU."""


class Limits(NamedTuple):
    """The least and the largest number that is let through."""

    low: float
    high: float


@dataclass(frozen=True)
class Linear:
    """x times the transpose of `weight`, and `bias`. With `inputs`, x is clamped to these limits before, and with
    `outputs` the result. `transposed`: `weight` has a row for each input, and x is multiplied by itself."""

    weight: Weight
    bias: Vector | None = None
    inputs: Limits | None = None
    outputs: Limits | None = None
    transposed: bool = False


@dataclass(frozen=True)
class Norm:
    """An RMS norm, or a layer norm if it is `centred`: without the mean. Then times `weight`, plus `bias`. Without
    `eps`, nothing is normed before."""

    eps: float | None
    weight: Vector | None = None
    bias: Vector | None = None
    centred: bool = False


@dataclass(frozen=True)
class PatchAttention:
    """Attention of all patches to all, or if it is `windowed`, to those of the same window. Of `kv_heads` heads of keys
    and values, each is that of as many of the `heads` of queries (0: there are as many). Queries and keys are normed
    over a head, or over all heads, values without a weight, and queries and keys are rotated if the encoder has
    `rotations`. Scores are multiplied by `scale`. In a `Stem`, a query's products with two vectors are added to them:
    those for how many rows it lies below a key, and how many columns right of it. `by_rows` and `by_columns` have one
    for each number from 1 - n to n - 1, float32 (2 n - 1, head_dim), where n is the side of a window, or of the
    picture."""

    q: Linear
    k: Linear
    v: Linear
    o: Linear
    q_norm: Norm | None
    k_norm: Norm | None
    v_norm: Norm | None
    heads: int
    head_dim: int
    scale: float
    windowed: bool = False
    by_rows: Vector | None = None
    by_columns: Vector | None = None
    kv_heads: int = 0

    @property
    def sharing(self) -> int:
        """How many heads of queries have the same keys and values."""
        return self.heads // (self.kv_heads or self.heads)

    @property
    def norms_all_heads(self) -> bool:
        """Whether queries and keys are normed over all heads."""
        weight = self.q_norm.weight if self.q_norm else None
        return weight is not None and weight.size != self.head_dim


@dataclass(frozen=True)
class PatchFeedForward:
    """down(activation(gate x) * up x), or down(activation(up x)) without a gate."""

    gate: Linear | None
    up: Linear
    down: Linear
    activation: Activation


@dataclass(frozen=True)
class PatchSublayer:
    norm: Norm
    operator: PatchAttention | PatchFeedForward
    post_norm: Norm | None


@dataclass(frozen=True)
class Merge:
    """What becomes of the patches of a token: their rows one after the other ("join"), those channel by channel
    ("channels"), or their mean."""

    how: Literal["join", "channels", "mean"]


@dataclass(frozen=True)
class Affine:
    """(x * factor - minus) * times."""

    factor: float = 1.0
    minus: Vector | None = None
    times: Vector | None = None


@dataclass(frozen=True)
class Activate:
    """activation(x)."""

    activation: Activation


@dataclass(frozen=True)
class QueryAttention:
    """Attention of `count` fixed `queries`, normed, to all patches: a row comes out for each of them. Keys are of x and
    the waves of a patch's place (`engine.description.encoder_input.waves`)."""

    queries: Vector
    count: int
    norm: Norm
    q: Linear
    k: Linear
    v: Linear
    o: Linear
    heads: int
    head_dim: int


@dataclass(frozen=True)
class CrossAttention:
    """Attention of `heads`, each of `head_dim` elements, of some rows to others: x = norm(x + o(attention))."""

    q: Linear
    k: Linear
    v: Linear
    o: Linear
    norm: Norm
    heads: int
    head_dim: int


@dataclass(frozen=True)
class WindowQueries:
    """A window of the encoder (`VisionSpec.window`) has a query for each of its tokens: the mean of the token's
    patches, normed, or of these the one with the number `patch`, and one of `queries`, float32 (tokens, dim). They
    attend to each other, and to the normed patches of their window with `places`, float32 (patches, dim) row by row.
    Then x = last_norm(x + feed_forward(x)): a row comes out for each token."""

    norm: Norm
    patch: int | None
    queries: Vector
    places: Vector
    query_norm: Norm
    own: CrossAttention
    cross: CrossAttention
    feed_forward: PatchFeedForward
    last_norm: Norm


@dataclass(frozen=True)
class Neighbours:
    """x, of which a token has `side` rows and columns, becomes what a convolution reads of every `stride`-th place: the
    `kernel` x `kernel` places around it, channel by channel, with zeros beyond the edges. Rows come out row by row."""

    kernel: int
    stride: int
    side: int


ProjectorStep = (
    Neighbours | Norm | Merge | Linear | Affine | Activate | PatchFeedForward | QueryAttention | WindowQueries
)


@dataclass(frozen=True)
class Projector:
    """What makes embeddings, or a part of them, of x after so many `sublayers`. Before it in each row stand those of x
    after `earlier` ones, and if it `reads_stem`, after it what the encoder's stem made."""

    sublayers: int
    steps: tuple[ProjectorStep, ...]
    earlier: tuple[int, ...] = ()
    reads_stem: bool = False


@dataclass(frozen=True)
class Convolution:
    """A convolution without a bias: of `kernel` x `kernel` places around every `stride`-th place, with zeros beyond the
    edges, and then `norm`. `weight`: a row for each channel of the result."""

    weight: Weight
    kernel: int
    stride: int
    norm: Norm | None


@dataclass(frozen=True)
class Stem:
    """An encoder before the encoder, of smaller patches of `patch` pixels a side, of which each picture has `side` rows
    and columns. What its `convolutions` make of them takes the place of the products of patches.

        x = patches @ kernel + bias + positions;  sublayers as those of the encoder;  convolutions

    Windows have `window` rows and columns from the upper left corner on. Those at the other edges are filled with
    zeros after the norm, which attend and are attended to as patches are."""

    patch: int
    side: int
    dim: int
    window: int
    kernel: Linear
    positions: Vector
    sublayers: tuple[PatchSublayer, ...]
    convolutions: tuple[Convolution, ...]


@dataclass(frozen=True)
class ImageStep:
    """A convolution of an image: of `kernel` x `kernel` places around every `stride`-th one, with as many zeros beyond
    the edges that each `stride` places become one, half of them before. `weight`: a row for each channel of the result,
    which is of all channels, or of one (`deep`). Then `bias`, `norm` over the channels, and GELU if it `activates`."""

    weight: Weight
    kernel: int
    stride: int = 1
    deep: bool = False
    bias: Vector | None = None
    norm: Norm | None = None
    activates: bool = False


@dataclass(frozen=True)
class ImageAttention:
    """Attention of all places to those that `k` and `v` make, with one head of keys: queries have as many heads as fit.
    Places are normed by `norm`."""

    norm: Norm
    q: ImageStep
    k: tuple[ImageStep, ...]
    v: tuple[ImageStep, ...]
    o: ImageStep


@dataclass(frozen=True)
class ImageBlock:
    """scale * steps(x), and x if it `adds` that."""

    steps: tuple[ImageStep | ImageAttention, ...]
    scale: Vector | None = None
    adds: bool = False


@dataclass(frozen=True)
class ConvolutionNet:
    """An encoder of convolutions (MobileNet): `blocks` of the picture's colours, then what comes out of those of
    `read`, all as large as the first of them, joined channel by channel; then the `last` block; means of squares, so
    that `side` rows and columns are left; and `norm`."""

    blocks: tuple[ImageBlock, ...]
    read: tuple[int, ...]
    last: ImageBlock
    side: int
    norm: Norm | None


@dataclass(frozen=True)
class Reduction:
    """What makes one row of those of a square of patches, `side` a side, after so many `sublayers`: their mean, and
    what `feed_forward` makes of norm(all of them, one after the other). Attention with windows is within a square."""

    sublayers: int
    side: int
    norm: Norm
    feed_forward: PatchFeedForward


@dataclass(frozen=True)
class OwnQueries:
    """Rows after all patches, and the only ones that are read: that one of `tables`, float32 (rows, dim), which has as
    many rows as there are patches. They see all rows up to themselves, and patches see patches. The pairs of a head
    turn by `rates`, in radians, for each row before."""

    tables: tuple[Vector, ...]
    rates: tuple[float, ...]


@dataclass(frozen=True)
class Rotations:
    """Radians by which each pair of a head turns for each row of patches, and for each column: (head_dim / 2,). Rows
    and columns are counted from `first` on."""

    by_row: tuple[float, ...]
    by_column: tuple[float, ...]
    first: int = 0


@dataclass(frozen=True)
class FixedRow:
    """An embedding that is the same in all pictures: `vector` after `steps`, which are norms and products."""

    vector: Vector
    steps: tuple[Norm | Linear, ...] = ()


@dataclass(frozen=True)
class Ends:
    """What stands among the embeddings of a picture's tokens: `line` after each row of them, `begin` before all, and
    `end` after all, without which the last row has no `line`; it is after pictures of `ended` rows alone, if that is
    given. In the `page` that all tiles are together, it is `page` after each row, and nothing else."""

    line: FixedRow | None = None
    begin: FixedRow | None = None
    end: FixedRow | None = None
    page: FixedRow | None = None
    ended: int = 0

    def end_of(self, rows: int) -> FixedRow | None:
        """What stands after a picture, or a part of one, of so many rows of tokens."""
        return self.end if self.ended in (0, rows) else None

    @property
    def rows(self) -> tuple[FixedRow, ...]:
        return tuple(filter(None, (self.line, self.begin, self.end, self.page)))


class Padding(NamedTuple):
    """A colour of 0 to 255 that makes a picture square, `at_last` when it has its size, else before."""

    colour: tuple[int, int, int]
    at_last: bool


ResizedPositions = Literal["bilinear", "faded", "bicubic", "smoothed", "smoothed bicubic"]
"""A filter; "faded" is bilinear, with zeros beyond the table, "smoothed" too, and those that are smoothed have
antialiasing."""


@dataclass(frozen=True)
class Positions:
    """What is added to patches by their place, of a table float32 (rows, dim). "stretched": a square of places,
    stretched to the picture's bilinearly, corners on corners. "nearest": a square of places, of which each patch has
    that below it. "patch": a row for each patch. "column and row": the row of the patch's column in the first half of
    the table, and that of its row in the second. `ResizedPositions`: a square of places as if these were pixels, which
    are made as many as the picture has patches, and a part of a patch `more` a side. `after_norm`: it is added to what
    the encoder's first norm gives, in place of what that reads. `of_summary`: the rows of the encoder's summary, if it
    has some."""

    table: Vector
    how: Literal["stretched", "nearest", "patch", "column and row"] | ResizedPositions
    after_norm: bool = False
    of_summary: Literal["first", "last", "none"] = "first"
    more: float = 0.0


@dataclass(frozen=True)
class VisionSpec:
    """An encoder. `patch`: the side of a patch in pixels. `merge`: so many patches a side become a token. `mean` and
    `std` of the colours (0 to 1), for (colour - mean) / std. `out`: elements of what each of the `projectors` makes of
    a token; the first one is what the model begins with, and the others are added later (`Sublayer.picture_part`).
    `ends`: what stands among the tokens. `window`: the side of a window in tokens, where some attention has windows:
    these begin at the upper left corner, and those at the other edges are smaller. With `tiles`, a picture may be cut;
    each tile is encoded by itself, and so is the whole picture, at last, or at first (`whole_first`). If they have a
    `page` (`Ends`), all tiles are read as one grid of tokens, those of a padding left out. A `padding` makes a picture
    square. A `summary` is one more row, after those of all patches, or several: what stands in place of a patch's
    product. They are part of no token, and are not rotated. The pixels of a patch are normed by `pixel_norm`, and are
    in the order of rows, columns and colours if these are `colours_last`, else colour by colour. A `stem` takes the
    place of `kernels`. With `own_queries`, there are as many rows again. With a `reduction`, the patches of a token
    follow each other square by square, and those of each square row by row."""

    kind: str
    name: str
    dim: int
    patch: int
    merge: int
    out: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    size: SizeRule
    kernels: tuple[Weight, ...]
    bias: Vector | None
    positions: Positions | None
    norm: Norm | None
    sublayers: tuple[PatchSublayer, ...]
    rotations: Rotations | None
    projectors: tuple[Projector, ...]
    ends: Ends | None
    window: int = 0
    tiles: TileRule | None = None
    whole_first: bool = False
    padding: Padding | None = None
    summary: Vector | None = None
    pixel_norm: Norm | None = None
    colours_last: bool = False
    stem: Stem | ConvolutionNet | None = None
    reduction: Reduction | None = None
    own_queries: OwnQueries | None = None

    def weights(self) -> Iterator[Weight]:
        """All matrices."""
        return iter(dict.fromkeys(part for part in parts_of(self) if isinstance(part, Weight)))

    def vectors(self) -> Iterator[Vector]:
        return iter(dict.fromkeys(part for part in parts_of(self) if isinstance(part, Vector)))

    @property
    def projector_steps(self) -> tuple[ProjectorStep, ...]:
        """The steps of all projectors."""
        return tuple(step for projector in self.projectors for step in projector.steps)

    def cut(self, width: int, height: int) -> Cut | None:
        """How a picture of `width` x `height` pixels is cut; None if it is not."""
        return self.tiles(width, height) if self.tiles else None

    def projectors_after(self, sublayers: int) -> list[Projector]:
        return [projector for projector in self.projectors if projector.sublayers == sublayers]

    @property
    def queries(self) -> int:
        """The embeddings of a picture, or of each part of it, if these are fixed; else 0."""
        return next((step.count for step in self.projector_steps if isinstance(step, QueryAttention)), 0)

    @property
    def page(self) -> FixedRow | None:
        """What ends the rows of tokens of all tiles, if these are read as one grid."""
        return self.ends.page if self.ends else None

    @property
    def has_windows(self) -> bool:
        """Whether some attention is `windowed`."""
        return self.window > 0 or self.reduction is not None

    @property
    def square(self) -> int:
        """The side of the squares of patches that become one row before the last one does; 1 if none do."""
        return self.reduction.side if self.reduction else 1

    @property
    def last_merge(self) -> int:
        """How many patches a side the last step makes one token of."""
        return self.merge // self.square

    @property
    def width(self) -> int:
        """Elements of an embedding."""
        return len(self.projectors) * self.out

    @property
    def n_bytes(self) -> int:
        """Bytes of all matrices and vectors in memory."""
        return sum(w.n_bytes for w in self.weights()) + sum(4 * v.size for v in self.vectors())

    @property
    def most_patches(self) -> int:
        """The most rows of a picture: its patches, and its summary, or its queries."""
        return self.size.most_tokens * self.merge**2 * (2 if self.own_queries else 1) + self.summary_rows

    @property
    def summary_rows(self) -> int:
        return self.summary.size // self.dim if self.summary else 0

    @property
    def is_float32(self) -> bool:
        return all(weight.type == 0 for weight in self.weights())

    def turns(
        self, rows: NDArray[Any], columns: NDArray[Any]
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Cosines and sines of the rotations of patches at these places, float32 (n, head_dim / 2) each."""
        assert self.rotations
        first = self.rotations.first
        angles = np.outer(rows + first, self.rotations.by_row) + np.outer(
            columns + first, self.rotations.by_column
        )
        return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
