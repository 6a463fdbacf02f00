"""Decode attention of several sequences at once."""

from dataclasses import replace

import numpy as np
from tinygrad import dtypes

from engine.formats.kv_format import KVFormat
from engine.targets.nvidia.kernels.attention.decode_block import combine
from engine.targets.nvidia.kernels.attention.flash_attention import FlashSplit, flash_attention
from engine.targets.nvidia.kernels.attention.kv_cache import copy_block
from engine.targets.nvidia.kernels.attention.store_rows import store_rows
from engine.targets.nvidia.kernels.products.small_batch import column_index, columns_size
from tests.kernels.gpu.buffers import buffer, close, prompt_index, rng, run, zeros
from tests.kernels.gpu.cache_layout import BLOCK, CONTEXT, Pool, cache_of, heads_of, kept, stored_in
from tests.kernels.gpu.check_attention import temperatures, turned, values_of


def decode(split, h, lengths, sequences, sinks=False, over_heads=False):
    """A step of the tokens of `sequences`, after `lengths` tokens each; -1 is a row without a token. Rows of the same
    sequence follow each other: then all are stored first."""
    pool, tokens = Pool(h, lengths, max(map(sequences.count, sequences))), len(sequences)
    n = h.query * h.dim
    rows = rng.standard_normal((tokens, h.rows // h.dim, h.dim)).astype(np.float32)
    cos, sin = rng.standard_normal((2, CONTEXT, h.dim // 2)).astype(np.float32)
    shapes = [(m, h.dim) for m in ((h.query, h.kv) if over_heads else (1, 1))]
    norms = [rng.standard_normal(shape).astype(np.float32) for shape in shapes] if h.norm_eps else []
    sink = [np.resize(np.float32([-30, 0.3, 2, 40]), h.query)] if sinks else []
    factors, temperature = temperatures(h)
    positions = [lengths[s] + sequences[:i].count(s) if s >= 0 else 0 for i, s in enumerate(sequences)]
    columns = [(7, p, max(s, 0), s >= 0) for p, s in zip(positions, sequences, strict=True)]
    state = buffer(np.array(columns, np.int32).T)
    norm, sink_buffer = [buffer(np.concatenate(norms))] if norms else [], [buffer(s) for s in sink]
    ins = [*pool.buffers, buffer(rows), buffer(cos), buffer(sin), buffer(pool.tables), state]
    ins += [*norm, *temperature]
    out = zeros(columns_size(tokens, n), dtypes.float16)
    if len({*sequences}) < tokens:
        run(store_rows(h, tokens, over_heads), *ins[: len(ins) - len(temperature)])
        h = replace(h, is_stored=True)
    kernel = flash_attention(h, split, sinks, over_heads, tokens)
    if split.splits == 1:
        run(kernel, out, *ins, *sink_buffer)
    else:
        parts = zeros(split.splits * tokens * n), zeros(split.splits * tokens * h.query * 2)
        run(kernel, *parts, *ins)
        run(combine(h, split.splits, sinks, tokens), out, *parts, *sink_buffer)
    got = out.numpy()[prompt_index(lambda m, e: column_index(m, e, n), tokens, n)]
    new = []
    for i, (s, position) in enumerate(zip(sequences, positions, strict=True)):
        if s < 0:
            continue
        of = [x if over_heads else x[0] for x in norms] or [None, None]
        q = turned(rows[i, : h.query], cos[position], sin[position], of[0]) * factors[position]
        past_k, past_v = pool.past[s]
        if h.stored == "nothing":
            close(got[i], pool.attended(q, past_k, past_v, *sink), 2e-3)
            continue
        k = turned(rows[i, h.query : h.query + h.kv], cos[position], sin[position], of[1])
        v = values_of(h, rows[i])
        k_all = np.concatenate([past_k, k[:, None].astype(np.float16)], 1)
        v_all = np.concatenate([past_v, v[:, None].astype(np.float16)], 1)
        after, rounds = (kept(h, k_all), kept(h, v_all)), h.is_stored and h.kv_format.is_quantized
        wanted = pool.attended(q, *(after if h.is_stored else (k_all, v_all)), *sink)
        close(got[i], wanted, 1e-2 if rounds else 2e-3)  # an element may lie between two integers
        pool.past[s] = list(after)
        new.append((pool.places(s, np.array(position)), k, v))
    if new:
        pool.check_stored(*map(np.array, zip(*new, strict=True)))


def check_rows_of_several_sequences() -> None:
    """Sequences of any lengths and order, a row without a token; a window; norms and sinks."""
    decode(FlashSplit(64, 1, 2, 2, 2, 2), heads_of(32, norm_eps=1e-6), (50, 0, 33), (2, -1, 0, 1), sinks=True)
    decode(FlashSplit(256, 3, 2, 2, 1), heads_of(norm_eps=1e-6), (130, 5), (1, 0), over_heads=True)
    decode(FlashSplit(256, 2, 2, 2, 1), heads_of(window=40, temperature=True), (130, 5), (0, 1))


def check_rows_of_one_sequence() -> None:
    """Each sees those before it, and a sequence beside; norms and sinks, a window, and a quantized cache."""
    decode(FlashSplit(64, 1, 2, 2, 2, 2), heads_of(32, norm_eps=1e-6), (50, 5), (0, 0, 1, -1, 0), sinks=True)
    h = heads_of(norm_eps=1e-6, window=40, temperature=True, kv_format=KVFormat.Q8_0, dim=32)
    decode(FlashSplit(256, 2, 2, 2, 1), h, (130,), (0, 0, 0), over_heads=True)
    h = heads_of(norm_eps=1e-6, normed_values=True, stored="keys")
    decode(FlashSplit(256, 3, 2, 2, 1), h, (15, 7), (0, 0, 0))


def check_rows_of_what_is_stored() -> None:
    """Normed values, keys as values, and a cache that another layer has filled."""
    options = {"norm_eps": 1e-6, "normed_values": True}
    for h in (
        heads_of(32, **options),
        heads_of(stored="keys", **options),
        heads_of(stored="nothing", **options),
        heads_of(stored="nothing", **options, window=40),
    ):
        decode(FlashSplit(h.cached(256), 1, 2, 2, 1), h, (130, 5), (1, -1, 0))
        decode(FlashSplit(h.cached(256), 2, 2, 2, 1), h, (130, 5), (1, -1, 0))


def check_rows_over_a_quantized_cache() -> None:
    """The same over q8_0; a block that is copied to another holds the same, and that of no other zeros."""
    h = heads_of(32, kv_format=KVFormat.Q8_0)
    decode(FlashSplit(256, 3, 2, 2, 1), h, (130, 5), (1, 0))
    k, v = rng.standard_normal((2, h.kv, h.slots, h.dim)).astype(np.float16)
    cache = cache_of(h, k, v)
    for source, target in ((3, 7), (-1, 0), (-1, 5)):
        run(copy_block(h), *cache, buffer(np.array([source, target], np.int32)))
    for x, found in zip((k, v), stored_in(h, cache), strict=True):
        x[:, 7 * BLOCK : 8 * BLOCK] = x[:, 3 * BLOCK : 4 * BLOCK]
        x[:, :BLOCK] = x[:, 5 * BLOCK : 6 * BLOCK] = 0
        assert np.array_equal(found, kept(h, x))
