"""Kernels for GPUs against numpy, on tinygrad's PYTHON device, which runs them thread by thread: `DEV=PYTHON::sm_90
python -m tests.kernels.gpu.emulated CHECK`. A process of its own, since a process has one default device."""

import sys
import tempfile
from pathlib import Path
from unittest import mock

import gguf
import numpy as np
from tinygrad import Tensor, dtypes

from engine.events import Sampling
from engine.formats.gguf import GGUF
from engine.formats.quantization import QUANTIZED
from engine.kernels.gpu.attention import SLACK, Heads, Split, attention, combine, split_for
from engine.kernels.gpu.flash_attention import FlashSplit, flash_attention, flash_split
from engine.kernels.gpu.matmul import Tiles, fragment_index, fragments_size, matmul
from engine.kernels.gpu.matvec import Best, GateUp, Residual, Schedule, Stack, Store, matvec
from engine.kernels.gpu.packing import UNIT, Packing, permuted_size, prescale, units_of
from engine.kernels.gpu.prefill import Cut, attend_prompt, cut_for, rotate_prompt, tile_prompt
from engine.kernels.gpu.repack import Layout, Rows, repack
from engine.kernels.gpu.sample import Shortlist, draw, leaders, penalize, ranked, settings_of
from engine.kernels.gpu.schedules import matvec_schedule
from engine.kernels.gpu.token import embed, next_token
from engine.kernels.launch import Launches
from engine.measure import profile
from engine.model.config import ModelConfig
from engine.model.fused import FusedRunner
from engine.model.fused.device_sampler import DeviceSampler
from engine.model.fused.packed_model import PackedModel
from engine.model.model_runner import SamplingRunner
from engine.model.sampling import Sampler
from engine.model.weights import Weights
from tests import generated_model
from tests.reference import Reference, divergence

rng = np.random.default_rng(0)
FLOATS = {0: np.float32, 1: np.float16}


def random_matrix(ggml_type, rows, cols):
    """(bytes as a file holds them, the weights as float32)"""
    if ggml_type in FLOATS:
        w = rng.standard_normal((rows, cols)).astype(FLOATS[ggml_type])
        return w.view(np.uint8).reshape(-1), w.astype(np.float32)
    format = QUANTIZED[ggml_type]
    blocks = rng.integers(0, 256, (rows * cols // format.block, format.block_bytes), dtype=np.uint8)
    halves = rng.uniform(0.01, 0.02, (len(blocks), 2)).astype(np.float16).view(np.uint8)
    at = 208 if format.name == "Q6_K" else 0
    width = 4 if "m" in format.scales else 2
    blocks[:, at : at + width] = halves[:, :width]
    weights = gguf.dequantize(blocks.reshape(rows, -1), gguf.GGMLQuantizationType(ggml_type))
    return blocks.reshape(-1), weights.astype(np.float32)


def packed(ggml_type, rows, cols):
    raw, weights = random_matrix(ggml_type, rows, cols)
    layout = Layout(Packing(ggml_type), (Rows(rows),), cols)
    planes = layout.empty()
    repack(layout, [raw], planes)
    return planes, weights


def buffer(values):
    return Tensor(np.ascontiguousarray(values).reshape(-1)).realize()


def zeros(n, dtype=dtypes.float32):
    return Tensor.zeros(n, dtype=dtype).contiguous().realize()


def run(kernel, *buffers):
    launches = Launches()
    launches.add(kernel, *buffers)
    launches.captured()()


def places(cols):
    e = np.arange(cols)
    return (e % UNIT // 4 * units_of(cols) + e // UNIT) * 4 + e % 4


def laid_out(x, packing):
    out = np.zeros(permuted_size(x.size), np.float32)
    out[places(x.size)] = x * factors(packing, x.size)
    return buffer(out)


def factors(packing, n):
    return np.tile(prescale(packing.scaling), units_of(n))[:n]


def close(got, wanted, tolerance=2e-6):
    error = np.linalg.norm(np.asarray(got, np.float64) - wanted) / np.linalg.norm(wanted)
    assert error < tolerance, error


def formats():
    """Every type: most in a shape that fits its schedule, some with threads, rows and columns left over."""
    ragged = {6: (3, 96), 14: (3, 256), 1: (3, 72)}
    for ggml_type in (*QUANTIZED, *FLOATS):
        rows, cols = ragged.get(ggml_type, (4, 256))
        schedule = Schedule(3, 1, 2) if ggml_type in ragged else Schedule(4, 2, 1)
        packing = Packing(ggml_type)
        planes, weights = packed(ggml_type, rows, cols)
        assert [(p.numel(), p.dtype) for p in planes] == packing.shapes(rows, cols)
        x, out = rng.standard_normal(cols).astype(np.float32), zeros(rows)
        run(matvec(Stack.of(packing, rows, cols), schedule, Store(), "t"), out, laid_out(x, packing), *planes)
        close(out.numpy(), weights.astype(np.float64) @ x)


def epilogues():
    """What products are followed by, and what they are preceded by."""
    packing, cols, rows, eps = Packing(8), 128, 64, 1e-5
    planes, weights = packed(8, rows, cols)
    x = rng.standard_normal(cols).astype(np.float32)
    y = weights.astype(np.float64) @ x
    squares = rng.uniform(0, 9, 5).astype(np.float32)
    normed = y / np.sqrt(squares.sum() / cols + eps)
    schedule, vector = Schedule(2, 4, 2), laid_out(x, packing)

    out, bias = zeros(rows), rng.standard_normal(rows).astype(np.float32)
    kernel = matvec(Stack.of(packing, rows, cols), schedule, Store(True), "t", 5, eps)
    run(kernel, out, vector, buffer(squares), buffer(bias), *planes)
    close(out.numpy(), normed + bias)

    stream, weight = (
        rng.standard_normal(rows).astype(np.float32),
        rng.standard_normal(rows).astype(np.float32),
    )
    h, sums, following = buffer(stream.copy()), zeros(8), zeros(permuted_size(rows))
    run(
        matvec(Stack.of(packing, rows, cols), schedule, Residual(), "t"),
        h,
        sums,
        following,
        vector,
        buffer(weight),
        *planes,
    )
    close(h.numpy(), stream + y)
    close(sums.numpy().sum(), ((stream + y) ** 2).sum())
    close(following.numpy()[places(rows)], (stream + y) * weight)

    activated, scale = zeros(permuted_size(rows // 2)), prescale(6)
    run(
        matvec(Stack.of(packing, rows, cols), schedule, GateUp(), "t"),
        activated,
        vector,
        buffer(scale),
        *planes,
    )
    gate, up = y[0::2], y[1::2]
    close(activated.numpy()[places(rows // 2)] / scale[: rows // 2], gate / (1 + np.exp(-gate)) * up)

    logits, best, best_row = zeros(rows), zeros(8), zeros(8, dtypes.int32)
    run(matvec(Stack.of(packing, rows, cols), schedule, Best(), "t"), logits, best, best_row, vector, *planes)
    close(logits.numpy(), y)
    state, history = buffer(np.array([0, 2], np.int32)), zeros(4, dtypes.int32)
    run(next_token(8, 4, 32), state, history, best, best_row)
    assert state.numpy().tolist() == [y.argmax(), 3] and history.numpy()[2] == y.argmax()


def mixtures():
    """Matrices of several types in one product: whole blocks and not, of one scaling and of two, one loop or more."""
    cols = 512
    x = rng.standard_normal(cols).astype(np.float32)
    for kinds, schedule in (
        (((12, 8), (14, 4)), Schedule(8, 2, 2)),
        (((14, 3), (12, 6), (8, 2)), Schedule(4, 2, 2)),
        (((1, 5), (2, 4)), Schedule(8, 2, 1)),
    ):
        stack = Stack(tuple((Packing(t), rows) for t, rows in kinds), cols)
        matrices = [packed(t, rows, cols) for t, rows in kinds]
        vectors = [laid_out(x, next(p for p, _ in stack.matrices if p.scaling == s)) for s in stack.scalings]
        planes = [plane for own, _ in matrices for plane in own]
        y = np.concatenate([weights.astype(np.float64) @ x for _, weights in matrices])
        logits, n = zeros(stack.rows), stack.n_blocks(schedule)
        best, best_row = zeros(n), zeros(n, dtypes.int32)
        run(matvec(stack, schedule, Best(), "t"), logits, best, best_row, *vectors, *planes)
        close(logits.numpy(), y)
        assert best_row.numpy()[best.numpy().argmax()] == y.argmax()


def embedding():
    """A row of each kind of packing begins the stream; the angles of its position come along."""
    for ggml_type in (6, 12, 14, 1):
        packing, vocab, cols, half, context = Packing(ggml_type), 3, 256, 4, 8
        planes, weights = packed(ggml_type, vocab, cols)
        weight = rng.standard_normal(cols).astype(np.float32)
        tables = [rng.standard_normal((context, half)).astype(np.float32) for _ in range(2)]
        h, parts, following, angles = (
            zeros(cols),
            buffer(np.ones(6, np.float32)),
            zeros(cols),
            zeros(2 * half),
        )
        state = buffer(np.array([2, 5], np.int32))
        kernel = embed(packing, vocab, cols, 6, 1, context, half)
        run(kernel, h, parts, following, angles, state, *map(buffer, tables), buffer(weight), *planes)
        close(h.numpy(), weights[2], 2e-5)
        close(parts.numpy().sum(), (weights[2].astype(np.float64) ** 2).sum(), 2e-5)
        close(following.numpy()[places(cols)], weights[2] * weight, 2e-5)
        assert np.array_equal(angles.numpy(), np.concatenate([t[5] for t in tables]))


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
    heads = Heads(4, 2, 16, SLACK + 256, 1e-6 if normed else None)
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


def attention_whole():
    """One block a head: nothing cached, less than a tile, several tiles."""
    for position in (0, 5, 70):
        decode_attention(position, Split(128, 1, 1, 64, 2, 4), normed=False)
    decode_attention(9, Split(128, 1, 1, 64, 2, 4), normed=True)


def attention_split():
    """Several blocks a head, some of them without tokens, two heads to a block; more values ahead than weights."""
    for position in (3, 130):
        decode_attention(position, Split(256, 3, 2, 64, 2, 4), normed=True)


def attention_on_tensor_cores():
    """As above: one round and several, blocks that share heads or the values' dimensions, parts without tokens."""
    decode_attention(0, FlashSplit(64, 1, 2, 2, 2), normed=False)
    decode_attention(50, FlashSplit(64, 1, 2, 2, 2, 2), normed=True)
    decode_attention(100, FlashSplit(128, 1, 2, 2, 1), normed=False)
    decode_attention(3, FlashSplit(128, 3, 1, 2, 1, 2), normed=True)
    decode_attention(70, FlashSplit(128, 3, 2, 2, 1), normed=True)


def prompt_index(index, *sizes):
    """An index function of kernels as an array over its arguments."""
    grid = np.meshgrid(*(np.arange(n) for n in sizes), indexing="ij")
    return index(*grid)


def prefill_products():
    """Tensor-core products of types whose quarters differ, cut and whole, fewer tokens than the tile."""
    tokens, n = 16, 11
    for ggml_type, rows, cols in ((8, 24, 128), (6, 16, 128), (12, 16, 256), (14, 16, 256), (0, 16, 64)):
        packing = Packing(ggml_type)
        planes, weights = packed(ggml_type, rows, cols)
        scale = 4 / np.abs(weights).max()  # so that no product is beyond half precision
        x = (rng.standard_normal((tokens, cols)) * scale).astype(np.float16)
        fragments = np.zeros(fragments_size(tokens, cols), np.float16)
        fragments[prompt_index(lambda m, e, cols=cols: fragment_index(m, e, cols), tokens, cols)] = x
        prompt = buffer(np.array([0, n], np.int32))
        wanted = x[:n].astype(np.float64) @ weights.T.astype(np.float64)
        parts = 2 if cols > 64 else 1
        out = zeros(parts * tokens * rows)
        kernel = matmul(packing, tokens, rows, cols, Tiles(1, 1, 1, 2, parts), False, "t")
        run(kernel, out, buffer(fragments), prompt, *planes)
        close(out.numpy().reshape(parts, tokens, rows).sum(0)[:n], wanted, 1e-3)
        out = zeros(fragments_size(tokens, rows // 2), dtypes.float16)
        kernel = matmul(packing, tokens, rows, cols, Tiles(1, 2, 1, 1, 1), True, "t")
        run(kernel, out, buffer(fragments), prompt, *planes)
        place = prompt_index(lambda m, e, rows=rows: fragment_index(m, e, rows // 2), n, rows // 2)
        gate, up = wanted[:, 0::2], wanted[:, 1::2]
        close(out.numpy()[place], gate / (1 + np.exp(-gate)) * up, 2e-3)


def prefill_attention():
    """A prompt's queries and keys rotated and put away, and its causal attention over what came before too."""
    attended_prompt(Cut(1, 1, 2, 1), 21, 18)
    # keys that all queries see and keys that they do not, a row unused
    attended_prompt(Cut(2, 1, 1, 2), 30, 37)


def attended_prompt(cut, n, position):
    tokens = 32
    heads = Heads(4, 2, 16, SLACK + 128, 1e-6)
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


def rule():
    """Any shape has a schedule, and any attention a cut whose blocks have room in shared memory."""
    for query, kv, dim in (
        (32, 8, 64),
        (16, 8, 128),
        (14, 2, 64),
        (28, 4, 128),
        (64, 8, 128),
        (8, 1, 256),
        (9, 3, 64),
    ):
        heads = Heads(query, kv, dim, SLACK, None)
        for tokens in (64, 512):
            cut = cut_for(heads, tokens)
            assert cut.shared_bytes(dim) <= 48 << 10, (heads, cut)
            attend_prompt(heads, tokens, cut)
        for sms, limit in ((n, limit) for n in (8, 16, 132) for limit in (256, 8192, 131072)):
            split = flash_split(heads, limit, 256, sms)
            assert split.shared_bytes(dim) < 46 << 10 and heads.shared_by % split.group == 0, (heads, split)
            flash_attention(heads, split)
            attention(heads, split_for(heads, limit, 256, sms))
    for rows, cols in (
        (1, 32),
        (3, 64),
        (896, 896),
        (4864, 896),
        (151936, 896),
        (2048, 8192),
        (4096, 14336),
        (5, 4096),
    ):
        schedule = matvec_schedule(Stack.of(Packing(8), rows, cols), "sm_00")
        assert schedule.fits() and schedule.block_rows % 2 == 0


def drawn_tokens(sampling, logits, previous, numbers, shortlist, context=16):
    """The tokens that kernels draw with each of `numbers`, and the logits that they sort."""
    position, vocab = len(previous) - 1, shortlist.vocab
    said = np.zeros(context + 1, np.int32)
    said[: len(previous)] = previous
    tokens, settings, left = buffer(said), buffer(settings_of(sampling)), buffer(logits)
    if sampling.repeat_penalty != 1:
        state = buffer(np.array([0, position], np.int32))
        run(penalize(vocab, context, 8), left, settings, state, tokens)
    values, ids = zeros(shortlist.entries(0)), []
    run(leaders(shortlist), values, left)
    for level in range(len(shortlist.spans)):
        n, source = shortlist.entries(level + 1), [left] if level + 1 < len(shortlist.spans) else []
        outs = zeros(n), zeros(n, dtypes.int32)
        run(ranked(shortlist, level), *outs, values, *ids, *source)
        values, ids = outs[0], [outs[1]]
    drawn = []
    for number in numbers:
        by_position = np.zeros(context, np.float32)
        by_position[position] = number
        state, history = buffer(np.array([0, position], np.int32)), zeros(context, dtypes.int32)
        run(draw(shortlist, context), state, history, tokens, values, *ids, settings, buffer(by_position))
        token = int(history.numpy()[position])
        assert state.numpy().tolist() == [token, position + 1] and tokens.numpy()[position + 1] == token
        drawn.append(token)
    return drawn, left.numpy()


def sampling():
    """Tokens drawn by kernels are the host's: numbers on either side of each boundary between two tokens tell that
    the same ones are kept with the same probabilities, to 1e-4."""
    vocab = 150
    logits = np.round(rng.standard_normal(vocab) * 3, 1).astype(np.float32)  # some are alike
    order = np.argsort(-logits, kind="stable")
    logits[-1] = logits[order[0]] + 0.2  # where the last group is not whole
    shortlist = Shortlist(vocab, 16, (4, 2, 1))
    previous = [int(order[0]), 9, 7, int(order[1]), int(order[0]), int(order[40])]
    off = {"top_p": 1.0, "min_p": 0.0}
    for settings in (
        {"top_k": 6},
        {"top_k": 16, "temperature": 1.7, **off},
        {"top_k": 12, "top_p": 0.8, "min_p": 0.0, "temperature": 0.4},
        {"top_k": 12, "top_p": 1.0, "min_p": 0.1, "temperature": 1.0},
        {"top_k": 5, "repeat_penalty": 1.8, "repeat_last_n": 4, **off},
        {"temperature": 0.0, "repeat_penalty": 1.3},
    ):
        wanted = Sampling(**settings)
        assert shortlist.suffices(wanted)
        if wanted.temperature == 0:
            got, _ = drawn_tokens(wanted, logits, previous, [0.3], shortlist)
            assert got == [Sampler(wanted).sample(logits, previous)]
            continue
        ids, masses = Sampler(wanted).candidates(logits, previous)
        edges = np.concatenate([[0], np.cumsum(masses) / masses.sum()])
        wide = np.flatnonzero(np.diff(edges) > 3e-4)
        wide = wide[:2].tolist() + wide[2:][-2:].tolist()
        numbers = [x for i in wide for x in (edges[i] + 1e-4, edges[i + 1] - 1e-4)] + [1 - 2**-24]
        got, penalized = drawn_tokens(wanted, logits, previous, numbers, shortlist)
        assert got == [ids[i] for i in wide for _ in (0, 1)] + [ids[-1]], (settings, got, ids)
        close(penalized, Sampler(wanted)._penalized(logits, previous))
    for beyond in ({"top_k": 0}, {"top_k": 17}, {"repeat_penalty": 1.1, "repeat_last_n": 5000}):
        assert not shortlist.suffices(Sampling(**beyond))


def model():
    """Whole decode steps, one of them launched ahead of being asked for and then not wanted, one that draws."""
    shape = {"layers": 1, "dim": 32, "heads": 2, "kv_heads": 1, "ffn": 32}
    tokens = [3, 77]
    with tempfile.TemporaryDirectory() as folder:
        path = generated_model.write(Path(folder) / "model.gguf", architecture="qwen2", quant="F32", **shape)
        file, wanted = GGUF(path), Reference(path).logits(tokens)
    runner = FusedRunner(Weights(file, ModelConfig.from_gguf(file), lambda _: None), 32)
    runner._sampler = DeviceSampler(
        Shortlist(wanted.shape[1], 16, (16, 4, 1)), 32
    )  # emulation takes its time
    runner.decode(tokens[0], 0, run_ahead=True)
    assert isinstance(runner, SamplingRunner)
    assert runner.prepare_sampling(Sampling(top_k=1), tokens, np.zeros(1))
    assert runner.decode_and_sample(tokens[1], 1) == wanted[1].argmax()
    assert divergence(wanted[1], runner.logits()) < 1e-6


def profiled_prefill():
    """What the kernels of a prompt are for and must move, of 8 tokens after 24."""
    heads, tokens, position, padded = 2, 8, 24, 64
    shape = {"layers": 2, "dim": 64, "heads": 4, "kv_heads": heads, "ffn": 64}
    with tempfile.TemporaryDirectory() as folder:
        path = generated_model.write(Path(folder) / "model.gguf", architecture="qwen3", quant="F16", **shape)
        file = GGUF(path)
    config = ModelConfig.from_gguf(file)
    with (
        mock.patch.object(FusedRunner, "_compile"),
        mock.patch.object(PackedModel, "fill"),
    ):  # nothing is to run
        runner = FusedRunner(Weights(file, config, lambda _: None), 32)
    kernels = runner._prefill.step(padded).compiled().src
    replay = profile.Replay(kernels, runner._uses(), tokens, run=lambda: None)
    told = {}
    for call, role in zip(replay.calls, profile.roles_of(replay.calls, replay.uses), strict=True):
        name = profile._name(call).split("_")[1]
        told[name] = role, profile._bytes(replay, call, role, position)
    assert {name: role for name, (role, _) in told.items()} == {
        "embed": "embedding",
        "norm": "norm",
        "qkv0": "QKV projection",
        "rotate": "attention",
        "tile": "attention",
        "attend": "attention",
        "o": "attention output",
        "gate": "FFN gate+up",
        "down": "FFN down",
    }
    row = heads * config.head_dim * 2  # bytes of a token's keys, or values
    assert told["tile"][1] == 4 * row * (position + tokens) + 8, told
    queries = 2 * padded * config.heads * config.head_dim * 2  # and what comes of them
    assert told["attend"][1] == queries + 2 * row * (position + tokens) + 8, told


if __name__ == "__main__":
    globals()[sys.argv[1]]()
