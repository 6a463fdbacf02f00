"""A clang for the CPU backend: tinygrad compiles its CPU kernels with the program that the variable CC names."""

import contextlib
import hashlib
import importlib.util
import os
import shlex
import shutil
import subprocess
from pathlib import Path

import platformdirs

from engine.errors import BackendError
from engine.system.whole_file import write_whole


def find_clang() -> str | None:
    """The path of a program that takes clang's arguments: CC if it is a clang, else the clang on PATH, else the one in
    the package ziglang. None without any. Raises BackendError if the script for ziglang cannot be written."""
    if (cc := shutil.which(os.environ.get("CC", ""))) and _is_clang(cc):
        return cc
    return shutil.which("clang") or zig_clang()


def _is_clang(program: str) -> bool:
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        run = subprocess.run([program, "--version"], capture_output=True, stdin=subprocess.DEVNULL, timeout=5)
        return b"clang version" in run.stdout
    return False


def zig_clang() -> str | None:
    """A script in the cache folder that runs `zig clang`, because CC must be a single path. None without ziglang."""
    spec = importlib.util.find_spec("ziglang")
    if spec is None or spec.origin is None:
        return None
    zig = str(Path(spec.origin).with_name("zig"))
    folder = platformdirs.user_cache_path("orin-chat", appauthor=False)
    installation = hashlib.sha256(zig.encode()).hexdigest()[:8]
    script = folder / f"clang-{installation}"
    text = f'#!/bin/sh\nexec {shlex.quote(zig)} clang "$@"\n'.encode()
    try:
        if not script.is_file() or script.read_bytes() != text:
            write_whole(script, text, 0o755)
    except OSError as error:
        raise BackendError(
            f"The compiler's script cannot be written to {folder}: {error.strerror}.",
            "Set XDG_CACHE_HOME to a folder that can be written.",
        ) from error
    return str(script)
