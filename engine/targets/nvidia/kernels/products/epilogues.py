"""The last parts of the kernels of `matvec`: what they do with the rows of a block."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tinygrad import UOp

from engine.kernels.kernel import Kernel, Name
from engine.targets.nvidia.kernels.products.digit_rows import WORD_BYTES, Divided, form_of
from engine.targets.nvidia.kernels.uops import (
    I32,
    Activation,
    after_store,
    block_totals,
    chain,
    curved,
    f32,
    finish,
    gated,
    least_counting,
    load,
    load_run,
    shared,
    soft_capped,
    store,
    tree,
    within,
)
from engine.targets.nvidia.kernels.weights.matrix_bytes import UNIT
from engine.targets.nvidia.kernels.weights.weight_layout import permuted, permuted_size

LOWEST_LOGIT = -3e38  # below any logit


@dataclass(frozen=True)
class BlockRows:
    """The rows of block `block`: `count` rows from `first` on, below `end` (None if all blocks are whole), of `total`
    rows. The partial sums are in shared memory, and `product(i, valid)` gives the i-th row's product to any thread.
    `thread` is the number of the current one, `slot` the result's (`StackedMatrices.slots`), if there are several."""

    count: int
    total: int
    first: UOp
    end: UOp | None
    block: UOp
    thread: UOp
    product: Callable[[UOp, UOp], UOp]
    slot: UOp | None = None

    def index(self, i: UOp) -> UOp:
        return self.first + i

    def valid(self, i: UOp, step: int = 1) -> UOp:
        """Whether the block has an i-th row, or an i-th run of `step` rows."""
        ok = i < self.count // step
        return ok if self.end is None else ok & (self.index(i * step) < self.end)


@dataclass(frozen=True)
class Epilogue:
    """The last part of a product's kernel: `stores` takes the block's rows, and as parameters of their names the
    buffers `outs`, to which it gives the kernel's stores, and `ins`, which these may depend on. A run of `pair` rows
    must be in one block. `by_slot`: whether it stores results by their slot."""

    outs: tuple[Name, ...]
    ins: tuple[Name, ...]
    pair: int
    stores: Callable[..., list[UOp]]
    by_slot: bool = False


def _store(rows: BlockRows, out: UOp) -> list[UOp]:
    i = rows.thread
    ok, place = rows.valid(i), rows.index(i)
    if rows.slot is not None:
        place = place + rows.slot * rows.total
    return [store(out, place, rows.product(i, ok), ok)]


def _digits(rows: BlockRows, value: UOp, pair: int, bits: int, digits: UOp, factors: UOp) -> list[UOp]:
    """Stores digits and factors of a vector (`digit_rows.divide`), for a layout of these `input_scale_bits`. `value`:
    the number that a thread has of those of the block, one for each run of `pair` rows (`makes_digits`)."""
    i, n, count, form = rows.thread, rows.total // pair, rows.count // pair, form_of(bits)
    vector = UOp.const(0) if rows.slot is None else rows.slot
    values = after_store(shared(count, slot=4), i, value, i < count)
    n_words, each = count // WORD_BYTES, form.group_words
    word = i.minimum(n_words - 1)
    own, ok = word // each, i < n_words
    divided = Divided.of(form, load_run(values, own * form.group, form.group))
    group = rows.first // pair // form.group + own
    four = [load(values, own * form.group + column) for column in form.columns(word % each)]
    words = divided.store_word(digits, n, vector, group, word % each, four, ok)
    return [*words, *divided.store_factor(factors, n, vector, group, ok & (i % each).eq(0))]


def _store_squares(rows: BlockRows, out: UOp, squares: UOp) -> list[UOp]:
    i = rows.thread
    ok, row = rows.valid(i), rows.index(i)
    value = rows.product(i, ok)
    return [store(out, row, value, ok), _store_sum_of_squares(squares, value, ok, rows)]


def _store_sum_of_squares(out: UOp, value: UOp, ok: UOp, rows: BlockRows) -> UOp:
    """Stores the sum of the squares of a block's values, of which each thread with `ok` has one."""
    i = rows.thread
    square = ok.where(value * value, f32(0))
    squares = after_store(shared(rows.count, slot=1), i, square, i < rows.count)
    return store(out, rows.block, tree(load_run(squares, 0, rows.count)), i.eq(0))


STORE = Epilogue(("out",), (), 1, _store, by_slot=True)
"""out[row] = product. outs: out, float32 (rows,), of experts (used, rows)."""


@functools.cache
def stored(has_bias: bool = False, limit: float = 0.0) -> Epilogue:
    """As STORE, or out[row] = product + bias[row], cut to -limit to limit if there is one. ins: bias, float32 (rows,),
    if it `has_bias`."""
    if not (has_bias or limit):
        return STORE

    def stores(rows: BlockRows, out: UOp, bias: UOp | None) -> list[UOp]:
        i = rows.thread
        ok, row = rows.valid(i), rows.index(i)
        value = rows.product(i, ok) if bias is None else rows.product(i, ok) + load(bias, row, ok)
        return [store(out, row, within(value, limit), ok)]

    return Epilogue(("out",), (has_bias and "bias",), 1, stores)


STORE_BIASED = stored(has_bias=True)

STORE_SQUARES = Epilogue(("out", "squares"), (), 1, _store_squares)
"""As STORE, for `post_norm`. outs: out, float32 (rows,); squares, partial sums of them, float32 (blocks,)."""


@functools.cache
def as_logits(softcap: float = 0.0, has_bias: bool = False) -> Epilogue:
    """Stores logits, with a soft cap if there is one, and the largest of each block, without it, with its row. outs:
    logits, float32 (rows,); largest, float32 (blocks,); largest_rows, int32 (blocks,); ins: bias, which is added to the
    product, float32 (rows,), if it `has_bias`."""

    def stores(rows: BlockRows, logits: UOp, largest: UOp, largest_rows: UOp, bias: UOp | None) -> list[UOp]:
        i = rows.thread
        ok, row, first = rows.valid(i), rows.index(i), i.eq(0)
        value = rows.product(i, ok) if bias is None else rows.product(i, ok) + load(bias, row, ok)
        masked = ok.where(comparable(value), f32(LOWEST_LOGIT))
        values = after_store(shared(rows.count, slot=1), i, masked, i < rows.count)
        block_max, block_row = argmax([(load(values, k), UOp.const(k, I32)) for k in range(rows.count)])
        return [
            store(logits, row, soft_capped(value, softcap), ok),
            store(largest, rows.block, block_max, first),
            store(largest_rows, rows.block, block_row + rows.first.cast(I32), first),
        ]

    return Epilogue(("logits", "largest", "largest_rows"), (has_bias and "bias",), 1, stores)


@functools.cache
def add_residual(copies: int = 1, bias: bool = False, divides: int = 0) -> Epilogue:
    """Adds the product to the residual stream, and prepares the stream for the next products: permuted, and multiplied
    by the next norm's weight and by their input_scales. outs: stream, float32 (rows,); squares, partial sums of its
    squares, float32 (blocks,); `copies` permuted vectors, one for each input_scale; ins: norms, for each copy the
    norm's weight times the input_scale, float32 (rows,); bias, which is added to the product, float32 (rows,). If it
    `divides` the stream for a product whose vector comes in digits (`makes_digits`), the outs digits and factors are,
    for a layout of these `input_scale_bits`, those of the stream times digits_norm, the norm's weight, float32
    (rows,)."""
    outs: tuple[Name, ...] = ("stream", "squares", ("copies", copies))
    ins: tuple[Name, ...] = (("norms", copies), bias and "bias")
    if divides:
        outs, ins = (*outs, "digits", "factors"), (*ins, "digits_norm")

    def stores(
        rows: BlockRows, stream: UOp, squares: UOp, copies: Sequence[UOp], norms: Sequence[UOp], bias: UOp | None,
        digits: UOp | None, factors: UOp | None, digits_norm: UOp | None,
    ) -> list[UOp]:  # fmt: skip
        i = rows.thread
        ok, row = rows.valid(i), rows.index(i)
        value = load(stream, row, ok) + rows.product(i, ok)
        if bias is not None:
            value = value + load(bias, row, ok)
        stores = [store(stream, row, value, ok), _store_sum_of_squares(squares, value, ok, rows)]
        for out, weight in zip(copies, norms, strict=True):
            stores.append(store(out, permuted(row, rows.total), value * load(weight, row, ok), ok))
        if digits is not None and factors is not None and digits_norm is not None:
            stores += _digits(rows, value * load(digits_norm, row, ok), 1, divides, digits, factors)
        return stores

    return Epilogue(outs, ins, 1, stores)


@functools.cache
def add_to_stream(has_bias: bool = False) -> Epilogue:
    """Adds the product to the residual stream, which is not ready for the next products then. outs: stream, float32
    (rows,); ins: bias, which is added to the product, float32 (rows,), if it `has_bias`."""

    def stores(rows: BlockRows, stream: UOp, bias: UOp | None) -> list[UOp]:
        i = rows.thread
        ok, row = rows.valid(i), rows.index(i)
        value = load(stream, row, ok) + rows.product(i, ok)
        return [store(stream, row, value if bias is None else value + load(bias, row, ok), ok)]

    return Epilogue(("stream",), (has_bias and "bias",), 1, stores)


@functools.cache
def activated_ungated(activation: Activation, has_bias: bool, has_curve: bool = False) -> Epilogue:
    """activation(product), or activation(product + bias), permuted and scaled for the next product. outs: out, that
    vector, of experts (used, permuted_size(rows)); ins: its input_scale, float32 (UNIT,); bias, float32 (rows,), if it
    `has_bias`; curve, if it `has_curve`, which takes the place of the activation: float32 (4,) (`uops.curved`)."""

    def stores(rows: BlockRows, out: UOp, input_scale: UOp, bias: UOp | None, curve: UOp | None) -> list[UOp]:
        i = rows.thread
        ok, row = rows.valid(i), rows.index(i)
        value = rows.product(i, ok) if bias is None else rows.product(i, ok) + load(bias, row, ok)
        value = gated(value, f32(1), activation) if curve is None else curved(value, curve)
        value = value * load(input_scale, row % UNIT, ok)
        return [store(out, _in_slot(permuted(row, rows.total), rows.total, rows), value, ok)]

    ins = "input_scale", has_bias and "bias", has_curve and "curve"
    return Epilogue(("out",), ins, 1, stores, by_slot=True)


@functools.cache
def activated(activation: Activation) -> Epilogue:
    """activation(gate) * up, from rows that alternate between gate and up, permuted and scaled for the next product.
    outs: out, that vector, of experts (used, permuted_size(rows / 2)); ins: its input_scale, float32 (UNIT,)."""

    def stores(rows: BlockRows, out: UOp, input_scale: UOp) -> list[UOp]:
        i = rows.thread
        ok = rows.valid(i, 2)
        column = rows.first // 2 + i
        value = gated(rows.product(i * 2, ok), rows.product(i * 2 + 1, ok), activation)
        value = value * load(input_scale, column % UNIT, ok)
        n = rows.total // 2
        return [store(out, _in_slot(permuted(column, n), n, rows), value, ok)]

    return Epilogue(("out",), ("input_scale",), 2, stores, by_slot=True)


@functools.cache
def activated_in_digits(activation: Activation, bits: int) -> Epilogue:
    """As `activated`, for a next product of a layout of these `input_scale_bits`, whose vector comes in digits
    (`makes_digits`). outs: digits and factors, of experts those of each (`digit_rows.divide`)."""

    def stores(rows: BlockRows, digits: UOp, factors: UOp) -> list[UOp]:
        i = rows.thread
        ok = rows.valid(i, 2)
        value = gated(rows.product(i * 2, ok), rows.product(i * 2 + 1, ok), activation)
        return _digits(rows, value, 2, bits, digits, factors)

    return Epilogue(("digits", "factors"), (), 2, stores, by_slot=True)


def makes_digits(bits: int, columns: int, n: int) -> bool:
    """Whether blocks that make so many of the n numbers of a vector can make their digits, for a layout of these
    `input_scale_bits`: they have whole groups."""
    return columns % form_of(bits).group == 0 and n % columns == 0


def _in_slot(place: UOp, n: int, rows: BlockRows) -> UOp:
    """A place among the n numbers of a slot's vector, in all of them."""
    return place if rows.slot is None else place + rows.slot * permuted_size(n)


def _embed(rows: BlockRows, out: UOp, embedding: UOp, input_scale: UOp) -> list[UOp]:
    i = rows.thread
    ok, row = rows.valid(i), rows.index(i)
    value = gated(rows.product(i, ok), load(embedding, row, ok), "gelu") * load(input_scale, row % UNIT, ok)
    return [store(out, permuted(row, rows.total), value, ok)]


EMBED = Epilogue(("out",), ("embedding", "input_scale"), 1, _embed)
"""gelu(product) * embedding, permuted and scaled for the next product. outs: out, that vector; ins: embedding,
float32 (rows,); input_scale, float32 (UNIT,)."""


@functools.cache
def routed(n: int, activation: Activation, pair: int = 2) -> Epilogue:
    """Stores the product of the first `n` rows, those of a router and of a shared expert's gate, and the others as
    `activated` does: they alternate between that expert's gate and up, or are of up alone if `pair` is 1, and are
    another matrix. outs: logits, float32 (n,); out, the vector, float32 (permuted_size((rows - n) / pair),); ins: its
    input_scale, float32 (UNIT,)."""

    def stores(rows: BlockRows, logits: UOp, out: UOp, input_scale: UOp) -> list[UOp]:
        i, is_logit = rows.thread, rows.first < n
        ok = rows.valid(i) & is_logit
        results = [store(logits, rows.index(i), rows.product(i, ok), ok)]
        ok = rows.valid(i, pair) & (rows.first >= n)
        column = ((rows.first - n) // pair + i).maximum(0)
        products = [rows.product(i * pair + k, ok) for k in range(pair)]
        value = gated(products[0], products[1] if pair == 2 else f32(1), activation)
        value = value * load(input_scale, column % UNIT, ok)
        return [*results, store(out, permuted(column, (rows.total - n) // pair), value, ok)]

    return Epilogue(("logits", "out"), ("input_scale",), pair, stores)


@functools.cache
def activate(
    n: int, activation: Activation = "silu", slots: int = 1, first: int = 0, sparsity: float = 0.0
) -> Kernel:
    """activation(gate) * up, if the two are separate matrices. With a `sparsity`, only the largest gates count, which
    each block finds by itself. Buffers: out, permuted and scaled, of experts (slots, permuted_size(n)); rows, from
    `first` on gate and then up, float32 (slots, 2 * n); input_scale, float32 (UNIT,)."""
    threads = 256

    def kernel(out: UOp, rows: UOp, input_scale: UOp) -> UOp:
        column = UOp.special(-(-n // threads), "gidx0") * threads + UOp.special(threads, "lidx0")
        slot = UOp.special(slots, "gidx1") if slots > 1 else UOp.const(0)
        ok = None if n % threads == 0 else column < n
        row = slot * (2 * n) + column + first
        gate = load(rows, row, ok)
        if sparsity:
            assert slots == 1 and not first
            gate = (gate - _least(rows, n, threads, sparsity)).maximum(0.0)
        value = gated(gate, load(rows, row + n, ok), activation)
        value = value * load(input_scale, column % UNIT, ok)
        place = permuted(column, n) + slot * permuted_size(n)
        return finish(f"activate_{n}", [store(out, place, value, ok)])

    return Kernel(kernel, ("out",), ("rows", "input_scale"))


def _least(gates: UOp, n: int, threads: int, sparsity: float) -> UOp:
    """What n gates have to exceed to count, of which each thread of a block adds up some."""
    thread = UOp.special(threads, "lidx0")
    quads = [(thread + q * threads) * 4 for q in range(-(-n // (4 * threads)))]
    values = [x for quad in quads for x in load_run(gates, quad, 4, quad < n)]
    own = chain(values), chain(x * x for x in values)
    total, squares = block_totals(own, thread, threads, slot=2)
    return least_counting(total * f32(1 / n), squares, n, sparsity)


def comparable(logit: UOp) -> UOp:
    """A logit, or infinity in place of NaN, which compares with nothing: so it is found as the largest one."""
    return (logit < f32(math.inf)).where(logit, f32(math.inf))


def is_finite(largest: UOp) -> UOp:
    """Whether the largest of logits that are `comparable` is a number, so that a token can be chosen."""
    return (largest > f32(LOWEST_LOGIT)) & (largest < f32(math.inf))


def argmax(candidates: Sequence[tuple[UOp, UOp]]) -> tuple[UOp, UOp]:
    """The (value, index) pair with the largest value, and of equal values the first. The pairs are sorted by index."""
    pairs = list(candidates)
    while len(pairs) > 1:
        joined = []
        for (a, i), (b, j) in zip(pairs[0::2], pairs[1::2], strict=False):
            later = b > a
            joined.append((later.where(b, a), later.where(j, i)))
        pairs = joined + pairs[len(pairs) // 2 * 2 :]
    return pairs[0]
