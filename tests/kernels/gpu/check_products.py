"""Products with matrices of every type, for one token and for a prompt, and what is fused with them."""

import math
from dataclasses import replace

import numpy as np
from tinygrad import dtypes

from engine.formats.quantization import FORMATS, WIDENED, WIDENED_IQ3_S
from engine.kernels.device_memory import part_of
from engine.targets.nvidia.kernels.attention.flash_attention import flash_attention, flash_split, rows_split
from engine.targets.nvidia.kernels.attention.kv_cache import Heads
from engine.targets.nvidia.kernels.attention.prefill_attention import attend_prompt
from engine.targets.nvidia.kernels.attention.prompt_tiling import prompt_tiling
from engine.targets.nvidia.kernels.device import Chip
from engine.targets.nvidia.kernels.half_words import is_cuda
from engine.targets.nvidia.kernels.products import digit_rows
from engine.targets.nvidia.kernels.products.epilogues import (
    EMBED,
    STORE,
    STORE_BIASED,
    activate,
    activated,
    add_residual,
    as_logits,
)
from engine.targets.nvidia.kernels.products.head_norm import HeadNorm
from engine.targets.nvidia.kernels.products.matmul import Tiles, fragment_index, fragments_size, matmul
from engine.targets.nvidia.kernels.products.matvec import Brought, matvec
from engine.targets.nvidia.kernels.products.schedules import matvec_schedule
from engine.targets.nvidia.kernels.products.small_batch import column_index, columns_size
from engine.targets.nvidia.kernels.products.stacked_matrices import (
    Schedule,
    StackedMatrices,
    usual_release,
)
from engine.targets.nvidia.kernels.residual_stream.embedding import embed, embed_prompt
from engine.targets.nvidia.kernels.residual_stream.layer_embeddings import (
    gate_embeddings,
    layer_embeddings,
    stride,
)
from engine.targets.nvidia.kernels.residual_stream.prefill import (
    activate_prompt,
)
from engine.targets.nvidia.kernels.sampling.sampling import NOT_FINITE, next_token
from engine.targets.nvidia.kernels.weights.matrix_bytes import units_of
from engine.targets.nvidia.kernels.weights.weight_layout import WeightLayout, input_scale, permuted_size
from tests.kernels.gpu.buffers import (
    FLOATS,
    brings_to_cache,
    buffer,
    close,
    laid_out,
    packed,
    places,
    prompt_index,
    prompt_state,
    rng,
    run,
    zeros,
)
from tests.kernels.gpu.check_norms import normed
from tests.tier import THOROUGH

MET = usual_release(is_early=True)


def check_every_type() -> None:
    """Every type: most in a shape that fits its schedule, some with threads, rows and columns left over. A commit is
    checked with scales of parts of blocks and with codebooks; layers have Q8_0."""
    ragged = {6: (3, 96), 14: (9, 768), 1: (3, 72), 39: (3, 96)}  # of Q6_K as in `check_digits`
    for ggml_type in (*FORMATS, *FLOATS) if THOROUGH else (14, WIDENED_IQ3_S):
        rows, cols = ragged.get(ggml_type, (4, 256))
        schedule = Schedule(3, 1, 2) if ggml_type in ragged else Schedule(4, 2, 1)
        if rows > 4:  # its weights are loaded early, and the last block has one row
            schedule = Schedule(4, 2, 4, early=True, releases=MET)
        layout = WeightLayout(ggml_type)
        planes, weights = packed(ggml_type, rows, cols)
        assert [(p.numel(), p.dtype) for p in planes] == layout.shapes(rows, cols)
        x, out = rng.standard_normal(cols).astype(np.float32), zeros(rows)
        brought = planes[:1] if rows > 4 and brings_to_cache() else []
        brings = Brought((brought[0].nbytes() // 2 // 16 * 16,), keeps=False) if brought else None
        run(
            matvec(StackedMatrices.single(layout, rows, cols), schedule, STORE, "t", brings=brings),
            out,
            laid_out(x, layout),
            *planes,
            *brought,
        )
        close(out.numpy(), weights.astype(np.float64) @ x)


def check_digits() -> None:
    """Products of one token whose vector comes in digits: as exact as with float32, with integers of 4 or 6 bits as
    with numbers of 15 bits; groups of zeros, threads with unlike numbers of steps, a last block that is not full; and
    numbers that are not finite stay so. A commit is checked with a codebook and scales of parts of blocks."""
    rows, cols, eps = 9, 768, 1e-5
    squares, of_heads = rng.uniform(0, 9, 5).astype(np.float32), rng.uniform(0, 9, (6, 4)).astype(np.float32)
    for ggml_type in (2, 3, 12, 14, 20, 23, 39) if THOROUGH else (14, 23):
        layout, limit = WeightLayout(ggml_type), 1e-6 if ggml_type in (20, 23, 39) else 1e-4
        planes, weights = packed(ggml_type, rows, cols)
        stack = replace(StackedMatrices.single(layout, rows, cols), digits=True)
        digits, factors = digit_rows.form_of(layout.input_scale_bits).sizes(cols)
        divided = zeros(digits, dtypes.uint32), zeros(factors)
        x, out = rng.standard_normal(cols).astype(np.float32), zeros(rows)
        x *= 10.0 ** rng.uniform(-3, 3, cols).astype(np.float32)
        x[64:96] = 0
        run(digit_rows.divide(layout, cols), *divided, laid_out(x, layout))
        kernel = matvec(stack, Schedule(8, 2, 2, early=True, releases=MET), STORE, "t", 5, eps)
        run(kernel, out, *divided, buffer(squares), *planes)
        expected = weights.astype(np.float64) @ x / np.sqrt(squares.sum() / cols + eps)
        assert np.abs(out.numpy() - expected).max() < limit * np.abs(expected).max(), ggml_type
        kernel = matvec(stack, Schedule(12, 1, 4), STORE, "t", heads=HeadNorm(128, 4, eps))
        run(kernel, out, *divided, buffer(of_heads), *planes)
        expected = weights.astype(np.float64) @ (x / np.sqrt(of_heads.sum(1) / 128 + eps).repeat(128))
        assert np.abs(out.numpy() - expected).max() < limit * np.abs(expected).max(), ggml_type
        for odd in (np.nan, np.inf, -np.inf):
            x[100] = odd
            run(digit_rows.divide(layout, cols), *divided, laid_out(x, layout))
            run(kernel, out, *divided, buffer(of_heads), *planes)
            assert not np.isfinite(out.numpy()).any()


def check_epilogues() -> None:
    """What products are followed by, and what they are preceded by."""
    layout, cols, rows, eps = WeightLayout(8), 256, 64, 1e-5
    planes, weights = packed(8, rows, cols)
    x = rng.standard_normal(cols).astype(np.float32)
    y = weights.astype(np.float64) @ x
    squares = rng.uniform(0, 9, 5).astype(np.float32)
    normed = y / np.sqrt(squares.sum() / cols + eps)
    schedule, vector = Schedule(2, 4, 2), laid_out(x, layout)

    out, bias = zeros(rows), rng.standard_normal(rows).astype(np.float32)
    kernel = matvec(StackedMatrices.single(layout, rows, cols), schedule, STORE_BIASED, "t", 5, eps)
    run(kernel, out, vector, buffer(squares), buffer(bias), *planes)
    close(out.numpy(), normed + bias)
    of_heads = rng.uniform(0, 9, (2, 4)).astype(np.float32)
    kernel = matvec(
        StackedMatrices.single(layout, rows, cols), schedule, STORE, "t", heads=HeadNorm(128, 4, eps)
    )
    run(kernel, out, vector, buffer(of_heads), *planes)
    close(out.numpy(), weights.astype(np.float64) @ (x / np.sqrt(of_heads.sum(1) / 128 + eps).repeat(128)))

    stream, weight = (
        rng.standard_normal(rows).astype(np.float32),
        rng.standard_normal(rows).astype(np.float32),
    )
    h, sums, following = buffer(stream.copy()), zeros(8), zeros(permuted_size(rows))
    run(
        matvec(StackedMatrices.single(layout, rows, cols), schedule, add_residual(), "t"),
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

    for activation in ("silu", "gelu", "swiglu_oai") if THOROUGH else ("silu",):  # others: in check_layers
        kernel = matvec(StackedMatrices.single(layout, rows, cols), schedule, activated(activation), "t")
        for scale in input_scale(6), np.full(64, 2.0**-49, np.float32):
            out = zeros(permuted_size(rows // 2))
            run(kernel, out, vector, buffer(scale), *planes)
            close(out.numpy()[places(rows // 2)] / scale[: rows // 2], gated(y[0::2], y[1::2], activation))

    logits, best, best_row = zeros(rows), zeros(8), zeros(8, dtypes.int32)
    run(
        matvec(StackedMatrices.single(layout, rows, cols), schedule, as_logits(softcap=2.0), "t"),
        logits,
        best,
        best_row,
        vector,
        *planes,
    )
    close(logits.numpy(), 2 * np.tanh(y / 2))
    state, history = buffer(np.array([0, 2], np.int32)), zeros(4, dtypes.int32)
    run(next_token(8, 4, 32), state, history, best, best_row)
    assert state.numpy().tolist() == [y.argmax(), 3] and history.numpy()[2] == y.argmax()
    # NaN among a block's logits makes that its largest one (`comparable`).
    for broken in (math.inf, -math.inf):
        run(next_token(8, 4, 32), state, history, buffer(np.full(8, broken, np.float32)), best_row)
    assert state.numpy().tolist() == [0, 5] and history.numpy()[3:].tolist() == [NOT_FINITE]


def gated(gate, up, activation):
    if activation == "gelu":
        return gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) / 2 * up
    if activation == "swiglu_oai":
        gate, up = np.minimum(gate, 7), np.clip(up, -7, 7) + 1
        return gate / (1 + np.exp(-1.702 * gate)) * up
    return gate / (1 + np.exp(-gate)) * up


def check_activations() -> None:
    """Gate and up as vectors, for a token and for a prompt, with gates far from zero."""
    n, tokens = 96, 16
    gate, up = rng.standard_normal((2, tokens, n)).astype(np.float32)
    gate[:, :8] = [0, -1e-3, 30, -30, 80, -80, 1e4, -1e4]
    for activation in ("silu", "gelu", "swiglu_oai"):
        with np.errstate(over="ignore"):
            wanted = gated(gate.astype(np.float64), up, activation)
        out, ones = zeros(permuted_size(n)), buffer(np.ones(64, np.float32))
        run(activate(n, activation), out, buffer(np.concatenate([gate[0], up[0]])), ones)
        close(out.numpy()[places(n)], wanted[0])
        out = zeros(fragments_size(tokens, n), dtypes.float16)
        halves = [buffer(np.stack([x * 0.75, x * 0.25])) for x in (gate, up)]
        run(activate_prompt(tokens, n, (2, 2), activation), out, *halves)
        place = prompt_index(lambda m, e: fragment_index(m, e, n), tokens, n)
        close(out.numpy()[place], wanted, 1e-3)
    out = zeros(columns_size(tokens, n), dtypes.float16)
    run(activate_prompt(tokens, n, (2, 2), activation, "columns"), out, *halves)
    close(out.numpy()[prompt_index(lambda m, e: column_index(m, e, n), tokens, n)], wanted, 1e-3)


def check_embeddings_of_layers() -> None:
    """A token's embeddings of all layers, those of a prompt's tokens of some, and what a layer makes of them."""
    layout, vocab, size, layers, dim, eps = WeightLayout(8), 5, 32, 8, 96, 1e-3
    planes, table = packed(8, vocab, layers * size)
    ids, weight = [3, 1, 4], rng.standard_normal(size).astype(np.float32)
    for tokens, parts, used, sizes in ((1, 1, 8, []), (3, 2, 5, [np.float32([2, 0.5, 7])])):
        y = rng.standard_normal((parts, tokens, used, size)).astype(np.float32)
        projected = y.sum(0, dtype=np.float64) * dim**-0.5
        projected = projected * (sizes[0][:, None, None] if sizes else 1)
        rows = table.reshape(vocab, layers, size)[ids[:tokens], :used]
        wanted = (normed(projected, weight, eps) + rows * size**0.5) * 0.5**0.5
        out = zeros(used * stride(tokens, size))
        kernel = layer_embeddings(
            layout, tokens, vocab, dim, size, layers, parts, eps, used, divided=bool(sizes)
        )
        run(kernel, out, buffer(np.int32(ids)), buffer(y), *map(buffer, sizes), buffer(weight), *planes)
        got = out.numpy().reshape(used, -1)[:, : tokens * size].reshape(used, tokens, size)
        close(got, wanted.transpose(1, 0, 2), 1e-5)
    e = part_of(out, 2 * stride(3, size), stride(3, size))
    gate, result = (
        rng.standard_normal((2, 3, size)).astype(np.float32),
        zeros(fragments_size(16, size), dtypes.float16),
    )
    run(gate_embeddings(3, size, 2, "fragments"), result, buffer(gate), buffer(sizes[0]), e)
    place = prompt_index(lambda m, c: fragment_index(m, c, size), 3, size)
    wanted = gated(gate.sum(0) * sizes[0][:, None], got[2], "gelu")
    close(result.numpy()[place], wanted, 1e-3)
    planes, weights = packed(8, size)
    x, e, scale = rng.standard_normal(256).astype(np.float32), got[2, 0], input_scale(8)
    out, stack = zeros(permuted_size(size)), StackedMatrices.single(layout, size, 256)
    run(
        matvec(stack, Schedule(2, 4, 2), EMBED, "t"),
        out,
        laid_out(x, layout),
        buffer(e),
        buffer(scale),
        *planes,
    )
    close(out.numpy()[places(size)] / scale[:size], gated(weights.astype(np.float64) @ x, e, "gelu"))


def check_matrices_of_several_types() -> None:
    """Matrices of several types in one product of a normed vector: whole blocks and not, of one scaling and of two,
    one step or more."""
    cols, eps = 256, 1e-5
    x, sums = rng.standard_normal(cols).astype(np.float32), np.float32([30, 1, 50, 20, 70])
    rms = (sums.sum() / cols + eps) ** -0.5
    stacks = (
        (((14, 3), (12, 6), (8, 2)), Schedule(2, 2, 2)),
        (((12, 8), (14, 4)), Schedule(4, 2, 2)),
        (((1, 5), (2, 4)), Schedule(4, 2, 1)),
        (((39, 4), (11, 4), (20, 4)), Schedule(4, 2, 1)),
    )
    for kinds, schedule in stacks if THOROUGH else stacks[:2]:
        stack = StackedMatrices(tuple((WeightLayout(t), rows) for t, rows in kinds), cols)
        matrices = [packed(t, rows, cols) for t, rows in kinds]
        vectors = [
            laid_out(x, next(p for p, _ in stack.matrices if p.input_scale_bits == s))
            for s in stack.input_scale_bits
        ]
        planes = [plane for own, _ in matrices for plane in own]
        y = np.concatenate([weights.astype(np.float64) @ x for _, weights in matrices]) * rms
        logits, n = zeros(stack.rows), stack.n_blocks(schedule)
        best, best_row = zeros(n), zeros(n, dtypes.int32)
        kernel = matvec(stack, schedule, as_logits(), "t", len(sums), eps)
        run(kernel, logits, best, best_row, *vectors, buffer(sums), *planes)
        close(logits.numpy(), y)
        assert best_row.numpy()[best.numpy().argmax()] == y.argmax()


def check_embedding() -> None:
    """A row of each kind of layout begins the stream; the angles of its position come along, of one table or two."""
    rare = [(ggml_type, (4,), 1.0) for ggml_type in (1, 6, 10, 12, 23, 39)]
    for ggml_type, halves, scale in ((14, (4, 6), 16.0), *(rare if THOROUGH else ())):
        layout, vocab, cols, context = WeightLayout(ggml_type), 3, 256, 8
        planes, weights = packed(ggml_type, vocab, cols)
        weight = rng.standard_normal(cols).astype(np.float32)
        tables = [rng.standard_normal((context, n)).astype(np.float32) for n in halves for _ in (0, 1)]
        h, parts, following = zeros(cols), buffer(np.ones(6, np.float32)), zeros(cols)
        angles = [zeros(2 * n) for n in halves]
        state = buffer(np.array([2, 5, 0], np.int32))
        kernel = embed(layout, vocab, cols, 6, 1, context, halves, scale)
        run(kernel, h, parts, following, *angles, state, *map(buffer, tables), buffer(weight), *planes)
        row = weights[2] * scale
        close(h.numpy(), row, 2e-5)
        close(parts.numpy().sum(), (row.astype(np.float64) ** 2).sum(), 2e-5)
        close(following.numpy()[places(cols)], row * weight, 2e-5)
        for kind, out in enumerate(angles):
            cos, sin = tables[2 * kind : 2 * kind + 2]
            assert np.array_equal(out.numpy(), np.concatenate([cos[5], sin[5]]))
        prompt, ids = zeros(2 * cols), buffer(np.array([2, 9], np.int32))
        run(embed_prompt(layout, 2, vocab, cols, scale), prompt, ids, *planes)
        close(prompt.numpy(), np.concatenate([row, row]), 2e-5)
        shown, ids = rng.standard_normal(2 * cols).astype(np.float32), buffer(np.array([2, -7], np.int32))
        run(embed_prompt(layout, 2, vocab, cols, scale, True), prompt, ids, *planes, buffer(shown))
        close(prompt.numpy(), np.concatenate([row, shown[cols:]]), 2e-5)


def check_prompt_products() -> None:
    """Tensor-core products of types whose quarters differ, cut and whole, fewer tokens than the tile, and warps that
    have none; with several warps for a tile, which have as many steps or not; of activations in shared memory."""
    tokens, n = 32, 11
    common = (8, 24, 256), (14, 16, 256), (39, 16, 256)
    rare = (6, 16, 320), (0, 16, 64), (1, 16, 192), (8, 16, 320)
    rare += tuple((kind, 16, 256) for kind in (10, 11, 12, 13, 20, 23, 35, *WIDENED))
    for ggml_type, rows, cols in common + rare if THOROUGH else common:
        layout = WeightLayout(ggml_type)
        planes, weights = packed(ggml_type, rows, cols)
        scale = 4 / np.abs(weights).max()  # so that no product is beyond half precision
        x = (rng.standard_normal((tokens, cols)) * scale).astype(np.float16)
        fragments = np.zeros(fragments_size(tokens, cols), np.float16)
        fragments[prompt_index(lambda m, e, cols=cols: fragment_index(m, e, cols), tokens, cols)] = x
        prompt = prompt_state(tokens, (0, 0, n, 0))
        wanted = x[:n].astype(np.float64) @ weights.T.astype(np.float64)
        parts = 2 if cols > 64 else 1
        out = zeros(parts * tokens * rows)
        deep = units_of(cols) // parts
        kernel = matmul(layout, tokens, rows, cols, Tiles(1, 1, 2, parts, deep), False, "t")
        run(kernel, out, buffer(fragments), prompt, *planes)
        close(out.numpy().reshape(parts, tokens, rows).sum(0)[:n], wanted, 1e-3)
        is_staged = is_cuda() and cols > 64
        if is_staged:
            parts = 2 if cols == 256 else 1
            out = zeros(parts * tokens * rows)
            kernel = matmul(layout, tokens, rows, cols, Tiles(1, 1, 2, parts, staged=True), False, "t")
            run(kernel, out, buffer(fragments), prompt, *planes)
            close(out.numpy().reshape(parts, tokens, rows).sum(0)[:n], wanted, 1e-3)
        if not THOROUGH and ggml_type != 8:
            continue
        place = prompt_index(lambda m, e, rows=rows: fragment_index(m, e, rows // 2), n, rows // 2)
        for tiles in (
            Tiles(1, 2, 1, 1, min(2, units_of(cols))),
            *[Tiles(2, 2, 2, 1, staged=True)] * is_staged,
        ):
            out = zeros(fragments_size(tokens, rows // 2), dtypes.float16)
            kernel = matmul(layout, tokens, rows, cols, tiles, True, "t")
            run(kernel, out, buffer(fragments), prompt, *planes)
            close(out.numpy()[place], gated(wanted[:, 0::2], wanted[:, 1::2], "silu"), 2e-3)


def check_any_shape_has_a_schedule() -> None:
    """Any shape has a schedule, and any attention a cut whose blocks have room in shared memory."""
    for query, kv, dim, window in (
        (32, 8, 64, 0),
        (16, 8, 128, 0),
        (14, 2, 64, 0),
        (28, 4, 128, 0),
        (64, 8, 128, 0),
        (32, 32, 96, 0),
        (32, 32, 80, 0),
        (8, 1, 256, 0),
        (8, 4, 256, 0),
        (8, 4, 256, 1024),
        (4, 1, 256, 512),
        (9, 3, 64, 100),
    ):
        heads = Heads(query, kv, dim, 1024, None, dim**-0.5, block=32, pool=4, window=window)
        for tokens in (64, 512):
            for sms, limit in ((8, 48 << 10), (132, 99 << 10)):
                cut = prompt_tiling(heads, tokens, sms, limit)
                assert cut.shared_bytes(dim) <= limit, (heads, cut)
                attend_prompt(heads, tokens, cut)
        for sms, limit in ((n, limit) for n in (8, 16, 132) for limit in (256, 8192, 131072)):
            split = flash_split(heads, limit, 256, sms)
            assert split.shared_bytes(dim) < 46 << 10 and heads.shared_by % split.group == 0, (heads, split)
            flash_attention(heads, split)
            for rows in (4, 32):
                split = rows_split(heads, limit, rows, sms)
                assert split.shared_bytes(dim) < 46 << 10, (heads, split)
                flash_attention(heads, split, tokens=rows)
    for rows, cols in (
        (1, 32),
        (3, 64),
        (896, 896),
        (4864, 896),
        (151936, 896),
        (2048, 8192),
        (4096, 14336),
        (5, 4096),
        (40960, 192),
        (40960, 384),
    ):
        schedule = matvec_schedule(StackedMatrices.single(WeightLayout(8), rows, cols), Chip("sm_00"))
        assert schedule.fits() and schedule.block_rows % 2 == 0
