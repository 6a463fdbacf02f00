"""What the CUDA and NV backends need on any machine: a driver, a GPU, the runtime compiler (NVRTC) and CUDA headers."""

import re
from collections.abc import Iterator
from pathlib import Path

from engine.devices import cuda_driver
from engine.devices.cuda_toolkit import headers, runtime_compilers, stock_headers
from engine.devices.nvidia import gpus, why_not_nv
from engine.devices.system_files import read_text
from engine.doctor import Finding, bad, fair, good, note
from engine.doctor import jetson as jetsons
from engine.doctor.host import as_text
from engine.measure.nvml_counters import NvmlCounters
from engine.system.invocation import pip_install


def examine(root: Path = Path("/"), *, jetson: bool = False) -> list[Finding]:
    """No findings on a machine without an NVIDIA driver."""
    nodes = (root / "dev/nvidiactl").exists()
    names = gpus(root)
    if not (jetson or nodes or names):
        return []
    counters = [] if jetson or root != Path("/") else list(_counters())
    toolkit = f"sudo apt install {jetsons.toolkit(root)}" if jetson else "Install CUDA's toolkit"
    return [*_driver(root, names, nodes, jetson), *counters, *_compiler(root, toolkit)]


def _driver(root: Path, names: list[str], nodes: bool, jetson: bool) -> Iterator[Finding]:
    if names:
        yield good("GPU", ", ".join(names))
    if release := re.search(
        r"NVRM version:.*?\b(\d{3}\.[\d.]+)\b", read_text(root / "proc/driver/nvidia/version")
    ):
        yield good("driver", release[1])
    elif nodes and not jetson:
        yield note("driver", "its release is not known: there is none in /proc/driver/nvidia/version")
    folders = [
        folder for folder in cuda_driver.TEGRA_FOLDERS if (root / folder / cuda_driver.LIBRARY).exists()
    ]
    if jetson and folders:
        yield good("libcuda", f"/{folders[0]}/{cuda_driver.LIBRARY}")
    if why := why_not_nv(names):
        yield note("NV", f"not for this GPU: {why}", "Take the CUDA backend.")


def _counters(nvml: str = "pynvml") -> Iterator[Finding]:
    """Clocks, temperature and power, from NVML."""
    for counter in NvmlCounters(nvml).read():
        if counter.name == "GPU":  # the only counter without NVML
            is_missing = "not installed" in counter.absent
            yield note("clocks", counter.absent, pip_install("nvidia-ml-py") if is_missing else "")
        elif counter.name == "throttled" and counter.parts:
            advice = "Let it cool, or look at its power limit: nvidia-smi -q -d PERFORMANCE"
            yield fair("throttled", as_text(counter), advice)
        elif counter.name in ("GPU clock", "memory clock", "temperature", "power", "GPU memory"):
            yield note(counter.name, as_text(counter))


def _compiler(root: Path, toolkit: str) -> Iterator[Finding]:
    libraries, folders = runtime_compilers(root), headers(root)
    if libraries:
        yield good("libnvrtc", str(libraries[0]))
    else:
        advice = f"{toolkit}, or: {pip_install('nvidia-cuda-nvrtc-cu12')}. Or set NVRTC_PATH to the library."
        yield bad("libnvrtc", "not found: no kernel can be compiled for this GPU", advice)
    if not folders:
        advice = f"{toolkit}, or: {pip_install('nvidia-cuda-runtime-cu12')}. Or set CUDA_INCLUDE_PATH to the folder."
        yield bad("headers", "cuda_fp16.h is missing: kernels in half precision do not compile", advice)
        return
    define = re.search(r"#define CUDA_VERSION (\d+)", read_text(folders[0] / "cuda.h"))  # 12060 for 12.6
    major, minor = divmod(int(define[1]), 1000) if define else (0, 0)
    yield good("headers", f"{folders[0]}{f', CUDA {major}.{minor // 10}' if define else ''}")
    if folders[0] not in stock_headers(root):
        yield note("headers", "tinygrad alone would not find them; orin-chat tells it where they are")
    compiler = _major(libraries[0]) if libraries else 0
    if compiler and major and compiler != major:
        advice = "Set CUDA_INCLUDE_PATH to headers of the same release, as /usr/local/cuda-X.Y/include."
        yield fair("headers", f"they are of CUDA {major}, but libnvrtc is of CUDA {compiler}", advice)


def _major(library: Path) -> int:
    """12 of libnvrtc.so.12; 0 if the file name has no version."""
    version = re.search(r"\.so\.(\d+)", library.resolve().name)
    return int(version[1]) if version else 0
