"""Attention of one token and of a prompt, over a KV cache of keys and values in half precision."""

import numpy as np
from tinygrad import dtypes

from engine.kernels.gpu.decode_attention import Split, attention, combine
from engine.kernels.gpu.flash_attention import FlashSplit, flash_attention
from engine.kernels.gpu.kv_cache import CACHE_SLACK, Heads
from engine.kernels.gpu.matmul import fragment_index, fragments_size
from engine.kernels.gpu.prefill import rotate_prompt
from engine.kernels.gpu.prefill_attention import PromptTiling, attend_prompt, tile_prompt
from engine.kernels.gpu.weight_layout import UNIT, permuted_size
from tests.kernels.gpu.buffers import buffer, close, places, prompt_index, rng, run, zeros


class Cache:
    """A layer's keys and values, random, with a new token at `position`."""

    def __init__(self, heads, position, n_new=1):
        self.heads, self.position = heads, position
        h, n = heads, position + n_new
        self.k, self.v = (rng.standard_normal((h.kv, n, h.dim)).astype(np.float16) for _ in range(2))
        k, v = (
            np.zeros((h.kv, h.dim // 4, h.length, 4), np.float16),
            np.zeros((h.kv, h.length // 4, h.dim, 4), np.float16),
        )
        k[:, :, :position] = self.k[:, :position].reshape(h.kv, position, h.dim // 4, 4).transpose(0, 2, 1, 3)
        padded = np.zeros((h.kv, h.length, h.dim), np.float16)
        padded[:, :position] = self.v[:, :position]
        v[:] = padded.reshape(h.kv, -1, 4, h.dim).transpose(0, 1, 3, 2)
        self.keys, self.values = buffer(k), buffer(v)

    def attended(self, q, k, v):
        """float64 (query heads * dim): `q` (query, dim), `k` and `v` (kv, n, dim) of all tokens."""
        shared_by, outs = self.heads.shared_by, []
        for i, query in enumerate(q.astype(np.float64)):
            s = k[i // shared_by].astype(np.float64) @ query / np.sqrt(self.heads.dim)
            p = np.exp(s - s.max())
            outs.append(p @ v[i // shared_by].astype(np.float64) / p.sum())
        return np.concatenate(outs)


def turned(x, cos, sin, norm=None, eps=1e-6):
    if norm is not None:
        x = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * norm
    a, b = np.split(x, 2, -1)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def decode_attention(position, split, normed):
    heads = Heads(4, 2, 16, CACHE_SLACK + 256, 1e-6 if normed else None)
    cache, h = Cache(heads, position), heads
    rows = rng.standard_normal((h.query + 2 * h.kv, h.dim)).astype(np.float32)
    angles = rng.standard_normal(h.dim).astype(np.float32)
    norms = rng.standard_normal((2, h.dim)).astype(np.float32)
    cos, sin = np.split(angles, 2)
    q = turned(rows[: h.query], cos, sin, norms[0] if normed else None)
    k = turned(rows[h.query : h.query + h.kv], cos, sin, norms[1] if normed else None)
    keys = np.concatenate([cache.k[:, :position], k[:, None].astype(np.float16)], 1)
    values = np.concatenate([cache.v[:, :position], rows[-h.kv :, None].astype(np.float16)], 1)
    wanted = cache.attended(q, keys, values)

    state = buffer(np.array([7, position], np.int32))
    ins = [
        cache.keys,
        cache.values,
        buffer(rows),
        buffer(angles),
        state,
        *([buffer(norms)] if normed else []),
    ]
    out, ones = zeros(permuted_size(h.query * h.dim)), buffer(np.ones(UNIT, np.float32))
    attend = flash_attention if isinstance(split, FlashSplit) else attention
    if split.splits == 1:
        run(attend(heads, split), out, *ins, ones)
    else:
        sums, tops = zeros(split.splits * h.query * h.dim), zeros(split.splits * h.query * 2)
        run(attend(heads, split), sums, tops, *ins)
        run(combine(heads, split.splits), out, sums, tops, ones)
    close(out.numpy()[places(h.query * h.dim)], wanted, 1e-3)
    stored = cache.values.numpy().reshape(h.kv, -1, h.dim, 4)[:, position // 4, :, position % 4]
    assert np.array_equal(stored, rows[-h.kv :].astype(np.float16))
    stored = cache.keys.numpy().reshape(h.kv, h.dim // 4, h.length, 4)[:, :, position].reshape(h.kv, h.dim)
    close(stored, k, 1e-3)


def check_one_block_a_head() -> None:
    """One block a head: nothing cached, less than a tile, several tiles."""
    for position in (0, 5, 70):
        decode_attention(position, Split(128, 1, 1, 64, 2, 4), normed=False)
    decode_attention(9, Split(128, 1, 1, 64, 2, 4), normed=True)


def check_several_blocks_a_head() -> None:
    """Several blocks a head, some of them without tokens, two heads to a block; more values ahead than weights."""
    for position in (3, 130):
        decode_attention(position, Split(256, 3, 2, 64, 2, 4), normed=True)


def check_tensor_cores() -> None:
    """As above: one round and several, blocks that share heads or the values' dimensions, parts without tokens."""
    decode_attention(0, FlashSplit(64, 1, 2, 2, 2), normed=False)
    decode_attention(50, FlashSplit(64, 1, 2, 2, 2, 2), normed=True)
    decode_attention(100, FlashSplit(128, 1, 2, 2, 1), normed=False)
    decode_attention(3, FlashSplit(128, 3, 1, 2, 1, 2), normed=True)
    decode_attention(70, FlashSplit(128, 3, 2, 2, 1), normed=True)


def check_prompt_attention() -> None:
    """A prompt's queries and keys rotated and put away, and its causal attention over what came before too."""
    attended_prompt(PromptTiling(1, 1, 2, 1), 21, 18)
    # keys that all queries see and keys that they do not, a row unused
    attended_prompt(PromptTiling(2, 1, 1, 2), 30, 37)


def attended_prompt(cut, n, position):
    tokens = 32
    heads = Heads(4, 2, 16, CACHE_SLACK + 128, 1e-6)
    cache, h = Cache(heads, position, n), heads
    total = h.query + 2 * h.kv
    sums = rng.standard_normal((2, tokens, total * h.dim)).astype(np.float32)
    cos, sin = (rng.standard_normal((128, h.dim // 2)).astype(np.float32) for _ in range(2))
    norms = rng.standard_normal((2, h.dim)).astype(np.float32)
    queries = zeros(tokens * h.query * h.dim, dtypes.float16)
    prompt = buffer(np.array([position, n], np.int32))
    kernel = rotate_prompt(heads, tokens, (2,), (total * h.dim,), False)
    ins = [buffer(sums), buffer(cos), buffer(sin), prompt, buffer(norms)]
    run(kernel, queries, cache.keys, cache.values, *ins)
    out = zeros(fragments_size(tokens, h.query * h.dim), dtypes.float16)
    attend = attend_prompt(heads, tokens, cut)
    tiles = [zeros(h.cache_size, dtypes.float16) for _ in range(2)]
    run(tile_prompt(heads, 2), *tiles, cache.keys, cache.values, prompt)
    run(attend, out, queries, *tiles, prompt)

    rows = sums.sum(0).reshape(tokens, total, h.dim)[:n]
    here = [t[position : position + n, None] for t in (cos, sin)]
    q = turned(rows[:, : h.query], *here, norms[0])
    k = turned(rows[:, h.query : h.query + h.kv], *here, norms[1]).astype(np.float16).transpose(1, 0, 2)
    keys = np.concatenate([cache.k[:, :position], k], 1)
    values = np.concatenate(
        [cache.v[:, :position], rows[:, -h.kv :].astype(np.float16).transpose(1, 0, 2)], 1
    )
    place = prompt_index(lambda m, e: fragment_index(m, e, h.query * h.dim), n, h.query * h.dim)
    got = out.numpy()[place]
    for i in range(n):
        seen = position + i + 1
        close(got[i], cache.attended(q[i], keys[:, :seen], values[:, :seen]), 5e-3)
