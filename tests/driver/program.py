"""A kernel's launch: the code from the GPU's memory, run on this CPU with the GPU's page table."""

from __future__ import annotations

import ctypes
import functools
from ctypes import Structure, c_uint8, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass

from tests.driver.compiler import CODE_AT, HEADER, MAGIC, RESERVED_SHARED
from tests.driver.space import PAGE, REACH, Space, Unmapped, map_pages

WINDOW_BYTES = 1 << 32
_HEAP_BYTES = 256 << 20  # what is not touched costs nothing
_SHARED_MOST = 164 << 10


backwards = False
"""Whether the last warp of a block goes first."""


class Fault(Exception):
    """A multiprocessor stops. `warp_esr` is its error state."""

    def __init__(self, what: str, address: int, warp_esr: int):
        super().__init__(f"{what} at {address:#x}")
        self.what, self.address, self.warp_esr = what, address, warp_esr


_FAULTS = {
    2: ("a global access in a memory window", 0x10),
    3: ("a misaligned access", 0x0F),
    4: ("an access beyond shared memory", 0x0E),
    5: ("threads of a block at two barriers", 0x14),
    6: ("too many threads, or too large ones, for the simulator", 0),
}


@dataclass
class Launch:
    """What a launch descriptor says. Addresses are the GPU's."""

    program: int
    constants: int
    constant_bytes: int
    shared_bytes: int
    grid: tuple[int, int, int]
    block: tuple[int, ...]
    windows: tuple[int, int]  # local, shared


class Context(Structure):
    """As in cuda.hpp."""

    _fields_ = (
        ("pages", c_uint64),
        ("n_pages", c_uint64),
        ("local_window", c_uint64),
        ("shared_window", c_uint64),
        ("window_bytes", c_uint64),
        ("constants", c_uint64),
        ("shared", c_uint64),
        ("shared_bytes", c_uint64),
        ("heap", c_uint64),
        ("heap_bytes", c_uint64),
        ("grid", c_uint32 * 3),
        ("block", c_uint32 * 3),
        ("functions", c_void_p * 3),
        ("fault", c_uint64),
        ("fault_address", c_uint64),
        ("loads_and_stores", c_uint64),
        ("backwards", c_uint64),
        ("running", c_void_p),
        ("launcher", c_void_p),
        ("scrap", c_uint8 * 64),
    )


def run(space: Space, launch: Launch) -> int:
    """How many loads and stores the kernel made. Raises Fault or Unmapped where one of them was wrong."""
    magic, n, entry, constant_end, shared_bytes = HEADER.unpack(space.read(launch.program, HEADER.size))
    if magic != MAGIC:
        raise Fault("an illegal instruction", launch.program, 0x09)
    if constant_end > launch.constant_bytes or shared_bytes + RESERVED_SHARED > launch.shared_bytes:
        raise Fault("constants or shared memory too small", launch.program, 0x0E)
    if launch.shared_bytes > _SHARED_MOST:
        raise Fault("too much shared memory", launch.program, 0)
    code = _load(space.read(launch.program + CODE_AT, n))
    constants = space.read(launch.constants, constant_end)
    heap, shared = _scratch()
    aligned = ctypes.create_string_buffer(constants, len(constants))
    context = Context(
        pages=space.table,
        n_pages=REACH // PAGE,
        local_window=launch.windows[0],
        shared_window=launch.windows[1],
        window_bytes=WINDOW_BYTES,
        constants=ctypes.addressof(aligned),
        shared=shared,
        shared_bytes=launch.shared_bytes - RESERVED_SHARED,
        heap=heap,
        heap_bytes=_HEAP_BYTES,
        grid=launch.grid,
        block=launch.block,
        functions=_functions(),
        backwards=backwards,
    )
    _check_driver_constants(constants, launch.windows)
    ctypes.CFUNCTYPE(None, c_void_p)(code + entry)(ctypes.addressof(context))
    if context.fault == 1:
        raise Unmapped(context.fault_address)
    if context.fault:
        what, warp_esr = _FAULTS[context.fault]
        raise Fault(what, context.fault_address, warp_esr)
    return context.loads_and_stores


def _check_driver_constants(constants: bytes, windows: tuple[int, int]) -> None:
    """Words 6 to 9 of the bank, from which generic addresses are made, agree with the windows that were set."""
    shared, local = (int.from_bytes(constants[at : at + 8], "little") for at in (0x18, 0x20))
    if (local, shared) != windows:
        raise Fault("windows other than the channel's", shared, 0x10)


@functools.cache
def _load(code: bytes) -> int:
    address = map_pages(-1, len(code), executable=True)
    ctypes.memmove(address, code, len(code))
    return address


@functools.cache
def _scratch() -> tuple[int, int]:
    return map_pages(-1, _HEAP_BYTES), map_pages(-1, _SHARED_MOST)


@functools.cache
def _functions():
    libm = ctypes.CDLL("libm.so.6")
    return (c_void_p * 3)(
        *(ctypes.cast(getattr(libm, f), c_void_p).value for f in ("exp2f", "log2f", "sinf"))
    )
