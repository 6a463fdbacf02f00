"""Renders every kernel that a small model takes on an NVIDIA GPU, and proves the alignment of its vector accesses.

    DEV=NULL:NVCC:sm_87 python -m tests.kernels.gpu.rendered PATH FOLDER TYPE...

PATH is fused or graph, a TYPE is one of quantization, as in Q6_K. For each type the source goes to FOLDER/TYPE, and a
line is printed: the type, how many kernels there are, and how many vector accesses. tinygrad's NULL device stands in
for the GPU: it renders kernels and runs none.
"""

from __future__ import annotations

import gc
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tinygrad import Device, UOp, codegen, dtypes
from tinygrad.codegen import to_program
from tinygrad.device import Buffer, CompileError
from tinygrad.dtype import DType
from tinygrad.runtime.support import compiler_cuda

from engine.fixes import (
    dynamic_shared,
    graph_nodes,
    graph_rewrites,
    index_lowering,
    single_elements,
    slice_shapes,
)
from engine.kernels.kernel import Kernel
from engine.loading.weights import Weights
from engine.runtime.kv_blocks import KVBlocks
from engine.runtime.model_runner import ModelRunner, Slot
from engine.targets.graph.runner import GraphRunner
from engine.targets.nvidia.kernels.attention.decode_block import combine
from engine.targets.nvidia.kernels.attention.flash_attention import flash_attention, flash_split
from engine.targets.nvidia.kernels.attention.kv_cache import Heads
from engine.targets.nvidia.kernels.attention.prefill_attention import attend_prompt, combine_prompt
from engine.targets.nvidia.kernels.attention.prompt_rotation import norms_over_heads, rotate_prompt
from engine.targets.nvidia.kernels.attention.prompt_tiling import prompt_tiling
from engine.targets.nvidia.kernels.pieces import state_size
from engine.targets.nvidia.kernels.products import small_batch as few
from engine.targets.nvidia.kernels.products.chosen_experts import ChosenExperts
from engine.targets.nvidia.kernels.products.epilogues import (
    STORE,
    STORE_BIASED,
    activate,
    activated,
    add_residual,
)
from engine.targets.nvidia.kernels.products.matmul import ExpertTiles, expert_tiles, fragments_size, matmul
from engine.targets.nvidia.kernels.products.matvec import matvec
from engine.targets.nvidia.kernels.products.prefill_experts import (
    choose_experts,
    count_assignments,
    router_logits,
    sort_assignments,
)
from engine.targets.nvidia.kernels.products.schedules import matvec_schedule
from engine.targets.nvidia.kernels.products.stacked_matrices import StackedMatrices
from engine.targets.nvidia.kernels.residual_stream.layer_embeddings import layer_embeddings, stride
from engine.targets.nvidia.kernels.residual_stream.post_norm import add_both, add_both_blocks, add_normed
from engine.targets.nvidia.kernels.residual_stream.prefill import activate_prompt, norm_prompt
from engine.targets.nvidia.kernels.weights.matrix_bytes import UNIT
from engine.targets.nvidia.kernels.weights.weight_layout import WeightLayout, permuted_size
from engine.targets.nvidia.runner import NvidiaRunner
from tests import generated_model
from tests.cuda_sources import refused
from tests.kernels.gpu.alignment import BASE_BYTES, prove_uops
from tests.opened import opened
from tools.measure.chip_compiler import joined

F, H = dtypes.float32, dtypes.float16
CONTEXT = 608  # prompts in chunks of both sizes, decode near the start and deep in the context
BLOCKS = {"block": 32, "pool": 40}
PATHS: dict[str, Callable[[Weights, int], ModelRunner]] = {"fused": NvidiaRunner, "graph": GraphRunner}


def run_model(path: str, quant: str, layers: int) -> None:
    """Loads a model whose matrices are of one type, and runs its two steps. A prompt's last layer ends with keys and
    values: with one layer a prompt has no attention."""
    shape = {"layers": layers, "dim": 256, "heads": 4, "kv_heads": 2, "ffn": 256}
    with tempfile.TemporaryDirectory() as folder:
        file = generated_model.write(Path(folder) / "m.gguf", architecture="qwen3", quant=quant, **shape)
        weights = opened(file)
    runner = PATHS[path](weights, CONTEXT)
    with KVBlocks(runner).room(301):
        runner.run([Slot(0, (1,) * 20, 0, "none")])
        for position in (0, 300):
            runner.run([Slot(0, (1,), position)])


def render(kernel: Kernel, *buffers: tuple[int, DType]) -> None:
    placeholders = [UOp.placeholder((n,), dtype, slot=k) for k, (n, dtype) in enumerate(buffers)]
    to_program(kernel.graph(*placeholders), Device[Device.DEFAULT].renderer)


def render_other_products() -> None:
    """What only models with biases, with matrices of several types, with GELU or with post-norms take."""
    for ggml_type in (8, 12, 13):
        p, rows, cols = WeightLayout(ggml_type), 512, 2048
        stack = StackedMatrices.single(p, rows, cols)
        kernel = matvec(stack, matvec_schedule(stack), STORE_BIASED, "biased", 64, 1e-5)
        render(kernel, (rows, F), (permuted_size(cols), F), (64, F), (rows, F), *p.shapes(rows, cols))
    stack = StackedMatrices(((WeightLayout(12), 256), (WeightLayout(14), 128)), 2048)
    kernel = matvec(stack, matvec_schedule(stack), STORE, "mixed", 64, 1e-5)
    planes = [shape for p, n in stack.matrices for shape in p.shapes(n, 2048)]
    render(kernel, (384, F), *[(permuted_size(2048), F)] * 2, (64, F), *planes)
    render(activate(512, "gelu"), (permuted_size(512), F), (1024, F), (UNIT, F))
    halves = (fragments_size(64, 512), H), (64 * 512 * 2, F), (64 * 512 * 2, F)
    render(activate_prompt(64, 512, (2, 2), "gelu"), *halves)
    vector, sums = (320, F), (64, F)
    render(add_normed(320, (64,), 1, 1e-6), vector, (10, F), vector, vector, sums, vector, vector)
    halves = (fragments_size(64, 320), H), (64 * 320, F), (2 * 64 * 320, F)
    render(norm_prompt(64, 320, (2,), 1e-6, post_eps=1e-6), *halves, vector, vector)


def render_window() -> None:
    """The attention of a layer with a window, and queries that depend on the position."""
    h, tokens = Heads(4, 2, 96, CONTEXT, None, 0.1, **BLOCKS, window=100, temperature=True), 64
    size, rows = h.query * h.dim, (h.query + 2 * h.kv) * h.dim
    cache, queries = list(h.cache_planes), (tokens * size, H)
    angles, factors = [(CONTEXT * h.dim // 2, F)] * 2, (CONTEXT, F)
    ints = (h.table_size, dtypes.int32), (3, dtypes.int32)
    ins = *cache, (rows, F), (h.dim, F), *ints, factors
    split = flash_split(h, CONTEXT, 64, 16)
    render(flash_attention(h, split), (split.splits * size, F), (split.splits * h.query * 2, F), *ins)
    normed, weights = replace(h, norm_eps=1e-6), ((h.query + h.kv) * h.dim, F)
    short, out = replace(split, limit=64, splits=1), (permuted_size(size), F)
    kernel = flash_attention(normed, short, True, True)
    render(kernel, out, *cache, (rows, F), (h.dim, F), *ints, weights, factors, (h.query, F), (UNIT, F))
    parts = (split.splits * size, F), (split.splits * h.query * 2, F)
    render(combine(h, split.splits, True), out, *parts, (UNIT, F), (h.query, F))
    rotate = rotate_prompt(h, tokens, (1,), (rows,), False)
    render(rotate, queries, *cache, (tokens * rows, F), *angles, *ints, factors)
    cut = prompt_tiling(h, tokens, 16)
    sums = cut.sums_size(h, tokens), F
    render(attend_prompt(h, tokens, cut), sums, queries, *cache, *ints)
    render(combine_prompt(h, tokens, cut.splits), queries, sums, ints[1])


def render_wide_norms_and_sinks() -> None:
    """Attention in prefill with norms over all heads, and with sinks, of one of several sequences."""
    h, tokens = Heads(4, 2, 64, CONTEXT, 1e-6, 0.1, **BLOCKS), 64
    size, rows = h.query * h.dim, (h.query + 2 * h.kv) * h.dim
    cache, queries = list(h.cache_planes), (tokens * size, H)
    angles, sums = [(CONTEXT * h.dim // 2, F)] * 2, (2 * tokens * rows, F)
    ints = (8 * h.table_size, dtypes.int32), (3, dtypes.int32)
    render(norms_over_heads(h, tokens, (2,), (rows,), True), (2 * tokens, F), sums, (rows, F))
    rotate, norms = (
        rotate_prompt(h, tokens, (2,), (rows,), True, over_heads=True),
        ((h.query + h.kv) * h.dim, F),
    )
    render(rotate, queries, *cache, sums, *angles, *ints, (rows, F), norms, (2 * tokens, F))
    attend = attend_prompt(h, tokens, replace(prompt_tiling(h, tokens, 16), splits=1), has_sinks=True)
    render(attend, queries, queries, *cache, *ints, (h.query, F))


def render_rows() -> None:
    """Attention in decode of several sequences."""
    h, tokens = Heads(4, 2, 64, CONTEXT, 1e-6, 0.1, **BLOCKS, window=100), 3
    size, rows = h.query * h.dim, (h.query + 2 * h.kv) * h.dim
    cache, x = list(h.cache_planes), (few.columns_size(tokens, size), H)
    angles, tables = [(CONTEXT * h.dim // 2, F)] * 2, (8 * h.table_size, dtypes.int32)
    ins = *cache, (tokens * rows, F), *angles, tables, (4 * tokens, dtypes.int32), (2 * h.dim, F)
    split = flash_split(h, CONTEXT, 64, 16)
    parts = (split.splits * tokens * size, F), (split.splits * tokens * h.query * 2, F)
    render(flash_attention(h, split, tokens=tokens), *parts, *ins)
    render(combine(h, split.splits, tokens=tokens), x, *parts)
    render(flash_attention(h, replace(split, limit=64, splits=1), tokens=tokens), x, *ins)


def render_large_heads() -> None:
    """Attention of heads of 512 elements whose keys are the values, and over the cache of another layer."""
    for stored in ("keys", "nothing"):
        h = Heads(8, 2, 512, CONTEXT, 1e-6, 1.0, **BLOCKS, stored=stored, normed_values=True)
        size, tokens, norms = h.query * h.dim, 64, (2 * h.dim, F)
        cache, queries, angles = list(h.cache_planes), (tokens * size, H), [(CONTEXT * h.dim // 2, F)] * 2
        ints = (h.table_size, dtypes.int32), (3, dtypes.int32)
        ins = *cache, (h.rows, F), (h.dim, F), *ints, norms
        short, long = flash_split(h, 256, 256, 16), flash_split(h, CONTEXT, 256, 16)
        render(flash_attention(h, short), (permuted_size(size), F), *ins, (UNIT, F))
        render(flash_attention(h, long), (long.splits * size, F), (long.splits * h.query * 2, F), *ins)
        kept, own = (cache, ints) if stored == "keys" else ([], ints[1:])
        rotate = rotate_prompt(h, tokens, (1,), (h.rows,), False)
        render(rotate, queries, *kept, (tokens * h.rows, F), *angles, *own, norms)
    cut = replace(prompt_tiling(h, tokens, 16, 99 << 10), splits=1)
    render(attend_prompt(h, tokens, cut), (fragments_size(tokens, size), H), queries, *cache, *ints)


def render_layers_of_gemma4() -> None:
    """What joins layers side by side, and embeddings of layers."""
    n, p, size, layers = 704, WeightLayout(12), 256, 35
    vector, parts = (n, F), (add_both_blocks(n), F)
    products = (2 * n, F), (88 + 64, F), vector, vector
    kernel = add_both(n, (88, 64), 1, 1e-6, scaled=True)
    render(kernel, vector, parts, (permuted_size(n), F), *products, vector, (1, F), vector)
    for tokens, divided in ((1, False), (64, True)):
        kernel = layer_embeddings(p, tokens, 100, n, size, layers, 1, 1e-6, layers, divided)
        out, sums = (layers * stride(tokens, size), F), (tokens * layers * size, F)
        sizes, planes = [(tokens, F)] * divided, p.shapes(100, layers * size)
        render(kernel, out, (64, dtypes.int32), sums, *sizes, (size, F), *planes)


def render_experts() -> None:
    """What a mixture of experts takes in prefill."""
    tokens, n, used, width, cols, p = 64, 40, 4, 512, 2048, WeightLayout(12)
    experts, each = expert_tiles(tokens, used, n), (tokens * used, dtypes.int32)
    state = state_size(tokens), dtypes.int32
    stream, vector, rows = (tokens * cols, F), (cols, F), (tokens * cols, H)
    norm = norm_prompt(tokens, cols, (used,), 1e-6, n_biases=1, order="rows")
    render(norm, rows, stream, (used * tokens * cols, F), vector, vector)
    logits, counts = (tokens * n, F), (n, dtypes.int32)
    router = router_logits(tokens, cols, n, 1e-6, True)
    render(router, logits, stream, vector, state, (n * cols, F), (n, F))
    render(choose_experts(tokens, used, n, 6.1e-5), each, (tokens * used, F), logits, state)
    render(count_assignments(experts), counts, counts, each)
    lists = (experts.size, dtypes.int32), (experts.count, dtypes.int32)
    render(sort_assignments(experts), *lists, counts, each)
    for tiles in (experts, ExpertTiles(tokens, used, n, 64)):
        lists = (tiles.size, dtypes.int32), (tiles.count, dtypes.int32)
        activated = (fragments_size(tiles.size, width), H)
        gate_up = matmul(
            p, tokens, 2 * width, cols, tiles.tiles, True, "experts_gate_up", "swiglu_oai", tiles, True
        )
        render(gate_up, activated, rows, *lists, (n * 2 * width, F), *p.shapes(n * 2 * width, cols))
        down = matmul(
            p, tokens, cols, width, tiles.tiles, False, "experts_down", experts=tiles, has_bias=True
        )
        out, factors = (used * tokens * cols, F), (tokens * used, F)
        render(down, out, activated, *lists, factors, (n * cols, F), *p.shapes(n * cols, width))


def render_chosen_experts() -> None:
    """What a mixture of experts takes in decode."""
    for ggml_type, width, bias in ((12, 768, False), (8, 2880, True)):
        n, used, cols, p = 32, 4, 2048, WeightLayout(ggml_type)
        ids, weights = (used, dtypes.int32), (used, F)
        stack = StackedMatrices.single(p, 2 * width, cols, ChosenExperts(used, n, False, bias, 6.1e-5))
        epilogue, x = activated("swiglu_oai"), (permuted_size(cols), F)
        kernel = matvec(stack, matvec_schedule(stack), epilogue, "experts_gate_up", 64, 1e-5)
        biases = [(n * 2 * width, F)] if bias else []
        vectors, planes = (used * permuted_size(width), F), p.shapes(n * 2 * width, cols)
        render(
            kernel, vectors, ids, weights, (n, dtypes.int32), x, (64, F), (n, F), *biases, (UNIT, F), *planes
        )
        stack = StackedMatrices.single(p, cols, width, ChosenExperts(used, n, True, bias))
        schedule = matvec_schedule(stack)
        kernel = matvec(stack, schedule, add_residual(), "experts_down")
        biases, sums = [(n * cols, F)] if bias else [], (stack.n_blocks(schedule), F)
        ins = ids, weights, vectors, *biases, (cols, F)
        render(kernel, (cols, F), sums, x, *ins, *p.shapes(n * cols, width))


def render_small_batch_products() -> None:
    """What a decode step of several tokens takes."""
    rows, cols = 512, 2048
    for ggml_type, tokens, tiles in (
        (12, 16, few.SmallBatchTiles(2, 1, 4)),
        (13, 3, few.SmallBatchTiles(1, 2, 8)),
    ):
        p = WeightLayout(ggml_type)
        x, blocks = (few.columns_size(tokens, cols), H), tokens * few.n_blocks(rows, tiles)
        for epilogue, *buffers in (
            (few.stored(rows, 0, True), (tokens * rows, F), x, (rows, F)),
            (few.activated("silu"), (few.columns_size(tokens, rows // 2), H), x),
            (few.as_logits(30.0), (tokens * rows, F), (blocks, F), (blocks, dtypes.int32), x),
        ):
            kernel = few.small_batch_product(p, tokens, rows, cols, tiles, epilogue, "t")
            render(kernel, *buffers, *p.shapes(rows, cols))


def check_where_buffers_begin() -> None:
    """From now on, a buffer that does not begin at a multiple of BASE_BYTES raises AssertionError."""
    stock = Buffer.__init__

    def begin(self: Buffer, *arguments: Any, **options: Any) -> None:
        stock(self, *arguments, **options)
        assert self.offset % BASE_BYTES == 0, f"a buffer begins at byte {self.offset} of another"

    Buffer.__init__ = begin  # type: ignore[method-assign]


def compile_nothing() -> None:
    """From now on, sources are only looked at. One that CUDA has no kernel for raises CompileError."""
    compiler_cuda.NVPTXCompiler = compiler_cuda.PTXCompiler  # which needs no library
    compiler_cuda.PTXCompiler.compile_cached = lambda self, source: b"nothing"  # type: ignore[method-assign]
    compiler_cuda.NVCCCompiler.compile_cached = _looked_at  # type: ignore[method-assign]


def _looked_at(_: object, source: str) -> bytes:
    if why := refused(source):
        raise CompileError(f"{why}:\n{source}")
    return b"nothing"


def main(path: str, folder: str, *quants: str) -> None:
    """Raises AssertionError where the address of a vector access is not proven to be aligned."""
    gc.disable()  # a fifth of the time that kernels take to compile
    stock, programs = codegen.do_to_program, list[UOp]()
    codegen.do_to_program = lambda *arguments: programs.append(stock(*arguments)) or programs[-1]
    check_where_buffers_begin()
    compile_nothing()
    Device[Device.DEFAULT].allocator.free_cache = lambda: None  # which only devices with memory have
    is_ptx = "PTX" in type(Device[Device.DEFAULT].renderer).__name__
    dynamic_shared.apply()
    graph_nodes.apply()
    graph_rewrites.apply()
    index_lowering.apply()
    single_elements.apply()
    slice_shapes.apply()
    for quant in quants:
        programs.clear()
        run_model(path, quant, layers=1 if is_ptx else 2)
        if not is_ptx and path == "fused" and quant == quants[0]:
            render_other_products()
            render_window()
            render_wide_norms_and_sinks()
            render_large_heads()
            render_layers_of_gemma4()
            render_experts()
            render_chosen_experts()
            render_small_batch_products()
            render_rows()
        vectors = sum(map(prove_uops, programs))
        sources = [str(program.src[2].arg) for program in programs]
        Path(folder, quant).write_text("\n".join(sources) if is_ptx else joined([*dict.fromkeys(sources)]))
        print(quant, len(programs), vectors, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
