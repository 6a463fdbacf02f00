"""LayerNorms of the residual stream, in decode.

The mean of the stream is known once all of it is, so a kernel between a sublayer and the next one norms it, and leaves
the inputs of the products that follow. Each block goes over the whole stream, which is in the L2 cache, and computes
mean and factor by itself.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from tinygrad import UOp

from engine.kernels.kernel import Kernel
from engine.kernels.launch_hints import LaunchHints
from engine.targets.nvidia.kernels.residual_stream.token_norm import TokenNorm
from engine.targets.nvidia.kernels.uops import finish, load, store
from engine.targets.nvidia.kernels.weights.weight_layout import permuted


@functools.cache
def layer_norm(n: int, biased: tuple[bool, ...], eps: float) -> Kernel:
    """LayerNorms of the stream for the next products. Buffers: copies, for each of `biased` a permuted vector; stream,
    float32 (n,); norms, for each copy the norm's weight times the input_scale, float32 (n,); biases, of the copies that
    are biased the norm's bias times the input_scale, float32 (n,)."""
    token_norm = TokenNorm(n, eps)
    threads = token_norm.threads

    def kernel(copies: Sequence[UOp], stream: UOp, norms: Sequence[UOp], biases: Sequence[UOp]) -> UOp:
        mean, factor = token_norm.centred([load(stream, *place) for place in token_norm.places], 0)[1:]
        row = UOp.special(-(-n // threads), "gidx0") * threads + token_norm.thread
        ok = None if n % threads == 0 else row < n
        value, stores, left = (load(stream, row, ok) - mean) * factor, [], iter(biases)
        for out, weight, has_bias in zip(copies, norms, biased, strict=True):
            normed = value * load(weight, row, ok)
            normed = normed + load(next(left), row, ok) if has_bias else normed
            stores.append(store(out, permuted(row, n), normed, ok))
        return finish(f"layer_norm_{n}", stores)

    copies, n_biases = len(biased), sum(biased)
    hints = LaunchHints(releases="after its wait")
    return Kernel(kernel, (("copies", copies),), ("stream", ("norms", copies), ("biases", n_biases)), hints)
