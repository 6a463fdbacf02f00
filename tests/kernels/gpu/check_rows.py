"""Attention over a KV cache in blocks: decode of several sequences at once, and a prompt of one of them."""

import numpy as np
from tinygrad import dtypes

from engine.formats.kv_format import KVFormat
from engine.targets.nvidia.kernels.decode_block import combine
from engine.targets.nvidia.kernels.few_columns import column_index, columns_size
from engine.targets.nvidia.kernels.flash_attention import FlashSplit, flash_attention
from engine.targets.nvidia.kernels.kv_cache import CACHE_SLACK, Heads, copy_block
from engine.targets.nvidia.kernels.matmul import fragment_index, fragments_size
from engine.targets.nvidia.kernels.prefill import rotate_prompt
from engine.targets.nvidia.kernels.prefill_attention import PromptTiling, attend_prompt
from tests.kernels.gpu.buffers import buffer, close, prompt_index, rng, run, zeros
from tests.kernels.gpu.cache_layout import cache_of, kept, stored_in
from tests.kernels.gpu.check_attention import temperatures, turned, values_of

BLOCK, POOL, CONTEXT = 32, 40, 512


def pooled(dim=16, query=4, kv=2, norm_eps=None, **options):
    """Heads of a layer whose cache is a pool."""
    options = {"scale": dim**-0.5, "block": BLOCK, "pool": POOL} | options
    return Heads(query, kv, dim, CACHE_SLACK + CONTEXT, norm_eps, **options)


class Pool:
    """The keys and values of sequences with so many tokens each, in blocks in any order; blocks behind a window are
    given back. Places without a token hold numbers that would be noticed."""

    def __init__(self, heads, lengths, n_new=1):
        self.heads, h = heads, heads
        self.k, self.v = np.full((2, h.kv, h.slots, h.dim), 100, np.float16)
        free = list(rng.permutation(POOL))
        self.tables = np.full((len(lengths), h.table_size), -1, np.int32)
        self.past = []
        for table, n in zip(self.tables, lengths, strict=True):
            first = max(0, n - h.window + (h.stored != "nothing")) if h.window else 0
            for i in range(first // BLOCK, -(-(n + n_new) // BLOCK)):
                table[i] = free.pop()
            k, v = (rng.standard_normal((h.kv, n, h.dim)).astype(np.float16) for _ in range(2))
            self.past.append((k, v))
            there = np.arange(first, n)
            self.k[:, self.places(table, there)], self.v[:, self.places(table, there)] = (
                k[:, there],
                v[:, there],
            )
        self.buffers = cache_of(h, self.k, self.v)
        self.past = [(kept(h, k), kept(h, v)) for k, v in self.past]

    def places(self, table, tokens):
        return table[tokens // BLOCK] * BLOCK + tokens % BLOCK

    def attended(self, q, k, v, sinks=None):
        """float64 (query * dim): `q` (query, dim) of the last of the tokens with keys and values (kv, n, dim)."""
        h, outs = self.heads, []
        k, v = (x[:, -h.window :].astype(np.float64) if h.window else x.astype(np.float64) for x in (k, v))
        for i, query in enumerate(q.astype(np.float64)):
            s = k[i // h.shared_by] @ query * h.scale
            p = np.exp(s - s.max())
            sink = 0 if sinks is None else np.exp(float(sinks[i]) - s.max())
            outs.append(p @ v[i // h.shared_by] / (p.sum() + sink))
        return np.concatenate(outs)

    def check_stored(self, new):
        """The cache is what it was, and `new`: for places the keys and values, (kv, dim) each."""
        h = self.heads
        for place, (k, v) in new.items():
            self.k[:, place], self.v[:, place] = k, v
        keys, values = stored_in(h, self.buffers)
        close(keys, kept(h, self.k), 1e-2 if h.kv_format.is_quantized else 1e-3)
        close(values, kept(h, self.v), 1e-2 if h.kv_format.is_quantized else 1e-6)


def decode(split, h, lengths, sequences, sinks=False, wide=False):
    """A step of the tokens of `sequences`, after `lengths` tokens each; -1 is a row without a token."""
    pool, tokens = Pool(h, lengths), len(sequences)
    n = h.query * h.dim
    rows = rng.standard_normal((tokens, h.rows // h.dim, h.dim)).astype(np.float32)
    cos, sin = rng.standard_normal((2, CONTEXT, h.dim // 2)).astype(np.float32)
    shapes = [(m, h.dim) for m in ((h.query, h.kv) if wide else (1, 1))]
    norms = [rng.standard_normal(shape).astype(np.float32) for shape in shapes] if h.norm_eps else []
    sink = [np.resize(np.float32([-30, 0.3, 2, 40]), h.query)] if sinks else []
    factors, temperature = temperatures(h)
    last = int(h.stored == "nothing")  # the token is among those in the cache
    positions = [lengths[s] - last if s >= 0 else 0 for s in sequences]
    columns = [(7, p, max(s, 0), s >= 0) for p, s in zip(positions, sequences, strict=True)]
    state = buffer(np.array(columns, np.int32).T)
    norm, sink_buffer = [buffer(np.concatenate(norms))] if norms else [], [buffer(s) for s in sink]
    ins = [*pool.buffers, buffer(rows), buffer(cos), buffer(sin), buffer(pool.tables), state]
    ins += [*norm, *temperature]
    out = zeros(columns_size(tokens, n), dtypes.float16)
    kernel = flash_attention(h, split, sinks, wide, tokens)
    if split.splits == 1:
        run(kernel, out, *ins, *sink_buffer)
    else:
        parts = zeros(split.splits * tokens * n), zeros(split.splits * tokens * h.query * 2)
        run(kernel, *parts, *ins)
        run(combine(h, split.splits, sinks, tokens), out, *parts, *sink_buffer)
    got = out.numpy()[prompt_index(lambda m, e: column_index(m, e, n), tokens, n)]
    new = {}
    for i, (s, position) in enumerate(zip(sequences, positions, strict=True)):
        if s < 0:
            continue
        of = [x if wide else x[0] for x in norms] or [None, None]
        q = turned(rows[i, : h.query], cos[position], sin[position], of[0]) * factors[position]
        past_k, past_v = pool.past[s]
        if h.stored == "nothing":
            close(got[i], pool.attended(q, past_k, past_v, *sink), 2e-3)
            continue
        k = turned(rows[i, h.query : h.query + h.kv], cos[position], sin[position], of[1])
        v = values_of(h, rows[i]).astype(np.float16)
        k_all = np.concatenate([past_k, k[:, None].astype(np.float16)], 1)
        wanted = pool.attended(q, k_all, np.concatenate([past_v, v[:, None]], 1), *sink)
        close(got[i], wanted, 2e-3)
        new[pool.places(pool.tables[s], position)] = k, v
    pool.check_stored(new)


def check_rows_of_several_sequences() -> None:
    """Sequences of any lengths and order, a row without a token; a window; norms and sinks."""
    decode(FlashSplit(64, 1, 2, 2, 2, 2), pooled(32, norm_eps=1e-6), (50, 0, 33), (2, -1, 0, 1), sinks=True)
    decode(FlashSplit(256, 3, 2, 2, 1), pooled(norm_eps=1e-6), (130, 5), (1, 0), wide=True)
    decode(FlashSplit(256, 2, 2, 2, 1), pooled(window=40, temperature=True), (130, 5), (0, 1))


def check_rows_of_what_is_stored() -> None:
    """Normed values, keys as values, and a cache that another layer has filled."""
    options = {"norm_eps": 1e-6, "normed_values": True}
    for h in (
        pooled(32, **options),
        pooled(stored="keys", **options),
        pooled(stored="nothing", **options),
        pooled(stored="nothing", **options, window=40),
    ):
        decode(FlashSplit(h.cached(256), 1, 2, 2, 1), h, (130, 5), (1, -1, 0))
        decode(FlashSplit(h.cached(256), 2, 2, 2, 1), h, (130, 5), (1, -1, 0))


def check_rows_over_a_quantized_cache() -> None:
    """The same over q8_0; a block that is copied to another holds the same."""
    h = pooled(32, kv_format=KVFormat.Q8_0)
    decode(FlashSplit(256, 3, 2, 2, 1), h, (130, 5), (1, 0))
    k, v = rng.standard_normal((2, h.kv, h.slots, h.dim)).astype(np.float16)
    cache = cache_of(h, k, v)
    run(copy_block(h), *cache, buffer(np.array([3, 7], np.int32)))
    for x, found in zip((k, v), stored_in(h, cache), strict=True):
        x[:, 7 * BLOCK : 8 * BLOCK] = x[:, 3 * BLOCK : 4 * BLOCK]
        assert np.array_equal(found, kept(h, x))


def check_prompt_in_blocks() -> None:
    """A prompt's chunk of one of several sequences."""
    tokens, live = 16, 11
    for h, lengths, sequence in (
        (pooled(), (40, 70), 1),
        (pooled(window=40), (130, 3), 0),
        (pooled(32, kv_format=KVFormat.Q8_0), (40, 70), 1),
    ):
        pool, position, n = Pool(h, lengths, live), lengths[sequence], h.query * h.dim
        rows = rng.standard_normal((tokens, h.query + 2 * h.kv, h.dim)).astype(np.float32)
        cos, sin = rng.standard_normal((2, CONTEXT, h.dim // 2)).astype(np.float32)
        prompt = buffer(np.array([position, live, sequence], np.int32))
        queries, out = zeros(tokens * n, dtypes.float16), zeros(fragments_size(tokens, n), dtypes.float16)
        width, table = rows.shape[1] * h.dim, buffer(pool.tables)
        rotate = rotate_prompt(h, tokens, (1,), (width,), False)
        run(rotate, queries, *pool.buffers, *map(buffer, (rows, cos, sin)), table, prompt)
        attend = attend_prompt(h, tokens, PromptTiling(1, 4, 2, 1))
        run(attend, out, queries, *pool.buffers, table, prompt)
        got = out.numpy()[prompt_index(lambda m, e, n=n: fragment_index(m, e, n), live, n)]
        new, (past_k, past_v) = {}, pool.past[sequence]
        for i in range(live):
            at = position + i
            q, k = (turned(x, cos[at], sin[at]) for x in (rows[i, : h.query], rows[i, h.query : -h.kv]))
            v = rows[i, -h.kv :].astype(np.float16)
            past_k = np.concatenate([past_k, kept(h, k)[:, None]], 1)
            past_v = np.concatenate([past_v, kept(h, v)[:, None]], 1)
            close(got[i], pool.attended(q, past_k, past_v), 6e-3 if h.kv_format.is_quantized else 3e-3)
            new[pool.places(pool.tables[sequence], at)] = k, v
        pool.check_stored(new)
