"""Renders the kernels that wait late for the kernel before (`engine.fixes.early_launch`), and proves in their CUDA that
no access of what they wait for comes before a wait.

    DEV=NULL:NVCC:sm_90 python -m tests.kernels.gpu.late_waits

prints how many kernels there are. tinygrad's NULL device stands in for the GPU: it renders kernels and runs none.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from tinygrad import Device, UOp, dtypes
from tinygrad.codegen import to_program
from tinygrad.dtype import DType

from engine.fixes import early_launch, graph_nodes, graph_rewrites, index_lowering, slice_shapes
from engine.formats.kv_format import KVFormat
from engine.kernels.kernel import Kernel
from engine.kernels.launch_hints import Release
from engine.targets.nvidia.kernels.attention.flash_attention import flash_attention, flash_split
from engine.targets.nvidia.kernels.attention.kv_cache import Heads
from engine.targets.nvidia.kernels.products.chosen_experts import ChosenExperts
from engine.targets.nvidia.kernels.products.epilogues import (
    STORE,
    STORE_BIASED,
    activated,
    add_residual,
    as_logits,
    routed,
)
from engine.targets.nvidia.kernels.products.matvec import Brought, matvec
from engine.targets.nvidia.kernels.products.small_batch import SmallBatchTiles, small_batch_product, stored
from engine.targets.nvidia.kernels.products.small_batch import activated as gated_few
from engine.targets.nvidia.kernels.products.small_batch import as_logits as logits_few
from engine.targets.nvidia.kernels.products.stacked_matrices import Schedule, SharedExpert, StackedMatrices
from engine.targets.nvidia.kernels.products.warpgroup_matmul import WarpgroupTiles, warpgroup_matmul
from engine.targets.nvidia.kernels.recurrent.delta_decode import delta_decode
from engine.targets.nvidia.kernels.recurrent.delta_net import DeltaHeads
from engine.targets.nvidia.kernels.recurrent.mamba import MambaHeads, mamba
from engine.targets.nvidia.kernels.residual_stream.layer_norm import layer_norm
from engine.targets.nvidia.kernels.weights.weight_layout import WeightLayout
from tests.kernels.gpu.rendered import compile_nothing
from tests.tier import THOROUGH

MET: Release = "before its first barrier"
SHORT = Schedule(4, 8, 2, 0, early=True, releases=MET)  # of one step
LONG = Schedule(2, 16, 2, 3, early=True, releases=MET)  # with a loop
SIZE = 1 << 24  # of all buffers
INTEGERS = {"experts", "counts", "largest_rows", "tables", "state", "prompt"}

Made = tuple[Kernel, list[DType]]
"""A kernel, and the types of its planes: those of matrices, or of a cache."""


def products() -> Iterator[Made]:
    q4, q6, f32 = (WeightLayout(n) for n in (12, 14, 0))
    types = {layout: [dtype for _, dtype in layout.shapes(64, 256)] for layout in (q4, q6, f32)}
    one, two = StackedMatrices.single(q6, 64, 256), StackedMatrices(((q4, 64), (q6, 64)), 256)
    for schedule in (SHORT, LONG) if THOROUGH else (LONG,):
        more = ((STORE, {"n_norm_sums": 8}), (as_logits(), {"n_norm_sums": 8})) if THOROUGH else ()
        for epilogue, options in ((add_residual(2), {}), (STORE, {"starts_next": True}), *more):
            yield matvec(one, schedule, epilogue, "t", **options), types[q6]
        first, brings = ("stream", "norms"), Brought((4096,), True)
        yield matvec(one, schedule, add_residual(1), "t", loads_first=first, brings=brings), types[q6]
        yield matvec(two, schedule, STORE_BIASED, "t", 8), types[q4] + types[q6]
        choice = ChosenExperts(2, 8, False, True, None, True)
        chooses = StackedMatrices.single(q4, 128, 256, choice)
        of_chosen = Brought((4096,), False, 8)
        yield matvec(chooses, schedule, activated("silu"), "t", 8, brings=of_chosen), types[q4]
        added = StackedMatrices(((q4, 64),), 256, ChosenExperts(2, 8, True, True), SharedExpert(q6, 256))
        yield matvec(added, schedule, add_residual(), "t"), types[q4] + types[q6]
        beside = StackedMatrices(((f32, 8),), 256, beside=StackedMatrices.single(q4, 128, 256))
        yield matvec(beside, schedule, routed(8, "gelu"), "t", 8), types[f32] + types[q4]


def products_of_several_tokens() -> Iterator[Made]:
    for layout in map(WeightLayout, (12, 14, 0) if THOROUGH else (12,)):
        types = [dtype for _, dtype in layout.shapes(64, 512)]
        few = stored(64, has_bias=True), gated_few("silu"), logits_few()
        for epilogue in few if THOROUGH else few[:1]:
            yield small_batch_product(layout, 8, 64, 512, SmallBatchTiles(1, 1, 2), epilogue, "t"), types
        if THOROUGH:
            yield small_batch_product(layout, 64, 64, 512, SmallBatchTiles(2, 1, 2), stored(64), "t"), types
            tiles = WarpgroupTiles(64, 1, 1, 2, 4)
            yield warpgroup_matmul(layout, 64, 64, 1024, tiles, False, "t"), types


def attention() -> Iterator[Made]:
    plain = Heads(8, 2, 64, 8192, 1e-6, 0.1, block=32, pool=256)
    quantized = replace(plain, kv_format=KVFormat.Q8_0)
    others = quantized, replace(plain, gates=64), replace(plain, temperature=True)
    for heads in (plain, *others) if THOROUGH else (plain,):
        for limit in (256, 8192):
            kernel = flash_attention(heads, flash_split(heads, limit, 256, 16))
            yield kernel, [dtype for _, dtype in heads.cache_planes]


def norms() -> Iterator[Made]:
    yield layer_norm(320, (False, True), 1e-5), []


def states() -> Iterator[Made]:
    yield delta_decode(DeltaHeads(2, 4, 32, 4, 1e-5), 0, 2), []
    yield mamba(MambaHeads(4, 2, 32, 32, 4, 1e-5)), []


def source_of(kernel: Kernel, planes: Sequence[DType]) -> str:
    types, buffers = iter(planes), []
    for slot, name in enumerate(kernel.buffers):
        dtype = dtypes.int32 if name in INTEGERS else dtypes.float32
        dtype = next(types) if "planes" in name or "cache" in name else dtype
        buffers.append(UOp.placeholder((SIZE,), dtype, slot=slot))
    return str(to_program(kernel.graph(*buffers), Device[Device.DEFAULT].renderer).src[2].arg)


def prove(source: str, slots: set[int]) -> None:
    """Raises AssertionError if an access to a buffer of `slots` may come before a wait, or if a wait depends on a
    condition. A wait in a loop does not count after it."""
    waited, blocks = [False], [""]
    assert "griddepcontrol.wait" in source
    for line in source.split("__global__")[1].splitlines()[1:]:
        if line.strip().startswith("}"):
            waited.pop()
            blocks.pop()
        elif "griddepcontrol.wait" in line:
            assert "if" not in blocks
            waited[-1] = True
        elif {int(slot) for slot in re.findall(r"\bdata(\d+)_", line)} & slots:
            assert waited[-1], f"{line} comes before a wait"
        if line.endswith("{"):
            waited.append(waited[-1])
            blocks.append(line.split()[0])


def main() -> None:
    gc.disable()  # a fifth of the time
    compile_nothing()
    early_launch.apply()
    graph_nodes.apply()
    graph_rewrites.apply()
    index_lowering.apply()
    slice_shapes.apply()
    count = 0
    for kernel, planes in (*products(), *products_of_several_tokens(), *attention(), *norms(), *states()):
        names = kernel.hints.waits_for
        slots = {i for i, name in enumerate(kernel.buffers) if name.split(".")[0] in names}
        assert slots and slots < set(range(len(kernel.buffers)))
        prove(source_of(kernel, planes), slots)
        count += 1
    print(count)


if __name__ == "__main__":
    main()
