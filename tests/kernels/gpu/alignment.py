"""That no vector load or store of a model's steps has an address whose alignment is not proven: `DEV=NULL:NVCC:sm_87
python -m tests.kernels.gpu.alignment PATH QUANT...`, PATH being fused or graph. It is a process of its own, since
a process has one default device; the NULL device runs nothing.

Proven twice, each time from the index alone, by the largest power of two that is known to divide it: in tinygrad's
UOps before they become source, and in the PTX that the compiler made of C or (DEV=NULL:PTX:sm_87) tinygrad wrote
itself, where addresses are sums of registers. Both start from buffers that begin at multiples of 256 bytes; that
those of a model do is checked as well.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from math import gcd
from pathlib import Path
from typing import Any

from tinygrad import Device, codegen
from tinygrad.device import Buffer
from tinygrad.dtype import AddrSpace
from tinygrad.runtime.support import compiler_cuda
from tinygrad.uop.ops import Ops, UOp

from engine.formats.gguf import GGUF
from engine.model.config import ModelConfig
from engine.model.fused import FusedRunner
from engine.model.graph_runner import GraphRunner
from engine.model.model_runner import ModelRunner
from engine.model.weights import Weights
from tests import generated_model

BASE = 256  # what buffers of CUDA and NV begin at multiples of
ANY = 1 << 40  # divides zero


def divisor(index: UOp, known: dict[UOp, int]) -> int:
    """A power of two (or ANY) that divides an integer expression whatever its variables are."""
    if index not in known:
        parts = [divisor(source, known) for source in index.src] if index.op in _RULES else []
        known[index] = _RULES[index.op](index, parts) if index.op in _RULES else 1
    return known[index]


def _power(n: int) -> int:
    return n & -n if n else ANY


def _constant(u: UOp) -> int:
    """The number that an expression is; 0, which promises nothing as a shift, where it is none."""
    while u.op is Ops.CAST:
        u = u.src[0]
    return int(u.val) if u.op is Ops.CONST else 0


_RULES: dict[Ops, Callable[[UOp, list[int]], int]] = {
    Ops.CONST: lambda u, _: _power(int(u.val)),
    Ops.ADD: lambda u, p: gcd(*p),
    Ops.SUB: lambda u, p: gcd(*p),
    Ops.MUL: lambda u, p: min(p[0] * p[1], ANY),
    Ops.MULACC: lambda u, p: gcd(min(p[0] * p[1], ANY), p[2]),
    Ops.SHL: lambda u, p: min(p[0] << _constant(u.src[1]), ANY),
    Ops.AND: lambda u, p: max(p),
    Ops.WHERE: lambda u, p: gcd(*p[1:]),
    Ops.MAX: lambda u, p: gcd(*p),
    Ops.CAST: lambda u, p: p[0],
}


def prove_uops(program: UOp) -> int:
    """How many vector accesses to memory a kernel has, all of them proven. Raises AssertionError."""
    known: dict[UOp, int] = {}
    count = 0
    for u in program.src[1].src:
        if u.op not in (Ops.LOAD, Ops.STORE) or u.src[0].op is not Ops.SHRINK:
            continue
        buffer, index, size = u.src[0].src
        if buffer.addrspace is AddrSpace.REG:
            continue
        n = int(size.vmax)
        assert divisor(index, known) % n == 0, (
            f"{program.arg.name}: {n} of {buffer.dtype} at {index.render()}"
        )
        count += 1
    return count


# --- PTX -------------------------------------------------------------------------------------------------

_ACCESS = re.compile(
    r"(?:ld|st)\.(?:global|shared|local)\S*?(?:\.v(?P<n>[24]))?\.[busf](?P<bits>8|16|32|64|128)\s.*?"
    r"\[(?P<base>[^\]+]+)(?:\+(?P<offset>-?\d+))?\]"
)
_ASSIGN = re.compile(r"(?P<op>[a-z0-9_.]+)\s+(?P<to>%\w+),\s*(?P<arguments>.*);")
WIDE = 8  # bytes: what is narrower is one element
_NUMBER = re.compile(r"(-?(?:0x[0-9a-fA-F]+|\d+))U?")
Sum = dict[str, int]
"""What a register holds, modulo 2**32: the sum of values that are not known, each so many times, and of a number
(which is the value "1")."""
Instruction = tuple[str, list[str]]


def prove_ptx(kernel: str) -> int:
    """How many accesses of 8 bytes or more a kernel has, all of them proven. Raises AssertionError."""
    assigned, accesses = _by_value(kernel)
    registers = Registers(assigned)
    count = 0
    for match, base in accesses:
        size = int(match["n"] or 1) * int(match["bits"]) // 8
        if size >= WIDE:
            at = gcd(registers.divisor(base), _power(int(match["offset"] or 0)))
            assert at % size == 0, f"{match[0]}: known to be a multiple of {at} bytes only"
            count += 1
    return count


def _by_value(kernel: str) -> tuple[dict[str, list[Instruction]], list[tuple[re.Match[str], str]]]:
    """The instructions that assign to each register, and the accesses with their base registers. A register that is
    assigned to again in a run of instructions is another one from there on (%r#1); under its own name go its values
    at the ends of such runs, which others may find it with."""
    assigned: dict[str, list[Instruction]] = defaultdict(list)
    accesses, here, ends = [], {}, defaultdict(set)
    for n, line in enumerate(kernel.splitlines()):
        if re.match(r"\s*\S+:|.*\bbra\b", line):
            for name, value in here.items():
                ends[name].add(value)
            here = {}
        if match := _ACCESS.search(line):
            accesses.append((match, here.get(match["base"], match["base"])))
        if match := _ASSIGN.search(line):
            arguments = re.findall(r"[%\w.$-]+", match["arguments"])
            value, before = f"{match['to']}#{n}", here.get(match["to"], match["to"])
            assigned[value].append((match["op"], [here.get(a, a) for a in arguments]))
            if line.lstrip().startswith("@"):  # or it stays what it was
                assigned[value].append(("mov", [before]))
            here[match["to"]] = value
    for name, value in here.items():
        ends[name].add(value)
    assigned.update({name: [("mov", [value]) for value in sorted(values)] for name, values in ends.items()})
    return assigned, accesses


class Registers:
    """What is known of a kernel's registers, by the instructions that assign to each."""

    def __init__(self, assigned: dict[str, list[Instruction]]) -> None:
        self._assigned = assigned
        self._sums: dict[str, Sum] = {}
        self._divisors = dict.fromkeys(
            assigned, ANY
        )  # of those that are no sums; falls to what holds in all loops
        changed = True
        while changed:
            changed = False
            for name, instructions in assigned.items():
                now = gcd(*(self._divides(op, arguments) for op, arguments in instructions))
                changed |= now != self._divisors[name]
                self._divisors[name] = now

    def divisor(self, operand: str) -> int:
        """A power of two that divides what `operand` holds."""
        return gcd(*(times * self._of_symbol(symbol) for symbol, times in self._sum(operand).items()), ANY)

    def _of_symbol(self, symbol: str) -> int:
        if symbol == "1":
            return 1
        if symbol.startswith("%"):
            return self._divisors.get(symbol, 1)
        return 16  # an array in shared memory: tinygrad asks for it (__align__)

    def _sum(self, operand: str) -> Sum:
        if number := _NUMBER.fullmatch(operand):
            return {"1": int(number[1], 0)}
        if operand not in self._sums:
            self._sums[operand] = {operand: 1}
            if len(instructions := self._assigned.get(operand, [])) == 1:
                self._sums[operand] = self._linear(*instructions[0]) or {operand: 1}
        return self._sums[operand]

    def _linear(self, op: str, arguments: list[str]) -> Sum | None:
        """The sum that an instruction makes of sums, None if it is not linear."""
        name = op.partition(".")[0]
        if ".hi" in op or name not in ("mov", "cvt", "cvta", "add", "sub", "mul", "mad", "shl"):
            return None
        a, *others = (self._sum(argument) for argument in arguments)
        match name:
            case "add" | "sub":
                return _plus(a, _times(others[0], 1 if name == "add" else -1))
            case "mul" | "mad":
                numbers = [x for x in (a, others[0]) if set(x) == {"1"}]
                if not numbers:
                    return None
                product = _times(others[0] if numbers[0] is a else a, numbers[0]["1"])
                return _plus(product, others[1]) if name == "mad" else product
            case "shl":
                return _times(a, 1 << others[0]["1"]) if set(others[0]) == {"1"} else None
        return a

    def _divides(self, op: str, arguments: list[str]) -> int:
        """A power of two that divides what an instruction makes."""
        if op.startswith("ld.param") and op.endswith("64"):
            return BASE
        name = op.partition(".")[0]
        if (linear := self._linear(op, arguments)) is not None:
            return gcd(*(times * self._of_symbol(symbol) for symbol, times in linear.items()), ANY)
        if name not in ("mul", "shl", "and", "or", "xor", "selp", "min", "max", "bfi") or ".hi" in op:
            return 1
        d = [self.divisor(argument) for argument in arguments]
        match name:
            case "mul":
                return min(d[0] * d[1], ANY)
            case "and":
                return max(d)
            case "bfi":  # the first, shifted by the third, among the bits of the second
                return min(d[1], d[0] << int(arguments[2], 0))
            case "shl":
                return d[0]
        return gcd(*d[:2])


def _times(value: Sum, n: int) -> Sum:
    return {symbol: times * n for symbol, times in value.items()}


def _plus(a: Sum, b: Sum) -> Sum:
    return {symbol: a.get(symbol, 0) + b.get(symbol, 0) for symbol in a | b}


def ptx(sources: list[str]) -> list[str]:
    """What CUDA's compiler makes of kernels, each by itself. Raises CalledProcessError."""
    head = "\n".join(dict.fromkeys(line for s in sources for line in s.splitlines() if line.startswith("#")))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernels.cu"
        named = [
            re.sub(r"(__launch_bounds__\([^)]*\)) \w+\(", rf"\1 k{i}(", s) for i, s in enumerate(sources)
        ]
        bodies = (f"namespace n{i} {{\n{re.sub(r'(?m)^#.*', '', s)}\n}}" for i, s in enumerate(named))
        file.write_text(head + "\n" + "\n".join(bodies))
        command = [
            "nvcc",
            f"-arch={Device[Device.DEFAULT].renderer.target.arch}",
            "-ptx",
            str(file),
            "-o",
            "-",
        ]
        text = subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder).stdout
    return text.split(".entry")[1:]


# --- a model's steps -------------------------------------------------------------------------------------


PATHS: dict[str, Callable[[Weights, int], ModelRunner]] = {"fused": FusedRunner, "graph": GraphRunner}


def load_and_step(path: str, quant: str) -> None:
    """Loads a small model whose matrices are of one type, and runs its two steps."""
    shape = {"layers": 1, "dim": 256, "heads": 4, "kv_heads": 4, "ffn": 256}
    with tempfile.TemporaryDirectory() as folder:
        gguf = GGUF(
            generated_model.write(Path(folder) / "m.gguf", architecture="qwen3", quant=quant, **shape)
        )
    runner = PATHS[path](Weights(gguf, ModelConfig.from_gguf(gguf), lambda _: None), 600)
    runner.prefill([1] * 20, 0)
    for position in (0, 300):
        runner.decode(1, position)


def main(path: str, quants: list[str]) -> None:
    """Prints for each type: kernels that no type before had, vector accesses in their UOps, wide ones in their PTX.
    Raises AssertionError where one of them is not proven to be aligned."""
    stock, made = codegen.do_to_program, []
    codegen.do_to_program = lambda *arguments: made.append(stock(*arguments)) or made[-1]
    stock_buffer = Buffer.__init__

    def buffer(self: Buffer, *arguments: Any, **options: Any) -> None:
        stock_buffer(self, *arguments, **options)
        assert self.offset % BASE == 0, f"a buffer begins at byte {self.offset} of another"

    Buffer.__init__ = buffer  # type: ignore[method-assign]
    compiler_cuda.NVPTXCompiler = compiler_cuda.PTXCompiler  # which needs no library
    for compiler in (compiler_cuda.NVCCCompiler, compiler_cuda.PTXCompiler):
        compiler.compile_cached = lambda self, source: b"nothing"  # type: ignore[method-assign]
    in_c = "PTX" not in type(Device[Device.DEFAULT].renderer).__name__
    for quant in quants:
        made.clear()
        load_and_step(path, quant)
        vectors = sum(map(prove_uops, made))
        sources = [str(program.src[2].arg) for program in made]
        wide = sum(map(prove_ptx, ptx(sources) if in_c else sources))
        print(quant, len(made), vectors, wide, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
