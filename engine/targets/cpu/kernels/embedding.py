"""The first kernels of a step: the tokens' rows of the embedding matrix, and of a table that stays in the file."""

from __future__ import annotations

import functools

from tinygrad import UOp, dtypes

from engine.formats.quantization import FORMATS, Format
from engine.kernels.compilation import KernelFunction
from engine.targets.cpu.kernels.file_block import FileBlock
from engine.targets.cpu.kernels.kernel_builder import (
    F16,
    F32,
    I8,
    I16,
    U8,
    U16,
    Index,
    KernelBuilder,
    even_share,
    shift_left,
)
from engine.targets.cpu.kernels.step_state import n_tokens
from engine.targets.cpu.kernels.stream_size import UNIT
from engine.targets.cpu.kernels.weight_layout import LaneLayout, as_float, piecewise_linear


@functools.cache
def embed(
    layout: LaneLayout, tile: int, scale: float = 1.0, has_pictures: bool = False, stride: int = 1
) -> KernelFunction:
    """The rows times `scale`. Buffers: out, float32 (tokens, cols); the matrix's rows and its blocks in a row, int32
    (2,); the state if tile is more than 1; the numbers of the rows, int32 (tokens * stride,), of which each `stride`-th
    counts; the matrix's stream. Tokens outside the vocabulary are clamped; if it `has_pictures`, negative ones get
    their rows of the last buffer, float32 (tokens, cols)."""

    def kernel(part: UOp, parts: UOp, out: UOp, shape: UOp, *buffers: UOp) -> UOp:
        k = KernelBuilder(layout.lanes)
        *rest, of_pictures = buffers if has_pictures else (*buffers, None)
        *state, tokens, stream = rest
        rows, blocks = (k.index(shape, i) for i in range(2))
        cols = blocks * layout.block
        columns = UNIT if layout.format else 1
        first, count = even_share(cols // columns, part, parts)
        with k.loop(n_tokens(k, state[0], tile) if state else 1) as token, k.loop(count) as i:
            row = k.index(tokens, token * stride).maximum(0).minimum(rows - 1)
            group, lane, unit = row // layout.lanes, row % layout.lanes, first + i
            for c, value in enumerate(layout.columns(k, stream, group, blocks, unit, lane)):
                at, value = token * cols + unit * columns + c, value * scale if scale != 1.0 else value
                if of_pictures is not None:
                    value = (k.load(tokens, token) < 0).where(k.load(of_pictures, at), value)
                k.store(out, at, value)
        return k.finish(f"embed_{layout.name}_{tile}" + (f"_every_{stride}" if stride != 1 else ""))

    return kernel


@functools.cache
def embed_from_file(ggml_type: int, lanes: int, tile: int, scale: float = 1.0) -> KernelFunction:
    """As `embed`, of a matrix as the file holds it: its last buffer is the file's bytes, or its floats."""
    format = FORMATS.get(ggml_type)
    columns = format.block if format else 1

    def kernel(part: UOp, parts: UOp, out: UOp, shape: UOp, *buffers: UOp) -> UOp:
        k = KernelBuilder(lanes)
        *state, tokens, raw = buffers
        rows, blocks = (k.index(shape, i) for i in range(2))
        first, count = even_share(blocks, part, parts)
        with k.loop(n_tokens(k, state[0], tile) if state else 1) as token, k.loop(count) as i:
            row, block = k.index(tokens, token).maximum(0).minimum(rows - 1), first + i
            # A share's first step is an int32, in which sums with it stay, and which cannot number a file's bytes.
            at, to = (row * blocks).cast(dtypes.int64) + block, (token * blocks + block) * columns
            if format:
                _store_block(k, format, raw, at * format.block_bytes, out, to, scale)
            else:
                k.store(out, to, as_float(k.load(raw, at)) * scale)
        return k.finish(f"embed_{format.name if format else raw.dtype.name}_from_file_{tile}")

    return kernel


def _store_block(
    k: KernelBuilder, format: Format, raw: UOp, at: UOp, out: UOp, to: UOp, scale: float
) -> None:
    """Stores the weights of the block that begins at a byte of `raw`, times `scale`."""
    block = FileBlock(format, lambda n: k.load(raw, at + n).cast(U16))

    def half(byte: int) -> UOp:
        return block.word(byte).bitcast(F16).cast(F32)

    d = half(format.d)
    if format.exponent:
        d = shift_left(block.byte(format.d).cast(dtypes.uint32), 23).bitcast(F32)
    if format.factor != 1:
        d = d * format.factor
    for group in range(format.block // format.group):
        factor, minimum = d * scale, half(format.m) * scale if format.m is not None else None
        if format.scale:
            small = block.small(format.scale, group)
            signed = format.scale[0][0].bits == 8 or format.scale_offset
            factor = factor * (small.cast(U8).bitcast(I8) if signed else small).cast(F32)
        if minimum is not None:
            minimum = minimum * (block.small(format.minimum, group).cast(F32) if format.minimum else -1.0)

        def weight(i: Index, factor: UOp = factor, minimum: UOp | None = minimum) -> UOp:
            q = block.number(format.q, i, format.block)
            value = piecewise_linear(q.cast(I16), format.codebook) if format.codebook else q
            value = (value.cast(F32) - float(format.offset)) * factor
            return value if minimum is None else value - minimum

        with k.loop(format.group) as column:
            i = group * format.group + column
            k.store(out, to + i, weight(i))
