"""That kernels of a chain are launched early, and that nothing runs before what it depends on."""

import ctypes
import os
import pickle
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tinygrad import dtypes
from tinygrad.dtype import AddrSpace
from tinygrad.renderer.cstyle import uops_to_dtypes
from tinygrad.uop.ops import Ops, ProgramInfo, UOp

from engine.fixes import async_copies, early_launch, program_cache, tensor_copies
from engine.fixes.early_launch import RELEASE, WAIT
from engine.kernels.launch_hints import HintedInfo, LaunchHints, hints_of
from tests.paths import ROOT
from tests.thorough import rarely, thorough

CHAIN = [[], [0], [0, 1], [1, 2]]
FORK = [[], [0], [0], [1, 2], [3]]


@st.composite
def graphs(draw):
    sizes = range(draw(st.integers(1, 12)))
    return [sorted(draw(st.sets(st.sampled_from(range(i))))) if i else [] for i in sizes]


def reached(before, i):
    return {i}.union(*(reached(before, k) for k in before[i]))


@given(graphs())
def test_the_last_dependency_comes_after_all_others(before):
    for i, last in enumerate(early_launch.last_dependency(before)):
        fits = [k for k in before[i] if set(before[i]) <= reached(before, k)]
        assert fits == ([] if last is None else [last])


RENDER = """
import sys
from tinygrad import UOp, dtypes
from tinygrad.codegen import do_to_program
from tinygrad.helpers import Target
from tinygrad.renderer.cstyle import CUDARenderer
from tinygrad.runtime.support import compiler_cuda
from engine.fixes import early_launch, launch_bounds
from engine.targets.nvidia.kernels.uops import f32, finish, load, store
from engine.kernels.kernel import Kernel
from engine.kernels.launch_hints import LaunchHints
def init(self, *args, **options):
    self.compile_options, self.cachekey = [], "key"
compiler_cuda.NVRTCCompiler.__init__ = init
for fix in sys.argv[1:]:
    {"early": early_launch, "bounds": launch_bounds}[fix].apply()
def source(arch, **hints):
    renderer = CUDARenderer(Target.parse(f"CUDA::{arch}"))
    renderer.compiler.compile_cached = lambda source: b""
    i = UOp.special(64, "lidx0")
    function = lambda out: finish("k", [store(out, i, load(out, i) + f32(1))])
    kernel = Kernel(function, ("out",), (), LaunchHints(5, **hints))
    return do_to_program(kernel.graph(UOp.placeholder((64,), dtypes.float32, slot=0)), renderer).src[2].arg
for arch in ("sm_87", "sm_90", "sm_100"):
    print(repr(source(arch)))
print(source("sm_90", releases="after its wait").count("launch_dependents"))
"""


@pytest.mark.parametrize(
    "fixes", [rarely(()), rarely(("early",)), rarely(("early", "bounds")), ("bounds", "early")]
)
def test_kernels_wait_where_the_chip_can_launch_them_early(fixes):
    run = [sys.executable, "-c", RENDER, *fixes]
    done = subprocess.run(run, env={**os.environ}, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    *sources, launches = done.stdout.splitlines()
    assert len(sources) == 3
    assert int(launches) == ("early" in fixes)
    opening = r"""k(float* data0_64) {\n  asm volatile("griddepcontrol.wait;" ::: "memory");\n"""
    waits = [opening in source for source in sources]
    assert waits == ([False, True, True] if "early" in fixes else [False] * 3)
    assert all(("__launch_bounds__(64, 5)" in source) == ("bounds" in fixes) for source in sources)


class Driver:
    """What a graph's edges become, by the numbers of its nodes."""

    CUgraphNode, CUgraphExec = ctypes.c_void_p, ctypes.c_void_p

    def __init__(self, before, refuses):
        self.edges = {(k, i): "full" for i, nodes in enumerate(before) for k in nodes}
        self.refuses, self.instantiated = refuses, 0

    def cuGraphRemoveDependencies(self, _graph, a, b, _count):
        del self.edges[a[0] - 1, b[0] - 1]
        return 0

    def cuGraphAddDependencies(self, _graph, a, b, _count):
        self.edges[a[0] - 1, b[0] - 1] = "full"
        return 0

    def add_early(self, _graph, a, b, _edge, _count):
        if not self.refuses:
            self.edges[a[0] - 1, b[0] - 1] = "early"
        return int(self.refuses)

    def cuGraphExecDestroy(self, _instance):
        return 0

    def cuGraphInstantiate_v2(self, *_arguments):
        self.instantiated += 1
        return 0


def graph_of(monkeypatch, before, waits, refuses=False):
    driver = Driver(before, refuses)
    nodes = [ctypes.c_void_p(i + 1) for i in range(len(before))]
    linears = [UOp(Ops.LINEAR, src=(WAIT,) * waits[i]) for i in range(len(before))]
    programs = [UOp(Ops.PROGRAM, src=(UOp(Ops.SINK), linear)) for linear in linears]

    def stock_init(graph):
        graph.edges = [([nodes[k] for k in earlier], nodes[i]) for i, earlier in enumerate(before)]

    monkeypatch.setattr(early_launch, "cuda", driver)
    monkeypatch.setattr(early_launch, "_stock_init", stock_init)
    monkeypatch.setattr(early_launch, "_adder", lambda: driver.add_early)
    graph = SimpleNamespace(graph=None, instance=None, calls=[(0, program, (), {}) for program in programs])
    early_launch._init(graph)
    return driver


def test_a_chain_has_one_early_edge_from_each_kernel_to_the_next(monkeypatch):
    driver = graph_of(monkeypatch, CHAIN, [True] * 4)
    assert driver.edges == {(0, 1): "early", (1, 2): "early", (2, 3): "early"}
    assert driver.instantiated == 1


def test_kernels_that_do_not_wait_keep_their_edges(monkeypatch):
    driver = graph_of(monkeypatch, CHAIN, [True, True, False, True])
    assert driver.edges == {(0, 1): "early", (0, 2): "full", (1, 2): "full", (1, 3): "full", (2, 3): "full"}


def test_a_kernel_after_two_independent_ones_keeps_its_edges(monkeypatch):
    driver = graph_of(monkeypatch, FORK, [True] * 5)
    full = {(1, 3): "full", (2, 3): "full"}
    assert driver.edges == {(0, 1): "early", (0, 2): "early", (3, 4): "early", **full}


def test_a_driver_that_refuses_gets_ordinary_edges(monkeypatch):
    driver = graph_of(monkeypatch, CHAIN, [True] * 4, refuses=True)
    assert driver.edges == {(0, 1): "full", (1, 2): "full", (2, 3): "full"}


def operations(*first_slots):
    """Those of a kernel, in their order: loads of buffers, a loop that loads weights (slot 3) and an input (slot 1), a
    barrier, a store to slot 0 under a condition, a load of slot 2."""
    index = lambda slot: UOp.placeholder((8,), dtypes.float32, slot=slot).index(UOp.const(0))
    loads = [index(slot).load() for slot in first_slots]
    loop = UOp.range(3, 0)
    weights, x = index(3).load(), index(1).load()
    barrier = UOp(Ops.BARRIER)
    condition = UOp(Ops.IF, src=(UOp.const(True),))
    stored = index(0).store(x)
    later = index(2).load()
    end, fi = weights.end(loop), UOp(Ops.ENDIF, src=(condition,))
    return [
        *loads,
        loop,
        weights,
        x,
        end,
        barrier,
        condition,
        stored,
        fi,
        later,
        UOp(Ops.BARRIER, src=(later,)),
    ]


def info(*waits_for, releases="at its end"):
    return HintedInfo(buffers=("out", "x", "rows", "weights"), hints=LaunchHints(0, 0, waits_for, releases))


def added(uops, info):
    """What stands before what, of the operations that were added."""
    done = early_launch.with_waits(uops, info)
    assert [uop for uop in done if uop not in (WAIT, RELEASE)] == uops
    following = [*done[1:], None]
    return [(uop, following[i]) for i, uop in enumerate(done) if uop in (WAIT, RELEASE)]


def test_a_kernel_loads_weights_before_it_waits_and_lets_the_next_start_before_its_first_barrier():
    uops = operations()
    _loop, _weights, x, _end, barrier, condition, *_ = uops
    got = added(uops, info("out", "x", "rows", releases="before its first barrier"))
    assert got == [(WAIT, x), (RELEASE, barrier), (WAIT, condition)]


def test_a_loop_after_a_wait_needs_no_other():
    uops = operations(2)
    assert added(uops, info("out", "x", "rows")) == [(WAIT, uops[0])]


def test_a_kernel_waits_before_it_asks_for_a_copy_of_what_the_kernel_before_writes():
    x, weights = (UOp.placeholder((8,), dtypes.float32, slot=slot).index(UOp.const(0)) for slot in (1, 3))
    target = UOp.placeholder((8,), dtypes.float32, slot=4, addrspace=AddrSpace.LOCAL).index(UOp.const(0))
    copied = async_copies.asked(target, weights)
    uops = [weights.load(), copied, async_copies.asked(target, x, copied)]
    assert added(uops, info("out", "x", "rows")) == [(WAIT, uops[2])]
    map, barrier, none = weights, target, UOp.const(0)
    tiles = [tensor_copies.asked(target, map, of, (none, none), barrier, none) for of in (weights, x)]
    assert added(tiles, info("out", "x", "rows")) == [(WAIT, tiles[1])]


def test_a_kernel_that_reads_an_older_cache_waits_for_the_result_of_the_kernel_before():
    uops = operations()
    assert added(uops, info("rows")) == [(WAIT, uops[8])]


def test_a_kernel_that_says_nothing_waits_first():
    uops = operations()
    assert added(uops, HintedInfo()) == [(WAIT, uops[0])]
    assert added(uops, info(releases="after its wait")) == [(WAIT, RELEASE), (RELEASE, uops[0])]


def test_a_kernel_begins_with_its_requests_and_with_old_loads_that_it_needs_late():
    """Its parameters keep their order: it is that of a kernel's arguments."""
    early = HintedInfo(
        buffers=("out", "x", "rows", "weights"), hints=LaunchHints(0, 0, ("x",), loads_first=("rows",))
    )
    uops = operations()
    x, later = uops[2], uops[8]
    weights = uops[1].src[0]
    request = async_copies.brought(weights, 64, UOp.const(True), keeps=True)
    parameters = [place.src[0] for place in (uops[6].src[0], x.src[0], later.src[0], weights)]
    done = early_launch.with_waits([*parameters, *uops, request], early)
    assert done[:4] == parameters and len(done) == len({*done})
    assert done.index(weights) < done.index(request) < done.index(uops[0]) < done.index(WAIT) < done.index(x)
    assert done.index(later) < done.index(uops[0])
    simple = [*parameters, uops[1], weights, x, request]
    assert early_launch.with_waits(simple, early)[-4:] == [uops[1], request, WAIT, x]
    uops[1:2] = [uops[1], later.replace(src=(later.src[0].replace(src=(later.src[0].src[0], uops[0])),))]
    with pytest.raises(AssertionError, match="so early"):
        early_launch.with_waits(uops, early)


def test_a_request_that_depends_on_a_load_follows_those_of_weights():
    hinted = HintedInfo(buffers=("out", "experts", "rows", "planes"), hints=LaunchHints(0, 0, ("experts",)))
    number = UOp.placeholder((8,), dtypes.int32, slot=1).index(UOp.const(0)).load()
    planes, barrier = UOp.placeholder((64,), dtypes.float32, slot=3), UOp(Ops.BARRIER)
    weights = planes.index(number).load()
    request = async_copies.brought(planes.index(number * 4), 64, UOp.const(True), keeps=False)
    before = [*weights.toposort()]
    uops = [*before, barrier, *(uop for uop in request.toposort() if uop not in before)]
    done = early_launch.with_waits(uops, hinted)
    assert len(done) == len(uops) + 1 and done.index(WAIT) < done.index(number)
    assert done.index(weights) < done.index(request) < done.index(barrier)
    hinted = replace(hinted, hints=LaunchHints(releases="before its first barrier"))
    done = early_launch.with_waits(uops, hinted)
    assert [done[0], done[done.index(barrier) - 1]] == [WAIT, RELEASE]


def test_a_kernel_that_only_brings_halves_includes_their_header():
    """tinygrad includes it if an operation's value is a half: an address is none."""
    place = UOp.placeholder((64,), dtypes.half, slot=1).index(UOp.const(0))
    request = async_copies.brought(place, 64, UOp.const(True), keeps=True)
    assert (dtypes.half, 1) in uops_to_dtypes([*request.toposort()])


def test_a_program_on_disk_still_says_that_it_waits():
    instruction = UOp(Ops.CUSTOM, src=(UOp.special(4, "lidx0"),), arg="{0}")
    parts = UOp(Ops.SINK, arg=info("rows")), UOp(Ops.LINEAR, src=(WAIT, instruction, *instruction.src))
    program = UOp(Ops.PROGRAM, src=(*parts, UOp(Ops.SOURCE, arg=""), UOp(Ops.BINARY, arg=b"")))
    stored = program_cache._without_graphs(program.replace(arg=ProgramInfo(local_size=(4, 1, 1))))
    assert len(stored.src[1].src) == 1
    stored = pickle.loads(pickle.dumps(stored))
    assert early_launch._waits(stored) and hints_of(stored) == info("rows").hints


@thorough  # kernels of whole models
def test_kernels_that_wait_late_wait_before_they_touch_what_they_wait_for():
    """In the CUDA of every kind of kernel that does: products with a schedule that is early, and attention."""
    env = {**os.environ, "DEV": "NULL:NVCC:sm_90", "NULL_ALLOW_COPYOUT": "1"}
    run = [sys.executable, "-m", "tests.kernels.gpu.late_waits"]
    done = subprocess.run(run, env=env, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout) > 6
