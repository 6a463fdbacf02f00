"""The simulated drivers refuse what the real ones refuse (nvgpu's and nvmap's sources, L4T r36.4.4)."""

import ctypes
import errno
import os

import pytest

from engine.tegra import abi
from tests.driver.kernel import SimulatedKernel


class Caller:
    """Makes raw calls. `channel` leads one up to a step: "open", "space", "group", "quiet", "set up"."""

    def __init__(self):
        self.kernel = SimulatedKernel()
        self.nvmap, self.ctrl = (self.kernel.open(node) for node in (abi.NVMAP, abi.CTRL))

    def __call__(self, fd, request, **fields):
        argument = request.argument(**fields)
        self.kernel.ioctl(fd, request.number, argument)
        return argument

    def space(self, **fields):
        wanted = {"flags": 2, "va_range_start": 0x200000, "va_range_end": 0x8000000000} | fields
        return self(self.ctrl, abi.ALLOC_AS, **wanted).as_fd

    def buffer(self, size=8192, **fields):
        handle = self(self.nvmap, abi.NVMAP_CREATE, size=size).handle
        wanted = {"heap_mask": 1 << 30, "flags": 1 << 16, "align": 4096} | fields
        self(self.nvmap, abi.NVMAP_ALLOC, handle=handle, **wanted)
        return self(self.nvmap, abi.NVMAP_GET_FD, handle=handle).fd

    def channel(self, until="set up"):
        tsg, space = self(self.ctrl, abi.OPEN_TSG).tsg_fd, self.space()
        channel = self(self.ctrl, abi.OPEN_CHANNEL, runlist_id_or_fd=-1).runlist_id_or_fd
        steps = {
            "space": lambda: self(space, abi.AS_BIND_CHANNEL, channel_fd=channel),
            "subcontext": lambda: self(tsg, abi.TSG_CREATE_SUBCONTEXT, type=1, as_fd=space),
            "group": lambda: self(tsg, abi.TSG_BIND_CHANNEL_EX, channel_fd=channel, subcontext_id=1),
            "quiet": lambda: self(channel, abi.CHANNEL_WDT, wdt_status=1),
            "set up": lambda: self.set_up(channel),
        }
        for step, make in steps.items():
            if until == "open":
                break
            make()
            if step == until:
                break
        return channel, tsg, space

    def set_up(self, channel, ring=8192, **fields):
        wanted = {"num_gpfifo_entries": 1024, "flags": 0x0A, "userd_dmabuf_fd": self.buffer(4096)}
        return self(
            channel, abi.CHANNEL_SETUP_BIND, **wanted | {"gpfifo_dmabuf_fd": self.buffer(ring)} | fields
        )


@pytest.fixture
def call():
    caller = Caller()
    yield caller
    for fd in list(caller.kernel.files):
        caller.kernel.close(fd)
    assert caller.kernel.leaks() == []


def refuses(number, make):
    with pytest.raises(OSError) as caught:
        make()
    assert caught.value.errno == number, os.strerror(caught.value.errno)


def test_numbers_and_sizes(call):
    other = (
        abi.ALLOC_AS.number & ~(0x3FFF << 16)
    ) | 72 << 16  # a known request with another structure's size
    refuses(errno.ENOTTY, lambda: call.kernel.ioctl(call.ctrl, other, abi.AllocAs()))
    refuses(errno.EINVAL, lambda: call(call.ctrl, abi.NVMAP_CREATE, size=4096))  # another driver's
    unknown = abi.ALLOC_AS.number | 0xFF
    refuses(errno.EINVAL, lambda: call.kernel.ioctl(call.ctrl, unknown, abi.AllocAs()))
    refuses(errno.ENOENT, lambda: call.kernel.open("/dev/nvidiactl"))


@pytest.mark.parametrize(
    ("number", "fields"),
    [
        (errno.ENOMEM, {"heap_mask": 1 << 31}),
        (errno.EINVAL, {"align": 3000}),
        (errno.EINVAL, {"numa_nid": -2}),
        (errno.ENOMEM, {"size": 1 << 31}),
    ],
)
def test_buffers(call, number, fields):
    call.kernel.memory_bytes = 1 << 30
    refuses(number, lambda: call.buffer(**fields))


def test_handles(call):
    handle = call(call.nvmap, abi.NVMAP_CREATE, size=5000).handle
    assert handle >> 31
    refuses(errno.EINVAL, lambda: call(call.nvmap, abi.NVMAP_GET_FD, handle=handle))  # nothing there yet
    alloc = lambda: call(call.nvmap, abi.NVMAP_ALLOC, handle=handle, heap_mask=1 << 30, align=4096)
    alloc()
    assert call.kernel.warnings == ["nvmap: a buffer without a tag"]
    refuses(errno.EEXIST, alloc)
    call.kernel.ioctl(call.nvmap, abi.NVMAP_FREE.number, ctypes.c_int32(handle).value)
    refuses(errno.EINVAL, lambda: call(call.nvmap, abi.NVMAP_GET_FD, handle=handle))


@pytest.mark.parametrize(
    "fields",
    [
        {"va_range_start": 0},
        {"va_range_start": 0x1000},
        {"va_range_end": 0x7FFFF000},
        {"va_range_end": 0x200000},
        {"va_range_split": 0x400000},
        {"flags": 0},
    ],
)
def test_address_spaces(call, fields):
    refuses(errno.EINVAL, lambda: call.space(**fields))


def test_mappings(call):
    space, buffer = call.space(), call.buffer()
    wanted = {"compr_kind": -1, "dmabuf_fd": buffer, "page_size": 4096}
    for wrong in (
        {"compr_kind": 0},
        {"page_size": 65536},
        {"offset": 4096},
        {"mapping_size": 4096},
        {"flags": 2},
    ):
        refuses(errno.EINVAL, lambda wrong=wrong: call(space, abi.AS_MAP_BUFFER_EX, **wanted | wrong))
    refuses(errno.EBADF, lambda: call(space, abi.AS_MAP_BUFFER_EX, **wanted | {"dmabuf_fd": 9999}))
    va = call(space, abi.AS_MAP_BUFFER_EX, **wanted).offset
    call(space, abi.AS_UNMAP_BUFFER, offset=va)
    refuses(errno.EINVAL, lambda: call(space, abi.AS_UNMAP_BUFFER, offset=va))
    reserve = {"pages": 16, "page_size": 4096, "flags": 1}
    call(space, abi.AS_ALLOC_SPACE, offset=0x10000000, **reserve)
    refuses(errno.EINVAL, lambda: call(space, abi.AS_ALLOC_SPACE, offset=0x10001000, **reserve))
    refuses(errno.EINVAL, lambda: call(space, abi.AS_ALLOC_SPACE, offset=0xFD00000000, **reserve))


def test_the_order_of_a_channel(call):
    for until in ("open", "space", "subcontext", "group"):  # without a group, or with the watchdog
        refuses(errno.EINVAL, lambda until=until: call.set_up(call.channel(until)[0]))
    channel, tsg, space = call.channel("open")
    call(tsg, abi.TSG_CREATE_SUBCONTEXT, type=1, as_fd=space)
    bind = lambda: call(tsg, abi.TSG_BIND_CHANNEL_EX, channel_fd=channel, subcontext_id=1)
    refuses(errno.EINVAL, bind)  # before the address space
    call(space, abi.AS_BIND_CHANNEL, channel_fd=channel)
    refuses(errno.EINVAL, lambda: call(space, abi.AS_BIND_CHANNEL, channel_fd=channel))
    bind()
    refuses(errno.EINVAL, bind)
    refuses(errno.EINVAL, lambda: call(channel, abi.CHANNEL_ALLOC_OBJ_CTX, class_num=0xC7C0))  # no ring yet


@pytest.mark.parametrize(
    "fields",
    [
        {"num_gpfifo_entries": 1000},
        {"num_gpfifo_entries": 1},
        {"num_gpfifo_entries": 2048},  # more than the buffer holds
        {"flags": 0x08},
        {"flags": 0x02},
        {"userd_dmabuf_fd": 0},
        {"gpfifo_dmabuf_fd": 0},
        {"userd_dmabuf_offset": 4096},
        {"gpfifo_dmabuf_offset": 4096},
    ],
)
def test_rings(call, fields):
    channel, _, _ = call.channel("quiet")
    refuses(errno.EINVAL, lambda: call.set_up(channel, **fields))
    assert call.set_up(channel).work_submit_token == 511
    refuses(errno.EEXIST, lambda: call.set_up(channel))


def test_what_else_is_refused(call):
    channel, tsg, _ = call.channel()
    refuses(errno.EINVAL, lambda: call(channel, abi.CHANNEL_ALLOC_OBJ_CTX, class_num=0xC9C0))
    refuses(errno.EINVAL, lambda: call(channel, abi.CHANNEL_SET_ERROR_NOTIFIER, dmabuf_fd=0))
    refuses(errno.EINVAL, lambda: call(tsg, abi.TSG_READ_SM_ERRORS, num_sm=4))
    refuses(errno.EINVAL, lambda: call(call.ctrl, abi.FLUSH_L2, flags=abi.L2_INVALIDATE))
    refuses(errno.EINVAL, lambda: call(call.ctrl, abi.OPEN_TSG, share_token=1))
    refuses(errno.EINVAL, lambda: call(call.ctrl, abi.OPEN_CHANNEL, runlist_id_or_fd=3))
    refuses(errno.EINVAL, lambda: call.kernel.mmap(call.ctrl, abi.DOORBELL_BYTES * 2))
    page = call.kernel.mmap(call.ctrl, abi.DOORBELL_BYTES)
    refuses(errno.EBUSY, lambda: call.kernel.mmap(call.ctrl, abi.DOORBELL_BYTES))
    call.kernel.munmap(page, abi.DOORBELL_BYTES)


def test_a_large_ring_pushes_the_drivers_contexts_out_of_reach_with_the_first_ports_range(call):
    """3 MiB, as the first port's: with it the board froze. With ours there is room for any."""
    for end, warned in ((0x8000000000, False), (0xFFFFE00000, True)):
        call.kernel.warnings.clear()
        call.space = lambda end=end: Caller.space(call, va_range_end=end)
        channel, _, _ = call.channel("quiet")
        call.set_up(channel, ring=3 << 20)
        call(channel, abi.CHANNEL_ALLOC_OBJ_CTX, class_num=0xC7C0)
        assert bool(call.kernel.warnings) is warned
