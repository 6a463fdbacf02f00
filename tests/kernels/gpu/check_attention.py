"""Attention of one token and of a prompt, over a KV cache of keys and values in half precision."""

from dataclasses import replace

import numpy as np
from tinygrad import dtypes

from engine.formats.kv_format import KVFormat
from engine.targets.nvidia.kernels.attention.decode_block import combine, result_size
from engine.targets.nvidia.kernels.attention.flash_attention import FlashSplit, flash_attention, flash_split
from engine.targets.nvidia.kernels.attention.prefill_attention import attend_prompt, combine_prompt
from engine.targets.nvidia.kernels.attention.prompt_rotation import norms_over_heads, rotate_prompt
from engine.targets.nvidia.kernels.attention.prompt_tiling import PromptTiling, prompt_tiling
from engine.targets.nvidia.kernels.pieces import PIECE_ROWS, rows_of
from engine.targets.nvidia.kernels.products.activation_order import PLACES
from engine.targets.nvidia.kernels.products.matmul import fragments_size
from engine.targets.nvidia.kernels.weights.matrix_bytes import UNIT
from tests.kernels.gpu.buffers import buffer, close, places, prompt_index, prompt_state, rng, run, zeros
from tests.kernels.gpu.cache_layout import CONTEXT, Pool, heads_of, kept
from tests.tier import THOROUGH


def temperatures(heads):
    """The factors of queries by position, and the buffers of kernels that they are."""
    factors = np.ones(CONTEXT, np.float32)
    if not heads.temperature:
        return factors, []
    factors[:] = rng.uniform(0.5, 2, factors.size)
    return factors, [buffer(factors)]


def opened(gates):
    """The factors of the elements of a result; 1 if there are no gates."""
    return 1 / (1 + np.exp(-gates.reshape(-1))) if gates.size else 1


def turned(x, cos, sin, norm=None, eps=1e-6):
    if norm is not None and norm.ndim == 2:  # over all heads of x (tokens, heads, dim)
        x = x / np.sqrt((x * x).mean((-2, -1), keepdims=True) + eps) * norm
    elif norm is not None:
        x = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * norm
    a, b = np.split(x, 2, -1)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def values_of(heads, rows):
    """The values among rows of queries, keys and values (..., rows, dim), as far as there are values."""
    values = rows[..., -heads.kv :, :]
    if not heads.normed_values:
        return values
    return values / np.sqrt((values * values).mean(-1, keepdims=True) + heads.norm_eps)


def decode_attention(position, split, h, sinks=False, over_heads=False):
    pool = Pool(h, [position])
    rows = rng.standard_normal(((h.rows - h.first_row) // h.dim, h.dim)).astype(np.float32)
    angles = rng.standard_normal(h.dim).astype(np.float32)
    norms = rng.standard_normal((2, h.dim)).astype(np.float32) if h.norm_eps else [None, None]
    sink = [np.resize(np.float32([-30, 0.3, 2, 40]), h.query)] if sinks else []
    if over_heads:
        norms = [rng.standard_normal((n, h.dim)).astype(np.float32) for n in (h.query, h.kv)]
    factors, temperature = temperatures(h)
    cos, sin = np.split(angles, 2)
    gates = rng.standard_normal((h.query if h.gated else 0, h.dim)).astype(np.float32)
    q = turned(rows[: h.query], cos, sin, norms[0]) * factors[position]
    keys, values = pool.past[0]
    if h.stored != "nothing":
        k, v = turned(rows[h.query : h.query + h.kv], cos, sin, norms[1]), values_of(h, rows)
        keys = np.concatenate([keys, k[:, None].astype(np.float16)], 1)
        values = np.concatenate([values, v[:, None].astype(np.float16)], 1)
    wanted = pool.attended(q, keys, values, *sink) * opened(gates)

    sink, norm = [buffer(s) for s in sink], [buffer(np.concatenate(norms))] if h.norm_eps else []
    state = buffer(np.array([7, position, 0], np.int32))
    all_rows = buffer(np.concatenate([gates, rows]))
    ins = [*pool.buffers, all_rows, buffer(angles), buffer(pool.tables), state, *norm, *temperature]
    out, ones = zeros(result_size(h)), buffer(np.ones(UNIT, np.float32))
    if split.splits == 1:
        run(flash_attention(h, split, sinks, over_heads), out, *ins, *sink, ones)
    else:
        sums, tops = zeros(split.splits * h.query * h.dim), zeros(split.splits * h.query * 2)
        run(flash_attention(h, split, sinks, over_heads), sums, tops, *ins)
        run(combine(h, split.splits, sinks), out, sums, tops, ones, *sink, *[all_rows] * h.gated)
    if h.latent:
        halves = wanted.reshape(h.query, 2, h.dim // 2)[:, :, (h.dim - h.latent) // 2 :]
        got = out.numpy().reshape(h.query, -1)[:, places(h.latent)]
        close(got, halves.reshape(h.query, h.latent), 1e-3)
    else:
        close(out.numpy()[places(h.query * h.dim)], wanted, 1e-3)
    if h.stored != "nothing":
        pool.check_stored(pool.places(0, np.array([position])), k[None], v[None])


def check_decode_attention() -> None:
    """Nothing cached, one round and several, blocks that share heads or the values' dimensions, parts without
    tokens."""
    if THOROUGH:  # layers have one block that shares all
        decode_attention(50, FlashSplit(64, 1, 2, 2, 2, 2), heads_of(32, norm_eps=1e-6))
        decode_attention(0, FlashSplit(64, 1, 2, 2, 2), heads_of())
        decode_attention(100, FlashSplit(128, 1, 2, 2, 1), heads_of())
        decode_attention(3, FlashSplit(128, 3, 1, 2, 1, 2), heads_of(32, norm_eps=1e-6))
    decode_attention(70, FlashSplit(128, 3, 2, 2, 1), heads_of(norm_eps=1e-6))


def check_head_sizes() -> None:
    """Heads that are larger, or no power of two: of one token and of a prompt, in the division that a model gets."""
    odd, large = heads_of(80, 3, 1, 1e-6), heads_of(256, 2, 1, 1e-6, window=40)
    decode_attention(130, flash_split(odd, 256, 256, 2), odd)
    decode_attention(130, flash_split(large, 256, 32, 2), large)
    # warps that share the dimensions: one round, several
    decode_attention(50, FlashSplit(64, 1, 2, 2, 2, 2, 2), heads_of(64, norm_eps=1e-6))
    decode_attention(130, FlashSplit(256, 2, 1, 1, 1, 1, 2), heads_of(32))
    decode_attention(100, FlashSplit(256, 1, 2, 2, 1, 1, 2), heads_of(64, kv_format=KVFormat.Q8_0))
    shared_by_four, largest = heads_of(256, 4, 1, 1e-6, gates=256), heads_of(512, 4, 1, 1e-6)
    decode_attention(130, flash_split(shared_by_four, 512, 32, 2), shared_by_four)
    decode_attention(40, flash_split(largest, 256, 32, 2), largest)
    decode_attention(40, flash_split(largest, 256, 256, 2), largest)
    for h in (odd, large):
        attended_prompt(prompt_tiling(h, 32, 16), 18, 100, h)
    small = prompt_tiling(largest, 32, 2)  # room for the keys of one step
    assert small.held == 1 and small.shared_bytes(512) <= 48 << 10
    attended_prompt(replace(small, splits=1), 18, 20, largest)


def check_heads_of_latent_attention() -> None:
    """Of 576 elements, whose keys are the values: of one token, in one part and in several, of several, and of a
    prompt."""
    h = heads_of(576, 4, 1, stored="keys", latent=512)
    decode_attention(40, flash_split(h, 256, 256, 2), h)
    if THOROUGH:
        decode_attention(40, flash_split(h, 256, 32, 2), h)
    attended_prompt(replace(prompt_tiling(h, 32, 2), splits=2), 18, 20, h)


def check_windows() -> None:
    """A window, before and after it is full, with queries that depend on the position: one block a head and several,
    one round and several, parts without tokens."""
    small = heads_of(window=20, temperature=True, norm_eps=1e-6)
    large = heads_of(window=101, scale=0.3)
    for position in (0, 5, 19, 20, 47, 48, 49, 130):
        decode_attention(position, FlashSplit(22, 1, 2, 2, 2), small)
    for position in (400, 231, 230, 128, 127, 101, 3):
        decode_attention(position, FlashSplit(103, 3, 1, 2, 1), large)


def check_sinks() -> None:
    """Sinks below all scores, among them and above them: one block a head and several, with a window and without."""
    windowed = heads_of(window=20, temperature=True)
    for position in (0, 50):
        decode_attention(position, FlashSplit(64, 1, 2, 2, 2, 2), heads_of(32), sinks=True)
    decode_attention(49, FlashSplit(22, 1, 2, 2, 2), windowed, sinks=True)
    decode_attention(70, FlashSplit(128, 3, 2, 2, 1), heads_of(norm_eps=1e-6), sinks=True)


def check_capped_scores() -> None:
    """Of a token, whose own key has parts of its score, and of a prompt."""
    decode_attention(130, FlashSplit(256, 2, 1, 1, 1, 1, 2), heads_of(32, softcap=1.5))
    attended_prompt(PromptTiling(1, 2, 1, 1), 21, 18, heads_of(softcap=1.5))
    if THOROUGH:
        decode_attention(50, FlashSplit(64, 1, 2, 2, 2, 2), heads_of(32, window=20, softcap=1.5), sinks=True)


def check_what_is_stored() -> None:
    """Values that are normed, keys as values, and a cache that another layer has filled: of a token, of a prompt."""
    options = {"norm_eps": 1e-6, "normed_values": True}
    windowed, long = heads_of(stored="keys", window=20, **options), heads_of(32, stored="nothing", **options)
    more = (windowed, long) if THOROUGH else ()
    for h in (
        heads_of(**options),
        heads_of(32, stored="keys", **options),
        heads_of(stored="nothing", window=20, **options),
        *more,
    ):
        limit = h.cached(128)
        for position in (0, 49):
            decode_attention(position, FlashSplit(limit, 1, 2, 2, 1, h.dim // 16), h)
        attended_prompt(PromptTiling(1, 2, 1, 1), 21, 30, h)


def check_norms_over_all_heads() -> None:
    """Norms of queries and of keys over all heads: as many heads of keys as of queries, and fewer."""
    alike = heads_of(80, 3, 3, 1e-6)
    for split in (FlashSplit(64, 1, 2, 2, 2), FlashSplit(128, 3, 2, 2, 1)):
        decode_attention(50, split, heads_of(norm_eps=1e-6), over_heads=True)
    decode_attention(50, flash_split(alike, 256, 256, 2), alike, over_heads=True)


def check_gated_heads() -> None:
    """Results times the sigmoid of gates: one block a head and several, prompts."""
    small, large = heads_of(norm_eps=1e-6, gates=16), heads_of(32, norm_eps=1e-6, gates=32)
    decode_attention(50, FlashSplit(64, 1, 2, 2, 2, 2), large)
    decode_attention(50, FlashSplit(128, 3, 2, 2, 1), small)
    if THOROUGH:
        decode_attention(50, FlashSplit(64, 1, 2, 2, 2), small)
        attended_prompt(PromptTiling(1, 2, 1, 1), 21, 18, small)
    attended_prompt(PromptTiling(2, 2, 2, 3, shared=True), 30, 137, small)


def check_prompt_attention() -> None:
    """A prompt's queries and keys rotated and put away, and its causal attention over what came before too."""
    heads = heads_of(norm_eps=1e-6)
    attended_prompt(PromptTiling(1, 2, 1, 1), 21, 18, heads)
    # keys that all queries see and keys that they do not, a row unused, many blocks that share the keys
    attended_prompt(PromptTiling(2, 2, 1, 11, shared=True), 30, 140, heads)
    # more warps than parts of the keys to copy, and fewer; warps without queries
    attended_prompt(PromptTiling(1, 4, 2, 1), 9, 40, heads_of(temperature=True))
    attended_prompt(PromptTiling(1, 4, 4, 2), 32, 90, heads_of(16, 6, 2))
    # warps that share queries, whole and in splits
    if THOROUGH:
        attended_prompt(PromptTiling(1, 4, 2, 1, True, 2), 20, 40, heads_of(32))
    attended_prompt(PromptTiling(1, 4, 1, 2, True, 2), 20, 40, heads_of(64, 3, 1))


def check_windows_of_prompts() -> None:
    """Windows smaller than a chunk and larger, before and after they are full."""
    small, large = heads_of(window=20, norm_eps=1e-6), heads_of(window=100, scale=0.3)
    for position, n in ((0, 32), (19, 21), (40, 32), (64, 30), (333, 32)):
        attended_prompt(PromptTiling(1, 2, 1, 1), n, position, small)
    if not THOROUGH:
        return
    for position, n in ((0, 20), (90, 32), (112, 32), (130, 32), (144, 5), (301, 32)):
        attended_prompt(PromptTiling(2, 1, 1, 3), n, position, large)
        attended_prompt(PromptTiling(1, 4, 2, 1), n, position, large)


def check_sinks_of_prompts() -> None:
    """Sinks below all scores, among them and above them, with a window and without."""
    attended_prompt(PromptTiling(1, 2, 1, 1), 21, 18, heads_of(), sinks=True)
    windowed = heads_of(window=100, norm_eps=1e-6)
    attended_prompt(PromptTiling(2, 1, 1, 16), 30, 137, windowed, sinks=True)


def check_norms_over_all_heads_of_prompts() -> None:
    """Fewer elements than threads and more, with a bias; as many heads of keys as of queries, and fewer."""
    attended_prompt(PromptTiling(1, 2, 1, 1), 21, 18, heads_of(norm_eps=1e-6), over_heads=True)
    attended_prompt(PromptTiling(1, 1, 1, 1), 9, 3, heads_of(16, 20, 20, norm_eps=1e-5), over_heads=True)


def check_prompts_of_several_sequences() -> None:
    """A prompt's chunk of one of several sequences."""
    attended_prompt(PromptTiling(1, 2, 1, 1), 11, 130, heads_of(window=20), others=(3,))


def check_pieces_of_several_prompts() -> None:
    """Pieces of three prompts in a step: one that fills its rows, one of two units, windows and tables of their own.
    Blocks that gather what they store by eight tokens, of all heads and of some that share keys."""
    before = ((32, 5), (40, 70))
    shared = heads_of(64, 4, 1, norm_eps=1e-6)
    attended_prompt(PromptTiling(1, 4, 1, 1), 11, 130, shared, before=before, order="eights")
    if THOROUGH:
        attended_prompt(PromptTiling(1, 2, 1, 1), 21, 18, heads_of(128, 4, 1), order="eights")
        attended_prompt(PromptTiling(1, 4, 1, 1), 21, 18, heads_of(128, 2, 1), order="eights", sinks=True)
    attended_prompt(PromptTiling(2, 2, 2, 2), 11, 30, heads_of(window=20), before=before, sinks=True)
    gated = heads_of(32, 8, 1, norm_eps=1e-6, gates=32, kv_format=KVFormat.Q8_0)
    attended_prompt(PromptTiling(1, 8, 1, 1), 5, 0, gated, before=before[:1], order="eights")
    for h in (heads_of(64, 14, 2), heads_of(128, 16, 8), heads_of(64, 32, 8), heads_of(256, 8, 8)):
        assert 0 < prompt_tiling(h, 512, 132, 99 << 10, is_narrow=True).span(h) <= PIECE_ROWS


def check_pictures_of_prompts() -> None:
    """Tokens that see those after them in a picture, with a window and without, and keys in several splits."""
    attended_prompt(PromptTiling(1, 2, 1, 1), 37, 18, heads_of(ahead=True))
    attended_prompt(PromptTiling(2, 1, 1, 3), 50, 137, heads_of(window=20, ahead=True), before=((32, 5),))


def attended_prompt(
    cut, n, position, h, sinks=False, over_heads=False, others=(), before=(), order="fragments"
):
    """A piece of n tokens from `position` on, of the sequence after `others` of so many tokens. In the rows `before` it
    are pieces of other sequences: (number of tokens, position) each."""
    pieces, first = [], 0
    for sequence, (count, start) in enumerate((*before, (n, position)), len(others)):
        pieces.append((first, start, count, sequence))
        first += rows_of(count)
    tokens, pool = first, Pool(h, [*others, *(piece[1] for piece in pieces)], max(p[2] for p in pieces))
    total = h.rows // h.dim
    sink = [np.resize(np.float32([-30, 0.3, 2, 40]), h.query)] if sinks else []
    sums = rng.standard_normal((2, tokens, h.rows)).astype(np.float32)
    cos, sin = (rng.standard_normal((CONTEXT, h.dim // 2)).astype(np.float32) for _ in range(2))
    norms = rng.standard_normal((2, h.dim)).astype(np.float32) if h.norm_eps else [None, None]
    bias = [rng.standard_normal(total * h.dim).astype(np.float32)] if over_heads else []
    if over_heads:
        norms = [rng.standard_normal((n_heads, h.dim)).astype(np.float32) for n_heads in (h.query, h.kv)]
    factors, temperature = temperatures(h)
    queries = zeros(tokens * h.query * h.dim, dtypes.float16)
    prompt, tables = prompt_state(tokens, *pieces), buffer(pool.tables)
    norm = [buffer(np.concatenate(norms))] if h.norm_eps else []
    shape, biases = ((2,), (h.rows,), bool(bias)), [buffer(b) for b in bias]
    out = zeros(fragments_size(tokens, h.query * h.dim), dtypes.float16)
    if over_heads:
        norm.append(zeros(tokens * 2))
        run(norms_over_heads(h, tokens, *shape), norm[1], buffer(sums), *biases)
    kernel = rotate_prompt(h, tokens, *shape, over_heads, order)
    ins = [prompt, *biases, *norm, *temperature]
    cache, own_tables = (pool.buffers, [tables]) if h.stored != "nothing" else ([], [])
    run(kernel, queries, *[out] * h.gated, *cache, *map(buffer, (sums, cos, sin)), *own_tables, *ins)
    sink_buffers, parts = [buffer(s) for s in sink], zeros(cut.sums_size(h, tokens))
    seen = np.zeros(tokens, np.int32)
    for first, position, count, _ in pieces:
        seen[first : first + count] = position + 1 + np.arange(count)
        seen[first + 3 : first + count - 4] = position + count - 4  # a picture
    ins = [queries, *pool.buffers, tables, prompt, *([buffer(seen)] if h.ahead else [])]
    if cut.splits == 1:
        run(attend_prompt(h, tokens, cut, sinks, order), out, *ins, *sink_buffers)
    else:
        run(attend_prompt(h, tokens, cut), parts, *ins)
        run(combine_prompt(h, tokens, cut.splits, sinks, order), out, parts, prompt, *sink_buffers)

    place = prompt_index(lambda m, e: PLACES[order](m, e, h.query * h.dim), tokens, h.query * h.dim)
    got, all_rows, new = out.numpy()[place], (sums.sum(0) + sum(bias)).reshape(tokens, -1, h.dim), []
    for first, position, n, sequence in pieces:
        gates, rows = np.split(all_rows[first : first + n], [h.first_row // h.dim], 1)
        here = [t[position : position + n, None] for t in (cos, sin)]
        own_factors = factors[position : position + n, None, None]
        q = turned(rows[:, : h.query], *here, norms[0], h.norm_eps) * own_factors
        keys, values = pool.past[sequence]
        if h.stored != "nothing":
            k = kept(h, turned(rows[:, h.query : h.query + h.kv], *here, norms[1], h.norm_eps))
            v = kept(h, values_of(h, rows))
            new.append((pool.places(sequence, np.arange(position, position + n)), k, v))
            keys = np.concatenate([keys, k.transpose(1, 0, 2)], 1)
            values = np.concatenate([values, v.transpose(1, 0, 2)], 1)
        for i in range(n):
            own = position + i + 1
            until = int(seen[first + i]) if h.ahead else own
            shown = keys[:, :until], values[:, :until]
            wanted = pool.attended(q[i], *shown, *(sink or [None]), until - own) * opened(gates[i])
            close(got[first + i], wanted, 5e-3)
    if new:
        pool.check_stored(*map(np.concatenate, zip(*new, strict=True)))


def check_a_quantized_cache() -> None:
    """q8_0: one block a head and several, one round and several, runs of the values' dimensions, a window, a prompt."""
    q8_0 = {"kv_format": KVFormat.Q8_0}
    small, windowed = heads_of(32, norm_eps=1e-6, **q8_0), heads_of(32, window=101, **q8_0)
    decode_attention(50, FlashSplit(64, 1, 2, 2, 2, 2), heads_of(64, **q8_0))
    if THOROUGH:
        decode_attention(0, FlashSplit(64, 1, 2, 2, 2), small)
    decode_attention(130, FlashSplit(256, 3, 2, 2, 1), small)
    decode_attention(231, FlashSplit(103, 3, 1, 2, 1), windowed)
    for n, position in ((1, 0), (11, 40)):
        attended_prompt(PromptTiling(1, 2, 1, 2), n, position, small)
