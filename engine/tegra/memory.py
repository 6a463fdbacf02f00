"""Buffers that CPU and GPU share, and the layout of the GPU's address space:

    0x00_0020_0000 .. 0x80_0000_0000   buffers; nvgpu chooses their addresses
    0x80_0000_0000 .. 0x81_0000_0000   nvgpu's own buffers (rings, contexts), which follow the range it is given
    0xFD_0000_0000 .. 0xFE_0000_0000   the window onto a thread's local memory
    0xFE_0000_0000 .. 0xFF_0000_0000   the window onto a block's shared memory

A generic load or store inside a window accesses that memory instead of a buffer, and an access to global memory there
stops the multiprocessor (Invalid Address Space). So no buffer may lie in a window. The range for buffers could not end
at 2^40: buffers of models over 4 GiB would lie in the windows, and nvgpu's own 4 GiB would begin above 2^40, where
several registers cannot address them.

The width of the windows on this chip is not documented. 4 GiB is the width of Hopper's shared memory window, and the
largest that fits between the two. No board has shown yet that nvgpu accepts this range together with these windows.
"""

import contextlib
from dataclasses import dataclass

from engine.tegra import abi, driver
from engine.tegra.driver import AddressSpace, Dmabuf, Nvmap
from engine.tegra.errors import REPORT, DriverError

GIB = 1 << 30
BUFFERS = range(0x20_0000, 0x80_0000_0000)
LOCAL_WINDOW = range(0xFD_0000_0000, 0xFE_0000_0000)
SHARED_WINDOW = range(0xFE_0000_0000, 0xFF_0000_0000)
NVGPU_BYTES = 4 * GIB  # of address space, for nvgpu's own buffers
ADDRESS_LIMIT = 1 << 40  # rings, commands and launch descriptors (QMD) have addresses of 40 bits
LARGE_BYTES, LARGE_ALIGNMENT = 8 << 20, 2 << 20  # buffers from this size lie in whole large pages of the SMMU

assert BUFFERS.stop + NVGPU_BYTES <= LOCAL_WINDOW.start and SHARED_WINDOW.stop <= ADDRESS_LIMIT


def overlap(a: range, b: range) -> bool:
    return a.start < b.stop and b.start < a.stop


@dataclass(frozen=True)
class Mapping:
    """A buffer of `size` bytes (whole pages), at `va` for the GPU and at `address` for this process."""

    va: int
    address: int
    size: int


class Memory:
    """The buffers of an address space."""

    def __init__(self, nvmap: Nvmap, space: AddressSpace, cache: int = abi.INNER_CACHEABLE) -> None:
        """`cache` is how the CPU caches buffers (abi.INNER_CACHEABLE or abi.WRITE_COMBINE). Raises DriverError if a
        window lies in the range for buffers and cannot be reserved."""
        self._nvmap, self._space, self._cache = nvmap, space, cache
        self._mappings: dict[int, Mapping] = {}
        reserve_windows(space)

    def allocate(self, size: int, zero: bool = False) -> Mapping:
        """A buffer of at least `size` bytes, with the same address for CPU and GPU if possible. Raises
        DriverMemoryError if there is no room."""
        size = -(-size // abi.PAGE) * abi.PAGE
        align = LARGE_ALIGNMENT if size >= LARGE_BYTES else abi.PAGE
        buffer = self._nvmap.buffer(size, align, self._cache, zero)
        try:  # the mappings keep the buffer alive; an open file for each buffer would exceed the limit (ulimit -n)
            mapping = self._map(buffer, size)
        finally:
            buffer.close()
        self._mappings[mapping.va] = mapping
        return mapping

    def free(self, mapping: Mapping) -> None:
        """To be called when the GPU no longer uses the buffer. Does nothing if it is freed already."""
        if self._mappings.get(mapping.va) is mapping:
            del self._mappings[mapping.va]
            self._release(mapping)

    def free_keeping_address(self, mapping: Mapping) -> None:
        """Frees a buffer, but its address in this process stays readable: it reads as ones in all bits."""
        del self._mappings[mapping.va]
        driver.replace_with_ones(mapping.address, mapping.size)
        with contextlib.suppress(DriverError):
            self._space.unmap(mapping.va)

    def close(self) -> None:
        """Frees all buffers. Errors are ignored: after a fault the driver may refuse to unmap, and closing the address
        space frees the rest."""
        while self._mappings:
            with contextlib.suppress(DriverError):
                self._release(self._mappings.popitem()[1])

    def _map(self, buffer: Dmabuf, size: int) -> Mapping:
        va = self._space.map(buffer)
        try:
            check_addresses(range(va, va + size))
            # tinygrad's own tests confuse the two addresses, which are equal on its other devices; nothing here does
            address = buffer.map(size, preferred_address=va)
        except DriverError:
            self._space.unmap(va)
            raise
        return Mapping(va, address, size)

    def _release(self, mapping: Mapping) -> None:
        driver.unmap(mapping.address, mapping.size)
        self._space.unmap(mapping.va)


def reserve_windows(space: AddressSpace) -> None:
    """Reserves the windows, as far as the driver's range for buffers contains them."""
    for region in space.regions():
        for window in (LOCAL_WINDOW, SHARED_WINDOW):
            if overlap(region, window):
                start, stop = max(region.start, window.start), min(region.stop, window.stop)
                space.reserve(start, stop - start)


def check_addresses(buffer: range) -> None:
    """Raises DriverError for addresses that kernels cannot use."""
    if overlap(buffer, LOCAL_WINDOW) or overlap(buffer, SHARED_WINDOW) or buffer.stop > ADDRESS_LIMIT:
        raise DriverError(
            f"The GPU driver put a buffer at {buffer.start:#x}, where kernels cannot reach it.", REPORT
        )
