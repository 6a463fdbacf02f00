"""tinygrad 0.14.0: what a compiler has made is checked before it is kept, and one that does not end is not waited for.

A compiler may end without an error and without a whole program: where its folder for temporary files is full, or when
it is a script that cannot be read. tinygrad takes that for a program, and so would every later start. It waits without
a bound for one that hangs: a wrapper that asks a server, or a program on a disk that does not answer.

tinygrad starts a compiler for each kernel. Here one is kept for the next (`engine.devices.kept_clang`), which is a
third less to compute for each. What it does not compile, one of its own does.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Sequence
from types import SimpleNamespace

from tinygrad.runtime.support import compiler_cpu
from tinygrad.runtime.support.compiler_cpu import ClangCompiler

from engine.devices import kept_clang
from engine.errors import BackendError, CompilerHangsError
from engine.fixes import once

_stock_compile = ClangCompiler.compile
_HINT = "Is there room in the folder for temporary files (TMPDIR, /tmp)? The engine's log has what the compiler says."


@once("Checked output of compilers")
def apply() -> None:
    """Changes tinygrad in this process."""
    ClangCompiler.compile = _compile
    compiler_cpu.subprocess = SimpleNamespace(check_output=_check_output)
    kept_clang.keep()


def _check_output(command: Sequence[str], input: bytes) -> bytes:
    """As `subprocess.check_output`. Raises CompilerHangsError too."""
    try:
        return kept_clang.compiled(command, input) or _made_alone(command, input)
    except subprocess.TimeoutExpired:
        raise CompilerHangsError(
            f"The compiler {command[0]} has not ended within {kept_clang.LIMIT_S} s.",
            "Does it work by itself? CC=/path/of/clang names another one.",
        ) from None


def _made_alone(command: Sequence[str], source: bytes) -> bytes:
    """What a compiler of its own makes. Raises OSError, CalledProcessError and TimeoutExpired."""
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            for second in range(kept_clang.LIMIT_S):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    made, _ = process.communicate(None if second else source, timeout=kept_clang.SECOND_S)
                    break
            else:
                raise subprocess.TimeoutExpired(command, kept_clang.LIMIT_S)
        finally:
            process.kill()  # unless it has ended
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return made


def _compile(self: ClangCompiler, src: str) -> bytes:
    """Raises BackendError."""
    compiler = os.environ.get("CC", "clang")
    try:
        made: bytes = _stock_compile(self, src)
    except (OSError, subprocess.CalledProcessError) as error:
        raise BackendError(f"The compiler {compiler} failed: {_reason(error)}.", _HINT) from None
    size = kept_clang.object_bytes(made)
    if size is None or size > len(made):
        raise BackendError(f"The compiler {compiler} has made no whole program.", _HINT)
    return made


def _reason(error: OSError | subprocess.CalledProcessError) -> str:
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return f"exit status {error.returncode}" if error.returncode >= 0 else f"signal {-error.returncode}"
