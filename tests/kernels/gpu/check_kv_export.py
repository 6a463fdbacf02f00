"""Chunks of the KV cache, quantized for the disk and back."""

import numpy as np
from tinygrad import dtypes

from engine.formats.kv_format import KVFormat
from engine.targets.cpu.export import quantized
from engine.targets.nvidia.kernels.attention.kv_export import export_tokens, import_tokens
from tests.kernels.gpu.buffers import buffer, rng, run, zeros
from tests.kernels.gpu.cache_layout import BLOCK, cache_of, heads_of, stored_in
from tests.tier import THOROUGH

TOKENS = 64


def check_exports():
    for options in ({"kv_format": KVFormat.Q8_0}, *([{}] if THOROUGH else ())):
        h = heads_of(64, pool=10, **options)
        k, v = rng.standard_normal((2, h.kv, h.slots, h.dim)).astype(np.float16)
        k[0, 7 * BLOCK, :32] = 0
        cache = cache_of(h, k, v)
        n = 2 * h.kv * TOKENS * h.dim
        quants, scales = zeros(n, dtypes.int8), zeros(n // 32, dtypes.float16)
        at = buffer(np.array([7, 3], np.int32))
        run(export_tokens(h, TOKENS), quants, scales, *cache, at)
        places = np.concatenate([np.arange(BLOCK) + block * BLOCK for block in (7, 3)])
        wanted = [quantized(x[:, places].astype(np.float32)) for x in stored_in(h, cache)]
        found = quants.numpy().reshape(2, h.kv, TOKENS, h.dim), scales.numpy().reshape(2, h.kv, TOKENS, -1)
        for side in (0, 1):
            np.testing.assert_allclose(found[1][side], wanted[side][1], rtol=2e-3)
            assert np.abs(found[0][side].astype(int) - wanted[side][0]).max() <= 1
        new = [zeros(*plane) for plane in h.cache_planes]
        run(import_tokens(h, TOKENS), *new, quants, scales, at)
        steps = np.repeat(found[1].astype(np.float32), 32, axis=-1)
        back = found[0] * steps
        for side, tokens in enumerate(stored_in(h, new)):
            np.testing.assert_allclose(tokens[:, places], back[side], rtol=1e-3)
        run(import_tokens(h, TOKENS), *new, quants, scales, buffer(np.array([-1, 7], np.int32)))
        for side, tokens in enumerate(stored_in(h, new)):
            again = back[side].reshape(h.kv, 2, BLOCK, h.dim)[:, [1, 1]].reshape(h.kv, TOKENS, h.dim)
            np.testing.assert_allclose(tokens[:, places], again, rtol=1e-3)
            assert not tokens[:, :BLOCK].any()  # where -1 would have been taken for 0
