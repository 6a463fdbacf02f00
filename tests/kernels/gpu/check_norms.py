"""Norms of the residual stream between products, and what is added to it before, for one token and for a prompt."""

import numpy as np
from tinygrad import dtypes

from engine.targets.nvidia.kernels.products.activation_order import PLACES
from engine.targets.nvidia.kernels.products.epilogues import STORE_SQUARES
from engine.targets.nvidia.kernels.products.matmul import fragment_index, fragments_size
from engine.targets.nvidia.kernels.products.matvec import matvec
from engine.targets.nvidia.kernels.products.stacked_matrices import Schedule, StackedMatrices
from engine.targets.nvidia.kernels.residual_stream.layer_norm import layer_norm
from engine.targets.nvidia.kernels.residual_stream.post_norm import (
    add_both,
    add_both_blocks,
    add_normed,
    add_normed_blocks,
)
from engine.targets.nvidia.kernels.residual_stream.prefill import add_normed_sums, norm_prompt
from engine.targets.nvidia.kernels.weights.matrix_bytes import UNIT, units_of
from engine.targets.nvidia.kernels.weights.weight_layout import WeightLayout, permuted_size
from tests.kernels.gpu.buffers import buffer, close, laid_out, packed, places, prompt_index, rng, run, zeros
from tests.tier import THOROUGH


def normed(x, weight, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def check_post_norms() -> None:
    """A product is normed before it is added to the stream, for a token and for a prompt."""
    layout, cols, rows, eps = WeightLayout(8), 256, 64, 1e-5
    planes, weights = packed(8, rows, cols)
    x = rng.standard_normal(cols).astype(np.float32)
    product, squares = zeros(rows), zeros(8)
    kernel = matvec(StackedMatrices.single(layout, rows, cols), Schedule(2, 4, 2), STORE_SQUARES, "t")
    run(kernel, product, squares, laid_out(x, layout), *planes)
    y = weights.astype(np.float64) @ x
    close(product.numpy(), y)
    close(squares.numpy().sum(), (y * y).sum())
    for n, n_sums, copies in ((64, 8, 1), (320, 131, 2)):  # less than a block; blocks and a part of one
        y, stream, post, *following = rng.standard_normal((3 + copies, n)).astype(np.float32)
        squares = np.zeros(n_sums, np.float32)
        squares[: n_sums // 2] = np.add.reduceat(y * y, np.arange(n_sums // 2) * (n // (n_sums // 2)))
        wanted = stream + normed(y.astype(np.float64), post, eps)
        h, sums = buffer(stream), zeros(add_normed_blocks(n))
        outs, ins = [zeros(permuted_size(n)) for _ in following], [buffer(y), buffer(squares), buffer(post)]
        run(add_normed(n, (n_sums,), copies, eps), h, sums, *outs, *ins, *map(buffer, following))
        compare_stream(wanted, following, h, sums, outs)
        scale, h = np.float32([0.7]), buffer(stream)
        run(
            add_normed(n, (n_sums,), copies, eps, True),
            h,
            sums,
            *outs,
            *ins,
            *map(buffer, (scale, *following)),
        )
        compare_stream(wanted * 0.7, following, h, sums, outs)
    for tokens, n, parts in ((2, 96, 2), (1, 1100, 1)):
        y = rng.standard_normal((parts, tokens, n)).astype(np.float32)
        stream, (post, weight) = rng.standard_normal((tokens, n)), rng.standard_normal((2, n))
        stream, post, weight = (a.astype(np.float32) for a in (stream, post, weight))
        place = prompt_index(lambda m, e, n=n: fragment_index(m, e, n), tokens, n)
        for post_eps, bias, scale in (
            (None, [], []), (1e-2, [], [np.float32([0.7])]), (None, [post * 2], []), (eps, [weight * 3], [])
        ):  # fmt: skip
            added = y.sum(0, dtype=np.float64) + sum(bias)
            wanted = stream + (normed(added, post, post_eps) if post_eps else added)
            wanted = wanted * scale[0] if scale else wanted
            x, h = zeros(fragments_size(16, n), dtypes.float16), buffer(stream)
            ins = [y, *bias, *([post] if post_eps else []), *scale, weight]
            kernel = norm_prompt(tokens, n, (parts,), eps, post_eps, len(bias), scaled=bool(scale))
            run(kernel, x, h, *map(buffer, ins))
            close(h.numpy().reshape(tokens, n), wanted)
            close(x.numpy()[place], normed(wanted, weight, eps), 1e-3)
        sizes, x = zeros(tokens), zeros(fragments_size(16, n), dtypes.float16)
        run(norm_prompt(tokens, n, (), eps, keeps_sizes=True), x, sizes, h, buffer(weight))
        close(x.numpy()[place] * sizes.numpy()[:, None], wanted * weight, 1e-3)
        run(norm_prompt(tokens, n, (), eps, is_normed=False), x, h, buffer(weight))
        close(x.numpy()[place], wanted * weight, 1e-3)
        x = zeros(tokens * units_of(n) * UNIT, dtypes.float16)
        run(norm_prompt(tokens, n, (), eps, order="rows"), x, h, buffer(weight))
        rows, place = x.numpy(), prompt_index(lambda m, e, n=n: PLACES["rows"](m, e, n), tokens, n)
        close(rows[place], normed(wanted, weight, eps), 1e-3)
        rows[place] = 0
        assert not rows.any()


def check_layer_norms() -> None:
    """Of a token for products of which one has no bias, and of a prompt, to which two products are added before,
    for products of warpgroups."""
    for n, tokens in ((64, 2), (320, 1)) if THOROUGH else ((320, 1),):
        stream, *vectors = rng.standard_normal((5, n)).astype(np.float32)
        stream, (weight, bias, other, second) = stream + 1, vectors
        centred = (stream - stream.mean(dtype=np.float64)).astype(np.float64)
        outs = [zeros(permuted_size(n)) for _ in range(2)]
        ins = map(buffer, (stream, weight, other, bias))
        run(layer_norm(n, (False, True), 1e-2), *outs, *ins)
        close(outs[0].numpy()[places(n)], normed(centred, weight, 1e-2))
        close(outs[1].numpy()[places(n)], normed(centred, other, 1e-2) + bias)
        streams, *sums = rng.standard_normal((4, tokens, n)).astype(np.float32)
        wanted = streams + np.sum(sums, 0, dtype=np.float64) + bias + second
        wanted -= wanted.mean(-1, keepdims=True)
        x, h = zeros(fragments_size(16, n), dtypes.float16), buffer(streams)
        ins = [np.stack(sums[:2]), sums[2], bias, second, weight, other]
        options = {"n_biases": 2, "order": "eights", "centred": True, "shifted": True}
        kernel = norm_prompt(tokens, n, (2, 1), 1e-2, **options)
        run(kernel, x, h, *map(buffer, ins))
        close(h.numpy().reshape(tokens, n), wanted)
        place = prompt_index(lambda m, e, n=n: PLACES["eights"](m, e, n), tokens, n)
        close(x.numpy()[place], normed(wanted, weight, 1e-2) + other, 1e-3)


def compare_stream(wanted, following, h, sums, outs):
    """What a kernel leaves for the next products."""
    close(h.numpy(), wanted)
    close(sums.numpy().sum(), (wanted**2).sum())
    for out, weight in zip(outs, following, strict=True):
        close(out.numpy()[places(wanted.size)], wanted * weight)


def check_products_side_by_side() -> None:
    """Two products that are normed, added, and normed again: a part of a block, several blocks."""
    eps = 1e-5
    for n, n_sums, copies, scale in ((64, (8, 4), 1, []), (704, (131, 88), 2, [np.float32([0.7])])):
        ys, weights = (
            rng.standard_normal((2, n)).astype(np.float32),
            rng.standard_normal((2, n)).astype(np.float32),
        )
        stream, post, *following = rng.standard_normal((2 + copies, n)).astype(np.float32)
        both = sum(normed(y.astype(np.float64), w, eps) for y, w in zip(ys, weights, strict=True))
        wanted = (stream + normed(both, post, eps)) * (scale[0] if scale else 1)
        squares = [np.full(count, (y * y).sum() / count) for y, count in zip(ys, n_sums, strict=True)]
        of_products = map(buffer, (ys, np.concatenate(squares).astype(np.float32), *weights))
        h, sums, outs = (
            buffer(stream),
            zeros(add_both_blocks(n)),
            [zeros(permuted_size(n)) for _ in following],
        )
        ins = map(buffer, (post, *scale, *following))
        run(add_both(n, n_sums, copies, eps, bool(scale)), h, sums, *outs, *of_products, *ins)
        compare_stream(wanted, following, h, sums, outs)
        tokens, parts = 3, (1, 2)
        out, products, wanted = zeros(tokens * n), [], 0
        for w, count in zip(weights, parts, strict=True):
            y = rng.standard_normal((count, tokens, n)).astype(np.float32)
            products += [buffer(y), buffer(w)]
            wanted = wanted + normed(y.sum(0, dtype=np.float64), w, eps)
        run(add_normed_sums(tokens, n, parts, eps), out, *products)
        close(out.numpy().reshape(tokens, n), wanted)
