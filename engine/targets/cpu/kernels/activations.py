"""Activations as matrix products read them: quantized to 16-bit integers, or float32 for float matrices.

32 neighbouring columns share a scale, so that a product adds integers within the group and scales once. Rounding the
activations to 16 bits costs an error of some 1e-5 of the result.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from math import pi
from typing import Literal

from tinygrad import UOp, dtypes
from tinygrad.dtype import DType
from tinygrad.uop.ops import Ops

from engine.kernels.compilation import KernelFunction
from engine.targets.cpu.kernels.kernel_builder import F32, I16, I32, Index, KernelBuilder, add, even_share
from engine.targets.cpu.kernels.step_state import TILES, n_tokens
from engine.targets.cpu.kernels.stream_size import UNIT
from engine.targets.cpu.kernels.weight_layout import PAIRS, LaneLayout

# The largest quantized activation: of steps of a few tokens, which so compute for each what a step of one computes, and
# of whole tiles. There 8-bit scales are multiplied into 6-bit weights (Q6_K), and the sum of 32 products must fit 32
# bits: 32 * 128 * 16383 * 32 < 2**31.
_MAX_FEW, _MAX_TILES = 32767, 16383


@dataclass(frozen=True)
class Activations:
    """The buffers that a product reads, `tile` tokens side by side; `buffer_types` gives their types and sizes.

    - `values` (tiles, cols / 2, tile, 2) and `scales` (tiles, cols / 32, tile), for quantized matrices
    - `sums` (tiles, cols / 16): sums of 16 values, for types with an offset, if tile is 1
    - `scaled_sums` (tiles, cols / 32, tile): sums of 32 values times their scale, for types with minima
    - `run_sums` (tiles, cols / 16, tile): sums of 16 values times their scale, for types with minima of 16 columns
    - `floats` (tiles, cols, tile), for float matrices
    """

    tile: int
    cols: Index
    values: UOp | None = None
    scales: UOp | None = None
    sums: UOp | None = None
    scaled_sums: UOp | None = None
    run_sums: UOp | None = None
    floats: UOp | None = None

    def pair(self, k: KernelBuilder, tile_number: Index, n: Index, token: Index) -> UOp:
        """Columns 2n and 2n + 1 of a token of a tile, int16 (2,)."""
        assert self.values is not None
        return k.vector(self.values, (tile_number * (self.cols // 2) + n) * (2 * self.tile) + token * 2, 2)

    def scale(self, k: KernelBuilder, tile_number: Index, unit: Index, token: Index) -> UOp:
        """The scale of the 32 columns of a unit, float32."""
        assert self.scales is not None
        return k.load(self.scales, (tile_number * (self.cols // UNIT) + unit) * self.tile + token)

    def sum(self, k: KernelBuilder, tile_number: Index, run: Index, columns: int) -> UOp:
        """The sum of the n-th run of 16 or 32 `columns`, int32."""
        assert self.sums is not None
        n = columns // PAIRS
        first = tile_number * (self.cols // PAIRS) + run * n
        return add(k.load(self.sums, first + i) for i in range(n))

    def scaled_sum(self, k: KernelBuilder, tile_number: Index, unit: Index, token: Index) -> UOp:
        """The sum of the 32 columns of a unit, float32."""
        assert self.scaled_sums is not None
        return k.load(self.scaled_sums, (tile_number * (self.cols // UNIT) + unit) * self.tile + token)

    def run_sum(self, k: KernelBuilder, tile_number: Index, run: Index, token: Index) -> UOp:
        """The sum of the n-th run of 16 columns, float32."""
        assert self.run_sums is not None
        return k.load(self.run_sums, (tile_number * (self.cols // PAIRS) + run) * self.tile + token)

    def float(self, k: KernelBuilder, tile_number: Index, column: Index, token: Index) -> UOp:
        assert self.floats is not None
        return k.load(self.floats, (tile_number * self.cols + column) * self.tile + token)


def buffer_type(name: str) -> tuple[DType, int]:
    """The type of a buffer of `Activations`, and how many columns share one of its elements."""
    return {
        "values": (dtypes.int16, 1),
        "scales": (dtypes.float32, UNIT),
        "sums": (dtypes.int32, UNIT // 2),
        "scaled_sums": (dtypes.float32, UNIT),
        "run_sums": (dtypes.float32, UNIT // 2),
        "floats": (dtypes.float32, 1),
    }[name]


def buffer_names(layouts: Sequence[LaneLayout], tile: int) -> tuple[str, ...]:
    """The buffers of `Activations` that products with matrices of these layouts read."""
    formats = [layout.format for layout in layouts]
    needed = {
        "values": any(formats),
        "scales": any(formats),
        "sums": tile == 1 and any(f and f.offset for f in formats),
        "scaled_sums": any(f and "m" in f.scales and not f.has_nibble_scales for f in formats),
        "run_sums": any(f and f.has_nibble_scales for f in formats),
        "floats": not all(formats),
    }
    return tuple(name for name, is_needed in needed.items() if is_needed)


Gate = (
    Literal["silu", "gelu", "quick gelu", "swiglu_oai", "relu", "relu2", "xielu", "sigmoid", "tanh"]
    | tuple[float, float]
)


@dataclass(frozen=True)
class Quantization:
    """How the activations of a product are made from rows x, float32 (tokens, cols): `outputs` are the buffers of
    `Activations` to write. With `eps` the rows are RMS-normed and multiplied by a weight; with `gated` they are gates
    of other rows: silu(x) * other, gelu(x) * other, sigmoid(x) * other, or gpt-oss's; if `alone`, there are no others,
    and silu(x) is quantized, say. If `biased`, a bias is added to normed rows. With `rows`, as many rows as the state
    has tiles are quantized if `tile` is 1. With `gathered`, the rows are taken in another order. If `weighed`, each is
    multiplied by a number of its token."""

    outputs: tuple[str, ...]
    eps: float | None = None
    gated: Gate | Literal[""] = ""
    rows: bool = False
    gathered: bool = False
    alone: bool = False
    biased: bool = False
    weighed: bool = False


@functools.cache
def quantize_activations(quantization: Quantization, lanes: int, tile: int) -> KernelFunction:
    """Buffers: the outputs in their order; the number of units in a row, int32 (1,); the state if tile is more than 1
    or with `rows`; the number of the row of each token, int32 (tokens,), if gathered; the rows, float32 (tokens, cols);
    the other rows if gated but not alone, or the norm's weight, float32 (cols,), if normed, and after it in the same
    buffer the bias, if it is biased; the curve of xielu, float32 (4,); the numbers of tokens, float32 (tokens,), if
    they are weighed."""
    eps, gate = quantization.eps, quantization.gated
    vectors = UNIT // lanes
    assert vectors >= 2, "vectors of more than 16 lanes"

    def kernel(part: UOp, parts: UOp, *buffers: UOp) -> UOp:
        k = KernelBuilder(lanes)
        n_outputs = len(quantization.outputs)
        outs, rest = dict(zip(quantization.outputs, buffers, strict=False)), list(buffers[n_outputs:])
        units = k.index(rest.pop(0), 0)
        cols = units * UNIT
        state = rest.pop(0) if tile > 1 or quantization.rows else None
        sources = rest.pop(0) if quantization.gathered else None
        weights = rest.pop() if quantization.weighed else None
        curve = rest.pop() if gate == "xielu" else None
        rows, *other = rest
        first, count = even_share(units, part, parts)
        tiles: Index = 1 if state is None else k.index(state, TILES)
        factor = k.registers(1)
        with k.loop(tiles) as tile_number, k.loop(tile) as token:
            row: Index = tile_number * tile + token
            source = row if sources is None else k.index(sources, row)
            at = source * cols
            if eps is not None:
                mean = sum_of_squares(k, rows, at, cols) * cols.cast(F32).reciprocal()
                k.store(factor, 0, (mean + eps).sqrt().reciprocal())
            with k.loop(count) as done:
                unit = first + done
                values = []
                for i in range(vectors):
                    column = unit * UNIT + i * lanes
                    value = k.vector(rows, at + column)
                    if eps is not None:
                        value = value * k.load(factor, 0) * k.vector(other[0], column)
                    if quantization.biased:
                        value = value + k.vector(other[0], cols + column)
                    if curve is not None:
                        value = _xielu(k, value, curve)
                    elif gate:
                        beside = (
                            UOp.const(1.0, F32) if quantization.alone else k.vector(other[0], at + column)
                        )
                        value = gated(k, gate, value, beside)
                    if weights is not None:
                        value = value * k.load(weights, source)
                    values.append(value)
                store_unit(k, outs, values, (tile_number * units + unit) * tile, tile, token)
        kind: str = "normed" if eps is not None else "limited" if isinstance(gate, tuple) else gate or "plain"
        kind += "_biased" * quantization.biased
        kind += "_alone" * quantization.alone + "_weighed" * quantization.weighed
        return k.finish(f"prepare_{kind}_{len(outs)}_{tile}")

    return kernel


@functools.cache
def add_normed(
    eps: float, lanes: int, tile: int, added: bool = True, scaled: bool = False, biased: bool = False
) -> KernelFunction:
    """out += RMS-normed rows * weight; if it is not `added`, = instead of +=. If it is `scaled`, out is multiplied by a
    number at last. The threads share the tokens. Buffers: out, float32 (tokens, cols), which may be the rows; the
    number of units in a row, int32 (1,); the state if tile is more than 1; the rows, float32 (tokens, cols); the
    weight, float32 (cols,), and after it the bias, if it is `biased`; the number, float32 (1,), if there is one."""

    def kernel(part: UOp, parts: UOp, out: UOp, shape: UOp, *buffers: UOp) -> UOp:
        k = KernelBuilder(lanes)
        k.scratch(out)
        scale = buffers[-1] if scaled else None
        *state, rows, weight = buffers[:-1] if scaled else buffers
        cols = k.index(shape, 0) * UNIT
        first, count = even_share(n_tokens(k, state[0], tile) if state else 1, part, parts)
        factor = k.registers(1)
        with k.loop(count) as i:
            at = (first + i) * cols
            mean = sum_of_squares(k, rows, at, cols) * cols.cast(F32).reciprocal()
            k.store(factor, 0, (mean + eps).sqrt().reciprocal())
            with k.loop(cols // lanes) as j:
                normed = k.vector(rows, at + j * lanes) * k.load(factor, 0) * k.vector(weight, j * lanes)
                if biased:
                    normed = normed + k.vector(weight, cols + j * lanes)
                total = k.vector(out, at + j * lanes) + normed if added else normed
                k.store(out, at + j * lanes, total if scale is None else total * k.load(scale, 0))
        return k.finish(f"{'add' if added else 'store'}_normed{'_biased' * biased}_{tile}")

    return kernel


@functools.cache
def add_centred(
    n_rows: int, lanes: int, tile: int, centres: bool, begins: bool, factor: float
) -> KernelFunction:
    """out += the sum of `n_rows` rows; if it `begins`, = instead of +=. If it `centres`, the mean of out is taken off
    it. With a `factor`, it is multiplied by that before. The threads share the tokens. Buffers: out, float32 (tokens,
    cols); the number of units in a row, int32 (1,); the state if tile is more than 1; the rows, float32 (tokens, cols)
    each."""

    def kernel(part: UOp, parts: UOp, out: UOp, shape: UOp, *buffers: UOp) -> UOp:
        k = KernelBuilder(lanes)
        k.scratch(out)
        state, rows = buffers[:-n_rows], buffers[-n_rows:]
        cols = k.index(shape, 0) * UNIT
        first, count = even_share(n_tokens(k, state[0], tile) if state else 1, part, parts)
        sums, mean = k.registers(lanes), k.registers(1)
        with k.loop(count) as i:
            at = (first + i) * cols
            k.fill(sums, 0, UOp.const(0.0, F32))
            with k.loop(cols // lanes) as j:
                total = add(k.vector(row, at + j * lanes) for row in rows)
                total = total if begins else k.vector(out, at + j * lanes) + total
                total = total * factor if factor != 1 else total
                k.store(out, at + j * lanes, total)
                k.store(sums, 0, k.vector(sums, 0) + total)
            if centres:
                k.store(mean, 0, k.across(k.vector(sums, 0), Ops.ADD) * cols.cast(F32).reciprocal())
                with k.loop(cols // lanes) as j:
                    k.store(out, at + j * lanes, k.vector(out, at + j * lanes) - k.load(mean, 0))
        return k.finish(f"{'centre' if centres else 'add'}_{n_rows}_{tile}")

    return kernel


@functools.cache
def sparsify(deviations: float, lanes: int, tile: int) -> KernelFunction:
    """Keeps of each row x what is above its mean by more than so many standard deviations: x = max(x - that, 0). The
    threads share the tokens. Buffers: the rows, float32 (tokens, cols); the number of units in a row, int32 (1,); the
    state if tile is more than 1."""

    def kernel(part: UOp, parts: UOp, rows: UOp, shape: UOp, *state: UOp) -> UOp:
        k = KernelBuilder(lanes)
        k.scratch(rows)
        cols = k.index(shape, 0) * UNIT
        first, count = even_share(n_tokens(k, state[0], tile) if state else 1, part, parts)
        sums, squares, mean, least = (k.registers(n) for n in (lanes, lanes, 1, 1))
        with k.loop(count) as i:
            at = (first + i) * cols
            k.fill(sums, 0, UOp.const(0.0, F32))
            with k.loop(cols // lanes) as j:
                k.store(sums, 0, k.vector(sums, 0) + k.vector(rows, at + j * lanes))
            k.store(mean, 0, k.across(k.vector(sums, 0), Ops.ADD) * cols.cast(F32).reciprocal())
            k.fill(squares, 0, UOp.const(0.0, F32))
            with k.loop(cols // lanes) as j:
                off = k.vector(rows, at + j * lanes) - k.load(mean, 0)
                k.store(squares, 0, k.vector(squares, 0) + off * off)
            variance = k.across(k.vector(squares, 0), Ops.ADD) * (cols - 1).cast(F32).reciprocal()
            k.store(least, 0, k.load(mean, 0) + variance.sqrt() * deviations)
            with k.loop(cols // lanes) as j:
                above = k.vector(rows, at + j * lanes) - k.load(least, 0)
                k.store(rows, at + j * lanes, above.maximum(UOp.const(0.0, F32)))
        return k.finish(f"sparsify_{tile}")

    return kernel


@functools.cache
def gate_rows(gate: Gate, lanes: int, tile: int, alone: bool) -> KernelFunction:
    """Rows x become gates of other rows, or what they are if they are `alone` (`Quantization.gated`). The threads
    share the tokens. Buffers: the rows, float32 (tokens, cols); the number of units in a row, int32 (1,); the state if
    tile is more than 1; the other rows."""

    def kernel(part: UOp, parts: UOp, rows: UOp, shape: UOp, *buffers: UOp) -> UOp:
        k = KernelBuilder(lanes)
        k.scratch(rows)
        state, other = ([*buffers], None) if alone else (buffers[:-1], buffers[-1])
        cols = k.index(shape, 0) * UNIT
        first, count = even_share(n_tokens(k, state[0], tile) if state else 1, part, parts)
        with k.loop(count * (cols // lanes)) as i:
            at = first * cols + i * lanes
            beside = UOp.const(1.0, F32) if other is None else k.vector(other, at)
            k.store(rows, at, gated(k, gate, k.vector(rows, at), beside))
        return k.finish(f"gate_{'limited' if isinstance(gate, tuple) else gate}{'_alone' * alone}_{tile}")

    return kernel


@functools.cache
def cap(limit: float, lanes: int) -> KernelFunction:
    """x = limit * tanh(x / limit). Buffers: x, float32 (vectors * lanes,); the number of vectors, int32 (1,)."""

    def kernel(part: UOp, parts: UOp, x: UOp, count: UOp) -> UOp:
        k = KernelBuilder(lanes)
        k.scratch(x)
        first, n = even_share(k.index(count, 0), part, parts)
        with k.loop(n) as i:
            at = (first + i) * lanes
            k.store(x, at, capped(k, k.vector(x, at), limit))
        return k.finish("cap")

    return kernel


def capped(k: KernelBuilder, x: UOp, limit: float) -> UOp:
    """limit * tanh(x / limit)."""
    return (sigmoid(k, x * (2 / limit)) * 2.0 - 1.0) * limit


def gated(k: KernelBuilder, gate: Gate, x: UOp, other: UOp) -> UOp:
    """`x` as a gate of other activations."""
    if isinstance(gate, tuple):
        most, limit = gate
        return _silu(k, x.minimum(most), other.maximum(-limit).minimum(limit))
    return _GATES[gate](k, x, other)


def sigmoid(k: KernelBuilder, x: UOp) -> UOp:
    """1 / (1 + e**-x)."""
    return (k.exp(x * -1.0) + 1.0).reciprocal()


def _gate(k: KernelBuilder, x: UOp, other: UOp) -> UOp:
    return sigmoid(k, x) * other


def _tanh(k: KernelBuilder, x: UOp, other: UOp) -> UOp:
    return (sigmoid(k, x * 2.0) * 2.0 - 1.0) * other


def _silu(k: KernelBuilder, x: UOp, other: UOp) -> UOp:
    return x * sigmoid(k, x) * other


def _gelu(k: KernelBuilder, x: UOp, other: UOp) -> UOp:
    """The form with tanh: 0.5 x (1 + tanh(y)) = x sigmoid(2 y), y = sqrt(2 / pi) (x + 0.044715 x**3)."""
    return x * sigmoid(k, x * (x * x * (_GELU * 0.044715) + _GELU)) * other


def _quick_gelu(k: KernelBuilder, x: UOp, other: UOp) -> UOp:
    return x * sigmoid(k, x * 1.702) * other


def _relu(k: KernelBuilder, x: UOp, other: UOp) -> UOp:
    return x.maximum(UOp.const(0.0, F32)) * other


def _relu2(k: KernelBuilder, x: UOp, other: UOp) -> UOp:
    x = x.maximum(UOp.const(0.0, F32))
    return x * x * other


def _swiglu_oai(k: KernelBuilder, x: UOp, other: UOp) -> UOp:
    x, other = x.minimum(_SWIGLU_LIMIT), other.maximum(-_SWIGLU_LIMIT).minimum(_SWIGLU_LIMIT)
    return x * sigmoid(k, x * 1.702) * (other + 1.0)


def _xielu(k: KernelBuilder, x: UOp, curve: UOp) -> UOp:
    """x is above 0 or not, so of the two parts one is 0."""
    zero = UOp.const(0.0, F32)
    n, p, b, e = (k.load(curve, i) for i in range(4))
    above, below = x.maximum(zero), x.minimum(zero)
    return above * above * p + (k.exp(below.minimum(e)) - 1.0 - below) * n + x * b


_GELU = 2 * (2 / pi) ** 0.5
_SWIGLU_LIMIT = 7.0
_GATES = {
    "silu": _silu, "gelu": _gelu, "quick gelu": _quick_gelu, "swiglu_oai": _swiglu_oai, "relu": _relu,
    "relu2": _relu2, "sigmoid": _gate, "tanh": _tanh,
}  # fmt: skip


def sum_of_squares(k: KernelBuilder, rows: UOp, at: Index, n: Index, lanes: int = 0) -> UOp:
    """The sum of squares of n elements: a multiple of 32, or of `lanes` if given."""
    chains, lanes = (1, lanes) if lanes else (UNIT // k.lanes, k.lanes)
    sums = [k.zeros(lanes) for _ in range(chains)]
    with k.loop(n // (lanes * chains)) as i:
        for c, s in enumerate(sums):
            v = k.vector(rows, at + (i * chains + c) * lanes, lanes)
            k.store(s, 0, k.vector(s, 0, lanes) + v * v)
    return k.across(add(k.vector(s, 0, lanes) for s in sums), Ops.ADD)


def store_unit(
    k: KernelBuilder, outs: dict[str, UOp], values: list[UOp], place: UOp, tile: int, token: Index
) -> None:
    """Stores the 32 columns of a unit of one token to the buffers `outs`. `place` is the index of the unit's scales."""
    if "floats" in outs:
        for i, value in enumerate(values):
            at = place * UNIT + i * k.lanes * tile + token
            if tile == 1:
                k.store(outs["floats"], at, value)
            else:
                k.store_elements(outs["floats"], at, tile, value)
    if "values" not in outs:
        return
    magnitudes = (v.maximum(v * -1.0) for v in values)
    largest = k.across(functools.reduce(UOp.maximum, magnitudes), Ops.MAX)
    limit = _MAX_FEW if tile < k.lanes else _MAX_TILES
    scale = largest * (1 / limit)
    inverse = (largest.maximum(UOp.const(1e-30, F32))).reciprocal() * float(limit)
    # A cast truncates, so this rounds to the nearest integer.
    integers = [(v * inverse + 32768.5).cast(I32) - 32768 for v in values]
    for i, q in enumerate(integers):
        at = place * UNIT + i * k.lanes * tile + token * 2
        if tile == 1:
            k.store(outs["values"], at, q.cast(I16))
        else:
            k.store_elements(outs["values"], at, 2 * tile, q.cast(I16), together=2)
    k.store(outs["scales"], place + token, scale)
    half = len(integers) // 2
    sums = [k.across(add(integers[i : i + half]), Ops.ADD) for i in (0, half)]
    if "sums" in outs:
        for i, s in enumerate(sums):
            k.store(outs["sums"], place * (UNIT // PAIRS) + i, s)
    if "run_sums" in outs:
        for i, s in enumerate(sums):
            k.store(outs["run_sums"], place * (UNIT // PAIRS) + i * tile + token, s.cast(F32) * scale)
    if "scaled_sums" in outs:
        k.store(outs["scaled_sums"], place + token, (sums[0] + sums[1]).cast(F32) * scale)
