"""Proves that no vector load or store has an address whose alignment is unknown. A GPU has no unaligned ones, and the
blocks of quantized types have sizes like 210 bytes.

Each proof starts from the index alone, by the largest power of two that is known to divide it: in tinygrad's UOps
before they become source, and in PTX, which CUDA's compiler makes of C or tinygrad writes itself, where addresses are
sums of registers. Both take for granted that buffers begin at multiples of BASE_BYTES, which `rendered` checks.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from math import gcd

from tinygrad.dtype import AddrSpace
from tinygrad.uop.ops import Ops, UOp

BASE_BYTES = 256  # what buffers of CUDA and NV begin at multiples of
ANY = 1 << 40  # zero is a multiple of any power of two


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
        # Of those that are no sums; falls to what holds in all loops.
        self._divisors = dict.fromkeys(assigned, ANY)
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
            return BASE_BYTES
        name = op.partition(".")[0]
        if (linear := self._linear(op, arguments)) is not None:
            return gcd(*(times * self._of_symbol(symbol) for symbol, times in linear.items()), ANY)
        if (
            name not in ("mul", "mad", "shl", "shr", "and", "or", "xor", "selp", "min", "max", "bfi")
            or ".hi" in op
        ):
            return 1
        d = [self.divisor(argument) for argument in arguments]
        match name:
            case "mul":
                return min(d[0] * d[1], ANY)
            case "mad":
                return gcd(min(d[0] * d[1], ANY), d[2])
            case "and":
                return max(d)
            case "bfi":  # the first, shifted by the third, among the bits of the second
                return min(d[1], d[0] << int(arguments[2], 0))
            case "shl":
                return d[0]
            case "shr":  # exact, where no bit that is set is lost
                return max(d[0] >> int(arguments[1], 0), 1) if _NUMBER.fullmatch(arguments[1]) else 1
        return gcd(*d[:2])


def _times(value: Sum, n: int) -> Sum:
    return {symbol: times * n for symbol, times in value.items()}


def _plus(a: Sum, b: Sum) -> Sum:
    return {symbol: a.get(symbol, 0) + b.get(symbol, 0) for symbol in a | b}
