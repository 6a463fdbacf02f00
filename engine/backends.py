"""Chooses tinygrad's device and prepares what it needs: the environment that tinygrad reads at import, and changes to
tinygrad itself."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

import platformdirs

from engine.devices import cuda_driver
from engine.devices.nvidia import gpus, why_not_nv
from engine.errors import BackendError, UsageError
from engine.events import EngineOptions
from engine.tegra import abi

BACKENDS = ("CPU", "CUDA", "NV")
_MOST_COMPILERS = 32


def prepare(options: EngineOptions) -> str:
    """Sets DEV, CC and PARALLEL for `options.backend` and what else of `options` tinygrad reads from the
    environment (BEAM, JITBEAM, MV_*), before tinygrad is imported, and returns DEV.

    "auto" is the user's own DEV where it is set, else CUDA where an NVIDIA GPU can be used, else CPU. Raises
    UsageError for an unknown backend, BackendError for one that cannot work on this machine.
    """
    backend = options.backend.upper()
    if backend not in (*BACKENDS, "AUTO"):
        known = ", ".join(BACKENDS)
        raise UsageError(f"There is no backend {options.backend!r}.", f"Choose auto or one of {known}.")
    if backend == "AUTO":
        backend = os.environ.get("DEV") or ("CPU" if cuda_driver.unusable_because() else "CUDA")
    elif backend == "CUDA" and (flaw := cuda_driver.unusable_because()):
        raise BackendError(f"The CUDA backend cannot be used: {flaw}.", "Mend that, or choose --backend CPU.")
    device = _device(backend)
    if device == "NV" and (why := why_not_nv(gpus())):
        raise BackendError(f"{why[0].upper()}{why[1:]}.", "Choose --backend CUDA.")
    if clang := _clang():
        os.environ["CC"] = clang
    elif device == "CPU":
        raise BackendError(
            "The CPU backend needs the compiler clang, and there is none.",
            "Install it from your system's packages, or run: pip install ziglang",
        )
    os.environ["DEV"] = backend
    os.environ.setdefault("PATH", os.defpath)  # tinygrad takes for granted that there is one
    is_searched = device == "CPU" and options.kernels == "graph"  # compilers would spoil what it times
    os.environ.setdefault("PARALLEL", str(0 if is_searched else _compilers()))
    os.environ.setdefault("CACHELEVEL", "0")  # engine.kernels.kept keeps what tinygrad would keep
    if options.kernels == "graph" or device not in BACKENDS:
        os.environ.update(_search(options))
    return backend


def install(dev: str) -> None:
    """Makes the changes to tinygrad that all engines on a device need, whatever their kernels. `dev` is as tinygrad's
    variable DEV ("NV", "TEGRA+NV:CUDA"). To be called after `prepare` and before the first kernel. Raises BackendError
    where another tinygrad is installed."""
    from engine.fixes import compiler_processes

    compiler_processes.apply()
    device = _device(dev)
    if device in ("CUDA", "NV"):
        from engine.fixes import cuda_headers

        cuda_headers.apply()
    if device == "CUDA":
        from engine.fixes import early_launch

        early_launch.apply()
    if device == "NV":
        from engine.fixes import nv_windows

        nv_windows.apply()
        from engine.tegra import device as tegra

        tegra.install()


def _device(dev: str) -> str:
    """The device in [interface+]device[:renderer…], in capitals."""
    return dev.partition(";")[0].rpartition("+")[2].partition(":")[0].upper()


def _compilers() -> int:
    """How many processes compile, while this one waits for them."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, _MOST_COMPILERS) if cores > 1 else 0


def _search(options: EngineOptions) -> dict[str, str]:
    """tinygrad's variables for its own search and for its matrix-vector heuristic; the environment decides what
    `options` leave open. Only the captured steps are searched: other kernels run once. The schedules
    of quantized kernels are searched by `engine.model.fused.schedule_search`."""
    chosen: dict[str, int] = {}
    if options.search_width is not None:
        chosen |= {"BEAM": 0, "JITBEAM": options.search_width}
    if options.matvec is not None:
        chosen["MV_BLOCKSIZE"] = options.matvec.block_size
        chosen["MV_THREADS_PER_ROW"] = options.matvec.threads_per_row
        chosen["MV_ROWS_PER_THREAD"] = options.matvec.rows_per_thread
    return {name: str(value) for name, value in chosen.items()}


def flaw(backend: str) -> str:
    """What keeps a backend from working on this machine, in a few words; "" where nothing is known to. May
    take a second: a driver is asked."""
    match backend:
        case "CUDA":
            return cuda_driver.unusable_because()
        case "NV":
            return _nv_flaw()
        case "CPU":
            return "" if _clang() else "there is no compiler (clang, or the package ziglang)"
    return ""


def _nv_flaw() -> str:
    """On a Jetson NV needs the nodes of its own drivers, elsewhere nvidia.ko's."""
    nodes = [Path(node) for node in (abi.CTRL, abi.NVMAP)]
    if all(node.exists() for node in nodes):
        closed = [str(node) for node in nodes if not os.access(node, os.R_OK | os.W_OK)]
        return f"no permission for {' and '.join(closed)} (groups video and render)" if closed else ""
    if not Path("/dev/nvidiactl").exists():
        return "there is no NVIDIA kernel driver (/dev/nvidiactl)"
    return why_not_nv(gpus())


# --- a clang for the CPU backend -----------------------------------------------------------------------


def _clang() -> str | None:
    """A program that takes clang's arguments, as one path, which is what tinygrad wants in CC: the user's CC
    if it is a clang, the one on PATH, or the one inside the package ziglang."""
    if (cc := shutil.which(os.environ.get("CC", ""))) and _is_clang(cc):
        return cc
    return shutil.which("clang") or _zig_clang()


def _is_clang(program: str) -> bool:
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        run = subprocess.run([program, "--version"], capture_output=True, stdin=subprocess.DEVNULL, timeout=5)
        return b"clang version" in run.stdout
    return False


def _zig_clang() -> str | None:
    """A script that runs `zig clang`, kept in the cache folder; None if ziglang is not installed."""
    spec = importlib.util.find_spec("ziglang")
    if spec is None or spec.origin is None:
        return None
    zig = str(Path(spec.origin).with_name("zig"))
    folder = platformdirs.user_cache_path("orin-chat", appauthor=False)
    script = (
        folder / f"clang-{hashlib.sha256(zig.encode()).hexdigest()[:8]}"
    )  # one for each ziglang installed
    text = f'#!/bin/sh\nexec {shlex.quote(zig)} clang "$@"\n'
    try:
        if not script.is_file() or script.read_text() != text:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder) as new:
                (written := Path(new, script.name)).write_text(text)
                written.chmod(0o755)
                written.replace(script)
    except OSError as error:
        raise BackendError(
            f"The compiler's script cannot be written to {folder}: {error.strerror}.",
            "Set XDG_CACHE_HOME to a folder that can be written.",
        ) from error
    return str(script)
