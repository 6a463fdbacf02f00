"""What the changes to tinygrad for GPUs do, each checked against tinygrad without it."""

import os
import subprocess
import sys

import pytest

import engine.fixes
from engine.errors import BackendError
from engine.fixes import cuda_binaries, launch_bounds, program_cache, warpgroup_products
from tests.forked_code import run_each
from tests.paths import ROOT
from tests.thorough import thorough


def python(code, **env):
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PARALLEL": "0", **env},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


WAYS = ("without",), ("with",)
KERNELS = """
import sys
from tinygrad import UOp, dtypes
from tinygrad.codegen import to_program
from tinygrad.helpers import Target
from tinygrad.renderer.cstyle import CUDARenderer
from tinygrad.runtime.support import compiler_cuda
from engine.targets.nvidia.kernels.uops import after_store, finish, load, shared, store
from engine.kernels.kernel import Kernel
from engine.kernels.launch_hints import LaunchHints
def init(self, *args, **options):
    self.compile_options, self.cachekey = [], "key"
compiler_cuda.NVRTCCompiler.__init__ = init
renderer = CUDARenderer(Target.parse("CUDA::sm_90"))
renderer.compiler.compile_cached = lambda source: b""
def program(name, **hints):
    def function(out, x):
        i = UOp.special(64, "lidx0")
        halves = after_store(shared(20000, 0, dtypes.float16), i, load(x, i).cast(dtypes.float16))
        floats = after_store(shared(9, 1), i % 9, load(halves, 63 - i).cast(dtypes.float32))
        return finish(name, [store(out, i, load(floats, i % 9))])
    buffers = [UOp.placeholder((64,), dtypes.float32, slot=k) for k in (0, 1)]
    return to_program(Kernel(function, ("out",), ("x",), LaunchHints(**hints)).graph(*buffers), renderer)
"""

BOUNDS = """
def bounds(name, **hints):
    print(program(name, **hints).src[2].arg.split("__launch_bounds__(")[1].split(")")[0])
bounds("stock", min_blocks=5)
from engine.fixes import launch_bounds
launch_bounds.apply()
launch_bounds.apply()
bounds("asked", min_blocks=5)
bounds("renamed", min_blocks=5)
bounds("not_asked_mb5")
import re
from engine.fixes import streamed_loads
streamed_loads.apply()
def streamed(*names):
    i = UOp.special(4, "lidx0") * 4
    function = lambda out, x: finish("k", [store(out, i + k, load(x, i + k)) for k in range(4)])
    buffers = [UOp.placeholder((64,), dtypes.float32, slot=k) for k in (0, 1)]
    graph = Kernel(function, ("out",), ("x",), LaunchHints(streams=names)).graph(*buffers)
    print(re.findall("__ldcs.*?(data.)", to_program(graph, renderer).src[2].arg))
streamed()
streamed("x")
from engine.fixes import idle_threads, load_order
for fix in (load_order, idle_threads):
    fix.apply()
def order(guarded=True, **hints):
    def function(out, planes, x):
        i = UOp.special(64, "lidx0")
        own = after_store(shared(64, 0), i, load(planes, i) * load(x, i))
        return finish("k", [store(out, i, load(own, i), i < 8 if guarded else None)])
    buffers = [UOp.placeholder((64,), dtypes.float32, slot=k) for k in (0, 1, 2)]
    graph = Kernel(function, ("out",), ("planes", "x"), LaunchHints(**hints)).graph(*buffers)
    words = {"data1": "weights", "data2": "x", "pmevent": "hold", "buf0+": "sums", "__sync": "meet", "return;": "end"}
    lines = to_program(graph, renderer).src[2].arg.split("lidx0 = ")[1].splitlines()
    print(*(word for line in lines for part, word in words.items() if part in line))
order()
order(loads_together="all")
order(loads_together="weights")
order(idle_ends=True)
order(idle_ends=True, guarded=False)
"""


def test_a_kernel_asks_for_blocks_per_multiprocessor_for_loads_and_for_ends_of_threads():
    *bounds, none, streamed, stock, held, weights, ended, all_store = python(KERNELS + BOUNDS).splitlines()
    assert bounds == ["64", "64, 5", "64, 5", "64"]
    assert (none, streamed) == ("[]", "['data1']")
    assert stock == all_store == "weights x sums meet sums"
    assert (held, weights) == ("weights x hold sums meet sums", "weights hold x sums meet sums")
    assert ended == "weights x sums meet end sums"


RENDERER = """
import sys
from tinygrad import UOp, dtypes
from tinygrad.runtime.support import compiler_cuda
def init(self, *args, **options):
    self.compile_options, self.cachekey = [], "key"
compiler_cuda.NVRTCCompiler.__init__ = init
from tinygrad.codegen import to_program
from tinygrad.helpers import Target
from tinygrad.uop.ops import KernelInfo
from tinygrad.renderer.cstyle import CUDARenderer
"""
FLOATS = """
if sys.argv[1:] == ["with"]:
    from engine.fixes import float_instructions
    float_instructions.apply()
renderer = CUDARenderer(Target.parse("CUDA::sm_90"))
renderer.compiler.compile_cached = lambda source: b""
for dtype in (dtypes.float32, dtypes.int32, dtypes.float16):
    a = UOp.placeholder((2,), dtype, slot=0)
    first, second = (a.index(UOp.const(i)).load() for i in range(2))
    value = first.maximum(second) if dtype != dtypes.float16 else first.exp2()
    if dtype == dtypes.float32:
        value = value.exp2()
    graph = a.index(UOp.const(0)).store(value).sink(arg=KernelInfo(), tag=1)
    source = to_program(graph, renderer).src[2].arg
    print(*(source.count(word) for word in ("fmaxf", "__nvvm_ex2_approx_ftz_f(", " hexp2(", "=exp2(", " exp2(")))
print("ftz" in " ".join(renderer.compiler.compile_options))
"""


@thorough
def test_a_maximum_and_a_power_of_two_take_one_instruction():
    """Each a count for float32, int32 and float16. Other instructions keep denormal numbers, which weights are read
    as."""
    stock, fixed = run_each(RENDERER, FLOATS, *WAYS)
    float32, integer, half, _ = stock.splitlines()
    assert float32.split()[:2] == integer.split()[:2] == half.split()[:2] == ["0", "0"]
    assert fixed.splitlines() == ["1 1 0 0 0", integer, half, "False"]


SINGLE = """
if sys.argv[1:] == ["with"]:
    from engine.fixes import single_elements
    single_elements.apply()
from tinygrad.uop.ops import AxisType, Ops
renderer = CUDARenderer(Target.parse("CUDA::sm_90"))
renderer.compiler.compile_cached = lambda source: b""
a, k = UOp.placeholder((2,), dtypes.float32, slot=0), UOp.range(2, 0, AxisType.REDUCE)
total = a.index(k).load().reduce(k, arg=Ops.ADD) * 0.5
root = UOp(Ops.CUSTOM, dtypes.float32, (total,), "rsqrtf({0})")
graph = a.index(UOp.const(0)).store(root).sink(arg=KernelInfo(), tag=1)
print(to_program(graph, renderer).src[2].arg.count("make_float("))
"""


def test_a_named_instruction_reads_the_result_of_a_reduction():
    stock, fixed = run_each(RENDERER, SINGLE, *WAYS)
    assert (int(stock), int(fixed)) == (1, 0)


SHARED = """
import tinygrad.runtime.ops_cuda as cuda
cuda.CUDAProgram.__init__ = lambda self, dev, obj, smem=0: print(smem)
if "with" in sys.argv:
    from engine.fixes import dynamic_shared
    dynamic_shared.apply()
for made in (program("t"), program("asked", shared_bytes=65536)):
    cuda.CUDAProgram(None, made.to_elf())
    source = made.src[2].arg
    print(source.count("__shared__ __align__(16) half"), source.count("extern __shared__"))
    print(source.count("float* buf1 = (float*)(shared_bytes + 40000);"))
"""


@thorough
def test_a_kernel_asks_for_shared_memory():
    stock, asked = run_each(KERNELS, SHARED, *WAYS)
    assert stock.split() == ["0", "1", "0", "0"] * 2
    assert asked.split() == ["0", "1", "0", "0", "65536", "0", "1", "1"]


GROUPS = """
from tinygrad.runtime.support.compiler_cuda import NVRTCCompiler
def init(self, arch):
    self.arch, self.compile_options = arch, ["--minimal", f"--gpu-architecture={arch}"]
NVRTCCompiler.__init__ = init
NVRTCCompiler.compile = lambda self, source: print(self.compile_options[1][-6:]) or b""
if "with" in sys.argv:
    from engine.fixes import warpgroup_products
    warpgroup_products.apply()
compiler = NVRTCCompiler("sm_90")
for source in ("wgmma.fence", "mma.sync"):
    compiler.compile(source)
NVRTCCompiler("sm_87").compile("wgmma.fence")
"""


@thorough
def test_products_of_warpgroups_are_compiled_for_the_only_target_that_has_them():
    stock, fixed = run_each("import sys, tinygrad.runtime.support.compiler_cuda", GROUPS, *WAYS)
    assert stock.split() == ["=sm_90", "=sm_90", "=sm_87"]
    assert fixed.split() == ["sm_90a", "=sm_90", "=sm_87"]


BINARIES = """
import tinygrad.runtime.support.compiler_cuda as compilers
from tinygrad.helpers import DEV, Target
class Compiler:
    def __init__(self, arch, ptx=True, cache_key=""):
        self.ptx, self.cachekey = ptx, f"{cache_key}_{arch}"
compilers.NVRTCCompiler = compilers.NVCCCompiler = Compiler
from tinygrad.renderer.cstyle import CUDARenderer
if sys.argv[1:] == ["with"]:
    from engine.fixes import cuda_binaries
    cuda_binaries.apply()
for device in ("CUDA", "NV", "MOCK+CUDA", "CUDA"):
    print(CUDARenderer(Target.parse(device + "::sm_87")).compiler.ptx, end=" ")
    if device == "MOCK+CUDA":
        DEV.value = "CUDA::sm_87"  # as for a GPU that stands in for another
"""


def test_programs_are_compiled_to_the_end():
    stock, binaries = run_each("import sys, tinygrad.runtime.support.compiler_cuda", BINARIES, *WAYS)
    assert stock.split() == ["True", "False", "True", "True"]
    assert binaries.split() == ["False", "False", "True", "True"]


KEPT = """
import sys
import tinygrad.codegen as codegen, tinygrad.engine.realize as realize, tinygrad.schedule as schedule
from engine.fixes import program_cache
made, stock = [], codegen.do_to_program
codegen.do_to_program = lambda *a: made.append(a) or stock(*a)
scheduled, stock_schedule = [], schedule.create_schedule
schedule.create_schedule = lambda *a: scheduled.append(a) or stock_schedule(*a)
if sys.argv[1:] != ["without"]:
    program_cache.apply()
    program_cache.apply()
from tinygrad import Tensor
out = (Tensor(list(range(40))).contiguous().realize() * 3 + 1).tolist()
assert out == [3 * i + 1 for i in range(40)]
print(len(made), len(scheduled))
"""


@thorough
def test_programs_and_schedules_are_kept_from_one_run_to_the_next(tmp_path):
    env = {"DEV": "PYTHON", "XDG_CACHE_HOME": str(tmp_path)}
    assert min(map(int, python(KEPT, **env).split())) > 0
    assert python(KEPT, **env).split() == ["0", "0"]
    stock = python("import sys; sys.argv.append('without')\n" + KEPT, **env)
    assert min(map(int, stock.split())) > 0


SLIM = """
import sys
import tinygrad.engine.realize as realize, tinygrad.engine.worker as compile_workers
from engine.fixes import compiler_processes, program_cache
from engine.kernels import compilers
compiler_processes.apply()
if sys.argv[1:] != ["without"]:
    program_cache.apply()
import threading
from tinygrad import Tensor
from tinygrad.uop.ops import UOpMetaClass
threads, make = set(), UOpMetaClass.__call__
UOpMetaClass.__call__ = lambda *of, **more: threads.add(threading.get_ident()) or make(*of, **more)
a, b = (Tensor([float(i) for i in range(n)]).contiguous().realize() for n in (32, 64))
sums = [(x * 3 + 1).sum().contiguous() for x in (a, b)]
Tensor.realize(*sums)
assert compile_workers.worker_pool is not None
programs = [p for p in realize.to_program_cache.values() if p.arg.local_size is not None]
print([s.item() for s in sums], len(programs) > 1, len(threads), max(len(p.src[0].src) for p in programs))
compilers.end()
compilers.end()
assert compile_workers.worker_pool is None
print((a + 2).sum().item())
"""


@thorough
def test_compilers_send_programs_back_without_their_graphs_and_no_other_thread_makes_nodes(tmp_path):
    env = {"DEV": "PYTHON", "PARALLEL": "2", "CACHELEVEL": "0", "XDG_CACHE_HOME": str(tmp_path)}
    assert python(SLIM, **env).splitlines() == ["[1520.0, 6112.0] True 1 0", "560.0"]
    stock = python("import sys; sys.argv.append('without')\n" + SLIM, **env)
    assert stock.splitlines()[0] != "[1520.0, 6112.0] True 1 0"


SIZES = """
from types import SimpleNamespace
import tinygrad.runtime.graph.cuda as graphs
from tinygrad.uop.ops import Ops
from engine.fixes import graph_sizes
if sys.argv[1:] != ["without"]:
    graph_sizes.apply()
added, driver = [], graphs.cuda
def add(node, graph, dependencies, n, params):
    added.append([getattr(params._obj, f"{of}Dim{axis}") for of in ("grid", "block") for axis in "XYZ"])
    return 0
driver.cuGraphAddKernelNode = add
driver.cuGraphCreate = driver.cuGraphInstantiate_v2 = driver.cuGraphDestroy = driver.cuGraphExecDestroy = lambda *_: 0
info = SimpleNamespace(launch_dims=lambda given: ((given["rows"], 5, 1), (2, 1, 1)), outs=[], vars=[])
call = 0, SimpleNamespace(op=Ops.PROGRAM, arg=info), [], {}
runtime = SimpleNamespace(prg=None, smem=0, signature=())
known = dict(calls=[call], runtimes=[runtime], vars=["rows"], uop_replace=[[]])
known |= dict(var_vals_replace={}, launch_dims_replace={})
graphs.MultiGraphRunner.__init__ = lambda self, *_: vars(self).update(known)
graphs.CUDAGraph.new_node = lambda self, *_: (None, driver.CUgraphNode())
graphs.CUDAGraph(None)
print(*added)
"""


def test_kernels_of_a_graph_have_a_block_before_the_first_launch():
    stock, fixed = run_each("import sys, tinygrad.runtime.graph.cuda", SIZES, *WAYS)
    assert fixed.strip() == "[1, 5, 1, 2, 1, 1]"
    assert stock.strip() == "[0, 5, 1, 2, 1, 1]"


@pytest.mark.parametrize("fix", [cuda_binaries, launch_bounds, program_cache, warpgroup_products])
def test_another_tinygrad_is_refused(fix, monkeypatch):
    monkeypatch.setattr(engine.fixes, "TINYGRAD", "0.13.0")
    with pytest.raises(BackendError):
        fix.apply()
