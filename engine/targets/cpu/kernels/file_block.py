"""The numbers of a quantization block as a file holds it, in kernels."""

from __future__ import annotations

from collections.abc import Callable

from tinygrad import UOp

from engine.formats.quantization import Format, Plane, Planes
from engine.targets.cpu.kernels.kernel_builder import Index, shift_left, shift_right


class FileBlock:
    """A block of a type, whose bytes `byte` gives by their place, uint16: of one block, or of several as a vector. All
    numbers are uint16 of that shape."""

    def __init__(self, format: Format, byte: Callable[[Index], UOp]) -> None:
        self._format, self.byte = format, byte

    def word(self, n: int) -> UOp:
        """The 16 bits from byte n on."""
        return self.byte(n) | shift_left(self.byte(n + 1), 8)

    def number(self, planes: Planes, i: Index, n: int) -> UOp:
        """Number i of n."""
        value, low = self._bits(planes[0], i, n), planes[0].bits
        for plane in planes[1:]:
            value, low = value | shift_left(self._bits(plane, i, n), low), low + plane.bits
        return value

    def small(self, runs: tuple[Planes, ...], group: int) -> UOp:
        """The scale or the minimum of a group, of a signed one the byte."""
        n = self._format.block // self._format.group // len(runs)
        value = self.number(runs[group // n], group % n, n)
        return value - self._format.scale_offset & 255 if self._format.scale_offset else value

    def _bits(self, plane: Plane, i: Index, n: int) -> UOp:
        at, bit = plane.position(i, n)
        value = self.byte(at) if plane.bits == 8 else shift_right(self.byte(at), bit) & (2**plane.bits - 1)
        return value ^ 2 ** (plane.bits - 1) if plane.signed else value
