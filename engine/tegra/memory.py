"""Buffers that CPU and GPU share, and the addresses that the GPU may know them by.

    0x00_0020_0000 .. 0x80_0000_0000   buffers: nvgpu chooses their addresses
    0x80_0000_0000 .. 0x81_0000_0000   nvgpu's own (rings, contexts), right above the range that it was given
    0xFD_0000_0000 .. 0xFE_0000_0000   the shader's window onto its local memory
    0xFE_0000_0000 .. 0xFF_0000_0000   the shader's window onto its shared memory

A load or store inside a window goes to that memory instead of a buffer, and one that names global memory stops the
multiprocessor (Invalid Address Space). So no buffer may ever lie there. With a range up to 2^40, where models of
4 GiB and more ran into the windows, nvgpu's own 4 GiB also began above 2^40, out of reach for several registers.

The windows' width on this chip is not documented; 4 GiB is what it is on later ones, and as much as fits between the
two. That nvgpu takes this range and these windows at once was not seen on a board.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from engine.tegra import abi, driver
from engine.tegra.driver import AddressSpace, Dmabuf, Nvmap
from engine.tegra.errors import DriverError

GIB = 1 << 30
BUFFERS = range(0x20_0000, 0x80_0000_0000)
LOCAL_WINDOW = range(0xFD_0000_0000, 0xFE_0000_0000)
SHARED_WINDOW = range(0xFE_0000_0000, 0xFF_0000_0000)
KERNEL_BYTES = 4 * GIB  # of address space, that nvgpu takes for itself
REACH = 1 << 40  # rings, commands and launch descriptors (QMD) are found by addresses of 40 bits
LARGE, LARGE_ALIGNMENT = 8 << 20, 2 << 20  # buffers from this size lie in whole pages of the SMMU's

assert BUFFERS.stop + KERNEL_BYTES <= LOCAL_WINDOW.start and SHARED_WINDOW.stop <= REACH


def meet(a: range, b: range) -> bool:
    return a.start < b.stop and b.start < a.stop


@dataclass(frozen=True)
class Mapping:
    """A buffer as the GPU (`va`) and as this process (`address`) know it: `size` bytes, whole pages."""

    va: int
    address: int
    size: int


class Memory:
    """The buffers of an address space."""

    def __init__(self, nvmap: Nvmap, space: AddressSpace, cache: int = abi.INNER_CACHEABLE) -> None:
        """`cache` is how the CPU sees buffers. Raises DriverError where buffers could get addresses inside a window
        that nvgpu does not reserve."""
        self._nvmap, self._space, self._cache = nvmap, space, cache
        self._mappings: dict[int, Mapping] = {}
        guard(space)

    def allocate(self, size: int, zero: bool = False) -> Mapping:
        """At least `size` bytes. The two addresses are the same where that can be had. Raises
        DriverMemoryError when there is no room."""
        size = -(-size // abi.PAGE) * abi.PAGE
        buffer = self._nvmap.buffer(size, LARGE_ALIGNMENT if size >= LARGE else abi.PAGE, self._cache, zero)
        try:  # both mappings hold the buffer; a descriptor for each would soon be too many
            mapping = self._map(buffer, size)
        finally:
            buffer.close()
        self._mappings[mapping.va] = mapping
        return mapping

    def free(self, mapping: Mapping) -> None:
        """The GPU must be done with it. Once freed, or when all are, it does nothing."""
        if self._mappings.get(mapping.va) is mapping:
            del self._mappings[mapping.va]
            self._release(mapping)

    def bury(self, mapping: Mapping) -> None:
        """Frees a buffer, of which this process sees ones in all bits from now on: its address stays taken."""
        del self._mappings[mapping.va]
        driver.blank(mapping.address, mapping.size)
        with contextlib.suppress(DriverError):
            self._space.unmap(mapping.va)

    def close(self) -> None:
        """After a fault the driver may refuse to unmap; the address space is about to go as a whole."""
        while self._mappings:
            with contextlib.suppress(DriverError):
                self._release(self._mappings.popitem()[1])

    def _map(self, buffer: Dmabuf, size: int) -> Mapping:
        va = self._space.map(buffer)
        try:
            check(range(va, va + size))
            # tinygrad's own tests take one address for the other, as on its other devices; nothing here does
            address = buffer.map(size, wish=va)
        except DriverError:
            self._space.unmap(va)
            raise
        return Mapping(va, address, size)

    def _release(self, mapping: Mapping) -> None:
        driver.unmap(mapping.address, mapping.size)
        self._space.unmap(mapping.va)


def guard(space: AddressSpace) -> None:
    """Reserves the windows where the driver's own idea of the address space contains them."""
    for region in space.regions():
        for window in (LOCAL_WINDOW, SHARED_WINDOW):
            if meet(region, window):
                start, stop = max(region.start, window.start), min(region.stop, window.stop)
                space.reserve(start, stop - start)


def check(buffer: range) -> None:
    """Raises DriverError for addresses that kernels could not use."""
    if meet(buffer, LOCAL_WINDOW) or meet(buffer, SHARED_WINDOW) or buffer.stop > REACH:
        raise DriverError(
            f"The GPU driver put a buffer at {buffer.start:#x}, where kernels cannot reach it.",
            "Please send the report of `orin-chat doctor --report FILE`, or take the CUDA backend.",
        )
