"""The first kernel of a step: the tokens' rows of the embedding matrix."""

from __future__ import annotations

import functools

from tinygrad import UOp

from engine.kernels.compilation import Kernel
from engine.kernels.cpu.kernel_builder import KernelBuilder, even_share
from engine.kernels.cpu.step_state import n_tokens
from engine.kernels.cpu.weight_layout import UNIT, WeightLayout


@functools.cache
def embed(layout: WeightLayout, tile: int, scale: float = 1.0) -> Kernel:
    """The rows times `scale`. Buffers: out, float32 (tokens, cols); the matrix's rows and its blocks in a row, int32
    (2,); the state if tile is more than 1; the tokens, int32; the matrix's stream. Tokens outside the vocabulary are
    clamped."""

    def kernel(part: UOp, parts: UOp, out: UOp, shape: UOp, *buffers: UOp) -> UOp:
        k = KernelBuilder(layout.lanes)
        *state, tokens, stream = buffers
        rows, blocks = (k.index(shape, i) for i in range(2))
        cols = blocks * layout.block
        columns = UNIT if layout.format else 1
        first, count = even_share(cols // columns, part, parts)
        with k.loop(n_tokens(k, state[0], tile) if state else 1) as token, k.loop(count) as i:
            row = k.index(tokens, token).maximum(0).minimum(rows - 1)
            group, lane, unit = row // layout.lanes, row % layout.lanes, first + i
            for c, value in enumerate(layout.columns(k, stream, group, blocks, unit, lane)):
                k.store(out, token * cols + unit * columns + c, value * scale if scale != 1.0 else value)
        return k.finish(f"embed_{layout.name}_{tile}")

    return kernel
