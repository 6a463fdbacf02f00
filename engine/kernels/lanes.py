"""Matrix products for CPUs: the rows of a matrix lie side by side in the lanes of a vector register.

One loop form serves every format. For each group of `lanes` rows, blocks and elements are reduced over in
order; a vector of quantized integers is loaded once, its bit fields become float vectors, and each is
multiplied with one activation, broadcast, for each of a few tokens. No step crosses lanes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from operator import add

from tinygrad import UOp, dtypes
from tinygrad.uop.ops import AxisType, KernelInfo, Ops

from engine.formats.quantization import SPREAD, Format

Kernel = Callable[..., UOp]


def lane_product(format: Format | None, tokens: int, rows: int, cols: int, lanes: int) -> Kernel:
    """A kernel body for `Tensor.custom_kernel`: out (rows/lanes, tokens, lanes) float32, x (tokens, cols)
    float32, and for a quantized matrix the sums of x over each group (tokens, cols/group); then the matrix's
    planes in their order. rows and cols are the padded ones."""

    def kernel(out: UOp, x: UOp, *rest: UOp) -> UOp:
        row = _range(rows // lanes, 0, AxisType.LOOP)
        token = _range(tokens, 10, AxisType.UPCAST)
        lane = _range(lanes, 11, AxisType.UPCAST)
        if format is None:
            col = UOp.range(cols, 1, AxisType.REDUCE)
            (w,) = rest
            total = _sum(w[row, col, lane].cast(dtypes.float32) * x[token, col], col)
        else:
            total = _quantized(format, cols, row, token, lane, x, *rest)
        name = f"product_{format.name if format else 'float'}_{rows}x{cols}_{tokens}"
        loops = [r for r in (row, token, lane) if r.op is Ops.RANGE]
        store = out[row, token, lane].store(total).end(*loops)
        return store.sink(arg=KernelInfo(name=name, opts_to_apply=()))

    return kernel


def _range(size: int, axis: int, kind: AxisType) -> UOp:
    """A loop variable; just 0 where there is one step, which tinygrad's reductions do not take."""
    return UOp.range(size, axis, kind) if size > 1 else UOp.const(0)


def _sum(value: UOp, over: UOp) -> UOp:
    return value.reduce(over, arg=Ops.ADD) if over.op is Ops.RANGE else value


def _quantized(
    format: Format, cols: int, row: UOp, token: UOp, lane: UOp, x: UOp, sums: UOp, *planes: UOp
) -> UOp:
    names = [*(f"q{i}" for i in range(len(format.bits))), *format.scales]
    plane = dict(zip(names, planes, strict=True))
    chunk = max(SPREAD * 8 // min(format.bits), format.group)  # elements an iteration takes
    outer = max(format.block, chunk)
    block = _range(cols // outer, 1, AxisType.REDUCE)
    part = _range(outer // chunk, 2, AxisType.REDUCE)
    j = UOp.range(SPREAD, 3, AxisType.REDUCE)
    c = block * (outer // chunk) + part

    def scale(name: str, group: UOp) -> UOp:
        at = group if format.block == format.group or name in ("scale", "minimum") else block
        return plane[name][row, at, lane].cast(dtypes.float32)

    def integer(i: int) -> UOp:
        """The integers of elements 16i to 16i+15 of the chunk, one for each step of j."""
        value, low = None, 0
        for p, b in enumerate(format.bits):
            byte = plane[f"q{p}"][row, c * (chunk * b // 8 // SPREAD) + i * b // 8, j, lane].cast(dtypes.int32)
            field = (byte >> (i * b % 8)) & (2**b - 1) if b < 8 else byte
            value, low = (field if value is None else value | (field << low)), low + b
        assert value is not None
        return value.cast(dtypes.float32)

    scaled, shifted = [], []
    inner_d = format.block == format.group
    for g in range(chunk // format.group):
        group = c * (chunk // format.group) + g
        steps = range(g * format.group // SPREAD, (g + 1) * format.group // SPREAD)
        dot = _sum(reduce(add, [integer(i) * x[token, c * chunk + i * SPREAD + j] for i in steps]), j)
        xsum = sums[token, group]
        if format.offset:
            dot = dot - xsum * format.offset
        if "scale" in plane:
            dot = dot * scale("scale", group)
        scaled.append(dot * scale("d", group) if inner_d else dot)
        if "m" in plane:
            m = xsum * scale("minimum", group) if "minimum" in plane else xsum
            shifted.append(m * scale("m", group) if inner_d else m)
    total = _sum(reduce(add, scaled), part)
    minus = _sum(reduce(add, shifted), part) if shifted else None
    if not inner_d:
        total = total * plane["d"][row, block, lane].cast(dtypes.float32)
        minus = minus * plane["m"][row, block, lane].cast(dtypes.float32) if minus is not None else None
    return _sum(total if minus is None else total - minus, block)
