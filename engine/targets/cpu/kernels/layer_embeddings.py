"""What a token gives each layer of a model, and how a layer takes it (`engine.description.spec.LayerEmbeddings`)."""

from __future__ import annotations

import functools
from math import gcd

from tinygrad import UOp

from engine.kernels.compilation import KernelFunction
from engine.targets.cpu.kernels.activations import gated, sum_of_squares
from engine.targets.cpu.kernels.kernel_builder import KernelBuilder, even_share
from engine.targets.cpu.kernels.step_state import n_tokens


@functools.cache
def gate_embeddings(size: int, layers: int, dim: int, eps: float, lanes: int, tile: int) -> KernelFunction:
    """gelu(gate) * the embedding of a layer, of `size` elements. The threads share the tokens. Buffers: out, float32
    (tokens, size); the layer's number, int32 (1,); the state if tile is more than 1; the gates, float32 (tokens, size);
    the projection of the tokens' embeddings of `dim` elements, float32 (tokens, layers * size); the norm's weight,
    float32 (size,); the tokens' rows of the table times sqrt(size), float32 (tokens, layers * size)."""
    n = gcd(size, lanes)

    def kernel(part: UOp, parts: UOp, out: UOp, layer: UOp, *buffers: UOp) -> UOp:
        k = KernelBuilder(lanes)
        *state, gates, projected, weight, table = buffers
        first, count = even_share(n_tokens(k, state[0], tile) if state else 1, part, parts)
        of_layer, factor = k.index(layer, 0) * size, k.registers(1)
        with k.loop(count) as i:
            token = first + i
            at = token * (layers * size) + of_layer
            mean = sum_of_squares(k, projected, at, size, n) * (1 / (size * dim))
            k.store(factor, 0, (mean + eps).sqrt().reciprocal() * float(dim**-0.5))
            with k.loop(size // n) as j:
                column = j * n
                normed = k.vector(projected, at + column, n) * k.load(factor, 0) * k.vector(weight, column, n)
                e = (normed + k.vector(table, at + column, n)) * float(0.5**0.5)
                to = token * size + column
                k.store(out, to, gated(k, "gelu", k.vector(gates, to, n), e))
        return k.finish(f"gate_embeddings_{size}_{tile}")

    return kernel
