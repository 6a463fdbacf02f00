"""A compiler for the simulated GPU: CUDA C in, a cubin out whose machine code is this CPU's.

It takes the source that tinygrad would give to NVIDIA's compiler, unchanged but for pointers, which become checked
ones, and the parameters, which are read from the constant bank (cuda.hpp has the rest). The cubin has the sections
that tinygrad's loader looks at; the code stands where a GPU's would, and is fetched from the GPU's memory to be run.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import shutil
import struct
import subprocess
import tempfile
from pathlib import Path

from tinygrad.codegen.opt import tc
from tinygrad.device import CompileError, Compiler
from tinygrad.helpers import Target
from tinygrad.renderer.cstyle import CStyleLanguage, CUDARenderer
from tinygrad.runtime.support.elf import elf_loader, jit_loader

from engine.devices import kept_clang
from engine.devices.clang import find_clang, zig_clang
from engine.system.whole_file import write_whole
from tests.cuda_sources import refused
from tests.environment import FOLDER, KERNELS
from tests.paths import ROOT

PARAMETERS = 0x160  # where they begin in the constant bank, on compute capability 8
RESERVED_SHARED = 1024  # bytes of shared memory that belong to the system there
REGISTERS = 40  # a usual number; this CPU's do not count
# Bytes of code, its entry, of constants and of shared memory.
MAGIC, HEADER = b"CPUCUBIN", struct.Struct("<8s4I")
CODE_AT = 128  # from the header

_PRELUDE = Path(__file__).with_name("cuda.hpp")
_ENTRY = ".entry"
_KERNEL = re.compile(r'extern "C" __global__ void __launch_bounds__\([^)]*\) (\w+)\((.*?)\) \{\n', re.DOTALL)
_SHARED = re.compile(r"__shared__ __align__\(16\) ([\w ]+?) (\w+)\[(\d+)\];")
_MMA = re.compile(r"__device__ \w+ (__WMMA_\w+)\([^)]*\)\{(.*?)\n\}", re.DOTALL)
_COPY = re.compile(
    r'asm volatile\("cp\.async\.cg\.shared\.global \[%0\], \[%1\], 16;" '
    r':: "r"\(\(uint\)__cvta_generic_to_shared\((.*?)\)\), "l"\((.*?)\) : "memory"\);'
)
_COMMIT = 'asm volatile("cp.async.commit_group;" ::: "memory");'
_WAIT = re.compile(r'asm volatile\("cp\.async\.wait_group (\d+);" ::: "memory"\);')
_REQUEST = re.compile(
    r'asm volatile\("[^"]*cp\.async\.bulk\.prefetch\.L2[^"]*" :: '
    r'"l"\((.*?)\), "r"\(\(uint\)(.*?)\), "r"\((\d+)\)\);'
)
_DESCRIBED = r'"l"\(\(unsigned long long\)\(\(uint\)__cvta_generic_to_shared\((.*?)\) >> 4\) \| (\w+)\)'
_GROUP = re.compile(
    r'asm volatile\("[^"]*wgmma\.mma_async\.sync\.aligned\.m64n\d+k16\.f32\.f16\.f16 [^"]*" : (.*?) : '
    rf'(?:("r".*?)|{_DESCRIBED}), {_DESCRIBED} : "memory"\);'
)
_TILE = re.compile(r'asm volatile\("[^"]*cp\.async\.bulk\.tensor\.(\d)d[^"]*" :: (.*?) : "memory"\);')
# Barriers of copies that are made at once, and what makes them known.
_TILES_ORDER = re.compile(r'asm volatile\("[^"]*(?:mbarrier|fence\.proxy\.tensormap)[^"]*" ::.*?"memory"\);')
_GROUP_ORDER = re.compile(r'asm volatile\("(?:wgmma\.|fence\.proxy)[^"]*" ::: "memory"\);')
_OPERAND = re.compile(r'"[+]?[fr]"\(')
_SIZES = {"half": 2, "float": 4, "int": 4, "uint": 4, "unsigned int": 4, "long": 8, "unsigned long": 8}
_SIZES |= {
    "bool": 1,
    "nv_bfloat16": 2,
    "unsigned char": 1,
    "signed char": 1,
    "char": 1,
    "short": 2,
    "unsigned short": 2,
}


class SimulatedCompiler(Compiler):
    def __init__(self) -> None:
        super().__init__(None)

    def compile(self, src: str) -> bytes:
        if why := refused(src):
            raise CompileError(f"{why}:\n{src}")
        found = _KERNEL.search(src)
        assert found, src
        name, parameters = found[1], [p for p in found[2].split(", ") if p]
        body, shared_bytes = _shared(src[found.end() :])
        before = _MMA.sub(_mma, re.sub(r"#include <cuda_\w+\.h>\n", "", src[: found.start()]))
        signature, arguments, end = _parameters(parameters)
        waits = "__syncthreads" in body or "__WMMA" in body or "wgmma" in body
        body = _TILES_ORDER.sub("", _TILE.sub(_tile, body))
        body = _GROUP_ORDER.sub("", _GROUP.sub(_group, body))
        body = _REQUEST.sub(_request, body)
        if _COPY.search(body):
            body = _COPY.sub(r"copies.ask(\1, \2);", body).replace(_COMMIT, "copies.commit();")
            body = "  Copies copies;\n" + _WAIT.sub(r"copies.wait(\1);", body)
        body = re.sub(r"\(\(([\w ]+?)\*\)\(", r"(pointer_cast<\1>(", body[: body.rindex("}")])
        code = _machine_code(
            f"// ---- the kernel ----\n{before}\n"
            f"static void {name}(Context *context, dim3 threadIdx, dim3 blockIdx{signature}) {{\n{body}\n}}\n"
            f'extern "C" __attribute__((section("{_ENTRY}"))) void start(Context *context) {{\n'
            f"  {'launch' if waits else 'launch_without_barriers'}(context, [&](dim3 thread, dim3 block) "
            f"{{ {name}(context, thread, block{arguments}); }});\n}}\n"
        )
        return _cubin(name, code, end, shared_bytes)


class SimulatedCUDARenderer(CUDARenderer):
    def __init__(self, target: Target) -> None:
        CStyleLanguage.__init__(self, target)
        self.compiler, self.tensor_cores = SimulatedCompiler(), tc.get_cuda(target.arch)


def _mma(function: re.Match[str]) -> str:
    """A tensor core's instruction, which all threads of a warp execute together: in cuda.hpp."""
    assert "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32" in function[2], "not simulated"
    return f"#define {function[1]}(a, b, c) mma(context, threadIdx, __LINE__, a, b, c)"


def _group(product: re.Match[str]) -> str:
    """A warpgroup's instruction, of which each warp computes its own rows: in cuda.hpp."""
    sums, words, left, layout, right, _ = (_OPERAND.sub("(", operand or "") for operand in product.groups())
    taken = ", ".join(f"&{place}" for place in sums.split(", "))
    begun = f"{{ float *sums[] = {{{taken}}}; const u32 n = sizeof sums / sizeof *sums;"
    if left:
        return f"{begun} group_mma_shared(context, threadIdx, sums, n, {left}, {right}, {layout}); }}"
    return (
        f"{begun} u32 left[] = {{{words}}};"
        f" group_mma(context, threadIdx, __LINE__, sums, n, left, {right}, {product[6]}); }}"
    )


def _tile(copy: re.Match[str]) -> str:
    """A copy of a tile: in cuda.hpp."""
    operands = re.findall(r'"[rl]"\((?:\(uint\))?(.*?)\)(?=, "[rl]"|$)', copy[2])
    target, map, column, row, _, ok = operands[:6]
    target = target.removeprefix("__cvta_generic_to_shared(").removesuffix(")")
    return f"copy_tile(context, {target}, {map}, {column}, {row}, {ok}, {int(copy[1] == '4')});"


def _request(run: re.Match[str]) -> str:
    """A request of memory for the cache, whose first and last word are read here."""
    place, ok, words = run[1], run[2], int(run[3]) // 4
    return f"if ({ok}) {{ (void)*{place}; (void)*({place}+{words - 1}); }}"


def _shared(body: str) -> tuple[str, int]:
    """Shared arrays as places in the block's memory, and how much there is of it."""
    end = 0

    def place(array: re.Match[str]) -> str:
        nonlocal end
        kind, name, n = array[1], array[2], int(array[3])
        at = -(-end // 16) * 16
        end = at + _SIZES[kind] * n
        return f"local<{kind}> {name}{{context, {at}}};"

    return _SHARED.sub(place, body), end


def _parameters(parameters: list[str]) -> tuple[str, str, int]:
    """The kernel's own signature, the arguments read from constants, and where these end. As in C structures."""
    signature = arguments = ""
    at = PARAMETERS
    for parameter in parameters:
        kind, name = parameter.rsplit(" ", 1)
        kind = kind.removeprefix("volatile ").removeprefix("const ")
        pointed = kind.removesuffix("*")
        size = 8 if kind.endswith("*") else _SIZES[kind]
        at = -(-at // size) * size
        form = f"global<{pointed}>" if kind.endswith("*") else kind
        read = "pointer_parameter" if kind.endswith("*") else "value_parameter"
        signature += f", {form} {name}"
        arguments += f", {read}<{pointed}>(context, {at})"
        at += size
    return signature, arguments, at


def _machine_code(source: str) -> tuple[bytes, int]:
    """Code that runs wherever it lies, and its entry."""
    kept_clang.keep()
    made = _compiled("-include-pch", str(_prelude()), "-x", "c++", "-", source=source)
    _, sections, _ = elf_loader(made)
    return jit_loader(made), next(s.header.sh_addr for s in sections if s.name == _ENTRY)


@functools.cache
def _prelude() -> Path:
    """What clang knows when it has read cuda.hpp, for all kernels of a run of the tests: a sixth less work for each."""
    folder = os.environ.get(FOLDER) or tempfile.mkdtemp()
    known = Path(folder, "cuda.pch")
    if not known.exists():
        write_whole(known, _compiled("-x", "c++-header", str(_PRELUDE)))
    return known


def _compiled(*what: str, source: str = "") -> bytes:
    options = ["-std=c++20", "-O0", "-fPIC", "-ffreestanding", "-nostdlib", "-fno-exceptions", "-fno-rtti"]
    options += ["-fno-builtin", "-fno-math-errno", "-fno-asynchronous-unwind-tables", "-fno-stack-protector"]
    options += ["-fno-ident", "-march=native" if os.uname().machine == "x86_64" else "-mcpu=native", "-w"]
    options += ["-fno-jump-tables", "-fvisibility=hidden", "-ffp-contract=on"]
    command = [compiler() or "clang", "-c", *options, *what, "-o", "-"]
    if source and (kept := kept_clang.compiled(command, source.encode())):
        return kept
    made = subprocess.run(command, input=source.encode(), capture_output=True)
    if made.returncode:
        raise CompileError(f"{made.stderr.decode()}\n{source}")
    return made.stdout


@functools.cache
def compiler() -> str | None:
    """A clang that knows half precision on every CPU: 15 or later."""
    for found in (find_clang(), zig_clang()):
        if found:
            said = subprocess.run([found, "--version"], capture_output=True, text=True).stdout
            version = re.search(r"clang version (\d+)", said)
            if version and int(version[1]) >= 15:
                return found
    return None


def keeping_kernels(**variables: str) -> dict[str, str]:
    """The environment of a process with these `variables`, in which compiled kernels stay for the next run. The name of
    their folder follows from what compiles, loads and proves them; `engine.cache.disk_cache` tells kernels, and
    versions of tinygrad, apart. It tells the compiler of CPUs apart by its path too, which is another one in each
    run."""
    digest = hashlib.sha256(subprocess.run([compiler() or "true", "--version"], capture_output=True).stdout)
    for file in [*sorted(_PRELUDE.parent.glob("*.[ph]*")), ROOT / "tests/kernels/gpu/alignment.py"]:
        digest.update(file.read_bytes())
    folder = KERNELS / digest.hexdigest()
    for other in set(KERNELS.glob("?" * len(folder.name))) - {folder}:
        shutil.rmtree(other, ignore_errors=True)
    inherited = {name: value for name, value in os.environ.items() if name != "CC"}
    return inherited | {"XDG_CACHE_HOME": str(folder), **variables}


def _cubin(name: str, code: tuple[bytes, int], constant_end: int, shared_bytes: int) -> bytes:
    """An ELF file with what the loader reads: code, constants, shared memory, and facts (.nv.info) on them."""
    image, entry = code
    text = HEADER.pack(MAGIC, len(image), entry, constant_end, shared_bytes).ljust(CODE_AT, b"\0") + image
    progbits, nobits, info, strings = 1, 8, 0x70000000, 3
    facts = struct.pack("<BBHII", 4, 0x2F, 8, 0, REGISTERS) + struct.pack("<BBHII", 4, 0x12, 8, 0, 0)
    bank = struct.pack("<BBHIHH", 4, 0x0A, 8, 0, PARAMETERS, constant_end - PARAMETERS)
    sections = [
        (f".text.{name}", progbits, text, len(text)),
        (".nv.info", info, facts, len(facts)),
        (f".nv.info.{name}", info, bank, len(bank)),
        (f".nv.constant0.{name}", progbits, bytes(constant_end), constant_end),
    ]
    if shared_bytes:
        sections.append((f".nv.shared.{name}", nobits, b"", shared_bytes))
    names = b"\0" + b"".join(s[0].encode() + b"\0" for s in sections) + b".shstrtab\0"
    sections.append((".shstrtab", strings, names, len(names)))
    body, headers, at = b"", [bytes(64)], 64
    for title, kind, content, size in sections:
        at_name = names.index(title.encode() + b"\0")
        headers.append(struct.pack("<IIQQQQIIQQ", at_name, kind, 0, 0, at + len(body), size, 0, 0, 128, 0))
        body += content + bytes(-len(content) % 8)
    ident = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
    cuda = 190  # EM_CUDA
    start = struct.pack(
        "<HHIQQQIHHHHHH", 2, cuda, 1, 0, 0, at + len(body), 0, 64, 0, 0, 64, len(headers), len(sections)
    )
    return ident + start + body + b"".join(headers)
