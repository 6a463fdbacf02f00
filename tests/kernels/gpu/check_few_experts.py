"""Products of experts with few tokens each."""

import numpy as np
from tinygrad import dtypes

from engine.targets.nvidia.kernels.products.few_experts import block_tiles, few_experts, few_tiles
from engine.targets.nvidia.kernels.products.small_batch import columns_size
from engine.targets.nvidia.kernels.weights.weight_layout import WeightLayout
from tests.kernels.gpu.buffers import buffer, close, packed, rng, run, zeros
from tests.kernels.gpu.check_products import gated
from tests.kernels.gpu.check_prompt_experts import choice, sorted_assignments
from tests.kernels.gpu.check_small_batch import arranged
from tests.tier import THOROUGH


def check_products_of_few_tokens_with_experts() -> None:
    """Gate and up of each expert's tokens, then down, weighted, in parts for each slot; with biases and without, of
    rows and columns that fill tiles and that do not. Expert 1 has two tiles of tokens, the last one has none."""
    live, tokens, used, n = 11, 12, 2, 7
    ways = (
        (12, 8, 64, 1024, 64, False, "silu"),
        (8, 8, 288, 320, 104, True, "swiglu_oai"),
        (8, 8, 96, 160, 40, True, "swiglu_oai"),
    )
    for ggml_type, down_type, width, cols, dim, bias, activation in ways[:2] if THOROUGH else ways[2:]:
        experts, layout, down_layout = (
            few_tiles(tokens, used, n),
            WeightLayout(ggml_type),
            WeightLayout(down_type),
        )
        gate_up, over_heads = packed(ggml_type, n * 2 * width, cols)
        down, narrow = packed(down_type, n * dim, width)
        over_heads, narrow = over_heads.reshape(n, 2 * width, -1), narrow.reshape(n, dim, width)
        biases = [rng.standard_normal((n, m)).astype(np.float32) * bias * 2 for m in (2 * width, dim)]
        inputs = [[buffer(b)] if bias else [] for b in biases]
        x = (rng.standard_normal((tokens, cols)) / np.abs(over_heads).max() / 2).astype(np.float16)
        weights = rng.uniform(0.1, 1, (tokens, used)).astype(np.float32)
        chosen = choice(tokens, used, n, 1)
        assigned, owners = sorted_assignments(experts, chosen, live)
        assert list(owners).count(1) == 2 and n - 1 not in owners
        lists = [np.concatenate([assigned, np.full(experts.size - len(assigned), 99)]), owners]
        lists = [buffer(a.astype(np.int32)) for a in lists]
        activated = zeros(columns_size(experts.size, width), dtypes.float16)
        kernel = few_experts(layout, 2 * width, cols, block_tiles(cols), 2, "t", experts, activation, bias)
        run(kernel, activated, arranged(x), *lists, *inputs[0], *gate_up)
        out = buffer(np.full((used, tokens, dim), 7, np.float32))
        kernel = few_experts(down_layout, dim, width, block_tiles(width), 0, "t", experts, has_bias=bias)
        run(kernel, out, activated, *lists, buffer(weights), *inputs[1], *down)
        out = out.numpy().reshape(used, tokens, dim)
        assert (out[:, live:] == 7).all()
        for token in range(live):
            for slot, e in enumerate(chosen[token]):
                y = over_heads[e].astype(np.float64) @ x[token] + biases[0][e]
                y = narrow[e].astype(np.float64) @ gated(y[0::2], y[1::2], activation) + biases[1][e]
                close(out[slot, token], y * weights[token, slot], 3e-3)
