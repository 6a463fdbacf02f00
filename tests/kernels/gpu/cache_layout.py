"""The KV cache of a layer as numpy sees it, in any format."""

import numpy as np

from engine.formats.kv_format import QUANT_BLOCK
from tests.kernels.gpu.buffers import buffer

WORD = [0, 2, 1, 3]  # the dimension of each byte of a word


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
