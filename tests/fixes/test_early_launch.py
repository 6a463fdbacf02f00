"""That kernels of a chain are launched early, and that nothing runs before what it depends on."""

import ctypes
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tinygrad.uop.ops import Ops, UOp

from engine.fixes import early_launch
from tests.paths import ROOT

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
import tinygrad.renderer.cstyle as cstyle
from tinygrad.helpers import Target
from engine.fixes import early_launch, launch_bounds
stock = 'struct a {\\n}; extern "C" __global__ void __launch_bounds__(64) k(int* a) {\\n  *a = 1;\\n}'
cstyle.CStyleLanguage.render_kernel = lambda *a, **k: stock
for fix in sys.argv[1:]:
    {"early": early_launch, "bounds": launch_bounds}[fix].apply()
class Renderer(cstyle.CUDARenderer):
    def __init__(self, arch): self.target = Target.parse(f"NV::{arch}")
for arch in ("sm_87", "sm_90", "sm_100a"):
    print(repr(Renderer(arch).render_kernel("k_mb5", [], [], [])))
print(Renderer("sm_90").render_kernel("k_starts_next_1", [], [], []).count("launch_dependents"))
"""


@pytest.mark.parametrize("fixes", [(), ("early",), ("early", "bounds"), ("bounds", "early")])
def test_kernels_wait_where_the_chip_can_launch_them_early(fixes):
    run = [sys.executable, "-c", RENDER, *fixes]
    done = subprocess.run(run, env={**os.environ}, cwd=ROOT, capture_output=True, text=True)
    *sources, launches = done.stdout.splitlines()
    assert len(sources) == 3, done.stderr[-2000:]
    assert int(launches) == ("early" in fixes)
    opening = r"k(int* a) {\n  asm volatile(\"griddepcontrol.wait;\" ::: \"memory\");\n  *a = 1;\n}".replace(
        '\\"', '"'
    )
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
    sources = ["{ " + early_launch._WAIT * waits[i] + "}" for i in range(len(before))]
    programs = [UOp(Ops.PROGRAM, src=(UOp(Ops.SINK), UOp(Ops.SOURCE, arg=source))) for source in sources]

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


BODY = """  int alu0 = 3;
  for (int Ridx0 = 0; Ridx0 < alu0; Ridx0++) {
    uint val0 = (*(data12_8+Ridx0));
    float val1 = (*(data1_8+Ridx0));
    *(buf0+0) = val0*val1;
  }
  *(buf1+alu0) = (*(buf0+0));
  __syncthreads();
  if (alu0) {
    *(data0_8+0) = (*(buf1+0));
  }
  float val2 = (*(data2_8+0));
  __syncthreads();
}
"""


def test_a_kernel_loads_weights_before_it_waits_and_lets_the_next_start_before_its_first_barrier():
    lines = early_launch.waiting_late(BODY, range(12)).splitlines()
    added = [(i, line.strip()) for i, line in enumerate(lines) if "griddepcontrol" in line]
    wait, launch = early_launch._WAIT, early_launch._LAUNCH
    assert [(lines[i + 1].strip(), line) for i, line in added] == [
        ("float val1 = (*(data1_8+Ridx0));", wait),
        ("__syncthreads();", launch),
        ("if (alu0) {", wait),
    ]
    assert "\n".join(line for line in lines if "griddepcontrol" not in line) + "\n" == BODY


def test_a_loop_after_a_wait_needs_no_other():
    lines = early_launch.waiting_late("  float val9 = (*(data3_8+0));\n" + BODY, range(12)).splitlines()
    assert [i for i, line in enumerate(lines) if early_launch._WAIT in line] == [0]


def test_a_kernel_that_reads_an_older_cache_waits_for_the_result_of_the_kernel_before():
    lines = early_launch.waiting_late(BODY, [2], lets_start=False).splitlines()
    added = [i for i, line in enumerate(lines) if "griddepcontrol" in line]
    assert [lines[i + 1].strip() for i in added] == ["float val2 = (*(data2_8+0));"]
