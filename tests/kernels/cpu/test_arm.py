"""The kernels compiled for Arm and run on an emulated CPU: the same results as here. (What an emulator of one core
cannot show is that fences suffice between cores.)"""

import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from tinygrad import Device, Tensor, UOp, dtypes
from tinygrad.codegen import to_program
from tinygrad.runtime.support.compiler_cpu import ClangCompiler
from tinygrad.runtime.support.elf import jit_loader
from tinygrad.uop.ops import Ops

from engine.targets.cpu.kernels import memory, thread_pool
from engine.targets.cpu.kernels.activations import Quantization, buffer_names, quantize_activations
from engine.targets.cpu.kernels.attention import attention, mask, n_parts, scratch_size
from engine.targets.cpu.kernels.delta_net import DeltaHeads, convolve, delta_net
from engine.targets.cpu.kernels.expert_choice import choose_experts
from engine.targets.cpu.kernels.experts import (
    add_experts,
    expert_product,
    expert_shape,
    group_experts,
    max_tiles,
)
from engine.targets.cpu.kernels.kernel_sequence import KernelSequence
from engine.targets.cpu.kernels.patch_attention import attend
from engine.targets.cpu.kernels.patches import (
    PatchHeads,
    Preparation,
    RowNorm,
    add_rows,
    prepare,
    split_heads,
)
from engine.targets.cpu.kernels.product import ROUNDED, product, shape_of, span_of
from engine.targets.cpu.kernels.rope import HeadLanes, rotate
from engine.targets.cpu.kernels.stream_size import UNIT
from engine.targets.cpu.kernels.thread_pool import ThreadPool
from engine.targets.cpu.kernels.weight_layout import LaneLayout
from engine.targets.cpu.kernels.weight_repacking import repack
from tests.kernels.cpu.test_product import KINDS, blocks_of, ints
from tests.thorough import rarely, thorough

# Products are run by default, the rest by `make check-thorough`: x86 and Arm differ in what clang makes of a source.
unicorn = pytest.importorskip("unicorn", reason="the emulator unicorn is not installed")
LANES, PARTS, TILE = 8, 2, 4


class ArmCore:
    """An emulated core with a compiled kernel in its memory."""

    CODE, STACK, DATA, END = 0x100000, 0x800000, 0x1000000, 0xFFFF0

    def __init__(self, program: UOp) -> None:
        from unicorn import arm64_const as arm

        self._arm = arm
        source = next(u.arg for u in program.src if u.op is Ops.SOURCE)
        code = jit_loader(ClangCompiler(["arm64", "cortex-a78"]).compile(source), base=self.CODE)
        self._cpu = unicorn.Uc(unicorn.UC_ARCH_ARM64, unicorn.UC_MODE_ARM)
        self._cpu.ctl_set_cpu_model(arm.UC_CPU_ARM64_MAX)
        self._cpu.mem_map(0, 64 << 20)
        self._cpu.mem_write(self.CODE, code)
        self._cpu.reg_write(arm.UC_ARM64_REG_CPACR_EL1, 3 << 20)  # floating point allowed

    def run(self, part: int, parts: int, buffers: Sequence[np.ndarray]) -> None:
        """Calls the kernel; its arguments go to registers, then to the stack (AAPCS64)."""
        places, at = [], self.DATA
        for buffer in buffers:
            self._cpu.mem_write(at, buffer.tobytes())
            places.append(at)
            at += -(-buffer.nbytes // 64) * 64 + 64
        arguments = [part, parts, *places]
        for register, value in zip(range(8), arguments, strict=False):
            self._cpu.reg_write(getattr(self._arm, f"UC_ARM64_REG_X{register}"), value)
        self._cpu.mem_write(self.STACK, struct.pack(f"<{len(arguments)}Q", *arguments[8:], *arguments[:8]))
        self._cpu.reg_write(self._arm.UC_ARM64_REG_SP, self.STACK)
        self._cpu.reg_write(self._arm.UC_ARM64_REG_LR, self.END)
        self._cpu.emu_start(self.CODE, self.END)
        for place, buffer in zip(places, buffers, strict=True):
            buffer[:] = np.frombuffer(self._cpu.mem_read(place, buffer.nbytes), buffer.dtype)


def arm_program(kernel: Callable[..., UOp], buffers: Sequence[Tensor]) -> UOp:
    """The program in the forms that machines with Arm take."""
    with (
        mock.patch("engine.targets.cpu.kernels.kernel_builder.adds_pairs", lambda: False),
        mock.patch("engine.targets.cpu.kernels.weight_layout.looks_up", lambda: False),
    ):
        graph = thread_pool._graph(kernel, tuple(b.dtype for b in buffers))
    return to_program(graph, Device["CPU"].renderer)


def on_arm(
    pool: ThreadPool,
    kernel: Callable[..., UOp],
    outs: Sequence[Tensor],
    ins: Sequence[Tensor],
    parts: int = PARTS,
) -> float:
    """Runs the kernel here and there; the largest difference of what they store, relative to the largest value."""
    everything = [*outs, *ins]
    before = [memory.view(b).copy() for b in everything]
    step = KernelSequence(pool)
    step.add(kernel, *everything, parts=parts)
    run = step.compile()
    run()
    arm = ArmCore(arm_program(kernel, everything))
    for part in range(parts):
        arm.run(part, parts, before)
    here, there = (np.concatenate([b[: o.numel()].astype(np.float64) for b, o in zip(s, outs, strict=False)])
                   for s in ([memory.view(o) for o in outs], before))  # fmt: skip
    assert np.abs(here).max() > 0
    return float(np.abs(here - there).max() / np.abs(here).max())


def random(n: int, dtype=dtypes.float32, scale: float = 1.0) -> Tensor:
    values = np.random.default_rng(n).standard_normal(n) * scale
    return memory.array(values if dtype in dtypes.floats else values.astype(np.int64), dtype)


@pytest.mark.parametrize("tile", [1, TILE])
@pytest.mark.parametrize(
    "kind",
    [
        rarely(Type.F16),
        rarely(Type.BF16),
        rarely(Type.Q8_0),
        Type.Q4_K,
        rarely(Type.Q6_K),
        rarely(Type.MXFP4),
    ],
    ids=lambda k: k.name,
)
def test_products(pool: ThreadPool, kind: Type, tile: int) -> None:
    rows, cols, layout = 24, 256, LaneLayout(kind, LANES)
    stream = repack(pool, blocks_of(kind, rows, cols)[0], layout, np.arange(rows, dtype=np.int32), cols)
    inputs = []
    for name in buffer_names([layout], tile):
        kept = KINDS.get(name, dtypes.float32)
        inputs.append(random(tile * cols, kept, 1.0 if kept == dtypes.float32 else 1000.0))
    state = [ints(1)] if tile > 1 else []
    ins = [ints(*shape_of(rows, cols, layout, False)), *state, *inputs, random(rows), stream]
    kernel = product(layout, tile, span_of(cols) if tile > 1 else 1)
    assert on_arm(pool, kernel, [memory.zeros(tile * rows, dtypes.float32)], ins) < 1e-6


@thorough
@pytest.mark.parametrize("tile", [1, TILE])
def test_experts(pool: ThreadPool, tile: int) -> None:
    """Choice, groups, products and sum, of three experts."""
    count, used, rows, cols, tokens = 3, 2, 32, 64, 1 if tile == 1 else 6
    layout, n = LaneLayout(Type.Q8_0, LANES), max_tiles(tokens, used, count, tile)
    stream = repack(
        pool,
        blocks_of(Type.Q8_0, count * rows, cols)[0],
        layout,
        np.arange(count * rows, dtype=np.int32),
        cols,
    )
    state = [ints(2, tokens)] if tile > 1 else []
    chosen, weights = memory.zeros(tokens * used, dtypes.int32), memory.zeros(tokens * used, dtypes.float32)
    kernel = choose_experts(count, used, 1e-4, LANES, tile)
    outs = [chosen, weights, *([] if tile > 1 else [memory.zeros(count, dtypes.int32)])]
    assert on_arm(pool, kernel, outs, [*state, random(tokens * LANES)]) < 1e-6
    experts, lists, tiles = chosen, [], ints(used)
    if tile > 1:
        outs = [memory.zeros(size, dtypes.int32) for size in (n, n * tile, tokens * used, 1, count)]
        assert on_arm(pool, group_experts(count, used, tile), outs, [*state, chosen], parts=1) == 0
        experts, lists, tiles = outs[0], [*state, outs[2]], outs[3]
    inputs = []
    for name in buffer_names([layout], tile):
        kept = KINDS.get(name, dtypes.float32)
        inputs.append(random(n * tile * cols, kept, 1.0 if kept == dtypes.float32 else 1000.0))
    ins = [
        ints(*expert_shape(rows, cols, layout, True)),
        tiles,
        experts,
        *inputs,
        random(count * rows),
        stream,
    ]
    results = memory.zeros(n * tile * rows, dtypes.float32)
    assert on_arm(pool, expert_product(layout, tile, 2 if tile > 1 else 1), [results], ins) < 1e-6
    ins = [ints(rows // UNIT), *lists, weights, results]
    out = memory.zeros(tokens * rows, dtypes.float32)
    assert on_arm(pool, add_experts(used, True, LANES, tile), [out], ins) < 1e-6


@thorough
@pytest.mark.parametrize("tile", [1, TILE])
@pytest.mark.parametrize("kind", ["", "silu", "gelu", "swiglu_oai", "sigmoid", "normed"])
def test_activations(pool: ThreadPool, kind: str, tile: int) -> None:
    cols = 128
    names = ("values", "scales", *(("sums",) if tile == 1 else ()), "scaled_sums", "floats")
    outs = [memory.zeros(tile * cols, KINDS.get(name, dtypes.float32)) for name in names]
    state = [ints(1)] if tile > 1 else []
    normed = kind == "normed"
    other = [random(cols)] if normed else [random(tile * cols + 1)] if kind else []
    quantization = Quantization(names, 1e-5 if normed else None, "" if normed else kind)
    ins = [ints(cols // UNIT), *state, random(tile * cols), *other]
    # A rounding, of 16 bits
    assert on_arm(pool, quantize_activations(quantization, LANES, tile), outs, ins) < 1e-4


@thorough
@pytest.mark.parametrize("tile", [1, TILE])
@pytest.mark.parametrize("kind", ["full", "window"])
def test_attention(pool: ThreadPool, kind: str, tile: int) -> None:
    heads = HeadLanes(
        query=4, kv=2, dim=32, block=16, lanes=LANES, scale=0.2, norm_eps=1e-6, query_norm=True, key_norm=True
    )
    if kind == "window":
        heads = replace(heads, temperature=True, window=11, norms_over_heads=True, sinks=True)
    first = 13 if kind == "full" else 61
    state, places = [ints(1)] if tile > 1 else [], ints(*(n for t in range(tile) for n in (first + t, 1)))
    blocks, rows = ints(5, 5, *[0] * 5, 3, 1, 0, 4, 2), random(tile * heads.rows)
    keys, values = (random(n, dtype) for n, dtype in heads.cached(5))
    tables = [random(70 * 16), random(70 * 16 + 1), random(128), random(64)]
    queries = memory.zeros(tile * 128, dtypes.float32)
    kernel = rotate(heads, tile)
    ins = [blocks, *state, places, rows, *tables, *([random(70)] if heads.temperature else [])]
    assert on_arm(pool, kernel, [queries, keys, values], ins) < 1e-5
    of_step = heads, pool.count, tile, int(tile == 1)
    out, scores = (
        memory.zeros(n, dtypes.float32) for n in (tile * 128, scratch_size(heads, 5, *of_step[1:]))
    )
    ins = [scores, keys, values, blocks, *state, places, queries, memory.array(mask(LANES), dtypes.float32)]
    ins += [random(4)] if heads.sinks else []
    assert on_arm(pool, attention(*of_step), [out], ins, n_parts(*of_step)) < 1e-5


@thorough
@pytest.mark.parametrize("tile", [1, TILE])
def test_delta_nets(pool: ThreadPool, tile: int) -> None:
    net, tokens = DeltaHeads(2, 4, 32, 4, 1e-6, LANES), 1 if tile == 1 else 6
    x, gates = random(tokens * net.channels), random(tokens * 2 * net.gates)
    of_step = [*([ints(2, tokens)] if tile > 1 else []), ints(*[1, 0] * tokens)]  # from one slot to the other
    decay = memory.array(-np.arange(LANES), dtypes.float32)
    tables = [random(net.taps * net.channels), decay, random(LANES)]
    kernel, inputs = convolve(net, tile), random(2 * net.inputs_size)
    assert on_arm(pool, kernel, [x, gates, inputs], [*of_step, *tables]) < 1e-5
    out, states = memory.zeros(tokens * 128, dtypes.float32), random(2 * net.state_size)
    assert on_arm(pool, delta_net(net, tile), [out, states], [*of_step, x, gates, random(32)]) < 1e-5


@thorough
def test_patches(pool: ThreadPool) -> None:
    """An encoder's kernels: preparation, a product of rounded weights, heads, attention, and a sum."""
    rows, cols = 2 * LANES, 64
    norm, state = RowNorm(1e-6, True, True, True), ints(2, 0, 0)
    outs = [memory.zeros(rows * cols, dtypes.int16), memory.zeros(rows * cols // UNIT, dtypes.float32)]
    of_rows, x, limits = (
        ints(cols // UNIT, cols),
        random(rows * cols),
        memory.array(np.tile(np.repeat([-1.5, 1.5], LANES), 3), dtypes.float32),
    )
    vectors = [random(cols), random(cols + 1)]
    for activation in ("gelu", "exact gelu", "silu"):
        kernel = prepare(Preparation(ROUNDED, True, norm, activation, clamps=(True, False, True)), LANES)
        assert on_arm(pool, kernel, outs, [of_rows, state, x, *vectors, limits]) < 1e-4  # a rounding
    h, layout = (
        PatchHeads(2, 20, 0.3, replace(norm, centred=False), None, True, True, LANES),
        LaneLayout(1, LANES),
    )
    stream = random(layout.size(3 * h.width, cols), dtypes.float16)
    joined, shape = (
        memory.zeros(rows * 3 * h.width, dtypes.float32),
        shape_of(3 * h.width, cols, layout, False),
    )
    kernel = product(layout, LANES, span_of(cols), rounded=True)
    ins = [ints(*shape), state, *outs, random(3 * h.width), stream]
    assert on_arm(pool, kernel, [joined], ins) < 1e-6
    q, keys, v = (memory.zeros(2 * rows * n, dtypes.float32) for n in (h.dim, h.dim, h.padded_dim))
    norms = [random(20 + i) for i in range(4)]
    ins = [ints(2), state, joined, random(rows * 10), random(rows * 10 + 1), *norms, limits]
    assert on_arm(pool, split_heads(h), [q, keys, v], ins) < 1e-5
    out, scores = (memory.zeros(n, dtypes.float32) for n in (rows * h.width, PARTS * rows * LANES))
    ins = [scores, q, keys, v, random(rows), ints(2, 2), state]
    assert on_arm(pool, attend(h), [out], ins) < 1e-5
    kernel = add_rows(norm, True, LANES)
    ins = [of_rows, state, random(rows * cols + 1), *vectors, limits]
    assert on_arm(pool, kernel, [x], ins) < 1e-5
