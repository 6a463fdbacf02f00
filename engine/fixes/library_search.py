"""tinygrad 0.14.0: libraries are found by their names, without a look at each file of a folder, and their functions are
bound without copying all that a function knows of itself.

When tinygrad's modules for a device are imported, they look for libraries (CUDA's driver and compilers; libc): they ask
the system about each file of the system's folders, a thousand and more, several times. That took a twentieth of a
start. Here the names are compared first. The library that is found is the same.

CUDA's module binds 535 functions, of which 40 are called. Each was made like the one that it stands for
(functools.wraps), annotations and all, which took ten milliseconds of a start.
"""

from __future__ import annotations

import functools
import os
import re
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tinygrad.runtime.support.c import DLL

from engine.fixes import once

_stock_find = DLL.findlib
_FIRST = "/usr/lib64", "/usr/lib", "/usr/local/lib"
_THEN = "/usr/lib/wsl/lib/", "/lib", "/lib64", f"/lib/{sysconfig.get_config_var('MULTIARCH')}"


@once("How libraries are looked for")
def apply() -> None:
    """Changes tinygrad in this process. To be called before the modules of devices are imported."""
    DLL.findlib = staticmethod(_find if sys.platform == "linux" else _stock_find)
    DLL.bind = _bind


def _bind(self: DLL, restype: Any, *argtypes: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Takes the place of DLL.bind: makes of a function's declaration one that calls the library's."""

    def bound(declared: Callable[..., Any]) -> Callable[..., Any]:
        name, function = declared.__name__, None

        def call(*arguments: Any) -> Any:
            nonlocal function
            if function is None:
                function = getattr(self, name)
                function.argtypes, function.restype = argtypes, restype
            return function(*arguments)

        call.__name__ = name
        call.restype, call.argtypes = restype, argtypes  # type: ignore[attr-defined]
        return call

    return bound


def _find(name: str, paths: Sequence[str], extra_paths: Sequence[str] = ()) -> str | None:
    """Takes the place of DLL.findlib. `paths`: names as in "nvrtc", or whole paths."""
    own = os.environ.get(f"{name.replace('-', '_').upper()}_PATH", "")
    if own and Path(own).is_file():
        return own
    listed = os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    folders = [*filter(None, [own, *listed]), *_FIRST, *_THEN, *map(str, extra_paths)]
    for path in paths:
        if Path(path).is_absolute():
            if Path(path).is_file():
                return path
            continue
        for folder in folders:
            if found := next(_libraries(folder, path), None):
                return found
    return None


def _libraries(folder: str, name: str) -> Iterator[str]:
    """The libraries of a name in a folder, and no scripts of the linker."""
    start, pattern = f"lib{name}.so", re.compile(rf"lib{name}\.so\.?[0-9]*")
    for file in _names(folder):
        path = Path(folder, file)
        if file.startswith(start) and pattern.fullmatch(file) and path.is_file():
            with path.open("rb") as content:
                is_library = content.read(4) == b"\x7fELF"
            if is_library:
                yield str(path)


@functools.cache
def _names(folder: str) -> list[str]:
    try:
        return [entry.name for entry in os.scandir(folder)]
    except OSError:
        return []
