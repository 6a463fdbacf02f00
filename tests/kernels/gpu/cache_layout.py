"""The KV cache of a layer as numpy sees it, in any format."""

import numpy as np

from engine.formats.kv_format import QUANT_BLOCK
from engine.targets.nvidia.kernels.attention.kv_cache import Heads
from tests.kernels.gpu.buffers import buffer, close, rng

WORD = [0, 2, 1, 3]  # the dimension of each byte of a word
BLOCK, POOL, CONTEXT = 32, 40, 512


def heads_of(dim=16, query=4, kv=2, norm_eps=None, **options):
    return Heads(
        query, kv, dim, CONTEXT, norm_eps, **{"scale": dim**-0.5, "block": BLOCK, "pool": POOL} | options
    )


class Pool:
    """The keys and values of sequences with so many tokens each, in blocks in any order. If the layer stores nothing,
    `n_new` more tokens are there, which another layer has stored. Blocks behind a window are given back. Places without
    a token hold numbers that would be noticed."""

    def __init__(self, heads, lengths, n_new=1):
        self.heads, h = heads, heads
        self.k, self.v = np.full((2, h.kv, h.slots, h.dim), 100, np.float16)
        free = list(np.random.default_rng(0).permutation(POOL))
        self.tables = np.full((len(lengths), h.table_size), -1, np.int32)
        self.past = []
        for sequence, n in enumerate(lengths):
            first = max(0, n - h.window + 1) if h.window else 0
            for i in range(first // BLOCK, -(-(n + n_new) // BLOCK)):
                self.tables[sequence, i] = free.pop()
            k, v = (rng.standard_normal((h.kv, n + n_new, h.dim)).astype(np.float16) for _ in range(2))
            stored = n + n_new * (h.stored == "nothing")
            places = self.places(sequence, np.arange(first, stored))
            self.k[:, places], self.v[:, places] = k[:, first:stored], v[:, first:stored]
            self.past.append([kept(h, x)[:, :stored] for x in (k, v)])
        self.buffers = cache_of(h, self.k, self.v)

    def places(self, sequence, tokens):
        """Where a sequence's tokens are in the pool."""
        return self.tables[sequence, tokens // BLOCK] * BLOCK + tokens % BLOCK

    def attended(self, q, k, v, sinks=None, ahead=0):
        """float64 (query heads * dim): `q` (query, dim) of the last token, or of one with `ahead` tokens after it, `k`
        and `v` (kv, n, dim) of all tokens, `sinks` (query,)."""
        h, outs = self.heads, []
        first = max(0, k.shape[1] - ahead - h.window) if h.window else 0
        k, v = (x[:, first:].astype(np.float64) for x in (k, v))
        for i, query in enumerate(q.astype(np.float64)):
            s = k[i // h.shared_by] @ query * h.scale
            s = np.tanh(s / h.softcap) * h.softcap if h.softcap else s
            p = np.exp(s - s.max())
            sink = 0 if sinks is None else np.exp(sinks[i].astype(np.float64) - s.max())
            outs.append(p @ v[i // h.shared_by] / (p.sum() + sink))
        return np.concatenate(outs)

    def check_stored(self, places, k, v):
        """The cache is what it was, but for the keys and values (tokens, kv, dim) at `places`."""
        h, others = self.heads, np.delete(np.arange(self.heads.slots), places)
        keys, values = stored_in(h, self.buffers)
        assert np.array_equal(keys[:, others], kept(h, self.k)[:, others])
        assert np.array_equal(values[:, others], kept(h, self.v)[:, others])
        close(keys[:, places].transpose(1, 0, 2), kept(h, k), 1e-2 if h.kv_format.is_quantized else 1e-3)
        is_exact = not h.kv_format.is_quantized and not h.normed_values
        close(values[:, places].transpose(1, 0, 2), kept(h, v), 1e-6 if is_exact else 1e-3)


def cache_of(heads, k, v):
    """The buffers of keys and values, float16 (kv, slots, dim) each."""
    h, tiles = heads, heads.slots // 16
    if not h.kv_format.is_quantized:
        chunks = -(-h.dim // 16)
        k, v = (np.pad(x, ((0, 0), (0, 0), (0, chunks * 16 - h.dim))) for x in (k, v))
        keys = k.reshape(h.kv, tiles, 8, 2, chunks, 4, 4).transpose(0, 1, 4, 5, 2, 3, 6)
        values = v.reshape(h.kv, tiles, 4, 4, chunks, 8, 2).transpose(0, 1, 4, 2, 5, 3, 6)
        return [buffer(np.ascontiguousarray(x).view(np.uint32)) for x in (keys, values)]
    blocks, planes, scales = h.dim // QUANT_BLOCK, [], []
    for x in (k, v):
        q, scale = quantized(x)
        words = (q + 128).astype(np.uint8).reshape(h.kv, h.slots, h.dim // 4, 4)[..., WORD]
        planes.append(np.ascontiguousarray(words).view(np.uint32)[..., 0])
        scales.append(scale.reshape(h.kv, tiles, 4, 4, blocks).transpose(0, 1, 2, 4, 3))
    keys = planes[0].reshape(h.kv, tiles, 8, 2, blocks, 2, 4).transpose(0, 1, 4, 6, 2, 3, 5)
    values = planes[1].reshape(h.kv, tiles, 16, h.dim // 4).transpose(0, 1, 3, 2)
    arrays = [np.ascontiguousarray(x).reshape(-1) for x in (keys, values, *scales)]
    return [buffer(x) for x in arrays]


def quantized(x):
    """The integers of (..., dim), and the scales of blocks, float16 (..., dim / 32): ggml's quantize_row_q8_0_ref."""
    blocks = x.astype(np.float32).reshape(*x.shape[:-1], -1, QUANT_BLOCK)
    scale = np.abs(blocks).max(-1, keepdims=True) / np.float32(127)
    q = np.floor(np.divide(blocks, scale, where=scale > 0, out=np.zeros_like(blocks)) + np.float32(0.5))
    return q.reshape(x.shape).astype(np.int32), scale[..., 0].astype(np.float16)


def kept(heads, x):
    """What is left of (..., dim) after the cache has held it: float32."""
    if not heads.kv_format.is_quantized:
        return x.astype(np.float16).astype(np.float32)
    q, scale = quantized(x)
    return q * np.repeat(scale.astype(np.float32), QUANT_BLOCK, -1)


def stored_in(heads, cache):
    """The keys and values that buffers hold, float32 (kv, slots, dim) each."""
    h, tiles = heads, heads.slots // 16
    arrays = [x.numpy() for x in cache]
    if not h.kv_format.is_quantized:
        chunks = -(-h.dim // 16)
        arrays = [x.view(np.float16) for x in arrays]
        k = arrays[0].reshape(h.kv, tiles, chunks, 4, 8, 2, 4).transpose(0, 1, 4, 5, 2, 3, 6)
        v = arrays[1].reshape(h.kv, tiles, chunks, 4, 8, 4, 2).transpose(0, 1, 3, 5, 2, 4, 6)
        return [x.reshape(h.kv, h.slots, chunks * 16)[..., : h.dim].astype(np.float32) for x in (k, v)]
    blocks = h.dim // QUANT_BLOCK
    k = arrays[0].reshape(h.kv, tiles, blocks, 4, 8, 2, 2).transpose(0, 1, 4, 5, 2, 6, 3)
    v = arrays[1].reshape(h.kv, tiles, h.dim // 4, 16).transpose(0, 1, 3, 2)
    results = []
    for words, scale in zip((k, v), arrays[2:], strict=True):
        q = np.ascontiguousarray(words).reshape(-1).view(np.uint8).reshape(h.kv, h.slots, h.dim // 4, 4)
        of_tokens = scale.reshape(h.kv, tiles, 4, blocks, 4).transpose(0, 1, 2, 4, 3)
        scales = of_tokens.reshape(h.kv, h.slots, blocks).astype(np.float32)
        integers = q[..., WORD].reshape(h.kv, h.slots, h.dim).astype(np.float32) - 128
        results.append(integers * np.repeat(scales, QUANT_BLOCK, -1))
    return results
