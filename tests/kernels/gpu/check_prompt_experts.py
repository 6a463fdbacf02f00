"""Mixtures of experts for a prompt: the choice of experts, the assignments sorted by expert, and their products."""

import numpy as np
from tinygrad import dtypes

from engine.targets.nvidia.kernels.products.activation_order import PLACES
from engine.targets.nvidia.kernels.products.expert_choice import Scores
from engine.targets.nvidia.kernels.products.matmul import ExpertTiles, expert_tiles, fragments_size, matmul
from engine.targets.nvidia.kernels.products.prefill_experts import (
    add_shared,
    choose_experts,
    count_assignments,
    router_logits,
    sort_assignments,
)
from engine.targets.nvidia.kernels.residual_stream.prefill import norm_prompt
from engine.targets.nvidia.kernels.weights.weight_layout import WeightLayout
from tests.kernels.gpu.buffers import buffer, close, packed, prompt_index, prompt_state, rng, run, zeros
from tests.kernels.gpu.check_norms import normed
from tests.kernels.gpu.check_products import gated
from tests.tier import THOROUGH


def check_router() -> None:
    """Logits as exact as float32, of experts and columns that fill blocks and that do not."""
    tokens, live, eps = 16, 11, 1e-5
    prompt = prompt_state(tokens, (0, 5, live, 0))
    for n, cols, bias in ((32, 256, False), (40, 180, True), (6, 256, True), (8, 64, False)):
        h, weight = rng.standard_normal((tokens, cols)) * 8, rng.standard_normal(cols)
        router, biases = rng.standard_normal((n, cols)), rng.standard_normal(n)
        h, weight, router, biases = (a.astype(np.float32) for a in (h, weight, router, biases))
        out = zeros(tokens * n)
        ins = [buffer(a) for a in (h, weight)], [buffer(a) for a in (router, *([biases] if bias else []))]
        run(router_logits(tokens, cols, n, eps, bias), out, *ins[0], prompt, *ins[1])
        wanted = normed(h.astype(np.float64), weight, eps) @ router.T + (biases if bias else 0)
        close(out.numpy().reshape(tokens, n)[:live], wanted[:live], 1e-6)


def check_choice_of_experts() -> None:
    """The most probable experts in order, of equal ones the first; renormalised or not, and by a least sum."""
    tokens = 16
    for n, used, least in ((8, 2, None), (40, 8, 6.1e-5), (32, 4, 0.9), (3, 3, 6.1e-5)):
        logits = (rng.standard_normal((tokens, n)) * 3).astype(np.float32)
        logits[0], logits[1, : n // 2] = 2.0, 5.0
        chosen, weights = zeros(tokens * used, dtypes.int32), zeros(tokens * used)
        prompt = prompt_state(tokens, (0, 3, tokens, 0))
        run(choose_experts(tokens, used, n, least), chosen, weights, buffer(logits), prompt)
        p = np.exp(logits.astype(np.float64) - logits.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        wanted = np.argsort(-logits, -1, kind="stable")[:, :used]
        assert np.array_equal(chosen.numpy().reshape(tokens, used), wanted)
        best = np.take_along_axis(p, wanted, -1)
        if least is not None:
            best /= np.maximum(best.sum(-1, keepdims=True), least)
        close(weights.numpy().reshape(tokens, used), best, 1e-6)


def check_choice_by_scores() -> None:
    """The experts of the best scores, of groups or of all; weights are probabilities without the bias."""
    tokens = 16
    cases = (
        (8, 2, None, Scores("sigmoid", factor=2.5)),
        (40, 6, 6.1e-5, Scores("softmax", biased=True)),
        (256, 8, 6.1e-5, Scores("sigmoid", True, 2.5, groups=8, used_groups=4)),
        (12, 3, 0.9, Scores("softmax", False, 1.0, groups=3, used_groups=1)),
        (33, 5, None, Scores("softmax", factor=16.0)),
    )
    for n, used, least, scores in cases:
        logits = (rng.standard_normal((tokens, n)) * 3).astype(np.float32)
        logits[0], logits[1, : n // 2] = 2.0, 5.0
        bias = (rng.standard_normal(n) * scores.biased).astype(np.float32)
        chosen, weights = zeros(tokens * used, dtypes.int32), zeros(tokens * used)
        prompt = prompt_state(tokens, (0, 3, tokens, 0))
        ins = buffer(logits), prompt, *([buffer(bias)] if scores.biased else [])
        run(choose_experts(tokens, used, n, least, scores=scores), chosen, weights, *ins)
        p = np.exp(logits.astype(np.float64) - logits.max(-1, keepdims=True))
        p = p / p.sum(-1, keepdims=True) if scores.scoring == "softmax" else 1 / (1 + np.exp(-logits))
        ranked = (p + bias).reshape(tokens, scores.groups, -1)
        if scores.groups > 1:
            how_good = np.sort(ranked, -1)[..., -2:].sum(-1)
            rest = np.argsort(-how_good, -1, kind="stable")[:, scores.used_groups :]
            np.put_along_axis(ranked, rest[..., None], -np.inf, 1)
        wanted = np.argsort(-ranked.reshape(tokens, n), -1, kind="stable")[:, :used]
        assert np.array_equal(chosen.numpy().reshape(tokens, used), wanted), (n, used, scores)
        best = np.take_along_axis(p, wanted, -1)
        if least is not None:
            best /= np.maximum(best.sum(-1, keepdims=True), least)
        close(weights.numpy().reshape(tokens, used), best * scores.factor, 1e-6)


def choice(tokens, used, n, favourite):
    """int32 (tokens, used): different experts for each token, `favourite` always among them, the last one never."""
    others = [e for e in range(n - 1) if e != favourite]
    picks = [[favourite, *rng.permutation(others)[: used - 1]] for _ in range(tokens)]
    return np.array([rng.permutation(p) for p in picks], np.int32)


def sorted_assignments(experts, chosen, live):
    """(assignments, experts of the tiles) as numpy has them: whole tiles of each expert, -1 in what is left."""
    assigned, owners = [], []
    for e in range(experts.n):
        own = np.flatnonzero(chosen[:live].reshape(-1) == e)
        tiles = -(-len(own) // experts.tile)
        assigned += [*own, *[-1] * (tiles * experts.tile - len(own))]
        owners += [e] * tiles
    return np.array(assigned, np.int32), np.array(owners + [-1] * (experts.count - len(owners)), np.int32)


def check_sorted_assignments() -> None:
    """Experts without tokens and one with most, a tile and several, fewer tokens than the chunk, more tiles than
    threads; every choice has room. All choices are counted, those of tokens beyond the prompt are not."""
    for experts, live in (
        (ExpertTiles(16, 2, 5, 16), 11),
        (ExpertTiles(64, 4, 8, 48), 64),
        (ExpertTiles(64, 4, 8, 16), 1),
        (ExpertTiles(512, 8, 128, 16), 500),
    ):
        chosen = choice(experts.tokens, experts.used, experts.n, 1)
        wanted, owners = sorted_assignments(experts, chosen, live)
        chosen[live:] = -1
        chosen = buffer(chosen)
        counts, choices = zeros(experts.n, dtypes.int32), buffer(np.arange(experts.n, dtype=np.int32))
        assigned, tile_experts = (
            buffer(np.full(experts.size, 99, np.int32)),
            zeros(experts.count, dtypes.int32),
        )
        run(count_assignments(experts), counts, choices, chosen)
        run(sort_assignments(experts), assigned, tile_experts, counts, chosen)
        taken = np.bincount(chosen.numpy()[: live * experts.used], minlength=experts.n)
        assert np.array_equal(choices.numpy(), np.arange(experts.n) + taken)
        assert np.array_equal(assigned.numpy()[: len(wanted)], wanted)
        assert (assigned.numpy()[len(wanted) :] == 99).all()
        assert np.array_equal(tile_experts.numpy(), owners)
    worst = expert_tiles(512, 4, 32)
    assert worst.tile == 48 and worst.count >= 31 + -(-(2048 - 31) // 48)


def check_expert_products() -> None:
    """Gate and up of each expert's tokens, then down, weighted, in parts for each slot; with biases and without."""
    live, tokens, used, n, width, cols, dim = 27, 32, 2, 3, 64, 256, 40
    ways = ((8, 8, 48, True, "swiglu_oai"), (12, 8, 16, False, "silu"))
    for ggml_type, down_type, tile, bias, activation in ways if THOROUGH else ways[:1]:
        experts, layout, down_layout = (
            ExpertTiles(tokens, used, n, tile),
            WeightLayout(ggml_type),
            WeightLayout(down_type),
        )
        gate_up, over_heads = packed(ggml_type, n * 2 * width, cols * 2)
        down, narrow = packed(down_type, n * dim, width)
        over_heads, narrow = over_heads.reshape(n, 2 * width, -1), narrow.reshape(n, dim, width)
        biases = [rng.standard_normal((n, m)).astype(np.float32) * bias * 2 for m in (2 * width, dim)]
        inputs = [[buffer(b)] if bias else [] for b in biases]
        x = (rng.standard_normal((tokens, 2 * cols)) / np.abs(over_heads).max() / 2).astype(np.float16)
        weights = rng.uniform(0.1, 1, (tokens, used)).astype(np.float32)
        chosen = choice(tokens, used, n, 1)
        assigned, owners = sorted_assignments(experts, chosen, live)
        lists = [np.concatenate([assigned, np.full(experts.size - len(assigned), 99)]), owners]
        lists = [buffer(a.astype(np.int32)) for a in lists]
        activated = zeros(fragments_size(experts.size, width), dtypes.float16)
        kernel = matmul(
            layout, tokens, 2 * width, 2 * cols, experts.tiles, True, "t", activation, experts, bias
        )
        in_order = np.zeros(x.size, np.float16)
        in_order[prompt_index(lambda m, e: PLACES["rows"](m, e, 2 * cols), tokens, 2 * cols)] = x
        run(kernel, activated, buffer(in_order), *lists, *inputs[0], *gate_up)
        out = buffer(np.full((used, tokens, dim), 7, np.float32))
        kernel = matmul(
            down_layout, tokens, dim, width, experts.tiles, False, "t", experts=experts, has_bias=bias
        )
        run(kernel, out, activated, *lists, buffer(weights), *inputs[1], *down)
        out = out.numpy().reshape(used, tokens, dim)
        assert (out[:, live:] == 7).all()
        for token in range(live):
            for slot, e in enumerate(chosen[token]):
                y = over_heads[e].astype(np.float64) @ x[token] + biases[0][e]
                y = narrow[e].astype(np.float64) @ gated(y[0::2], y[1::2], activation) + biases[1][e]
                close(out[slot, token], y * weights[token, slot], 3e-3)


def check_a_shared_expert_of_prompts() -> None:
    """Its result joins the stream, times the sigmoid of its gate, which no expert is chosen by."""
    tokens, cols, n, used = 4, 300, 8, 3
    stream, sums = (
        rng.standard_normal(shape).astype(np.float32) for shape in ((tokens, cols), (2, tokens, cols))
    )
    logits = rng.standard_normal((tokens, n + 1)).astype(np.float32)
    logits[:, n] += 5
    h, chosen = buffer(stream), zeros(tokens * used, dtypes.int32)
    run(add_shared(tokens, cols, 2, n + 1), h, buffer(sums), buffer(logits))
    close(h.numpy().reshape(tokens, cols), stream + sums.sum(0) / (1 + np.exp(-logits[:, n:])))
    prompt = prompt_state(tokens, (0, 3, tokens, 0))
    run(choose_experts(tokens, used, n, None, n + 1), chosen, zeros(tokens * used), buffer(logits), prompt)
    best = np.argsort(-logits[:, :n], -1, kind="stable")[:, :used]
    assert np.array_equal(chosen.numpy().reshape(tokens, used), best)


def check_whole_mixture() -> None:
    """All kernels of a mixture, from the stream to the stream after it, with the tiles that a model gets: for a commit
    those of few tokens, which are a third of the work to compile."""
    live, tokens = (50, 64) if THOROUGH else (13, 16)
    used, n, width, dim, eps = 4, 6, 64, 512, 1e-5
    experts = expert_tiles(tokens, used, n)
    gate_up, over_heads = packed(8, n * 2 * width, dim)
    down, narrow = packed(8, n * dim, width)
    over_heads, narrow = over_heads.reshape(n, -1, dim), narrow.reshape(n, dim, width)
    h, weight, following = rng.standard_normal((tokens, dim)), *rng.uniform(0.02, 0.05, (2, dim))
    h, weight, following = (a.astype(np.float32) for a in (h, weight, following))
    router = rng.standard_normal((n, dim)).astype(np.float32) * 4
    router[-1] = 0  # mostly left out
    stream, prompt = buffer(h), prompt_state(tokens, (0, 3, live, 0))
    logits, probabilities = zeros(tokens * n), zeros(tokens * used)
    counts, choices, chosen, assigned, owners = (
        zeros(size, dtypes.int32) for size in (n, n, tokens * used, experts.size, experts.count)
    )
    rows, x = zeros(tokens * dim, dtypes.float16), zeros(fragments_size(tokens, dim), dtypes.float16)
    activated, sums = zeros(fragments_size(experts.size, width), dtypes.float16), zeros(used * tokens * dim)
    layout, tiles = WeightLayout(8), experts.tiles
    run(norm_prompt(tokens, dim, (), eps, order="rows"), rows, stream, buffer(weight))
    run(router_logits(tokens, dim, n, eps, False), logits, stream, buffer(weight), prompt, buffer(router))
    run(choose_experts(tokens, used, n, 6.1e-5), chosen, probabilities, logits, prompt)
    run(count_assignments(experts), counts, choices, chosen)
    run(sort_assignments(experts), assigned, owners, counts, chosen)
    kernel = matmul(layout, tokens, 2 * width, dim, tiles, True, "t", experts=experts)
    run(kernel, activated, rows, assigned, owners, *gate_up)
    kernel = matmul(layout, tokens, dim, width, tiles, False, "t", experts=experts)
    run(kernel, sums, activated, assigned, owners, probabilities, *down)
    run(norm_prompt(tokens, dim, (used,), eps), x, stream, sums, buffer(following))

    got = stream.numpy().reshape(tokens, dim)
    for token, ours in zip(h[:live].astype(np.float64), got, strict=False):
        normal = normed(token, weight, eps)
        p = np.exp(router @ normal)
        best = np.argsort(-p, kind="stable")[:used]
        ys = (over_heads[e] @ normal for e in best)
        hidden = [gated(y[0::2], y[1::2], "silu") for y in ys]
        added = sum(narrow[e] @ a * p[e] for e, a in zip(best, hidden, strict=True)) / p[best].sum()
        close(ours - token, added, 5e-3)
