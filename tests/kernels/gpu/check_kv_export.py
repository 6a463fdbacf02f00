"""Chunks of the KV cache, quantized for the disk and back."""

import numpy as np
from tinygrad import dtypes

from engine.kernels.gpu.kv_cache import CACHE_SLACK, Heads
from engine.kernels.gpu.kv_export import export_tokens, import_tokens
from engine.model.lower.cpu_export import quantized
from tests.kernels.gpu.buffers import buffer, rng, run, zeros

TOKENS = 64


def check_exports():
    for position, options in ((96, {}), (320, {"window": 128, "ring": 192})):
        h = Heads(4, 2, 64, CACHE_SLACK + 512, None, 0.1, **options)
        k, v = rng.standard_normal((2, h.kv, h.slots, h.dim)).astype(np.float16)
        k[0, position % h.slots, :32] = 0
        keys = buffer(k.reshape(h.kv, h.slots, h.dim // 4, 4).transpose(0, 2, 1, 3))
        values = buffer(v.reshape(h.kv, h.slots // 4, 4, h.dim).transpose(0, 1, 3, 2))
        n = 2 * h.kv * TOKENS * h.dim
        quants, scales = zeros(n, dtypes.int8), zeros(n // 32, dtypes.float16)
        at = buffer(np.array([position], np.int32))
        run(export_tokens(h, TOKENS), quants, scales, keys, values, at)
        places = np.arange(position, position + TOKENS) % h.slots
        wanted = [quantized(x[:, places].astype(np.float32)) for x in (k, v)]
        found = quants.numpy().reshape(2, h.kv, TOKENS, h.dim), scales.numpy().reshape(2, h.kv, TOKENS, -1)
        for side in (0, 1):
            np.testing.assert_allclose(found[1][side], wanted[side][1], rtol=2e-3)
            assert np.abs(found[0][side].astype(int) - wanted[side][0]).max() <= 1
        new_keys, new_values = (zeros(h.cache_size, dtypes.float16) for _ in range(2))
        run(import_tokens(h, TOKENS), new_keys, new_values, quants, scales, at)
        steps = np.repeat(found[1].astype(np.float32), 32, axis=-1)
        back = found[0] * steps
        tiles = new_keys.numpy().reshape(h.kv, h.dim // 4, h.slots, 4).transpose(0, 2, 1, 3)
        np.testing.assert_allclose(tiles.reshape(k.shape)[:, places], back[0], rtol=1e-3)
        tiles = new_values.numpy().reshape(h.kv, h.slots // 4, h.dim, 4).transpose(0, 1, 3, 2)
        np.testing.assert_allclose(tiles.reshape(v.shape)[:, places], back[1], rtol=1e-3)
