"""What CUDA and NV need on any machine: a driver, a GPU, the runtime compiler and its headers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from engine.devices.cuda_toolkit import headers, runtime_compilers, stock_headers
from engine.devices.nvidia import gpus, why_not_nv
from engine.doctor import Finding, bad, fair, good, note
from engine.doctor.host import as_text, read
from engine.measure.counters import Nvml

_TOOLKIT = "Install CUDA's toolkit (on a Jetson: sudo apt install cuda-toolkit-12-6)"


def examine(root: Path = Path("/"), *, jetson: bool = False) -> list[Finding]:
    """Nothing on a machine without an NVIDIA driver."""
    nodes = (root / "dev/nvidiactl").exists()
    names = gpus(root)
    if not (jetson or nodes or names):
        return []
    counters = [] if jetson or root != Path("/") else list(_counters())
    return [*_driver(root, names, nodes, jetson), *counters, *_compiler(root)]


def _driver(root: Path, names: list[str], nodes: bool, jetson: bool) -> Iterator[Finding]:
    if names:
        yield good("GPU", ", ".join(names))
    if release := re.search(
        r"NVRM version:.*?\b(\d{3}\.[\d.]+)\b", read(root / "proc/driver/nvidia/version")
    ):
        yield good("driver", release[1])
    elif nodes and not jetson:
        yield note("driver", "its release is not known (/proc/driver/nvidia/version)")
    if why := why_not_nv(names):
        yield note("NV", f"not for this GPU: {why}", "CUDA is the backend to take.")


def _counters(nvml: str = "pynvml") -> Iterator[Finding]:
    """Clocks, temperature and power, as NVML has them."""
    for counter in Nvml(nvml).read():
        if counter.name == "GPU":  # the one counter there is without NVML
            yield note("clocks", counter.absent, "pip install 'orin-chat[gpu]'")
        elif counter.name == "throttled" and counter.parts:
            advice = "Let it cool, or look at its power limit: nvidia-smi -q -d PERFORMANCE"
            yield fair("throttled", as_text(counter), advice)
        elif counter.name in ("GPU clock", "memory clock", "temperature", "power", "GPU memory"):
            yield note(counter.name, as_text(counter))


def _compiler(root: Path) -> Iterator[Finding]:
    libraries, folders = runtime_compilers(root), headers(root)
    if libraries:
        yield good("libnvrtc", str(libraries[0]))
    else:
        advice = f"{_TOOLKIT}, or: pip install nvidia-cuda-nvrtc-cu12. NVRTC_PATH names one."
        yield bad("libnvrtc", "there is none: no kernel can be compiled for this GPU", advice)
    if not folders:
        advice = f"{_TOOLKIT}, or: pip install nvidia-cuda-runtime-cu12. CUDA_INCLUDE_PATH names a folder."
        yield bad("headers", "there is no cuda_fp16.h: kernels in half precision do not compile", advice)
        return
    found = re.search(r"#define CUDA_VERSION (\d+)", read(folders[0] / "cuda.h"))
    release = f", CUDA {int(found[1]) // 1000}.{int(found[1]) % 1000 // 10}" if found else ""
    yield good("headers", f"{folders[0]}{release}")
    if folders[0] not in stock_headers(root):
        yield note("headers", "tinygrad alone would not find them; it is told (engine/fixes/cuda_headers.py)")
    both = _major(libraries[0]) if libraries else 0
    if both and found and both != int(found[1]) // 1000:
        advice = "Name headers of the same release: CUDA_INCLUDE_PATH=/usr/local/cuda-X.Y/include"
        yield fair("headers", f"libnvrtc is of CUDA {both}, the headers are of another", advice)


def _major(library: Path) -> int:
    match = re.search(r"\.so\.(\d+)", library.resolve().name)
    return int(match[1]) if match else 0
