"""Matrix products for CPUs: the rows of a matrix lie side by side in the lanes of a vector register.

For each group of `lanes` rows, blocks and elements are reduced over in order. A vector of quantized integers
is loaded, its bit fields become float vectors, and each is multiplied with one activation, the same for all
lanes. No step crosses lanes. Two forms, from the same description of formats:

- one token: integers are multiplied as they are, scales are applied to the sum of a group, and offsets and
  minima to the sum of the group's activations, which comes precomputed. Every step on weights counts here.
- several tokens: weights are dequantized once, then each token takes one multiply-add.

Vectors are loads of `SHRINK(buffer, offset, lanes)`: engine/fixes/cpu_vectors.py keeps them whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from itertools import count
from math import ceil
from operator import add
from pathlib import Path

from tinygrad import UOp, dtypes
from tinygrad.dtype import AddrSpace
from tinygrad.uop.ops import AxisType, KernelInfo, Ops

from engine.formats.quantization import SPREAD, Format

Kernel = Callable[..., UOp]
Values = list[UOp]

_CHUNK = 64  # elements of a step with one token: four sums side by side hide the latency of a multiply-add
_L2_SHARE = (
    256 << 10
)  # bytes of weights that several tiles of tokens take turns on, to find them in the cache


def register_lanes() -> int:
    """How many float32 fit this CPU's vectors: 16 in AVX-512's, 8 in AVX2's or in two of NEON's."""
    try:
        flags = Path("/proc/cpuinfo").read_text().split()
    except OSError:
        return 8
    return 16 if "avx512f" in flags else 8


def lane_product(
    format: Format | None, tokens: int, rows: int, cols: int, lanes: int, tile: int = 1, threads: int = 1
) -> Kernel:
    """A kernel for `Tensor.custom_kernel`, called with out, x, (sums,) and the planes of the matrix in their
    order.

    out float32 (tokens, rows). `tile` tokens, a divisor of `tokens`, share a load of the weights: x is
    float32 (tokens / tile, cols, tile). With a tile of 1 a quantized matrix needs sums, float32 (tokens, cols
    / group): the activations of each group added up. rows and cols are the padded ones. `threads` cores
    divide the rows.
    """
    bytes_a_step = lanes * cols * (sum(format.bits) if format else 32) // 8

    def kernel(*buffers: UOp) -> UOp:
        out, x, *rest = (buffer.base for buffer in buffers)
        k = Program(lanes)
        groups = rows // lanes
        per_thread, thread = k.share(groups, threads, AxisType.THREAD)
        together = per_thread if tokens == tile else max(1, min(per_thread, _L2_SHARE // bytes_a_step))
        per_turn, some = k.share(per_thread, ceil(per_thread / together))
        turn = k.loop(tokens // tile)
        row = thread + some + k.loop(per_turn)
        if format is None:
            totals = _floats(k, cols, tile, row, x, turn, *rest)
        elif tile == 1:
            totals = [_integers(k, format, cols, row, x, turn, *rest)]
        else:
            totals = _dequantized(k, format, cols, tile, row, x, turn, *rest)
        for t, total in enumerate(totals):
            k.store(out, ((turn * tile + t) * groups + row) * lanes, total)
        return k.finish(f"product_{format.name if format else 'float'}_{rows}x{cols}_{tokens}")

    return kernel


class Program:
    """A kernel under construction: its loops, its registers, its stores."""

    def __init__(self, lanes: int) -> None:
        self.lanes = lanes
        self._numbers = count()
        self._loops: list[UOp] = []
        self._stores: list[UOp] = []

    def loop(self, size: int, kind: AxisType = AxisType.LOOP) -> UOp:
        """A loop around all that follows: its variable, or just 0 where there is one step."""
        if size == 1:
            return UOp.const(0)
        self._loops.append(UOp.range(size, next(self._numbers), kind))
        return self._loops[-1]

    def share(self, n: int, parts: int, kind: AxisType = AxisType.LOOP) -> tuple[int, UOp]:
        """Divides n steps into parts, a loop: how many steps a part has, and its first. Where they do not
        divide evenly, parts overlap, and do the same twice."""
        size = ceil(n / parts)
        part = self.loop(parts, kind)
        return size, part * size if size * parts == n else part * (n - size) // (parts - 1)

    def load(self, buffer: UOp, at: UOp) -> UOp:
        return UOp(Ops.SHRINK, src=(buffer, at, UOp.const(self.lanes))).load()

    def store(self, buffer: UOp, at: UOp, value: UOp) -> None:
        self._stores.append(UOp(Ops.SHRINK, src=(buffer, at, UOp.const(self.lanes))).store(value))

    def carry(self, sizes: Sequence[int], start: Values, step: Callable[..., Values]) -> Values:
        """Vectors carried through nested loops of `sizes`: `step(values, *loop variables)` gives the next
        ones.

        They live in registers, float32 (lanes,). Returns the last ones."""
        outer = tuple(self._loops)
        loops = [UOp.range(n, next(self._numbers), AxisType.REDUCE) for n in sizes if n > 1]
        indices = iter(loops)
        variables = [next(indices) if n > 1 else UOp.const(0) for n in sizes]
        if not loops:
            return step(start, *variables)
        registers = [
            UOp.placeholder((self.lanes,), dtypes.float32, next(self._numbers), AddrSpace.REG) for _ in start
        ]

        def place(register: UOp) -> UOp:
            return UOp(Ops.SHRINK, src=(register, UOp.const(0), UOp.const(self.lanes)))

        begun = UOp.group(*(place(r.after(*outer)).store(s) for r, s in zip(registers, start, strict=True)))
        inside = [place(r.after(begun, *loops)) for r in registers]
        self._loops += loops
        new = step([r.load() for r in inside], *variables)
        del self._loops[len(outer) :]
        done = UOp.group(*(r.store(v) for r, v in zip(inside, new, strict=True))).end(*loops)
        return [place(r.after(done)).load() for r in registers]

    def finish(self, name: str) -> UOp:
        body = UOp.group(*self._stores).end(*self._loops)
        return body.sink(arg=KernelInfo(name=name, opts_to_apply=()))


def _zeros(n: int) -> Values:
    return [UOp.const(0.0, dtypes.float32)] * n


def _float(v: UOp) -> UOp:
    if v.dtype == dtypes.bfloat16:  # the upper half of a float32
        return (v.bitcast(dtypes.uint16).cast(dtypes.uint32) << 16).bitcast(dtypes.float32)
    return v.cast(dtypes.float32)


def _floats(k: Program, cols: int, tile: int, row: UOp, x: UOp, turn: UOp, w: UOp) -> Values:
    chains = max(c for c in (4, 2, 1) if cols % c == 0) if tile == 1 else 1

    def step(sums: Values, col: UOp) -> Values:
        out = []
        for c in range(chains):
            at = col * chains + c
            weight = _float(k.load(w, (row * cols + at) * k.lanes))
            xs = [x.index((turn * cols + at) * tile + t).load() for t in range(tile)]
            out += [s + weight * v for s, v in zip(sums[c * tile : (c + 1) * tile], xs, strict=True)]
        return out

    sums = k.carry([cols // chains], _zeros(chains * tile), step)
    return sums if tile > 1 else [reduce(add, sums)]


class _Planes:
    """The planes of a quantized matrix, read by element and by group."""

    def __init__(self, k: Program, format: Format, cols: int, row: UOp, planes: Sequence[UOp]) -> None:
        names = [*(f"q{i}" for i in range(len(format.bits))), *format.scales]
        self._plane = dict(zip(names, planes, strict=True))
        self._k, self.format, self._cols, self._row = k, format, cols, row
        self.span = SPREAD * 8 // min(format.bits)  # elements that a byte of the narrowest plane touches

    def __contains__(self, name: str) -> bool:
        return name in self._plane

    def scale(self, name: str, at: UOp) -> UOp:
        """One of d, m (by block), scale, minimum (by group)."""
        per_row = self._cols // (self.format.group if name in ("scale", "minimum") else self.format.block)
        return self._k.load(self._plane[name], (self._row * per_row + at) * self._k.lanes).cast(
            dtypes.float32
        )

    def integers(self, start: UOp, j: UOp, n: int) -> Values:
        """Elements start + j, start + j + 16, ... (n of them) of the row; start is a multiple of `span`."""
        values: list[UOp | None] = [None] * n
        low = 0
        for i, bits in enumerate(self.format.bits):
            fields = 8 // bits
            for byte in range(ceil(n / fields)):
                first = start * bits // 8 + byte * SPREAD + j
                q = self._k.load(
                    self._plane[f"q{i}"], (self._row * (self._cols * bits // 8) + first) * self._k.lanes
                )
                if bits == 8:
                    values[byte] = q
                    continue
                q = q.cast(dtypes.int32)
                for f in range(fields):
                    field = q if f == 0 else q >> (f * bits)
                    field = field if f == fields - 1 else field & (2**bits - 1)
                    before = values[byte * fields + f]
                    values[byte * fields + f] = field if before is None else before | (field << low)
            low += bits
        return [v.cast(dtypes.float32) for v in values if v is not None]


def _integers(
    k: Program, format: Format, cols: int, row: UOp, x: UOp, turn: UOp, sums: UOp, *rest: UOp
) -> UOp:
    planes = _Planes(k, format, cols, row, rest)
    part = max(planes.span, _CHUNK if cols % _CHUNK == 0 else format.block)
    whole = max(format.block, part)
    nested = (
        whole > format.group and "scale" in planes
    )  # groups in a block: d and m are applied to their sums

    def groups(values: Values, c: UOp, p: UOp) -> Values:
        start = (c * (whole // part) + p) * part

        def dot(chains: Values, j: UOp) -> Values:
            q = planes.integers(start, j, part // SPREAD)
            xs = [x.index(turn * cols + start + i * SPREAD + j).load() for i in range(len(q))]
            return [s + w * v for s, w, v in zip(chains, q, xs, strict=True)]

        chains = k.carry([SPREAD], _zeros(part // SPREAD), dot)
        total, minus = values[0], values[1:]
        steps = format.group // SPREAD
        for g in range(part // format.group):
            group = c * (whole // format.group) + p * (part // format.group) + g
            value = reduce(add, chains[g * steps : (g + 1) * steps])
            xsum = sums.index(turn * (cols // format.group) + group).load()
            if format.offset:
                value = value + xsum * -float(format.offset)
            total = total + value * planes.scale("scale" if nested else "d", group)
            if minus:
                minus = [minus[0] + planes.scale("minimum" if nested else "m", group) * xsum]
        return [total, *minus]

    def block(values: Values, c: UOp) -> Values:
        if not nested:
            return groups(values, c, UOp.const(0))
        total, *minus = k.carry([whole // part], _zeros(len(values)), lambda inner, p: groups(inner, c, p))
        new = [values[0] + total * planes.scale("d", c)]
        return [*new, values[1] + minus[0] * planes.scale("m", c)] if minus else new

    total, *minus = k.carry([cols // whole], _zeros(2 if "m" in planes else 1), block)
    return total - minus[0] if minus else total


def _dequantized(
    k: Program, format: Format, cols: int, tile: int, row: UOp, x: UOp, turn: UOp, *rest: UOp
) -> Values:
    planes = _Planes(k, format, cols, row, rest)
    part = max(planes.span, format.group)

    def chunk(values: Values, c: UOp) -> Values:
        factors = []
        for g in range(part // format.group):
            group = c * (part // format.group) + g
            block = c * part // format.block if part < format.block else c * (part // format.block) + g
            scale = planes.scale("d", block)
            if "scale" in planes:
                scale = scale * planes.scale("scale", group)
            shift = scale * -float(format.offset) if format.offset else None
            if "m" in planes:
                minimum = planes.scale("m", block)
                if "minimum" in planes:
                    minimum = minimum * planes.scale("minimum", group)
                shift = -minimum if shift is None else shift - minimum
            factors.append((scale, shift))

        def dot(sums: Values, j: UOp) -> Values:
            for i, q in enumerate(planes.integers(c * part, j, part // SPREAD)):
                scale, shift = factors[i * SPREAD // format.group]
                weight = q * scale if shift is None else q * scale + shift
                at = (turn * cols + c * part + i * SPREAD + j) * tile
                sums = [s + weight * x.index(at + t).load() for t, s in enumerate(sums)]
            return sums

        return k.carry([SPREAD], values, dot)

    return k.carry([cols // part], _zeros(tile), chunk)
