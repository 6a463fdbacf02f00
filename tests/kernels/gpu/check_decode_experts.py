"""Mixtures of experts for one token: the choice, and the products that read the chosen experts only."""

from dataclasses import replace

import numpy as np
from tinygrad import dtypes

from engine.kernels.device_memory import DeviceCounts
from engine.targets.nvidia.kernels.device import Chip
from engine.targets.nvidia.kernels.products import digit_rows
from engine.targets.nvidia.kernels.products.chosen_experts import ChosenExperts
from engine.targets.nvidia.kernels.products.epilogues import (
    STORE,
    STORE_BIASED,
    STORE_SQUARES,
    activated,
    activated_in_digits,
    add_residual,
    routed,
)
from engine.targets.nvidia.kernels.products.matvec import matvec
from engine.targets.nvidia.kernels.products.prefill_experts import choose_experts
from engine.targets.nvidia.kernels.products.schedules import matvec_schedule
from engine.targets.nvidia.kernels.products.stacked_matrices import Schedule, SharedExpert, StackedMatrices
from engine.targets.nvidia.kernels.weights.weight_layout import WeightLayout, input_scale, permuted_size
from tests.kernels.gpu.buffers import buffer, close, laid_out, packed, places, prompt_state, rng, run, zeros
from tests.kernels.gpu.check_products import gated

TYPES = {12: Schedule(4, 2, 2), 8: Schedule(2, 2, 1), 0: Schedule(3, 4, 2)}  # Q4_K, Q8_0, F32


def vector(n):
    return rng.standard_normal(n).astype(np.float32)


def check_choice_of_experts_of_a_token() -> None:
    """The router's product, then the choice: the most experts that a known model has, some of them equal."""
    n, used, cols, eps = 256, 10, 128, 1e-5
    planes, router = packed(0, n, cols)
    x, bias, squares = vector(cols), vector(n), np.full(3, 30, np.float32)
    logits, layout = zeros(n), WeightLayout(0)
    kernel = matvec(
        StackedMatrices.single(layout, n, cols), Schedule(2, 8, 2), STORE_BIASED, "router", 3, eps
    )
    run(kernel, logits, laid_out(x, layout), buffer(squares), buffer(bias), *planes)
    wanted = router.astype(np.float64) @ x / np.sqrt(squares.sum() / cols + eps) + bias
    close(logits.numpy(), wanted)
    tied = logits.numpy()
    tied[[7, 200, 31]] = tied.max()
    for scores in (logits.numpy(), tied):
        ids, weights = zeros(used, dtypes.int32), zeros(used)
        run(choose_experts(1, used, n, 6.1e-5), ids, weights, buffer(scores), prompt_state(1, (0, 3, 1, 0)))
        best = np.argsort(-scores, kind="stable")[:used]
        assert np.array_equal(ids.numpy(), best)
        p = np.exp(scores[best] - scores.max())
        close(weights.numpy(), p / p.sum())


def check_gate_and_up_of_chosen_experts() -> None:
    """The choice, and each chosen expert's gate and up of the same normed vector: in whole blocks and not, with biases
    and without, with fewer experts than threads and with more, two of them equal."""
    cols, eps = 256, 1e-5
    squares, x = rng.uniform(0, 9, 5).astype(np.float32), vector(cols)
    cases = (
        ("silu", False, 4, 16, 3),
        ("swiglu_oai", True, 10, 6, 3),
        ("gelu", False, 10, 6, 3),
        ("silu", False, 4, 16, 2),
    )
    types = [
        *TYPES.items(),
        (12, Schedule(10, 2, 2)),
    ]  # in the last one two threads share the comparisons of one
    for (ggml_type, schedule), (activation, bias, rows, n, used) in zip(types, cases, strict=True):
        least_sum = 6.1e-5 if bias else None
        layout, experts = WeightLayout(ggml_type), ChosenExperts(used, n, False, bias, least_sum)
        planes, weights = packed(ggml_type, n * rows, cols)
        biases = [rng.standard_normal((n, rows)).astype(np.float32) * 3] if bias else []
        size, scale, logits = permuted_size(rows // 2), input_scale(6), vector(n)
        logits[[n - 1, n // 3]] = logits.max()
        out, stack = zeros(used * size), StackedMatrices.single(layout, rows, cols, experts)
        chosen, probabilities, choices = zeros(used, dtypes.int32), zeros(used), DeviceCounts([3, n, 5])
        kernel = matvec(stack, schedule, activated(activation), "t", 5, eps)
        ins = laid_out(x, layout), buffer(squares), buffer(logits), *map(buffer, biases), buffer(scale)
        for _ in range(2):
            run(kernel, out, chosen, probabilities, choices.arrays[1], *ins, *planes)
        ids = np.argsort(-logits, kind="stable")[:used]
        assert np.array_equal(chosen.numpy(), ids)
        before, counts, after = choices.read()
        assert np.array_equal(counts, 2 * np.isin(np.arange(n), ids))
        assert not before.any() and not after.any()
        p = np.exp(logits[ids].astype(np.float64))
        close(probabilities.numpy(), p / (p.sum() if bias else np.exp(logits).sum()))
        y = weights.reshape(n, rows, cols)[ids].astype(np.float64) @ x
        y = y / np.sqrt(squares.sum() / cols + eps) + sum(b[ids] for b in biases)
        got = out.numpy().reshape(used, size)[:, places(rows // 2)] / scale[: rows // 2]
        close(got, gated(y[:, 0::2], y[:, 1::2], activation), 4e-6)


def check_gate_and_up_apart() -> None:
    """Gate and up of unlike types, one of which has one d a row: blocks of one of them read nothing beyond the last
    expert of the other, where there is no number."""
    cols, rows, n, used = 256, 8, 2, 2
    x, logits, y = vector(cols), np.array([1, 2], np.float32), []
    layouts, planes = (WeightLayout(23), WeightLayout(6)), []
    for layout in layouts:
        own, weights = packed(layout.ggml_type, n * rows, cols)
        whole = [plane.numpy() for plane in own]
        planes += [
            buffer(np.concatenate([w, np.full(w.nbytes, 0xFF, np.uint8).view(w.dtype)])) for w in whole
        ]
        y.append(weights.reshape(n, rows, cols)[::-1].astype(np.float64) @ x)
    experts = ChosenExperts(used, n, False)
    stack = StackedMatrices(tuple((layout, rows) for layout in layouts), cols, experts)
    out, chosen, probabilities = zeros(used * 2 * rows), zeros(used, dtypes.int32), zeros(used)
    ins = *(laid_out(x, layout) for layout in reversed(layouts)), buffer(logits)
    run(
        matvec(stack, Schedule(2, 4, 2), STORE, "t"),
        out, chosen, probabilities, zeros(n, dtypes.int32), *ins, *planes,
    )  # fmt: skip
    close(out.numpy().reshape(used, 2, rows).transpose(1, 0, 2), np.stack(y), 4e-6)


def check_down_of_chosen_experts() -> None:
    """The weighted sum of the chosen experts' results joins the stream: one step and several, idle threads, biases."""
    cols, n, ids = 256, 4, np.array([3, 0, 2], np.int32)
    cases = (False, 16), (True, 10), (True, 16)
    for (ggml_type, schedule), (bias, rows) in zip(TYPES.items(), cases, strict=True):
        layout, experts = WeightLayout(ggml_type), ChosenExperts(len(ids), n, True, bias)
        planes, weights = packed(ggml_type, n * rows, cols)
        biases = [rng.standard_normal((n, rows)).astype(np.float32) * 3] if bias else []
        xs, p, stream, norm = (
            vector((len(ids), cols)),
            rng.uniform(0.1, 1, len(ids)),
            vector(rows),
            vector(rows),
        )
        p = p.astype(np.float32)
        stack = StackedMatrices.single(layout, rows, cols, experts)
        vectors = buffer(np.concatenate([laid_out(x, layout).numpy() for x in xs]))
        ins = buffer(ids), buffer(p), vectors, *map(buffer, biases)
        y = np.einsum("erc,ec->er", weights.reshape(n, rows, cols)[ids].astype(np.float64), xs)
        y = p @ (y + sum(b[ids] for b in biases))
        blocks = stack.n_blocks(schedule)
        h, sums, following = buffer(stream), zeros(blocks), zeros(permuted_size(rows))
        run(matvec(stack, schedule, add_residual(), "t"), h, sums, following, *ins, buffer(norm), *planes)
        close(h.numpy(), stream + y, 4e-6)
        close(sums.numpy().sum(), ((stream + y) ** 2).sum(), 4e-6)
        close(following.numpy()[places(rows)], (stream + y) * norm, 4e-6)
        product, sums = zeros(rows), zeros(blocks)
        run(matvec(stack, schedule, STORE_SQUARES, "t"), product, sums, *ins, *planes)
        close(product.numpy(), y, 4e-6)


def check_digits_of_experts() -> None:
    """Small floats of chosen experts, whose vectors come in digits. The router makes those of gate and up beside its
    logits, and gate and up those of down, to whose results that of a shared expert is added."""
    cols, rows, n, used, layout = 320, 128, 4, 2, WeightLayout(39)
    planes, weights = packed(39, n * rows, cols)
    weights, sizes = weights.reshape(n, rows, cols).astype(np.float64), digit_rows.form_of(1).sizes
    x, (of_router, router) = vector(cols), packed(0, n, cols)

    def digits_of(vectors, n_cols):
        return [
            zeros(vectors * k, d) for k, d in zip(sizes(n_cols), (dtypes.uint32, dtypes.float32), strict=True)
        ]

    stack, logits, made = StackedMatrices.single(WeightLayout(0), n, cols), zeros(n), digits_of(1, cols)
    kernel = matvec(stack, Schedule(3, 2, 2), STORE, "t", divides=layout)
    run(kernel, logits, *made, laid_out(x, WeightLayout(0)), laid_out(x, layout), *of_router)
    close(logits.numpy(), router.astype(np.float64) @ x)

    stack = StackedMatrices.single(layout, rows, cols, ChosenExperts(used, n, False))
    stack, outs, ids, p = (
        replace(stack, digits=True),
        digits_of(used, rows // 2),
        zeros(used, dtypes.int32),
        zeros(used),
    )
    kernel = matvec(stack, Schedule(5, 16, 4), activated_in_digits("silu", 1), "t")
    run(kernel, *outs, ids, p, zeros(n, dtypes.int32), *made, logits, *planes)
    best = np.argsort(-logits.numpy())[:used]
    assert np.array_equal(ids.numpy(), best)
    y = weights[best] @ x
    # [digit, word // 4, unit, word % 4], four bytes with a sign
    digits = outs[0].numpy().reshape(used, 3, 16).view(np.int8).astype(np.float64)
    integers = np.einsum("edc,d->ec", digits, [1, 2**8, 2**16]).reshape(used, -1, 32)
    got = integers * outs[1].numpy().reshape(used, -1, 1)
    close(got.reshape(used, -1), gated(y[:, 0::2], y[:, 1::2], "silu"), 4e-6)

    shared = SharedExpert(WeightLayout(12), 256)
    stack = replace(stack, experts=ChosenExperts(used, n, True), shared=shared)
    xs, factor, product, made = (
        vector((used, cols)),
        np.float32([0.3, 0.7]),
        zeros(rows),
        digits_of(used, cols),
    )
    vectors = buffer(np.concatenate([laid_out(x, layout).numpy() for x in xs]))
    run(digit_rows.divide(layout, cols, used), *made, vectors)
    shared_x, (of_shared, shared_weights) = vector(shared.cols), packed(12, rows, shared.cols)
    ins = buffer(np.array([2, 0], np.int32)), buffer(factor), *made, laid_out(shared_x, shared.layout)
    gates = buffer(np.array([9, 9, 9, 9, -0.5], np.float32))
    run(matvec(stack, Schedule(3, 4, 2), STORE, "t"), product, *ins, gates, *planes, *of_shared)
    wanted = factor @ np.einsum("erc,ec->er", weights[[2, 0]], xs)
    close(product.numpy(), wanted + shared_weights.astype(np.float64) @ shared_x / (1 + np.exp(0.5)), 4e-6)


def check_products_beside_experts() -> None:
    """The sum of the chosen experts, and beside it a product of another vector of another length: rows that fill their
    blocks, and rows that do not."""
    n, ids, p = 4, np.array([3, 0, 2], np.int32), np.float32([0.5, 0.2, 0.3])
    for (a, b), schedule, rows in (((8, 12), Schedule(2, 2, 2), 16), ((12, 8), Schedule(4, 2, 2), 10)):
        layouts, cols, experts = (WeightLayout(a), WeightLayout(b)), (256, 512), ChosenExperts(3, n, True)
        packs = packed(a, n * rows, cols[0]), packed(b, rows, cols[1])
        beside = StackedMatrices.single(layouts[1], rows, cols[1])
        stack = StackedMatrices(((layouts[0], rows),), cols[0], experts, beside=beside)
        xs, x = vector((len(ids), cols[0])), vector(cols[1])
        vectors = buffer(np.concatenate([laid_out(x, layouts[0]).numpy() for x in xs]))
        product, squares = zeros(2 * rows), zeros(stack.n_blocks(schedule))
        ins = buffer(ids), buffer(p), vectors, laid_out(x, layouts[1])
        run(matvec(stack, schedule, STORE_SQUARES, "t"), product, squares, *ins, *packs[0][0], *packs[1][0])
        of_experts = packs[0][1].reshape(n, rows, cols[0])[ids].astype(np.float64)
        wanted = p @ np.einsum("erc,ec->er", of_experts, xs), packs[1][1].astype(np.float64) @ x
        close(product.numpy(), np.concatenate(wanted), 4e-6)
        close(squares.numpy().sum(), (np.concatenate(wanted) ** 2).sum(), 4e-6)


def check_router_beside_gate_and_up() -> None:
    """A router and gate and up of a feed-forward layer, which have other norms of the same stream."""
    n, cols, width, eps, layouts = 8, 256, 16, 1e-5, (WeightLayout(0), WeightLayout(12))
    (planes, router), (others, weights) = packed(0, n, cols), packed(12, 2 * width, cols)
    beside = StackedMatrices.single(layouts[1], 2 * width, cols)
    stack = StackedMatrices(((layouts[0], n),), cols, beside=beside)
    xs, squares, scale = vector((2, cols)), np.full(3, 30, np.float32), input_scale(6)
    logits, out = zeros(n), zeros(permuted_size(width))
    kernel = matvec(stack, Schedule(2, 4, 2), routed(n, "gelu"), "t", 3, eps)
    vectors = (laid_out(x, layout) for x, layout in zip(xs, layouts, strict=True))
    run(kernel, logits, out, *vectors, buffer(squares), buffer(scale), *planes, *others)
    factor = 1 / np.sqrt(squares.sum() / cols + eps)
    close(logits.numpy(), router.astype(np.float64) @ xs[0] * factor)
    y = weights.astype(np.float64) @ xs[1] * factor
    close(out.numpy()[places(width)] / scale[:width], gated(y[0::2], y[1::2], "gelu"), 4e-6)


def check_residual_with_bias() -> None:
    """A bias joins the stream with the product."""
    layout, cols, rows = WeightLayout(8), 256, 16
    planes, weights = packed(8, rows, cols)
    x, stream, norm, bias = vector(cols), vector(rows), vector(rows), vector(rows)
    h, sums, following = buffer(stream), zeros(4), zeros(permuted_size(rows))
    kernel = matvec(StackedMatrices.single(layout, rows, cols), Schedule(2, 2, 2), add_residual(1, True), "t")
    run(kernel, h, sums, following, laid_out(x, layout), buffer(norm), buffer(bias), *planes)
    wanted = stream + weights.astype(np.float64) @ x + bias
    close(h.numpy(), wanted)
    close(sums.numpy().sum(), (wanted**2).sum())
    close(following.numpy()[places(rows)], wanted * norm)


def check_schedules_of_experts() -> None:
    """Blocks of all chosen experts count; threads share the units of all whose results are added."""
    layout = WeightLayout(12)
    for width, dim, used, n in ((1024, 2048, 8, 64), (768, 2048, 8, 128), (2880, 2880, 4, 32)):
        gate_up = StackedMatrices.single(layout, 2 * width, dim, ChosenExperts(used, n, False))
        down = StackedMatrices.single(layout, dim, width, ChosenExperts(used, n, True))
        for stack in (gate_up, down):
            s = matvec_schedule(stack, Chip("sm_00", 132))
            assert s.fits() and s.block_rows % 2 == 0, (stack, s)
            assert stack.n_blocks(s) * stack.slots >= 132, (stack, s)
            assert stack.units >= s.threads
