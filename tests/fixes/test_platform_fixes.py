"""What the changes to tinygrad for whole platforms do, each checked against tinygrad without it."""

import sys

import pytest
from tinygrad.runtime.autogen import nv_580

import engine.fixes
from engine.devices import cuda_driver, cuda_toolkit
from engine.errors import BackendError
from engine.fixes import compiler_processes, cuda_headers, nv_windows, visible_gpus
from tests.forked_code import output_of, run_each
from tests.thorough import rarely, thorough


def python(code, *arguments, stdin=False, **env):
    """What `code` prints, in a process of its own; from standard input as from `-c`."""
    command = [sys.executable, "-", *arguments] if stdin else [sys.executable, "-c", code, *arguments]
    return output_of(command, code if stdin else None, **env).split()


def test_variables_of_other_programs_do_not_reach_tinygrad():
    code = "from engine.fixes import environment_variables as n; n.apply() if {} else 0; import os; "
    code += "import tinygrad.helpers as t, tinygrad.dtype as d; "
    code += (
        "print(t.DEBUG.value, t.getenv('MAX_BUFFER_SIZE', 0), t.JIT_BATCH_SIZE.value, t.getenv('BEAM', 0), "
    )
    code += "d.dtypes.default_float.name, t.getenv('CPU_LLVM'), 'NO_COLOR' in os.environ, os.getenv('HOME'))"
    odd = {"DEBUG": "app:*", "NO_COLOR": "", "MAX_BUFFER_SIZE": "10", "DEFAULT_FLOAT": "x", "CPU_LLVM": "1"}
    own = {"JIT_BATCH_SIZE": "7", "BEAM": "all", "HOME": "/nowhere"}
    assert python(code.format(True), **odd, **own) == ["0", "0", "7", "0", "float", "0", "False", "/nowhere"]
    with pytest.raises(AssertionError, match="invalid literal"):
        python(code.format(False), **odd)


# --- processes that compile ------------------------------------------------------------------------------

POOL = """
import os, sys
if "main ran again" in os.environ:
    print("main ran again")
os.environ["main ran again"] = ""
from tinygrad.codegen.opt import heuristic
import tinygrad.engine.worker as compile_workers
from engine.fixes import compiler_processes, matvec_heuristic
matvec_heuristic.apply()
if sys.argv[-1] == "with":
    compiler_processes.apply()
pool = compile_workers.get_worker_pool()
ask = "__import__('tinygrad.codegen.opt.heuristic').codegen.opt.heuristic.hand_coded_optimizations.__module__"
print(pool.apply(eval, [ask]))
print(pool.apply(eval, ["__import__('os').getppid()"]) == os.getpid())
print(pool.apply(eval, ["__import__('tinygrad').helpers.ALLOW_DEVICE_USAGE.value"]))
pool.terminate()
"""


@pytest.mark.parametrize("stdin", [False, rarely(True)])
def test_compilers_are_forked_from_a_clean_process_and_know_the_changes(stdin):
    env = {"PARALLEL": "2", "DEV": "CPU"}
    stock = python(POOL, "without", stdin=stdin, **env)
    fixed = python(POOL, "with", stdin=stdin, **env)
    assert stock == ["tinygrad.codegen.opt.heuristic", "True", "0"]
    assert fixed == ["engine.fixes.matvec_heuristic", "False", "0"]


SEARCH = """
from engine.fixes import compiler_processes
compiler_processes.apply()
import tinygrad.engine.worker as compile_workers
from tinygrad import Tensor
a, b = (Tensor([[float(i + j) for i in range(16)] for j in range(16)]).contiguous().realize() for _ in "ab")
print((a @ b)[0, 0].item(), compile_workers.worker_pool is not None)
"""


@thorough
def test_a_search_finds_its_kernels_with_them():
    env = {"BEAM": "1", "PARALLEL": "2", "DEV": "CPU", "IGNORE_BEAM_CACHE": "1", "BEAM_UPCAST_MAX": "4"}
    assert python(SEARCH, **env) == ["1240.0", "True"]


# --- CUDA's headers --------------------------------------------------------------------------------------

COMPILER = """
import sys
from tinygrad.runtime.autogen import nvrtc
nvrtc.dll._loaded_.add("nvrtc")
nvrtc.nvrtcVersion = lambda major, minor: 0
from tinygrad.runtime.support.compiler_cuda import NVRTCCompiler
if sys.argv[1] == "with":
    from engine.fixes import cuda_headers
    cuda_headers.apply()
print(*[option for option in NVRTCCompiler("sm_87").compile_options if option.startswith("-I")])
"""


def test_the_compiler_is_told_of_headers_that_lie_elsewhere(tmp_path):
    stray, own = tmp_path / "cuda-12.6/targets/aarch64-linux/include", tmp_path / "own"
    for folder in (stray, own):
        folder.mkdir(parents=True)
        (folder / "cuda_fp16.h").touch()
    env = {"CUDA_PATH": str(tmp_path / "nowhere"), "CUDA_HOME": str(stray.parent)}
    assert f"-I{stray}" not in python(COMPILER, "without", **env)
    assert python(COMPILER, "with", **env) == [f"-I{stray}", f"-I{tmp_path}/nowhere/include"]
    named = python(COMPILER, "with", CUDA_INCLUDE_PATH=str(own), **env)
    assert named[0] == f"-I{own}"


@thorough
def test_headers_that_tinygrad_finds_are_left_to_it(tmp_path):
    (tmp_path / "include").mkdir()
    (tmp_path / "include/cuda_fp16.h").touch()
    env = {"CUDA_PATH": str(tmp_path)}
    assert python(COMPILER, "with", **env) == python(COMPILER, "without", **env) == [f"-I{tmp_path}/include"]


def test_a_library_among_packages_is_found(tmp_path, monkeypatch):
    for name in ("CUDA_PATH", "CUDA_HOME", "CUDA_INCLUDE_PATH", "NVRTC_PATH", "LD_LIBRARY_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(cuda_toolkit.shutil, "which", lambda name: None)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site")])
    package = tmp_path / "site/nvidia/cuda_nvrtc"
    (package / "lib").mkdir(parents=True)
    (package / "lib/libnvrtc.so.12").touch()
    (package / "lib/libnvrtc-builtins.so.12.6").touch()
    assert cuda_toolkit.runtime_compilers(tmp_path) == [package / "lib/libnvrtc.so.12"]
    beside = package.with_name("cuda_runtime") / "include"
    beside.mkdir(parents=True)
    (beside / "cuda_fp16.h").touch()
    assert cuda_toolkit.headers(tmp_path) == [beside]
    jetson = tmp_path / "usr/local/cuda-12.6/targets/aarch64-linux"
    for path in ("lib/libnvrtc.so.12", "include/cuda_fp16.h"):
        (jetson / path).parent.mkdir(parents=True)
        (jetson / path).touch()
    assert cuda_toolkit.runtime_compilers(tmp_path)[0] == jetson / "lib/libnvrtc.so.12"
    assert cuda_toolkit.headers(tmp_path) == [jetson / "include", beside]


# --- NV's windows ----------------------------------------------------------------------------------------

WINDOWS = """
import ctypes, mmap, sys
from tinygrad.runtime.ops_nv import NVKIface
from engine.fixes import nv_windows
if sys.argv[1] == "with":
    nv_windows.apply()
n = 0
try:
    while True:
        at = NVKIface._alloc_gpu_vaddr(None, 1 << 40, alignment=2 << 20)
        n += 1
        if nv_windows.overlaps_windows(at, 1 << 40):
            print("overlaps")
            break
except RuntimeError as error:
    print("none")
print(n > 100)
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
middle, flags = nv_windows.WINDOWS[len(nv_windows.WINDOWS) // 2], mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
print(nv_windows.overlaps_windows(libc.mmap(middle, 4096, 3, flags, -1, 0), 4096))
"""


@thorough
def test_neither_buffers_of_nv_nor_memory_of_the_cpu_meet_a_window():
    stock, fixed = run_each("import tinygrad.runtime.ops_nv", WINDOWS, ["without"], ["with"])
    assert stock.split() == ["overlaps", "True", "True"]
    assert fixed.split() == ["none", "True", "False"]


def test_memory_that_is_there_already_is_not_mapped(monkeypatch):
    monkeypatch.setattr(nv_windows, "_stock_alloc", lambda self, size, **options: options["cpu_addr"])
    assert nv_windows._alloc(None, 4096, cpu_addr=None) is None
    assert nv_windows._alloc(None, 4096, cpu_addr=nv_windows.WINDOWS.stop) == nv_windows.WINDOWS.stop
    with pytest.raises(BackendError, match="windows"):
        nv_windows._alloc(None, 8192, cpu_addr=nv_windows.WINDOWS.start - 4096)


def test_nv_takes_the_gpu_that_cuda_shows_first(monkeypatch):
    cards = [nv_580.nv_ioctl_card_info_t(gpu_id=n) for n in range(3)]
    for n, card in enumerate(cards):
        card.pci_info.bus = 0x1A + n
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(cuda_driver, "library", object)
    monkeypatch.setattr(cuda_driver, "pci_bus_id", lambda: "0000:1B:00.0")
    assert visible_gpus._visible(cards, "NV") == cards, "all, as without the change"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-1b")
    assert [card.gpu_id for card in visible_gpus._visible(cards, "NV")] == [1]
    monkeypatch.setattr(cuda_driver, "pci_bus_id", lambda: "")
    assert not visible_gpus._visible(cards, "NV"), "it shows none"
    monkeypatch.setattr(cuda_driver, "library", lambda: None)
    assert visible_gpus._visible(cards, "NV") == cards, "nobody knows its order"


@pytest.mark.parametrize("fix", [compiler_processes, cuda_headers, nv_windows])
def test_another_tinygrad_is_refused(fix, monkeypatch):
    monkeypatch.setattr(engine.fixes, "TINYGRAD", "0.13.0")
    with pytest.raises(BackendError):
        fix.apply()


ON_NV = ["cuda_headers", "float_instructions", "nv_windows", "single_elements", "visible_gpus"]


@pytest.mark.parametrize(
    "dev, wanted",
    [
        ("CPU", ["compiler_output"]),
        (
            "CUDA",
            [
                "cuda_headers",
                "driver_calls",
                "dynamic_shared",
                "early_launch",
                "float_instructions",
                "graph_leftovers",
                "graph_sizes",
                "idle_threads",
                "load_order",
                "single_elements",
                "streamed_loads",
                "warpgroup_products",
            ],
        ),
        rarely("TEGRA+NV:CUDA", ON_NV),
        rarely("NV;CPU", ON_NV),
    ],
)
def test_a_device_gets_the_changes_that_are_for_it(dev, wanted):
    found = python(
        "import sys; from engine import backends, fixes; backends.install(sys.argv[1]); print(*fixes.applied())",
        dev,
    )
    always = ["codegen_threads", "compiler_processes", "graph_nodes", "graph_rewrites", "index_lowering"]
    always += ["library_search", "slice_shapes"]
    assert sorted(found) == [f"engine.fixes.{name}" for name in sorted([*always, *wanted])]
    # The second reads what the first has put into kernels.
    ordered = [f"engine.fixes.{name}" for name in ("load_order", "idle_threads")]
    assert [name for name in found if name in ordered] in ([], ordered)
