"""Sequences of kernels: compiled once, and not even built where they are known from an earlier run."""

import os
import subprocess
import sys

import pytest

from tests.forked_code import run_each
from tests.paths import ROOT
from tests.thorough import thorough

IMPORTS = """
import functools
import gc
import sys
import numpy as np
from tinygrad import UOp, dtypes
from tinygrad.engine import realize
from tinygrad.uop.ops import Ops
from engine.fixes import program_cache
from engine.kernels import compilation
from engine.kernels.compilation import compile_all
from engine.targets.nvidia.kernels.kernel_sequence import KernelSequence, forgetting
from engine.kernels.device_memory import to_device
from engine.targets.nvidia.kernels.uops import at, f32, finish, load
from engine.kernels.kernel import Kernel
"""
KERNELS = """
program_cache.apply()
built, compiled, stock = [], [], realize._compile_kernel
realize._compile_kernel = lambda task: compiled.append(0) or stock(task)

@functools.cache
def scale(n, factor):
    def kernel(out, x):
        built.append(factor)
        i = UOp.special(n, "lidx0")
        return finish(f"scale_{factor}", [at(out, i).store(load(x, i) * f32(factor))])
    return Kernel(kernel, ("out",), ("x",))
"""
CODE = """
factor = float(*sys.argv[1:])
x, y, z = (to_device(np.arange(8, dtype=np.float32)) for _ in range(3))
def sequence():
    step = KernelSequence()
    for _ in range(2):
        step.add(scale(8, 2.0), out=y, x=x)
        step.add(scale(8, factor), out=z, x=y)
    return step
steps = sequence(), sequence()
compile_all([step.linear for step in steps])
for step in (*steps, sequence()):
    step.capture()()
assert all(call.src[0].op is Ops.PROGRAM for call in sequence().calls)
assert (z.numpy() == np.arange(8) * 2 * factor).all()
tables = realize.to_program_cache, realize.runtime_cache
known = [len(table) for table in tables]
with forgetting():
    step = KernelSequence()
    step.add(scale(8, factor + 0.5), out=z, x=x)
    launch = step.capture()
    launch()
    assert [len(table) for table in tables] == [n + 1 for n in known]
assert [len(table) for table in tables] == known
launch()
assert (z.numpy() == np.arange(8) * (factor + 0.5)).all()
del steps, step
gc.collect()
assert not compilation._programs, "graphs are let go once they are compiled"
print(len(built), len(compiled))
"""


def variables(cache, compilers=0):
    path = os.pathsep.join([str(cache), str(ROOT)])
    processes = {"PARALLEL": str(compilers), "CACHELEVEL": "0", "PYTHONPATH": path}
    return {"DEV": "PYTHON", "XDG_CACHE_HOME": str(cache), **processes}


def run(cache, code, compilers=0):
    env = {**os.environ, **variables(cache, compilers)}
    done = subprocess.run([sys.executable, "-c", code], env=env, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return tuple(map(int, done.stdout.split()))


def test_each_kernel_is_compiled_once_and_known_in_the_next_run_where_it_is_the_same(tmp_path):
    runs = run_each(IMPORTS, KERNELS + CODE, ["3"], ["3"], ["5"], **variables(tmp_path))
    assert [run.split() for run in runs] == [["3", "3"], ["0", "0"], ["2", "2"]]


@thorough
def test_without_a_cache_all_is_made_again(tmp_path):
    (tmp_path / "orin-chat").write_text("in the way")
    runs = run_each(IMPORTS, KERNELS + CODE, ["3"], ["3"], **variables(tmp_path))
    assert [run.split() for run in runs] == [["3", "3"]] * 2


MODULE = IMPORTS + KERNELS.replace("realize._compile_kernel =", "_ =")  # compilers could not call that
BEGUN = """
import functools
import numpy as np
from scaling import *
x, y, z = (to_device(np.arange(8, dtype=np.float32)) for _ in range(3))
def sequence():
    step = KernelSequence()
    for _ in range(2):
        step.add(scale(8, 2.0), out=y, x=x)
        step.add(scale(8, 3.0), out=z, x=y)
    return step
from tinygrad import codegen
from engine.fixes import compiler_processes
from engine.kernels import compilation
compiler_processes.apply()
to_program = codegen.do_to_program
codegen.do_to_program = lambda *task: compiled.append(task) or to_program(*task)
def build():
    return [sequence().linear]
finish = compilation.begin_once(("step",), build)
print(len(compilation._compiling), len(built), int(compilation.was_compiled(("step",))))
finish()
step = sequence()
launch = step.capture()
print(len(compilation._compiling), len(built), len(compiled), int(compilation.was_compiled(("step",))))
launch()
assert (z.numpy() == np.arange(8) * 6).all()
"""


@pytest.fixture
def scaling(tmp_path):
    (tmp_path / "scaling.py").write_text(MODULE)


def test_compilers_build_kernels(tmp_path, scaling):
    assert run(tmp_path, BEGUN, compilers=2) == (2, 0, 0, 0, 0, 0, 1)
    assert run(tmp_path, BEGUN, compilers=2) == (0, 0, 1, 0, 0, 0, 1)


@thorough  # `test_compilers_build_kernels`; what is built here is in all tests
def test_what_compilers_cannot_build_is_built_here(tmp_path, scaling):
    begin = "import os\nos.environ['HERE'] = str(os.getpid())\nfrom scaling import *"
    broken = BEGUN.replace("from scaling import *", begin)
    here = "        assert os.environ['HERE'] == str(os.getpid())\n        built.append(factor)"
    (tmp_path / "scaling.py").write_text("import os\n" + MODULE.replace("        built.append(factor)", here))
    assert run(tmp_path, broken, compilers=2) == (2, 0, 0, 0, 2, 2, 1)


@thorough
def test_without_compilers_what_was_begun_is_done_when_it_is_needed(tmp_path, scaling):
    assert run(tmp_path, BEGUN) == (0, 2, 0, 0, 2, 2, 1)


REPACKING = """
import numpy as np
from tinygrad import Tensor
from engine.fixes import program_cache
from engine.targets.nvidia.kernels.weights import weight_repacking
from engine.targets.nvidia.kernels.weights.weight_repacking import MatrixSpec, TensorRows
from engine.targets.nvidia.kernels.weights.weight_layout import WeightLayout
from engine.formats.rope_order import HeadOrder
from engine.targets.nvidia.kernels.weights.upload import upload
from tests.kernels.gpu.buffers import part_of
program_cache.apply()
scheduled, stock = [], Tensor.linear_with_vars
Tensor.linear_with_vars = lambda *planes: scheduled.append(planes) or stock(*planes)
spec = MatrixSpec(WeightLayout(8), (TensorRows(16, HeadOrder(8, 8, True)), TensorRows(16)), 256)
rng = np.random.default_rng(0)
def repacked():
    sources = [rng.integers(0, 255, 16 * spec.row_bytes, np.uint8) for _ in spec.tensors]
    planes = spec.allocate()
    weight_repacking.repack(spec, upload(map(part_of, sources)), planes)
    return sum(int(plane.numpy().view(np.uint8).sum()) for plane in planes)
weight_repacking.prepare_repacking([spec])
print(len(scheduled), repacked(), repacked())
"""


@thorough  # `test_each_kernel_is_compiled_once` for a sequence of repacking
def test_repacking_is_scheduled_once_by_a_compiler_and_found_in_the_next_run(tmp_path):
    begin = "from engine.fixes import compiler_processes; compiler_processes.apply(); "
    begun = REPACKING.replace(
        "weight_repacking.prepare",
        f"{begin}weight_repacking.begin_repacking([spec])\nweight_repacking.prepare",
    )
    scheduled, *sums = run(tmp_path, begun, compilers=2)
    assert scheduled == 0
    assert run(tmp_path, REPACKING) == (0, *sums)
    without = tmp_path / "without compilers"
    assert [run(without, REPACKING) for _ in range(2)] == [(1, *sums), (0, *sums)]
