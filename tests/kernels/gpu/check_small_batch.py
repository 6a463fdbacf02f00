"""Products with matrices of every type for a few tokens, and what is fused with them."""

import numpy as np
from tinygrad import dtypes

from engine.formats.quantization import FORMATS
from engine.targets.nvidia.kernels.products.small_batch import (
    SmallBatchTiles,
    activated,
    as_logits,
    column_index,
    columns_size,
    n_blocks,
    small_batch_product,
    stored,
)
from engine.targets.nvidia.kernels.weights.weight_layout import WeightLayout
from tests.kernels.gpu.buffers import FLOATS, buffer, close, packed, prompt_index, rng, run, zeros
from tests.kernels.gpu.check_products import gated
from tests.tier import THOROUGH


def arranged(x):
    """Activations (tokens, cols) as a buffer, in the order of products; what is beside them is zero."""
    tokens, cols = x.shape
    out = np.zeros(columns_size(tokens, cols), np.float16)
    out[prompt_index(lambda m, e: column_index(m, e, cols), tokens, cols)] = x
    return buffer(out)


def given(ggml_type, tokens, rows, cols):
    """(layout, planes, activations, products): no product is beyond half precision."""
    planes, weights = packed(ggml_type, rows, cols)
    x = (rng.standard_normal((tokens, cols)) * (4 / np.abs(weights).max())).astype(np.float16)
    return WeightLayout(ggml_type), planes, arranged(x), x.astype(np.float64) @ weights.T.astype(np.float64)


def check_small_batch_of_every_type() -> None:
    """Every type: whole units and not, rows and columns left over, warps that share columns unevenly."""
    ragged = {8: (17, 352), 14: (40, 512), 1: (5, 72), 39: (33, 96)}
    for ggml_type in (*FORMATS, *FLOATS) if THOROUGH else (11, 12, *ragged):  # others: in check_products
        rows, cols = ragged.get(ggml_type, (16, 256))
        tiles = SmallBatchTiles(1, 1, 2 if cols > 256 else 1)
        if rows > 33:  # weights of the second step are loaded in the first one
            tiles = SmallBatchTiles(2, 1, 1)
        layout, planes, x, wanted = given(ggml_type, 5, rows, cols)
        out = zeros(5 * rows)
        run(small_batch_product(layout, 5, rows, cols, tiles, stored(rows), "t"), out, x, *planes)
        close(out.numpy().reshape(5, rows), wanted, 1e-3)


def check_small_batch_divided() -> None:
    """One tile of tokens and more, warps side by side and in turn, several steps for a warp, columns divided among
    blocks too."""
    for tokens, tiles in (
        (8, SmallBatchTiles(2, 2, 2)), (11, SmallBatchTiles(1, 2, 3)), (30, SmallBatchTiles(2, 1, 1)), (9,
        SmallBatchTiles(1, 1, 2, splits=2)),
    ):  # fmt: skip
        rows, cols = 64, 1280
        layout, planes, x, wanted = given(12, tokens, rows, cols)
        out = zeros(tiles.splits * tokens * rows)
        run(small_batch_product(layout, tokens, rows, cols, tiles, stored(rows), "t"), out, x, *planes)
        close(out.numpy().reshape(tiles.splits, tokens, rows).sum(0), wanted, 1e-3)


def check_small_batch_sliced() -> None:
    """Steps of a quarter or a half of four units, whose weights are loaded a step ahead: of warps that share the
    columns unevenly, of rows and units left over, and of blocks that divide the columns."""
    shapes = {6: (40, 96, 1, 1, 4), 1: (33, 328, 2, 1, 4), 14: (32, 1280, 3, 1, 2), 12: (64, 1024, 2, 2, 4)}
    # Of other types, `check_prompt_products` makes the same pairs.
    others = dict.fromkeys({*FORMATS, *FLOATS} - {*shapes}, (32, 512, 1, 1, 2))
    common = {ggml_type: shapes[ggml_type] for ggml_type in (14,)}
    for ggml_type, (rows, cols, parts, splits, slices) in (shapes | others if THOROUGH else common).items():
        tiles = SmallBatchTiles(2, 1, parts, splits=splits, slices=slices)
        layout, planes, x, wanted = given(ggml_type, 9, rows, cols)
        out = zeros(splits * 9 * rows)
        run(small_batch_product(layout, 9, rows, cols, tiles, stored(rows), "t"), out, x, *planes)
        close(out.numpy().reshape(splits, 9, rows).sum(0), wanted, 1e-3)


def check_small_batch_epilogues() -> None:
    """What products are followed by."""
    tokens, rows, cols = 3, 48, 512
    tiles = SmallBatchTiles(1, 2, 2)
    layout, planes, x, wanted = given(8, tokens, rows, cols)
    bias, out = rng.standard_normal(rows + 7).astype(np.float32), zeros(tokens * (rows + 7))
    kernel = small_batch_product(layout, tokens, rows, cols, tiles, stored(rows + 7, 5, True), "t")
    run(kernel, out, x, buffer(bias), *planes)
    out = out.numpy().reshape(tokens, -1)
    close(out[:, 5 : 5 + rows], wanted + bias[5 : 5 + rows], 1e-3)
    assert not out[:, :5].any() and not out[:, 5 + rows :].any()
    for activation in ("silu", "swiglu_oai"):
        out = zeros(columns_size(tokens, rows // 2), dtypes.float16)
        run(
            small_batch_product(layout, tokens, rows, cols, tiles, activated(activation), "t"),
            out,
            x,
            *planes,
        )
        place = prompt_index(lambda m, e: column_index(m, e, rows // 2), tokens, rows // 2)
        close(out.numpy()[place], gated(wanted[:, 0::2], wanted[:, 1::2], activation), 2e-3)
        assert np.count_nonzero(out.numpy()) <= tokens * rows // 2
    n = n_blocks(rows, tiles)
    logits, best, best_row = zeros(tokens * rows), zeros(n * tokens), zeros(n * tokens, dtypes.int32)
    kernel = small_batch_product(layout, tokens, rows, cols, tiles, as_logits(softcap=50.0), "t")
    run(kernel, logits, best, best_row, x, *planes)
    close(logits.numpy().reshape(tokens, rows), 50 * np.tanh(wanted / 50), 1e-3)
    best, best_row = best.numpy().reshape(tokens, n), best_row.numpy().reshape(tokens, n)
    found = best_row[np.arange(tokens), best.argmax(-1)]
    assert np.array_equal(found, wanted.argmax(-1))
