"""Streams beside the residual one, which a layer mixes as it begins and as it ends (`engine.description.altup`).

What mixes them depends on the whole residual stream of a token, so a block goes over all of it, and adds up what it
needs in one pass. Of a prompt, a block has a token, whose streams it changes in place. A decode step has one token, and
several blocks, each with a share of its elements: there the residual stream comes as a copy, which no other block
changes meanwhile, permuted as the inputs of products are, and the next products' inputs are left, as by
`epilogues.add_residual`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from tinygrad import UOp

from engine.kernels.kernel import Kernel, Name
from engine.targets.nvidia.kernels.products.activation_order import PLACES, Order
from engine.targets.nvidia.kernels.products.matmul import as_half
from engine.targets.nvidia.kernels.uops import (
    block_totals,
    chain,
    f32,
    finish,
    inverse_rms,
    load,
    soft_capped,
    store,
)
from engine.targets.nvidia.kernels.weights.matrix_bytes import UNIT
from engine.targets.nvidia.kernels.weights.weight_layout import permuted

_THREADS = 256

Place = tuple[UOp, UOp | None]
"""A column, and whether there is one (None: always)."""


@dataclass(frozen=True)
class Streams:
    """`count` streams of `tokens` tokens, of `cols` elements each; 0 tokens stand for one of a decode step. `eps`: that
    of norms."""

    tokens: int
    cols: int
    count: int
    eps: float

    @property
    def blocks(self) -> int:
        """The blocks of a token."""
        return 1 if self.tokens else -(-self.cols // _THREADS)

    @property
    def name(self) -> str:
        return f"{self.count}_streams_{self.tokens}_{self.cols}"

    @property
    def outs(self) -> tuple[Name, ...]:
        return "stream", not self.tokens and "squares"


class _Token:
    """A block of a token. `whole`: the columns of which this thread adds up what the block needs; `own`: those that it
    stores."""

    def __init__(self, streams: Streams) -> None:
        self.streams, self.thread = streams, UOp.special(_THREADS, "lidx0")
        self.token = UOp.special(streams.tokens, "gidx0") if streams.tokens else UOp.const(0)
        self.block = UOp.const(0) if streams.tokens else UOp.special(streams.blocks, "gidx0")
        quads = -(-streams.cols // (4 * _THREADS))
        columns = [(self.thread + q * _THREADS) * 4 + i for q in range(quads) for i in range(4)]
        self.whole = [self._place(column, 4 * quads * _THREADS) for column in columns]
        own = self.block * _THREADS + self.thread
        self.own = self.whole if streams.tokens else [self._place(own, streams.blocks * _THREADS)]

    def _place(self, column: UOp, most: int) -> Place:
        return column, None if most == self.streams.cols else column < self.streams.cols

    def row(self, buffer: UOp, places: Sequence[Place], part: int = 0) -> list[UOp]:
        """A token's elements of a buffer (parts, tokens, cols)."""
        first = (self.token + part * max(self.streams.tokens, 1)) * self.streams.cols
        return [load(buffer, first + column, ok) for column, ok in places]

    def sums_of(self, buffer: UOp, parts: int, places: Sequence[Place]) -> list[UOp]:
        """The elements of a product that comes as partial sums."""
        rows = [self.row(buffer, places, part) for part in range(parts)]
        return [chain(terms) for terms in zip(*rows, strict=True)]

    def residual(self, x: UOp, places: Sequence[Place]) -> list[UOp]:
        """Elements of the residual stream, or of the copy of a decode step."""
        if self.streams.tokens:
            return self.row(x, places)
        return [load(x, permuted(column, self.streams.cols), ok) for column, ok in places]

    def dots(self, vectors: UOp, count: int, values: Sequence[UOp]) -> list[UOp]:
        """A thread's parts of the products of vectors (count, cols) and values."""
        rows = ([load(vectors, i * self.streams.cols + c, ok) for c, ok in self.whole] for i in range(count))
        return [chain(a * b for a, b in zip(row, values, strict=True)) for row in rows]

    def totals(self, own: Sequence[UOp]) -> list[UOp]:
        """The sums over all threads of a few numbers that each has."""
        return block_totals(own, self.thread, _THREADS, slot=0)

    def left(
        self, stream: UOp, squares: UOp | None, copies: Sequence[UOp], norms: Sequence[UOp], values: Sequence[UOp]
    ) -> list[UOp]:  # fmt: skip
        """The stores of the residual stream's new elements, and of a decode step those for the next products."""
        stores = self.stores(stream, values)
        if squares is None:
            return stores
        ((column, ok),), (value,), n = self.own, values, self.streams.cols
        square = value * value if ok is None else ok.where(value * value, f32(0))
        (total,) = block_totals([square], self.thread, _THREADS, slot=2)
        stores.append(store(squares, self.block, total, self.thread.eq(0)))
        for out, weight in zip(copies, norms, strict=True):
            stores.append(store(out, permuted(column, n), value * load(weight, column, ok), ok))
        return stores

    def stores(self, buffer: UOp, values: Sequence[UOp]) -> list[UOp]:
        """Stores this thread's elements of a stream."""
        first = self.token * self.streams.cols
        return [store(buffer, first + c, x, ok) for (c, ok), x in zip(self.own, values, strict=True)]

    def mixed(self, coefficients: UOp, dots: Sequence[UOp], squares: UOp, rows: int) -> list[UOp]:
        """The products of coefficients (rows, count) and of the router's modes, from its products with the stream."""
        count, factor = self.streams.count, inverse_rms(squares, self.streams.cols, self.streams.eps)
        modes = [soft_capped(dot * factor, 1.0) for dot in dots]
        return [
            chain(load(coefficients, row * count + k) * mode for k, mode in enumerate(modes))
            for row in range(rows)
        ]


def _squares(values: Sequence[UOp]) -> UOp:
    return chain(value * value for value in values)


@functools.cache
def predict(s: Streams, parts: tuple[int, ...], copies: int = 0) -> Kernel:
    """Begins a layer. Buffers: stream, float32 (tokens, cols); squares of a decode step, partial sums of its squares,
    float32 (blocks,); predicted, the stream once more; others, the other streams, float32 (tokens, cols) each; `copies`
    permuted vectors; x, the residual stream before; rows, what is added to each of the other streams, normed, partial
    sums, float32 (parts, tokens, cols), with the norm's weight, float32 (cols,); or if there are `parts` of several,
    what they begin as, made as long as the residual stream is; router, float32 (count, cols); coefficients, float32
    (count * count, count); norms, for each copy the weight, float32 (cols,)."""
    begins = len(parts) > 1 or s.count == 2

    def kernel(
        stream: UOp, squares: UOp | None, predicted: UOp, others: Sequence[UOp], copies: Sequence[UOp],
        x: UOp | None, rows: Sequence[UOp], norm: UOp | None, router: UOp, coefficients: UOp,
        norms: Sequence[UOp],
    ) -> UOp:  # fmt: skip
        token = _Token(s)
        source = stream if x is None else x
        values = token.residual(source, token.whole)
        of_rows = [_squares(token.sums_of(r, n, token.whole)) for r, n in zip(rows, parts, strict=True)]
        length, *sums = token.totals([_squares(values), *of_rows, *token.dots(router, s.count, values)])
        sums, dots = sums[: len(rows)], sums[len(rows) :]
        mixed = token.mixed(coefficients, dots, length, s.count**2)
        added = [token.sums_of(r, n, token.own) for r, n in zip(rows, parts, strict=True)]
        if norm is None:
            factors = [(length / of_row).sqrt() for of_row in sums]
            old = [[v * f for v in row] for row, f in zip(added, factors, strict=True)]
        else:
            factor = inverse_rms(sums[0], s.cols, s.eps)
            change = [v * factor * load(norm, *place) for v, place in zip(added[0], token.own, strict=True)]
            old = [
                [a + b for a, b in zip(token.row(other, token.own), change, strict=True)] for other in others
            ]
        streams = [token.residual(source, token.own), *old]
        new = [
            [
                own + chain(mixed[j * s.count + i] * v for i, v in enumerate(column))
                for own, column in zip(streams[j], zip(*streams, strict=True), strict=True)
            ]
            for j in range(s.count)
        ]
        stores = token.left(stream, squares, copies, norms, new[0]) + token.stores(predicted, new[0])
        for other, after in zip(others, new[1:], strict=True):
            stores += token.stores(other, after)
        return finish(f"{'begin' if norm is None else 'predict'}_{s.name}", stores)

    outs = (*s.outs, "predicted", ("others", s.count - 1), ("copies", copies))
    ins = not s.tokens and "x", ("rows", len(parts)), not begins and "norm", "router", "coefficients"
    return Kernel(kernel, outs, (*ins, ("norms", copies)))


@functools.cache
def correct(s: Streams, copies: int = 0) -> Kernel:
    """Ends a layer: s_i = p_i + (1 + c_i) (x - p_0). Buffers: stream, others, squares, copies, x, router and norms as
    in `predict`; predicted, p_0; coefficients, float32 (count, count)."""

    def kernel(
        stream: UOp, squares: UOp | None, others: Sequence[UOp], copies: Sequence[UOp], x: UOp | None,
        predicted: UOp, router: UOp, coefficients: UOp, norms: Sequence[UOp],
    ) -> UOp:  # fmt: skip
        token = _Token(s)
        source = stream if x is None else x
        values = token.residual(source, token.whole)
        length, *dots = token.totals([_squares(values), *token.dots(router, s.count, values)])
        factors = [c + f32(1) for c in token.mixed(coefficients, dots, length, s.count)]
        first = token.row(predicted, token.own)
        change = [x - p for x, p in zip(token.residual(source, token.own), first, strict=True)]
        old = [first, *(token.row(other, token.own) for other in others)]
        new = [
            [p + c * factor for p, c in zip(row, change, strict=True)]
            for row, factor in zip(old, factors, strict=True)
        ]
        stores = token.left(stream, squares, copies, norms, new[0])
        for other, after in zip(others, new[1:], strict=True):
            stores += token.stores(other, after)
        return finish(f"correct_{s.name}", stores)

    outs = (*s.outs, ("others", s.count - 1), ("copies", copies))
    ins = not s.tokens and "x", "predicted", "router", "coefficients", ("norms", copies)
    return Kernel(kernel, outs, ins)


@functools.cache
def gather(s: Streams, parts: int, order: Order = "columns") -> Kernel:
    """The other streams after all layers, for products of which only the direction counts: divided by the root mean
    square of the residual one. Buffers: outs, for each a permuted vector, or of a prompt activations, float16 in an
    `Order`; others, rows and norm as in `predict`; x, the residual stream, as there; input_scales of a decode step,
    those of the products, float32 (UNIT,) each."""

    def kernel(
        outs: Sequence[UOp], x: UOp, others: Sequence[UOp], rows: UOp, norm: UOp, input_scales: Sequence[UOp]
    ) -> UOp:
        token = _Token(s)
        length, of_rows = token.totals(
            [_squares(token.residual(x, token.whole)), _squares(token.sums_of(rows, parts, token.whole))]
        )
        scale, factor = inverse_rms(length, s.cols, s.eps), inverse_rms(of_rows, s.cols, s.eps)
        change = [
            v * factor * load(norm, *place)
            for v, place in zip(token.sums_of(rows, parts, token.own), token.own, strict=True)
        ]
        stores = []
        for i, (out, other) in enumerate(zip(outs, others, strict=True)):
            for (column, ok), before, added in zip(
                token.own, token.row(other, token.own), change, strict=True
            ):
                value = (before + added) * scale
                if s.tokens:
                    place, value = PLACES[order](token.token, column, s.cols), as_half(value)
                else:
                    place = permuted(column, s.cols)
                    value = value * load(input_scales[i], column % UNIT, ok)
                stores.append(store(out, place, value, ok))
        return finish(f"gather_{s.name}_{order}", stores)

    n = s.count - 1
    return Kernel(
        kernel, (("outs", n),), ("x", ("others", n), "rows", "norm", ("input_scales", 0 if s.tokens else n))
    )


@functools.cache
def merge(s: Streams, parts: tuple[int, ...], copies: int = 0) -> Kernel:
    """The mean of the residual stream and of `rows`, made as long. Buffers: as in `predict`."""

    def kernel(
        stream: UOp, squares: UOp | None, copies: Sequence[UOp], x: UOp | None, rows: Sequence[UOp],
        norms: Sequence[UOp],
    ) -> UOp:  # fmt: skip
        token = _Token(s)
        source = stream if x is None else x
        of_rows = [_squares(token.sums_of(r, n, token.whole)) for r, n in zip(rows, parts, strict=True)]
        length, *sums = token.totals([_squares(token.residual(source, token.whole)), *of_rows])
        factors = [(length / of_row).sqrt() for of_row in sums]
        added = [token.sums_of(r, n, token.own) for r, n in zip(rows, parts, strict=True)]
        values = [
            chain([own, *(v * f for v, f in zip(column, factors, strict=True))]) * f32(1 / s.count)
            for own, column in zip(token.residual(source, token.own), zip(*added, strict=True), strict=True)
        ]
        return finish(f"merge_{s.name}", token.left(stream, squares, copies, norms, values))

    outs = (*s.outs, ("copies", copies))
    return Kernel(kernel, outs, (not s.tokens and "x", ("rows", len(parts)), ("norms", copies)))
