"""Chooses tinygrad's device and prepares tinygrad for it: variables that it reads at import, and fixes to its code."""

import os
import re
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

from engine.devices import cuda_driver
from engine.devices.clang import find_clang
from engine.devices.cpus import allowed_cpus
from engine.devices.nvidia import gpus, why_not_nv
from engine.errors import BackendError, UsageError, one_line
from engine.protocol.events import EngineOptions
from engine.system.invocation import pip_install
from engine.tegra import abi

BACKENDS = ("CPU", "CUDA", "NV")
_MAX_COMPILERS = 32
_LOCKS = "/dev/shm"
"""Where Linux keeps the locks that processes share."""


def prepare(options: EngineOptions, is_asked: bool = False) -> str:
    """Sets the environment variables that tinygrad reads at import: DEV, CC and PARALLEL for `options.backend`, and
    BEAM, JITBEAM and MV_* for the other options. To be called before tinygrad is imported. Returns DEV, which names a
    chip that is asked for.

    "auto" is the user's own DEV if tinygrad has it, else CUDA if there is a usable NVIDIA GPU, else CPU. If the driver
    `is_asked` by the caller (`ask_driver`), it is taken for usable. Raises UsageError for an unknown backend,
    BackendError for one that cannot work on this machine.
    """
    from engine.fixes import environment_variables

    environment_variables.apply()
    backend = options.backend.upper()
    if backend not in (*BACKENDS, "AUTO"):
        known = ", ".join(BACKENDS)
        raise UsageError(f"There is no backend {options.backend!r}.", f"Choose auto or one of {known}.")

    def why_not() -> str:
        return "" if is_asked else cuda_driver.unusable_because()

    if backend == "AUTO":
        backend = _own_device() or ("CPU" if why_not() else "CUDA")
    elif backend == "CUDA" and (why := why_not()):
        raise unusable_cuda(why)
    device = _device(backend)
    if options.chip:
        backend = _as_chip(options.chip, device)
    if device == "NV" and (why := why_not_nv(gpus())):
        raise BackendError(f"{why[0].upper()}{why[1:]}.", "Choose --backend CUDA.")
    if clang := find_clang():
        os.environ["CC"] = clang
    elif device == "CPU":
        raise BackendError(
            "The CPU backend needs the compiler clang, which is not installed.",
            f"Install it from your system's packages, or run: {pip_install('ziglang')}",
        )
    if device == "CUDA" and (path := cuda_driver.search_path()):
        os.environ["LD_LIBRARY_PATH"] = path
    os.environ["DEV"] = backend
    os.environ.setdefault("PATH", os.defpath)  # tinygrad fails without PATH
    # Processes that compile kernels for this one. tinygrad's search times kernels on the CPU cores, which they would
    # keep busy. They share locks, which some containers have no place for.
    cpus, is_searched = len(allowed_cpus()), device == "CPU" and options.kernels == "graph"
    if sys.platform == "linux" and not os.access(_LOCKS, os.W_OK):
        os.environ["PARALLEL"] = "0"
    if not os.environ.get("PARALLEL", "").isdecimal():
        os.environ["PARALLEL"] = str(0 if is_searched or cpus == 1 else min(cpus, _MAX_COMPILERS))
    os.environ.setdefault("CACHELEVEL", "0")  # engine.cache.disk_cache replaces tinygrad's own cache
    if options.kernels == "graph" or device not in BACKENDS:
        os.environ.update(_search_variables(options))
    return backend


def _own_device() -> str:
    """The user's own DEV; "" if it is none of tinygrad's: other programs have DEV=true."""
    dev = os.environ.get("DEV", "")
    spec = find_spec("tinygrad")  # does not import it
    folders = spec.submodule_search_locations if spec else None
    is_known = any(
        Path(folder, "runtime", f"ops_{_device(dev).lower()}.py").is_file() for folder in folders or ()
    )
    return dev if is_known else ""


def _as_chip(chip: str, device: str) -> str:
    """DEV for a GPU that stands in for one of the compute capability `chip`. Raises UsageError, BackendError."""
    if not (number := re.fullmatch(r"sm_(\d\d+)", chip)) or device != "CUDA":
        raise UsageError(
            f"No GPU can stand in for {chip} on {device}.", "Name a chip as sm_87, on --backend CUDA."
        )
    major, minor = cuda_driver.compute_capability()
    if int(number[1]) > 10 * major + minor:
        own = f"its compute capability is {major}.{minor}"
        raise BackendError(f"This GPU cannot stand in for {chip}: {own}.", "Name an earlier one.")
    return f"CUDA:CUDA:{chip}"


def ask_driver(options: EngineOptions) -> Callable[[], str] | None:
    """Has a thread start CUDA's driver if `prepare` would, which takes as long as importing tinygrad or longer. The
    function that it returns waits for it, and says why CUDA cannot be used; "" if it can."""
    backend = options.backend.upper()
    if not may_use_gpu(options) or not (backend == "CUDA" or (backend == "AUTO" and not _own_device())):
        return None
    thread = ThreadPoolExecutor(1, "driver")
    asked = thread.submit(cuda_driver.unusable_because)
    thread.shutdown(wait=False)
    return asked.result


def unusable_cuda(why: str) -> BackendError:
    return BackendError(f"The CUDA backend cannot be used: {why}.", "Fix that, or choose --backend CPU.")


def may_use_gpu(options: EngineOptions) -> bool:
    """Whether `prepare` may choose a GPU. Asks no driver, so it takes no time."""
    return options.backend.upper() != "CPU" and cuda_driver.library() is not None


def install(dev: str) -> None:
    """Applies the fixes to tinygrad that every engine on a device needs. `dev` is the value of DEV ("NV",
    "TEGRA+NV:CUDA"). To be called after `prepare` and before the first kernel. Raises BackendError if another version
    of tinygrad is installed."""
    from engine.fixes import library_search

    library_search.apply()
    from engine.fixes import codegen_threads, compiler_processes, unused_renderers

    codegen_threads.apply()
    compiler_processes.apply()
    device = _device(dev)
    change_kernels(device)
    unused_renderers.apply(dev)
    if device == "CPU":
        from engine.fixes import compiler_output

        compiler_output.apply()
    if device in ("CUDA", "NV"):
        from engine.fixes import cuda_headers

        cuda_headers.apply()
    if device == "CUDA":
        from engine.fixes import driver_calls, graph_leftovers, graph_sizes

        for fix in (driver_calls, graph_leftovers, graph_sizes):  # the second comes after others, as it says
            fix.apply()
    if device == "NV":
        from engine.fixes import nv_windows, visible_gpus

        nv_windows.apply()
        visible_gpus.apply()
        from engine.tegra import device as tegra

        tegra.install()


def change_kernels(device: str) -> None:
    """Applies the fixes to tinygrad that the kernels of a device ("CPU", "CUDA", "NV") follow from, also where another
    one stands in for it."""
    from engine.fixes import graph_nodes, graph_rewrites, index_lowering, slice_shapes

    for fix in (graph_nodes, graph_rewrites, index_lowering, slice_shapes):
        fix.apply()
    if device in ("CUDA", "NV"):
        from engine.fixes import float_instructions, single_elements

        float_instructions.apply()
        single_elements.apply()
    if device == "CUDA":
        from engine.fixes import (
            dynamic_shared,
            early_launch,
            idle_threads,
            load_order,
            streamed_loads,
            warpgroup_products,
        )

        # In this order: one of them comes after another, as it says.
        for fix in (
            dynamic_shared, early_launch, load_order, idle_threads, streamed_loads, warpgroup_products,
        ):  # fmt: skip
            fix.apply()


def open_device(dev: str) -> Callable[[], None]:
    """Begins to open the device; the function that it returns waits until it is open. A thread opens CUDA, whose driver
    takes a tenth of a second to make a context. Nothing else may use the device meanwhile. To be called after
    `install`; the function raises what tinygrad raises."""
    from tinygrad import Device

    if _device(dev) != "CUDA":
        return lambda: None
    thread = ThreadPoolExecutor(1, "device")
    opened = thread.submit(lambda: Device[Device.DEFAULT])
    thread.shutdown(wait=False)
    return lambda: opened.result().synchronize()  # which makes its context the one of the thread that calls


def no_device_error(dev: str, failures: ExceptionGroup[Exception]) -> BackendError:
    """The error to raise if tinygrad found no device for `dev` (see `install`). `failures` are those of the interfaces
    that it tried."""
    device = _device(dev)
    why = unusable_because(device) or "; ".join(one_line(str(error)) for error in failures.exceptions)
    hint = f"Fix that, or choose --backend {'CUDA' if not cuda_driver.unusable_because() else 'CPU'}."
    return BackendError(f"The {device} backend cannot be used: {why.rstrip('.')}.", hint)


def _device(dev: str) -> str:
    """The device of DEV, which has the form [interface+]device[:renderer…], in capitals."""
    return dev.partition(";")[0].rpartition("+")[2].partition(":")[0].upper()


def _search_variables(options: EngineOptions) -> dict[str, str]:
    """tinygrad's variables for its own search and for its matrix-vector heuristic; the environment decides what
    `options` leave open. Only the captured steps are searched: other kernels run once. The schedules of quantized
    kernels are searched by `engine.targets.nvidia.schedule_search`."""
    chosen: dict[str, int] = {}
    if options.search_width is not None:
        chosen |= {"BEAM": 0, "JITBEAM": options.search_width}
    if matvec := options.matvec:
        chosen |= {"MV_BLOCKSIZE": matvec.block_size, "MV_THREADS_PER_ROW": matvec.threads_per_row,
                   "MV_ROWS_PER_THREAD": matvec.rows_per_thread}  # fmt: skip
    return {name: str(value) for name, value in chosen.items()}


def unusable_because(backend: str) -> str:
    """Why a backend cannot work on this machine, in a few words; "" if no reason is known. May take a second, because
    it asks a driver."""
    match backend:
        case "CUDA":
            return cuda_driver.unusable_because()
        case "NV":
            return _nv_unusable_because()
        case "CPU":
            try:
                return "" if find_clang() else "there is no compiler (clang, or the package ziglang)"
            except BackendError as error:  # a full disk
                return f"{error.message[:1].lower()}{error.message[1:]}".rstrip(".")
    return ""


def _nv_unusable_because() -> str:
    """On a Jetson NV needs the device nodes of nvgpu and nvmap, elsewhere those of nvidia.ko."""
    nodes = [Path(node) for node in (abi.CTRL, abi.NVMAP)]
    if all(node.exists() for node in nodes):
        closed = [str(node) for node in nodes if not os.access(node, os.R_OK | os.W_OK)]
        return f"no permission for {' and '.join(closed)} (groups video and render)" if closed else ""
    if not Path("/dev/nvidiactl").exists():
        return "there is no NVIDIA kernel driver (/dev/nvidiactl)"
    return why_not_nv(gpus())
