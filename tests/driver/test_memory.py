"""Buffers on the simulated driver: sizes, addresses, and what happens when there is no room."""

import ctypes
import errno

import pytest
from tinygrad.device import BufferSpec

from engine.tegra import abi, memory
from engine.tegra.driver import Control, Nvmap
from engine.tegra.errors import DriverError, DriverMemoryError
from tests.driver.conftest import buffer, contents, held
from tests.driver.kernel import SimulatedKernel
from tests.driver.simulate import simulated
from tests.driver.space import map_pages, unmap_pages

MIB, GIB = 1 << 20, 1 << 30
FIRST_PORT = range(0x200000, 0xFFFFE00000)  # its range of addresses, which held the windows


@pytest.fixture
def space():
    """nvmap and an address space on a machine with 64 GiB."""
    with simulated(SimulatedKernel(memory_bytes=64 * GIB)) as kernel:
        nvmap, control = Nvmap(), Control()
        made = []

        def open_(addresses=memory.BUFFERS):
            made.append(control.address_space(addresses.start, addresses.stop))
            return made[-1], memory.Memory(nvmap, made[-1])

        yield kernel, open_
        for thing in (*made, control, nvmap):
            thing.close()


def test_the_size_asked_for_is_the_buffers_and_whole_pages_are_mapped(board):
    device = board.open()
    for size in (1, 4096, 5000, 1 << 20):
        made = buffer(device, size=size)
        assert made.size == size and made.meta.size == -(-size // 4096) * 4096
        assert made.va_addr != made.cpu_view().addr  # nothing may take one for the other
        assert len(device.allocator._as_buffer(made)) == size
    values = bytes(range(256)) * 20
    assert bytes(contents(device, buffer(device, values), ctypes.c_uint8)) == values


def test_a_buffer_has_the_gpus_address_here_too_where_that_is_free(board):
    board.kernel.same_addresses = True
    device = board.open()
    made = buffer(device, size=64 << 10)
    assert made.va_addr == made.cpu_view().addr
    device.allocator.free(made, made.size, BufferSpec(nolru=True))
    taken = map_pages(-1, 64 << 10, at=made.va_addr)
    other = buffer(device, b"abcd" * 16384)  # the same address again, for the GPU
    assert other.va_addr == made.va_addr != other.cpu_view().addr
    assert bytes(contents(device, other, ctypes.c_uint8)) == b"abcd" * 16384
    unmap_pages(taken, 64 << 10)


def test_buffers_from_8_mib_lie_in_large_pages_and_those_from_4_gib_are_made_too(board):
    board.kernel.memory_bytes = 16 * GIB
    device = board.open()
    board.kernel.calls.clear()
    for size, alignment in ((8 * MIB - 4096, 4096), (8 * MIB, 2 * MIB), (5 * GIB, 2 * MIB)):
        buffer(device, size=size)
        asked = board.kernel.allocated[-1]
        assert asked.align == alignment and asked.flags & 3 == abi.INNER_CACHEABLE
    assert board.kernel.calls.count("NVMAP_IOC_CREATE_64") == 1
    assert board.kernel.warnings == []


def test_zeroed_where_asked(board):
    device = board.open()
    dirty = device.allocator.alloc(4096, BufferSpec(nolru=True))
    clean = device.allocator.alloc(4096, BufferSpec(zero=True))
    assert any(contents(device, dirty)) and not any(contents(device, clean))


def test_many_buffers_need_no_descriptors(board):
    device = board.open()
    before = held()[0]
    made = [buffer(device, size=4096) for _ in range(300)]
    assert held()[0] == before and len(board.kernel.handles) == 0
    for one in made:
        device.allocator.free(one, one.size, BufferSpec(nolru=True))
    assert sum(len(s.mapped) for s in board.kernel.spaces) < 10


def test_addresses_are_reused_and_a_buffer_is_freed_once(board):
    memory = board.open().iface.memory
    first = memory.allocate(64 << 10)
    memory.free(first)
    second = memory.allocate(64 << 10)
    assert second.va == first.va
    memory.free(first)  # which is gone: not the one that has its address now
    assert second.va in board.kernel.spaces[0].mapped


@pytest.mark.parametrize("number", [errno.ENOMEM, errno.EMFILE])
def test_no_room_is_a_memory_error_and_leaves_nothing(board, number):
    memory = board.open().iface.memory
    before = held()
    for name in ("CREATE", "ALLOC", "GET_FD", "MAP_BUFFER_EX", "mmap dmabuf"):
        board.kernel.fail_at(name, number)
        with pytest.raises(MemoryError, match=errno.errorcode[number]):
            memory.allocate(8192)
        assert held() == before and not board.kernel.handles
    board.kernel.fail_at("NVMAP_IOC_FREE", number)
    memory.free(memory.allocate(8192))  # a handle that stays until nvmap is closed
    assert held()[1:] == before[1:]


def test_when_memory_is_short_tinygrad_gives_back_what_it_keeps(board):
    device = board.open()
    board.kernel.memory_bytes = board.kernel.used + 20 * MIB
    kept = device.allocator.alloc(15 * MIB)
    device.allocator.free(kept, 15 * MIB)  # into tinygrad's own cache
    assert device.allocator.alloc(16 * MIB).size == 16 * MIB
    with pytest.raises(MemoryError):
        device.allocator.alloc(16 * MIB)


def test_the_first_ports_eighth_large_buffer_lay_in_a_window(space, monkeypatch):
    """What the driver would do with that range, if windows were neither reserved nor checked for."""
    _, open_ = space
    monkeypatch.setattr(memory, "reserve_windows", lambda space: None)
    monkeypatch.setattr(memory, "check_addresses", lambda addresses: None)
    _, buffers = open_(FIRST_PORT)
    addresses = [buffers.allocate(512 * MIB).va for _ in range(8)]
    assert addresses[-1] == 0xFE00200000 and addresses[-1] in memory.SHARED_WINDOW
    buffers.close()


def test_our_range_has_no_window_and_the_kernels_own_part_is_within_reach(space):
    kernel, open_ = space
    made, buffers = open_()
    mappings = [buffers.allocate(512 * MIB) for _ in range(10)]
    mappings += [buffers.allocate(size) for size in (4096, 64 << 10, MIB, 16 * MIB)]
    for m in mappings:
        assert m.va in memory.BUFFERS and m.va + m.size - 1 in memory.BUFFERS
    assert made.regions() == [memory.BUFFERS]
    assert kernel.spaces[0].kernel.end <= memory.LOCAL_WINDOW.start < memory.ADDRESS_LIMIT
    buffers.close()


def test_windows_within_the_range_are_reserved(space):
    """The second guard, for a driver that takes no range: buffers then go around the windows."""
    kernel, open_ = space
    _, buffers = open_(FIRST_PORT)
    assert sorted(kernel.spaces[0].reserved) == [memory.LOCAL_WINDOW.start, memory.SHARED_WINDOW.start]
    for _ in range(12):
        mapping = buffers.allocate(512 * MIB)
        addresses = range(mapping.va, mapping.va + mapping.size)
        assert not memory.overlap(addresses, memory.LOCAL_WINDOW)
        assert not memory.overlap(addresses, memory.SHARED_WINDOW)
    buffers.close()


def test_an_address_in_a_window_is_refused_and_given_back(space, monkeypatch):
    kernel, open_ = space
    monkeypatch.setattr(memory, "reserve_windows", lambda space: None)
    _, buffers = open_(FIRST_PORT)
    with pytest.raises(DriverError, match=r"0xf[de]\w{8}, where kernels"):
        for _ in range(8):
            buffers.allocate(512 * MIB)
    buffers.close()
    assert not kernel.spaces[0].mapped and not kernel.mappings


def test_without_the_reservation_there_is_no_start(space):
    kernel, open_ = space
    kernel.fail(3, errno.EINVAL)  # ALLOC_AS, GET_VA_REGIONS, ALLOC_SPACE, and the second one
    with pytest.raises(DriverError, match="ALLOC_SPACE"):
        open_(FIRST_PORT)


def test_the_address_space_runs_out(space):
    _, open_ = space
    _, buffers = open_(range(0x200000, 0x2200000))
    with pytest.raises(DriverMemoryError, match="MAP_BUFFER_EX failed: ENOMEM"):
        for _ in range(40):
            buffers.allocate(MIB)
    buffers.close()
