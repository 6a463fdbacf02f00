"""LayerNorms of the residual stream, in decode.

The mean of the stream is known once all of it is, so a kernel between a sublayer and the next one norms it, and leaves
the inputs of the products that follow. Each block goes over the whole stream, which is in the L2 cache, and computes
mean and factor by itself, of the sums of elements and of their squares: streams have means that are small beside their
elements, so float32 suffices.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from tinygrad import UOp

from engine.kernels.kernel import Kernel
from engine.kernels.launch_hints import LaunchHints
from engine.targets.nvidia.kernels.residual_stream.token_norm import TokenNorm
from engine.targets.nvidia.kernels.uops import (
    after_store,
    chain,
    f32,
    finish,
    load,
    load_run,
    registers,
    shared,
    store,
    store_run,
    tree,
)
from engine.targets.nvidia.kernels.weights.weight_layout import permuted


@functools.cache
def layer_norm(n: int, biased: tuple[bool, ...], eps: float, permutes: bool = True) -> Kernel:
    """LayerNorms of the stream for the next products. Buffers: copies, for each of `biased` a vector, which is permuted
    if it `permutes`; stream, float32 (n,); norms, for each copy the norm's weight times the input_scale, float32 (n,);
    biases, of the copies that are biased the norm's bias times the input_scale, float32 (n,)."""
    token_norm = TokenNorm(n, eps)
    threads, copies, n_biases = token_norm.threads, len(biased), sum(biased)
    lanes = min(32, threads // 2)  # that add the sums of all threads

    def kernel(copies: Sequence[UOp], stream: UOp, norms: Sequence[UOp], biases: Sequence[UOp]) -> UOp:
        thread = token_norm.thread
        row = UOp.special(-(-n // threads), "gidx0") * threads + thread
        ok = None if n % threads == 0 else row < n
        # These come from far, so they are loaded before the kernel waits for the stream.
        vectors = registers(len(copies) + n_biases, 0)
        read = UOp.group(*store_run(vectors, 0, [load(vector, row, ok) for vector in (*norms, *biases)]))
        stream, vectors = stream.after(read), vectors.after(read)
        values = [load(stream, *place) for place in token_norm.places]
        sums = shared(2 * threads, 0)
        own = store(sums, thread, chain(values)), store(sums, threads + thread, chain(v * v for v in values))
        sums = sums.after(UOp.group(*own))
        adds, first = thread < 2 * lanes, thread // lanes * threads + thread % lanes
        lane_sum = tree([load(sums, first + lanes * k, adds) for k in range(threads // lanes)])
        lane_sums = after_store(shared(2 * lanes, 1), thread, lane_sum, adds)
        mean, square = (tree(load_run(lane_sums, lanes * k, lanes)) * f32(1 / n) for k in (0, 1))
        factor = ((square - mean * mean).maximum(0.0) + f32(eps)).sqrt().reciprocal()
        value, stores, left = (load(stream, row, ok) - mean) * factor, [], iter(range(n_biases))
        for i, (out, has_bias) in enumerate(zip(copies, biased, strict=True)):
            normed = value * load(vectors, i)
            normed = normed + load(vectors, len(copies) + next(left)) if has_bias else normed
            stores.append(store(out, permuted(row, n) if permutes else row, normed, ok))
        return finish(f"{'layer' if permutes else 'begin_layer'}_norm_{n}", stores)

    hints = LaunchHints(waits_for=("copies", "stream"), releases="after its wait")
    return Kernel(kernel, (("copies", copies),), ("stream", ("norms", copies), ("biases", n_biases)), hints)
