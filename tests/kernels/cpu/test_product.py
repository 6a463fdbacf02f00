"""Weight layout and products, for every type, against what the gguf package says the weights are."""

import mmap

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from tinygrad import dtypes
from tinygrad.uop.ops import Ops

from engine.formats.ggml_types import GGML_TYPES
from engine.formats.quantization import FLOATS, QUANTIZED, read_as
from engine.formats.widening import widened
from engine.targets.cpu.kernels import memory, thread_pool
from engine.targets.cpu.kernels.activations import Quantization, buffer_names, quantize_activations
from engine.targets.cpu.kernels.embedding import embed, embed_from_file
from engine.targets.cpu.kernels.kernel_sequence import KernelSequence
from engine.targets.cpu.kernels.product import product, shape_of, span_of
from engine.targets.cpu.kernels.stream_size import UNIT
from engine.targets.cpu.kernels.thread_pool import ThreadPool
from engine.targets.cpu.kernels.weight_layout import LaneLayout
from engine.targets.cpu.kernels.weight_repacking import repack
from tests.quantized_blocks import Q1_0, dequantized, random_blocks
from tests.thorough import rarely

LANES = 8  # kernels of half the size: less to compile
TYPES = [*FLOATS, *QUANTIZED, Type.TQ2_0, Q1_0, Type.NVFP4, Type.IQ3_XXS]
KINDS = {"values": dtypes.int16, "sums": dtypes.int32}


def blocks_of(kind: int, rows: int, cols: int) -> tuple[np.ndarray, np.ndarray]:
    """Blocks as they are read of a file, and the weights, float64 (rows, cols); no infinite scales."""
    blocks = random_blocks(kind, rows, cols)
    finite = np.isfinite(dequantized(kind, blocks)).all(1, keepdims=True)
    blocks = np.ascontiguousarray(np.where(finite, blocks, 0), np.uint8)
    weights = dequantized(kind, blocks).reshape(rows, cols).astype(np.float64)
    return widened(kind, blocks.reshape(-1)), weights


def packed(pool: ThreadPool, kind: int, rows: int, cols: int, lanes: int = LANES):
    blocks, weights = blocks_of(kind, rows, cols)
    layout = LaneLayout(read_as(kind), lanes)
    return layout, repack(pool, blocks, layout, np.arange(rows, dtype=np.int32), cols), weights


def ints(*values: int):
    return memory.array(np.array(values), dtypes.int32)


def multiply(
    pool: ThreadPool,
    kind: Type,
    rows: int,
    cols: int,
    tokens: int,
    tile: int,
    lanes: int = LANES,
    biased: bool = False,
) -> float:
    """The error of products of random activations plus a bias, relative to the largest. `biased`: the bias is added to
    a residual stream."""
    layout, stream, weights = packed(pool, kind, rows, cols, lanes)
    x = np.random.default_rng(1).standard_normal((tokens, cols)).astype(np.float32)
    bias = np.random.default_rng(2).standard_normal(layout.groups(rows) * lanes).astype(np.float32)
    out = memory.zeros(tokens * bias.size, dtypes.float32)
    state = [ints(tokens // tile)] if tile > 1 else []
    names = buffer_names([layout], tile)
    inputs = [memory.zeros(2 * tokens * cols, KINDS.get(name, dtypes.float32)) for name in names]
    stream_in = np.random.default_rng(3).standard_normal((tokens, bias.size)).astype(np.float32)
    rows_in, biases = memory.array(x, dtypes.float32), memory.array(bias, dtypes.float32)
    added = [memory.array(stream_in, dtypes.float32), biases] if biased else [biases]
    step = KernelSequence(pool)
    step.add(
        quantize_activations(Quantization(names), lanes, tile), *inputs, ints(cols // UNIT), *state, rows_in
    )
    kernel = product(layout, tile, span_of(cols) if tile > 1 else 1, biased)
    step.add(kernel, out, ints(*shape_of(rows, cols, layout, biased)), *state, *inputs, *added, stream)
    step.compile()()
    wanted = x.astype(np.float64) @ weights.T + bias[:rows] + stream_in[:, :rows] * biased
    return float(np.abs(memory.view(out).reshape(tokens, -1)[:, :rows] - wanted).max() / np.abs(wanted).max())


# A commit is checked with a type of each kind: floats, scales of blocks, scales of their parts, codebooks, vectors.
KINDS_OF_BLOCKS = (Type.F32, Type.Q8_0, Type.Q6_K, Type.Q4_K)
COMMON = (Type.F32, Type.Q6_K, Type.Q4_K, Type.MXFP4, Type.IQ2_S)  # Q8_0 with a bias


@pytest.mark.parametrize(
    "kind",
    [kind if kind in COMMON else rarely(kind) for kind in TYPES],
    ids=lambda kind: GGML_TYPES[kind].name,
)
def test_one_token(pool: ThreadPool, kind: int) -> None:
    assert multiply(pool, kind, 40, 512, 1, 1) < (5e-5 if kind not in FLOATS else 2e-6)


EMBEDDED = [kind if kind in (Type.F32, Type.Q6_K, Type.IQ2_S) else rarely(kind) for kind in TYPES]
TILED = Type.Q8_0, Type.Q4_K


# In registers; and through the L1 cache.
@pytest.mark.parametrize(
    ("tile", "kind"),
    [
        *((4, kind) if kind is Type.Q4_K else rarely(4, kind) for kind in TYPES),
        *((LANES, kind) if kind in TILED else rarely(LANES, kind) for kind in KINDS_OF_BLOCKS),
    ],
)
def test_tiles_of_tokens(pool: ThreadPool, tile: int, kind: int) -> None:
    assert multiply(pool, kind, 40, 512, 2 * tile, tile) < (1e-4 if kind not in FLOATS else 2e-6)


@pytest.mark.parametrize("lanes", [rarely(4), rarely(16)])
def test_other_widths(pool: ThreadPool, lanes: int) -> None:
    assert multiply(pool, Type.Q6_K, 24, 256, 1, 1, lanes) < 5e-5


@pytest.mark.parametrize("kind", [rarely(Type.F32), Type.Q8_0], ids=lambda kind: kind.name)
@pytest.mark.parametrize("tile", [1, 4])
def test_a_bias_and_a_residual_stream(pool: ThreadPool, tile: int, kind: Type) -> None:
    assert multiply(pool, kind, 24, 64, 2 * tile if tile > 1 else 1, tile, biased=True) < 1e-4


def test_columns_that_make_no_whole_spans(pool: ThreadPool) -> None:
    assert multiply(pool, Type.Q8_0, 16, 96, LANES, LANES) < 1e-4


@pytest.mark.parametrize("kind", EMBEDDED, ids=lambda kind: GGML_TYPES[kind].name)
def test_rows_of_the_embedding(pool: ThreadPool, kind: int) -> None:
    """Repacked, and as the file holds them."""
    blocks, weights = blocks_of(kind, 40, 512)
    layout = LaneLayout(read_as(kind), LANES)
    stream = repack(pool, blocks, layout, np.arange(40, dtype=np.int32), 512)
    in_file = memory.mapped(blocks, dtypes.uint8 if layout.format else layout.dtype)
    outs, token = [memory.zeros(512, dtypes.float32) for _ in range(2)], ints(0)
    shape, step = ints(40, 512 // layout.block), KernelSequence(pool)
    step.add(embed(layout, 1), outs[0], shape, token, stream)
    step.add(embed_from_file(layout.ggml_type, LANES, 1), outs[1], shape, token, in_file)
    run = step.compile()
    for row in (0, 17, 39):
        memory.view(token)[:] = row
        run()
        for out in outs:
            np.testing.assert_allclose(
                memory.view(out), weights[row], rtol=2e-6, atol=1e-6 * np.abs(weights[row]).max()
            )


def test_a_row_of_a_file_of_gigabytes(pool: ThreadPool) -> None:
    """Of a table whose bytes an int32 cannot number. Its other rows take no memory. Some compilers give sums of int32
    64 bits, so the type of the sums is looked at too."""
    blocks, weights = blocks_of(Type.Q4_K, 1, 8192)
    rows = (3 << 30) // blocks.size
    raw = np.frombuffer(
        mmap.mmap(-1, rows * blocks.size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8
    ).reshape(rows, -1)
    raw[-1] = blocks
    out, step = memory.zeros(2 * 8192, dtypes.float32), KernelSequence(pool)
    inputs = ints(rows, 8192 // 256), ints(1), ints(rows - 1, 0), memory.mapped(raw, dtypes.uint8)
    kernel = embed_from_file(Type.Q4_K, LANES, 2, 3.0)
    step.add(kernel, out, *inputs)
    step.compile()()
    types = (dtypes.float32, *[dtypes.int32] * 3, dtypes.uint8)
    nodes = thread_pool._graph(kernel, types).toposort()
    places = {u.src[1].dtype for u in nodes if u.op is Ops.INDEX and u.src[0].dtype is dtypes.uint8}
    assert places == {dtypes.int64}
    wanted = 3 * np.concatenate([weights[0], np.zeros(8192)])
    np.testing.assert_allclose(memory.view(out), wanted, atol=1e-6 * np.abs(wanted).max())


def test_rows_of_the_embedding_times_a_constant(pool: ThreadPool) -> None:
    layout, stream, weights = packed(pool, Type.Q4_K, 8, 256)
    out = memory.zeros(4 * 256, dtypes.float32)
    step = KernelSequence(pool)
    step.add(embed(layout, 4, 48.0), out, ints(8, 1), ints(1), ints(3, 7, 0, 3), stream)
    step.compile()()
    wanted = 48 * weights[[3, 7, 0, 3]]
    np.testing.assert_allclose(memory.view(out).reshape(4, -1), wanted, atol=1e-6 * np.abs(wanted).max())


@pytest.mark.parametrize("kind", QUANTIZED, ids=lambda kind: Type(kind).name)
def test_bytes_are_the_files(kind: int) -> None:
    block, block_bytes = gguf.GGML_QUANT_SIZES[Type(kind)]
    in_file = 64 * 1024 // block * block_bytes
    most = {Type.MXFP4: 1.06, Type.IQ4_XS: 1.08}.get(Type(kind), 1.04)
    assert in_file <= LaneLayout(kind, LANES).size(64, 1024) * 2 <= most * in_file
