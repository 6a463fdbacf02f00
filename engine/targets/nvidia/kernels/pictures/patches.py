"""The kernels of an encoder of pictures between its products and its attention (`engine.description.vision`).

Activations are rows of patches, or of tokens after these are merged. A kernel is made for a `size`, up to so many rows;
the buffer `count` has their number. Products are those of prompts (`matmul`): they leave partial sums, float32 (parts,
size, columns), and what comes next adds these, a bias and the limits of the product: its `Terms`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tinygrad import UOp

from engine.kernels.kernel import Kernel
from engine.targets.nvidia.kernels.pieces import used_rows
from engine.targets.nvidia.kernels.products.matmul import as_half, fragment_index
from engine.targets.nvidia.kernels.products.runs import Runs
from engine.targets.nvidia.kernels.residual_stream.token_norm import TokenNorm
from engine.targets.nvidia.kernels.uops import (
    F32,
    LOG2_E,
    UngatedActivation,
    activated,
    after_store,
    all_of,
    chain,
    f32,
    finish,
    inverse_rms,
    load,
    load_run,
    shared,
    store,
)

ROWS = 128  # sizes are multiples of this
_THREADS = 256
Form = Literal["fragments", "rows"]
"""Rows are float32 (size, columns). Fragments are what `matmul` reads, float16."""
MergeHow = Literal["join", "channels", "mean"]


@dataclass(frozen=True)
class Terms:
    """A product's result in a kernel: so many partial sums, and whether it has a bias, float32 (columns,), and limits,
    float32 (2,): the least and the largest value."""

    parts: int = 1
    has_bias: bool = False
    has_limits: bool = False

    def load(
        self,
        sums: UOp,
        bias: UOp | None,
        limits: UOp | None,
        place: tuple[int, UOp, UOp, int],
        ok: UOp | None,
    ) -> UOp:
        """The element at `place`: the size, its row, its column, and the number of columns."""
        size, row, column, cols = place
        values = [load(sums, (p * size + row) * cols + column, ok) for p in range(self.parts)]
        if bias is not None:
            values.append(load(bias, column, ok))
        return clamped(chain(values), limits)


@dataclass(frozen=True)
class NormShape:
    """A norm: with a weight, a bias, and without the mean first if it is `centred`. Without `eps`, only these."""

    eps: float | None
    has_weight: bool
    has_bias: bool
    centred: bool


def clamped(value: UOp, limits: UOp | None, first: int | UOp = 0) -> UOp:
    """A value within the limits at `first` and after it."""
    if limits is None:
        return value
    low, high = load_run(limits, first, 2)
    return value.maximum(low).minimum(high)


@functools.cache
def patch_input(
    size: int, patch: int, merge: int, mean: tuple[float, float, float], std: tuple[float, float, float],
    summarized: int = 0, colours_last: bool = False, square: int = 1,
) -> Kernel:  # fmt: skip
    """A picture as the first product reads it, colour by colour, or pixel by pixel if they are `colours_last`. Of the
    patches of a token, those of each square of `square` a side follow each other. Buffers: out, float16 fragments
    (size, 3 patch²); pixels, uint8 (height, width, 3); count, int32: patches, and at index 1 the columns of tokens. The
    last rows, as many as `summarized`, are of no patch: zeros."""
    area, cols = patch * patch, 3 * patch * patch

    def kernel(out: UOp, pixels: UOp, count: UOp) -> UOp:
        column = UOp.special(-(-cols // _THREADS), "gidx0") * _THREADS + UOp.special(_THREADS, "lidx0")
        row = UOp.special(size, "gidx1")
        across = load(count, 1).maximum(1).cast(row.dtype)
        ok = (row < used_rows(count, size)) & (column < cols)
        token, own = row // merge**2, row % merge**2
        channel, pixel = (column % 3, column // 3) if colours_last else (column // area, column % area)
        of_square, within = own // square**2, own % square**2
        down, right = (
            of * square + place
            for of, place in (
                (of_square // (merge // square), within // square),
                (of_square % (merge // square), within % square),
            )
        )
        y = (token // across * merge + down) * patch + pixel // patch
        x = (token % across * merge + right) * patch + pixel % patch
        value = load(pixels, (y * (across * merge * patch) + x) * 3 + channel, ok).cast(F32)
        factors, offsets = zip(
            *((1 / (255 * s), -m / s) for m, s in zip(mean, std, strict=True)), strict=True
        )
        factor, offset = (
            channel.eq(0).where(f32(a), channel.eq(1).where(f32(b), f32(c))) for a, b, c in (factors, offsets)
        )
        place, colour = fragment_index(row, column, cols), value * factor + offset
        if summarized:
            colour = (row + summarized < used_rows(count, size)).where(colour, f32(0))
        name = f"patch_input_{size}_{patch}" + "_pixels" * colours_last + f"_{square}" * (square > 1)
        return finish(name, [store(out, place, as_half(colour), ok)])

    return Kernel(kernel, ("out",), ("pixels", "count"))


@functools.cache
def embed_patches(size: int, cols: int, parts: tuple[int, ...], has_bias: bool, terms: int) -> Kernel:
    """The stream before the first layer. Buffers: stream, float32 (size, cols); sums, those of the product with each
    kernel of patches; bias, float32 (cols,); of a table of positions table, float32 (rows, cols), and `terms` rows of
    it for each patch with their shares, int32 and float32 (size, terms); count."""

    def kernel(
        stream: UOp, sums: Sequence[UOp], bias: UOp | None, table: UOp | None, rows: UOp | None, shares: UOp | None,
        count: UOp,
    ) -> UOp:  # fmt: skip
        column, row, ok = _element(size, cols, count)
        products = zip(sums, parts, strict=True)
        values = [Terms(n).load(one, None, None, (size, row, column, cols), ok) for one, n in products]
        if bias is not None:
            values.append(load(bias, column, ok))
        if table is not None and rows is not None and shares is not None:
            for i in range(terms):
                place = load(rows, row * terms + i, ok).maximum(0).cast(row.dtype)
                values.append(load(shares, row * terms + i, ok) * load(table, place * cols + column, ok))
        name = f"patch_embed_{size}_{cols}_{terms}"
        return finish(name, [store(stream, row * cols + column, chain(values), ok)])

    positions = (terms > 0 and "table", terms > 0 and "rows", terms > 0 and "shares")
    return Kernel(kernel, ("stream",), (("sums", len(parts)), has_bias and "bias", *positions, "count"))


@functools.cache
def norm_patches(
    size: int, cols: int, added: Terms | None = None, post: NormShape | None = None,
    norm: NormShape | None = None, clamps: bool = False, form: Form = "fragments",
) -> Kernel:  # fmt: skip
    """Adds a product to the stream, normed before if there is a `post` norm; and norms the stream. Buffers: x, the
    normed stream in a `Form`, within clamp, float32 (2,), if it `clamps`; stream, float32 (size, cols); of what is
    added sums, bias and limits; post_weight and post_bias, weight and bias, those of the norms; count."""

    def kernel(
        x: UOp | None, stream: UOp, sums: UOp | None, bias: UOp | None, limits: UOp | None,
        post_weight: UOp | None, post_bias: UOp | None, weight: UOp | None, norm_bias: UOp | None,
        clamp: UOp | None, count: UOp,
    ) -> UOp:  # fmt: skip
        block, row = TokenNorm(cols, 0.0), UOp.special(size, "gidx0")
        live = row < used_rows(count, size)
        places = [(column, all_of(ok, live)) for column, ok in block.places]
        values, stores = [load(stream, row * cols + column, ok) for column, ok in places], []
        if sums is not None and added:
            more = [added.load(sums, bias, limits, (size, row, column, cols), ok) for column, ok in places]
            if post:
                more = _normed(block, cols, more, places, post, 0, post_weight, post_bias)
            values = [value + term for value, term in zip(values, more, strict=True)]
            for (column, ok), value in zip(places, values, strict=True):
                stores.append(store(stream, row * cols + column, value, ok))
        if norm and x is not None:
            normed = _normed(block, cols, values, places, norm, 4, weight, norm_bias)
            for (column, ok), value in zip(places, normed, strict=True):
                stores.append(_store(x, form, row, column, cols, clamped(value, clamp), ok))
        return finish(f"patch_norm_{size}_{cols}_{added.parts if added else 0}", stores)

    return Kernel(
        kernel,
        (norm is not None and "x", added is not None and "stream"),
        (
            added is None and "stream",
            added is not None and "sums",
            bool(added and added.has_bias) and "bias",
            bool(added and added.has_limits) and "limits",
            bool(post and post.has_weight) and "post_weight",
            bool(post and post.has_bias) and "post_bias",
            bool(norm and norm.has_weight) and "weight",
            bool(norm and norm.has_bias) and "norm_bias",
            clamps and "clamp",
            "count",
        ),
    )


def _normed(
    block: TokenNorm, cols: int, values: Sequence[UOp], places: Sequence[tuple[UOp, UOp | None]], norm: NormShape,
    slot: int, weight: UOp | None, bias: UOp | None,
) -> list[UOp]:  # fmt: skip
    """The values of a block's token after a norm. Takes `slot` and the next three."""
    if norm.centred:
        mean = block.total(values, slot) * f32(1 / cols)
        less = [value - mean for value in values]
        values = [x if ok is None else ok.where(x, f32(0)) for x, (_, ok) in zip(less, places, strict=True)]
    if norm.eps is not None:
        factor = block.factor(values, slot + 2, norm.eps)
        values = [value * factor for value in values]
    result = []
    for value, (column, ok) in zip(values, places, strict=True):
        value = value if weight is None else value * load(weight, column, ok)
        result.append(value if bias is None else value + load(bias, column, ok))
    return result


@functools.cache
def activate_rows(
    size: int, cols: int, up: Terms, gate: Terms | None = None, activation: UngatedActivation | None = None,
    clamps: bool = False, form: Form = "fragments",
) -> Kernel:  # fmt: skip
    """activation(gate) * up, or without a gate activation(up), or up itself. Buffers: out, in a `Form`; up and gate,
    each with a bias and limits; clamp, as in `norm_patches`; count."""

    def kernel(
        out: UOp, up_sums: UOp, up_bias: UOp | None, up_limits: UOp | None, gate_sums: UOp | None,
        gate_bias: UOp | None, gate_limits: UOp | None, clamp: UOp | None, count: UOp,
    ) -> UOp:  # fmt: skip
        column, row, ok = _element(size, cols, count)
        value = up.load(up_sums, up_bias, up_limits, (size, row, column, cols), ok)
        if gate and gate_sums is not None and activation:
            own = gate.load(gate_sums, gate_bias, gate_limits, (size, row, column, cols), ok)
            value = activated(own, activation) * value
        elif activation:
            value = activated(value, activation)
        stores = [_store(out, form, row, column, cols, clamped(value, clamp), ok)]
        return finish(f"patch_activate_{size}_{cols}_{activation or 'nothing'}".replace(" ", "_"), stores)

    names: list[str | bool] = []
    for name, terms in ("up", up), ("gate", gate):
        if terms:
            names += [
                f"{name}_sums",
                terms.has_bias and f"{name}_bias",
                terms.has_limits and f"{name}_limits",
            ]
    inputs = tuple(name for name in (*names, clamps and "clamp", "count") if isinstance(name, str))
    return Kernel(kernel, ("out",), inputs)


@functools.cache
def merge_rows(merged: int, cols: int, merge: int, how: MergeHow) -> Kernel:
    """The rows of tokens from those of their patches (`Merge`). Buffers: out, float32 (merged, columns); rows, float32
    (patches, cols); count, of tokens."""
    n = merge * merge
    width = cols if how == "mean" else n * cols

    def kernel(out: UOp, rows: UOp, count: UOp) -> UOp:
        column, token, ok = _element(merged, width, count)
        if how == "mean":
            values = [load(rows, (token * n + i) * cols + column, ok) for i in range(n)]
            value = chain(values) * f32(1 / n)
        elif how == "join":
            value = load(rows, token * width + column, ok)
        else:
            value = load(rows, (token * n + column % n) * cols + column // n, ok)
        return finish(f"patch_merge_{merged}_{width}_{how}", [store(out, token * width + column, value, ok)])

    return Kernel(kernel, ("out",), ("rows", "count"))


@functools.cache
def neighbour_rows(
    size: int, cols: int, kernel_side: int, stride: int, side: int, is_ordered: bool
) -> Kernel:
    """What a convolution reads (`Neighbours`): `kernel_side` x `kernel_side` rows of those that a token has `side` x
    `side` of, channel by channel, for every `stride`-th row and column of them. Rows are those of a picture, row by
    row, or token by token if they are `is_ordered`. Buffers: out, float32 (size, columns); rows, float32 (n, cols);
    count: of rows of out, and at index 1 the columns of tokens."""
    area, per_token = kernel_side**2, (side // stride) ** 2

    def kernel(out: UOp, rows: UOp, count: UOp) -> UOp:
        column, row, ok = _element(size, cols * area, count)
        tokens = load(count, 1).maximum(1).cast(row.dtype)
        width, height = tokens * side, used_rows(count, size) // per_token // tokens * side
        across = width // stride
        place = column % area
        y = row // across * stride + place // kernel_side - kernel_side // 2
        x = row % across * stride + place % kernel_side - kernel_side // 2
        inside = ok & (y >= 0) & (y < height) & (x >= 0) & (x < width)
        y, x = y.maximum(0), x.maximum(0)
        source = y * width + x
        if is_ordered:
            source = (y // side * tokens + x // side) * side**2 + y % side * side + x % side
        value = inside.where(load(rows, source * cols + column // area, inside), f32(0))
        name = f"patch_neighbours_{size}_{cols}_{kernel_side}_{stride}_{side}"
        return finish(name, [store(out, row * (cols * area) + column, value, ok)])

    return Kernel(kernel, ("out",), ("rows", "count"))


@functools.cache
def place_rows(size: int, cols: int, width: int, first: int) -> Kernel:
    """Rows as columns of wider ones, from `first` on. Buffers: out, float32 (size, width); rows, float32 (size, cols);
    count."""

    def kernel(out: UOp, rows: UOp, count: UOp) -> UOp:
        column, row, ok = _element(size, cols, count)
        value = load(rows, row * cols + column, ok)
        return finish(
            f"patch_place_{size}_{cols}_{first}", [store(out, row * width + first + column, value, ok)]
        )

    return Kernel(kernel, ("out",), ("rows", "count"))


@functools.cache
def scale_rows(size: int, cols: int, factor: float, has_minus: bool, has_times: bool) -> Kernel:
    """(row * factor - minus) * times (`Affine`). Buffers: out and rows, float32 (size, cols); minus and times, float32
    (cols,); count."""

    def kernel(out: UOp, rows: UOp, minus: UOp | None, times: UOp | None, count: UOp) -> UOp:
        column, row, ok = _element(size, cols, count)
        value = load(rows, row * cols + column, ok) * f32(factor)
        value = value if minus is None else value - load(minus, column, ok)
        value = value if times is None else value * load(times, column, ok)
        return finish(f"patch_scale_{size}_{cols}", [store(out, row * cols + column, value, ok)])

    return Kernel(kernel, ("out",), ("rows", has_minus and "minus", has_times and "times", "count"))


@dataclass(frozen=True)
class PatchHeads:
    """The heads of an encoder's attention. `norms`: the epsilons of the norms of queries, keys and values over a head
    (None: no norm); queries and keys have weights. `turns`: queries and keys are rotated. `scale`: of scores.
    `sharing`: how many heads have the same keys and values."""

    count: int
    dim: int
    norms: tuple[float | None, float | None, float | None]
    turns: bool
    scale: float
    sharing: int = 1

    @property
    def padded(self) -> int:
        """Elements of a head in memory: those of whole tiles. The last ones are zeros."""
        return -(-self.dim // 16) * 16

    def size(self, rows: int) -> int:
        """Elements of the queries, the keys or the values of so many rows."""
        return self.count * rows * self.padded


def operand_index(heads: PatchHeads, size: int, which: UOp, head: UOp, row: UOp, d: UOp) -> UOp:
    """The index of an element of queries (`which` is 0), keys (1) or values (2), which are [head, 16 rows, 16
    dimensions, thread, element]: tiles of tensor cores. Thread 4g + t has the t-th four dimensions of queries g and
    g + 8, and of keys 2g and 2g + 1; and the dimensions 2g and 2g + 1 of the t-th four values."""
    tile = ((head * (size // 16) + row // 16) * (heads.padded // 16) + d // 16) * 256
    r, e = row % 16, d % 16
    query = (r % 8 * 4 + e // 4) * 8 + e % 4 // 2 * 4 + r // 8 * 2 + e % 2
    key = (r // 2 * 4 + e // 4) * 8 + r % 2 * 4 + e % 4
    value = (e // 2 * 4 + r // 4) * 8 + e % 2 * 4 + r % 4
    return tile + which.eq(0).where(query, which.eq(1).where(key, value))


@functools.cache
def rotate_patches(
    heads: PatchHeads,
    size: int,
    parts: tuple[int, ...],
    sizes: tuple[int, ...],
    has_bias: bool,
    has_limits: bool,
) -> Kernel:
    """Norms and rotates queries and keys, for `attend_patches`. Their products with the values come in runs of `sizes`
    columns (`Runs`). Buffers: operands, float16, queries, keys and values one after the other (`operand_index`): those
    of the rows after the last up to a multiple of `ROWS` are zeros; sums, those of each run; bias, float32 (columns of
    all,); limits, float32 (3, 2), of queries, keys and values; cos and sin, float32 (size, dim / 2); norms, the weights
    of those of queries and keys, float32 (2, dim); count."""
    h, half = heads, heads.dim // 2
    total, per_block = 3 * h.count, max(1, _THREADS // half)
    runs = Runs(size, parts, sizes)

    def kernel(
        operands: UOp, sums: Sequence[UOp], bias: UOp | None, limits: UOp | None, cos: UOp | None, sin: UOp | None,
        norms: UOp | None, count: UOp,
    ) -> UOp:  # fmt: skip
        d, own = UOp.special(half, "lidx0"), UOp.special(per_block, "lidx1")
        row, block = UOp.special(size, "gidx0"), UOp.special(-(-total // per_block), "gidx1")
        section = block * per_block + own
        inside, n = section < total, used_rows(count, size)
        live = inside & (row < (n + (ROWS - 1)) // ROWS * ROWS)
        ok = inside & (row < n)
        which, head = (section // h.count).minimum(2), section % h.count
        of_keys = h.count + ((which - 1) * h.count + head) // h.sharing
        column = (section if h.sharing == 1 else which.eq(0).where(head, of_keys)) * h.dim
        pair = [runs.load(sums, bias, row, column + e, ok) for e in (d, d + half)]
        pair = [clamped(x, limits, which * 2) for x in pair]
        if any(h.norms):
            squares = shared(per_block * half, 0)
            squares = after_store(squares, own * half + d, pair[0] * pair[0] + pair[1] * pair[1])
            total_squares = chain(load_run(squares, own * half, half))
            factors = [f32(1) if eps is None else inverse_rms(total_squares, h.dim, eps) for eps in h.norms]
            factor = which.eq(0).where(factors[0], which.eq(1).where(factors[1], factors[2]))
            pair = [x * factor for x in pair]
            if norms is not None:
                weights = [load(norms, which.minimum(1) * h.dim + e) for e in (d, d + half)]
                pair = [which.eq(2).where(x, x * w) for x, w in zip(pair, weights, strict=True)]
        if cos is not None and sin is not None:
            c, s = (load(of, row * half + d, ok) for of in (cos, sin))
            a, b = pair
            turned = [a * c - b * s, b * c + a * s]
            pair = [which.eq(2).where(x, y) for x, y in zip(pair, turned, strict=True)]
        scale = which.eq(0).where(f32(h.scale * LOG2_E), f32(1))
        stores = []
        for x, e in zip(pair, (d, d + half), strict=True):
            place = which * h.size(size) + operand_index(h, size, which, head, row, e)
            stores.append(store(operands, place, as_half(ok.where(x * scale, f32(0))), live))
        return finish(f"patch_rotate_{h.count}_{h.dim}_{size}", stores)

    return Kernel(
        kernel,
        ("operands",),
        (
            ("sums", len(sizes)),
            has_bias and "bias",
            has_limits and "limits",
            h.turns and "cos",
            h.turns and "sin",
            h.norms[0] is not None and "norms",
            "count",
        ),
    )


def _element(size: int, cols: int, count: UOp) -> tuple[UOp, UOp, UOp]:
    """The column and the row of a thread, and whether there is such an element."""
    column = UOp.special(-(-cols // _THREADS), "gidx0") * _THREADS + UOp.special(_THREADS, "lidx0")
    row = UOp.special(size, "gidx1")
    ok = row < used_rows(count, size)
    return column, row, ok if cols % _THREADS == 0 else ok & (column < cols)


def _store(out: UOp, form: Form, row: UOp, column: UOp, cols: int, value: UOp, ok: UOp | None) -> UOp:
    if form == "rows":
        return store(out, row * cols + column, value, ok)
    return store(out, fragment_index(row, column, cols), as_half(value), ok)
