"""CUDA's compilers at hand, and what they say of kernels for a chip: registers, spills, shared memory.

NVRTC is what the engine compiles with. It says what its assembler says (`--ptxas-options=-v`), and needs no GPU.
Kernels go in one text, since reading the headers takes longer than compiling a kernel; but only those that include the
same headers, or one could name a type that only another one's header declares.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.devices import cuda_toolkit
from engine.errors import BackendError

_KERNEL = re.compile(
    r"Compiling entry function '(?P<entry>\w+)'.*?\d+ bytes stack frame, "
    r"(?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads.*?"
    r"Used (?P<registers>\d+) registers[^\n]*?(?:(?P<shared>\d+) bytes smem|\n)",
    re.DOTALL,
)


@dataclass(frozen=True)
class Limits:
    """Of a multiprocessor ("Compute Capabilities" in the CUDA C++ Programming Guide)."""

    threads: int
    blocks: int
    shared_kb: int


_BLOCK_THREADS = 1024  # at most
LIMITS = {
    "sm_75": Limits(1024, 16, 64),
    "sm_80": Limits(2048, 32, 164),
    "sm_86": Limits(1536, 16, 100),
    "sm_87": Limits(1536, 16, 164),
    "sm_89": Limits(1536, 24, 100),
    "sm_90": Limits(2048, 32, 228),
    "sm_100": Limits(2048, 32, 228),
    "sm_110": Limits(1536, 24, 228),
    "sm_120": Limits(1536, 24, 100),
}
REGISTERS = 65536  # of a multiprocessor
STATIC_SHARED = 48 << 10  # that a kernel may declare
_OF_BLOCK = 1 << 10  # of shared memory, that belong to the system


@dataclass(frozen=True)
class Use:
    """Of a kernel. `spilled`: bytes that a thread stores to memory since it has too few registers, or loads; `shared`:
    bytes that a block declares."""

    registers: int
    spilled: int
    shared: int

    def resident(self, threads: int, dynamic_shared: int, limits: Limits) -> int:
        """How many blocks of so many threads a multiprocessor has room for; 0 of more than CUDA allows."""
        if threads > _BLOCK_THREADS:
            return 0
        per_warp = -(-self.registers * 32 // 256) * 256
        warps = -(-threads // 32)
        shared = self.shared + dynamic_shared + _OF_BLOCK
        return min(
            REGISTERS // per_warp // warps,
            limits.threads // (32 * warps),
            limits.blocks,
            (limits.shared_kb << 10) // shared,
        )


def included(source: str) -> tuple[str, ...]:
    """The lines of a kernel that include headers."""
    return tuple(line for line in source.splitlines() if line.startswith("#include"))


def alike(source: str) -> tuple[str, ...]:
    """What kernels have in common that are compiled as one text, so that each would compile alone: the headers, and
    whether they have instructions of one chip only (`engine.fixes.warpgroup_products`)."""
    return (*included(source), *["wgmma"] * ("wgmma." in source))


def joined(sources: Sequence[str]) -> str:
    """One file of CUDA C: each kernel in a namespace of its own, k0, k1, …, and what they include before them."""
    includes: dict[str, None] = {}
    spaces = []
    for i, source in enumerate(sources):
        includes.update(dict.fromkeys(included(source)))
        text = "\n".join(line for line in source.splitlines() if not line.startswith("#include"))
        spaces.append(f"namespace k{i} {{\n{text}\n}}")
    body = "\n".join(spaces).replace('extern "C" __global__', "__global__")
    return "\n".join([*includes, "#undef INFINITY", "#undef NAN", body])


def runtime_compilers() -> list[Path]:
    """The newest library of each release of NVRTC on this machine."""
    by_release: dict[str, Path] = {}
    for path in cuda_toolkit.runtime_compilers():
        by_release.setdefault(path.resolve().name, path)
    return list(by_release.values())


class RuntimeCompiler:
    """A library of NVRTC. Raises BackendError if it cannot be loaded, or if there are no headers."""

    def __init__(self, path: Path) -> None:
        try:
            self._library = ctypes.CDLL(str(path))
        except OSError as error:
            raise BackendError(f"{path} cannot be loaded: {error}.") from None
        beside = [parent / "include" for parent in path.resolve().parents[:3]]
        beside += [parent / "cuda_runtime/include" for parent in path.resolve().parents[:3]]
        headers = [folder for folder in beside if (folder / cuda_toolkit.HEADER).is_file()]
        headers += cuda_toolkit.headers()
        if not headers:
            raise BackendError(f"There is no {cuda_toolkit.HEADER} on this machine.")
        self._headers = headers[0]
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        self.name = f"NVRTC {major.value}.{minor.value}"

    def uses(self, sources: Sequence[str], chip: str) -> list[Use]:
        """What each of these kernels takes, in their order; they are `alike`. Raises BackendError if one cannot be
        compiled."""
        assert len(set(map(alike, sources))) == 1
        program, own = ctypes.c_void_p(), "a" if "wgmma" in alike(sources[0]) else ""
        options = [f"--gpu-architecture={chip}{own}", f"-I{self._headers}", "--ptxas-options=-v"]
        text = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        self._library.nvrtcCreateProgram(
            ctypes.byref(program), joined(sources).encode(), b"kernels.cu", 0, None, None
        )
        failed = self._library.nvrtcCompileProgram(program, len(options), text)
        size = ctypes.c_size_t()
        self._library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        self._library.nvrtcGetProgramLog(program, log)
        self._library.nvrtcDestroyProgram(ctypes.byref(program))
        said = log.value.decode(errors="replace")
        if failed:
            raise BackendError(f"{self.name} does not compile a kernel for {chip}: {said[-2000:]}")
        return read_log(said, len(sources))


def read_log(said: str, count: int) -> list[Use]:
    """What the assembler says of the kernels of `joined`. Raises BackendError if it does not speak of all."""
    uses: dict[int, Use] = {}
    for found in _KERNEL.finditer(said):
        space = re.match(r"_ZN(\d+)k", found["entry"])
        assert space, found["entry"]
        digits = int(space[1]) - 1  # of the namespace's number
        number = int(found["entry"][space.end() :][:digits])
        spilled = max(int(found["stores"]), int(found["loads"]))
        uses[number] = Use(int(found["registers"]), spilled, int(found["shared"] or 0))
    if len(uses) != count:
        raise BackendError(f"The assembler speaks of {len(uses)} kernels of {count}.")
    return [uses[i] for i in range(count)]
