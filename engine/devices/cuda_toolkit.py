"""Finds CUDA's runtime compiler (NVRTC) and its headers on this machine, without loading them.

tinygrad looks for the library in the linker's folders and in /usr/local/cuda. It looks for headers in
$CUDA_PATH/include, or else in /usr/local/cuda/include, /usr/include and /opt/cuda/include. A toolkit may also be in a
folder with its version (/usr/local/cuda-12.6), in Python packages (nvidia-cuda-nvrtc, nvidia-cuda-runtime), or in a Nix
store.
"""

import os
import re
import shutil
import site
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

HEADER = "cuda_fp16.h"  # included by kernels in half precision
_LIBRARY = re.compile(r"libnvrtc\.so(\.\d+)*")


def runtime_compilers(root: Path = Path("/")) -> list[Path]:
    """All libnvrtc on this machine; $NVRTC_PATH first, then those that tinygrad would load itself."""
    named = [Path(path)] if (path := os.environ.get("NVRTC_PATH")) else []
    folders = [Path(path) for path in os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep) if path]
    folders += [root / name for name in ("usr/lib64", "usr/lib", "usr/local/lib", "lib", "lib64")]
    folders += sorted((root / "usr/lib").glob("*-linux-gnu"))
    folders += [*_of_toolkits(root, "lib64", "lib"), *(folder / "lib" for folder in _packages())]
    libraries = [path for folder in folders for path in _libraries(folder)]
    return _unique(path for path in (*named, *libraries) if path.is_file())


def headers(root: Path = Path("/")) -> list[Path]:
    """All folders with CUDA's headers: first those in $CUDA_INCLUDE_PATH, then tinygrad's own, then those beside a
    runtime compiler, then any others."""
    return _unique(folder for folder in _header_folders(root) if (folder / HEADER).is_file())


def stock_headers(root: Path = Path("/")) -> list[Path]:
    """The include folders that tinygrad 0.14.0 passes to the compiler."""
    if path := os.environ.get("CUDA_PATH"):
        return [Path(path) / "include"]
    return [root / "usr/local/cuda/include", root / "usr/include", root / "opt/cuda/include"]


def _header_folders(root: Path) -> Iterator[Path]:
    if named := os.environ.get("CUDA_INCLUDE_PATH"):
        yield from map(Path, named.split(os.pathsep))
    yield from stock_headers(root)
    if home := os.environ.get("CUDA_HOME"):
        yield Path(home) / "include"
    for library in runtime_compilers(root):
        for parent in list(library.resolve().parents)[:5]:
            yield parent / "include"
            if parent.name == "nvidia":  # Python packages: the headers are in another one
                yield from sorted(parent.glob("cu*/include"))
    if nvcc := shutil.which("nvcc"):
        yield Path(nvcc).resolve().parents[1] / "include"
    yield from _of_toolkits(root, "include")
    for package in _packages():
        yield package / "include"


def _of_toolkits(root: Path, *names: str) -> Iterator[Path]:
    """Folders of installed toolkits; among those with a version in their name, the newest first."""
    toolkits = [root / "usr/local/cuda", root / "opt/cuda", root / "usr/lib/cuda"]
    version = lambda path: [int(part) for part in re.findall(r"\d+", path.name)]
    toolkits += sorted((root / "usr/local").glob("cuda-*"), key=version, reverse=True)
    for toolkit in toolkits:
        for name in names:
            yield toolkit / name
        for name in names:
            yield from sorted((toolkit / "targets").glob(f"*/{name}"))


def _packages() -> list[Path]:
    """Folders of NVIDIA's Python packages, as nvidia/cuda_nvrtc and nvidia/cu13."""
    folders = [*site.getsitepackages(), site.getusersitepackages(), *sys.path]
    return _unique(path for folder in folders for path in sorted((Path(folder) / "nvidia").glob("cu*")))


def _libraries(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if _LIBRARY.fullmatch(path.name))
    except OSError:
        return []


def _unique(paths: Iterable[Path]) -> list[Path]:
    """Paths without repetitions, even by symbolic links. The first of equal paths stays."""
    return list({path.resolve(): path for path in reversed(list(paths))}.values())[::-1]
