"""A Linux with nvmap and nvgpu, as far as their callers can tell: nodes, descriptors, and the drivers' own rules.

Descriptors are real ones and buffers real shared memory, so that what is not closed or unmapped can be counted. The
rules (order, sizes, flags, errno) are those of the drivers' sources in L4T r36.4.4: common/fifo/channel.c,
os/linux/ioctl_*.c, common/mm/vm.c, nvmap_ioctl.c. What the graphics context is made of, the SMMU, power, and the
time that things take are not simulated.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable
from ctypes import sizeof
from dataclasses import dataclass, field

from engine.tegra import abi
from engine.tegra.driver import System
from tests.driver.buddy import PAGE, Full
from tests.driver.gpu import Gpu
from tests.driver.space import REACH, Space

COMPUTE_CLASS, COPY_CLASS, MULTIPROCESSORS = 0xC7C0, 0xC7B5, 8
REQUESTS = [value for value in vars(abi).values() if isinstance(value, abi.Request)]
_KNOWN = {(r.number >> 8 & 0xFF, r.number & 0xFF): r for r in REQUESTS}
_MAGIC = {"nvmap": "N", "ctrl": "G", "as": "A", "tsg": "T", "channel": "H"}
_CONTEXT_BUFFERS = (4096, 65536, 1 << 20, 16 << 20)  # of a graphics context, roughly
PDE_BYTES = 2 << 20  # what an entry of the page directory covers: ranges begin and end at multiples of it


@dataclass
class Buffer:
    """What an nvmap handle stands for."""

    size: int
    fd: int = -1  # the kernel's own reference, once there is memory


@dataclass
class Tsg:
    space: Space | None = None
    channels: list[Channel] = field(default_factory=list)
    errors: list[tuple[int, int]] = field(default_factory=lambda: [(0, 0)] * MULTIPROCESSORS)


@dataclass
class Channel:
    """`gpu` runs from set-up to the last close."""

    id: int
    space: Space | None = None
    tsg: Tsg | None = None
    watchdog: bool = True
    gpu: Gpu | None = None
    objects: list[int] = field(default_factory=list)
    notifier: int = -1  # descriptor of the buffer that errors go to
    held: list[int] = field(default_factory=list)  # descriptors


def refuse(number: int) -> OSError:
    return OSError(number, os.strerror(number))


def require(condition: object, number: int = errno.EINVAL) -> None:
    if not condition:
        raise refuse(number)


class SimulatedKernel(System):
    """Put into `engine.tegra.driver.system`. `warnings` is the kernel's log.

    `fail(i, number)` makes the i-th call from now on fail, `fail_at(name, number)` the next one whose name ends so;
    `calls` are the names of those made since.
    """

    def __init__(self, memory_bytes: int = 8 << 30, nodes: tuple[str, ...] = (abi.NVMAP, abi.CTRL)):
        self.memory_bytes, self.nodes = memory_bytes, nodes
        self.files: dict[int, tuple[str, object]] = {}
        self.handles: dict[int, Buffer] = {}
        self.allocated: list[abi.NvmapAlloc] = []  # as asked for
        self.used = 0  # bytes in buffers that live, by anybody's reference
        self.sizes: dict[int, int] = {}  # of living buffers, by inode
        self.mappings: dict[int, tuple[int, int]] = {}  # address in the process: bytes, the buffer's inode
        self.doorbells: dict[int, int] = {}  # control descriptor: its page's descriptor
        self.spaces: list[Space] = []
        self.warnings: list[str] = []
        self.calls: list[str] = []
        self.next_channel, self.next_handle = 511, 0x8000_0001
        self._failing: tuple[int | str, int] | None = None
        self.gpu_flags = 0x01BF5FFF7F5D035D  # an AGX Orin's
        self.same_addresses = (
            False  # whether a buffer may have the GPU's address here too; else they are not mixed up
        )
        self.silent = False  # GPUs do not say how far they are in their rings
        self.sm_version, self.characteristics_bytes = 0x807, sizeof(abi.Characteristics)
        self.gpus: list[Gpu] = []

    def fail(self, index: int, number: int) -> None:
        self.calls.clear()
        self._failing = (index, number)

    def fail_at(self, name: str, number: int) -> None:
        self.calls.clear()
        self._failing = (name, number)

    # ---- the calls ----

    def open(self, path: str) -> int:
        self._count(f"open {path}")
        require(path in self.nodes, errno.ENOENT)
        return self._descriptor("nvmap" if path == abi.NVMAP else "ctrl", None)

    def close(self, fd: int) -> None:
        kind, thing = self.files.pop(fd)
        if fd in self.doorbells:
            os.close(self.doorbells.pop(fd))
        os.close(fd)
        if kind == "channel":
            self._close_channel(thing)
        if kind == "nvmap":  # handles are their client's
            for handle in list(self.handles):
                self._nvmap_ioc_free(None, handle)
        self._collect()

    def ioctl(self, fd: int, number: int, argument: ctypes.Structure | int) -> None:
        kind, thing = self.files[fd]
        magic, nr, size = chr(number >> 8 & 0xFF), number & 0xFF, number >> 16 & 0x3FFF
        request = _KNOWN.get((ord(magic), nr))
        self._count(request.name if request else f"ioctl {number:#x}")
        require(_MAGIC.get(kind) == magic and request is not None)
        if request.number != number:
            raise refuse(errno.ENOTTY)
        require(isinstance(argument, int) or sizeof(argument) == size)
        handler: Callable[..., None] = getattr(self, "_" + request.name.lower())
        handler(thing, argument)

    def mmap(self, fd: int, length: int, at: int = 0) -> int:
        if at and not self.same_addresses:
            raise refuse(errno.EEXIST)
        kind, thing = self.files[fd]
        self._count(f"mmap {kind}")
        if kind == "ctrl":
            require(length <= abi.DOORBELL_BYTES)
            require(fd not in self.doorbells, errno.EBUSY)
            self.doorbells[fd] = os.memfd_create("doorbell")
            os.ftruncate(self.doorbells[fd], abi.DOORBELL_BYTES)
            address = super().mmap(self.doorbells[fd], length)
            for gpu in self.gpus:
                gpu.ring_at(self.doorbells[fd])
        else:
            require(kind == "dmabuf" and length <= thing.size)
            address = super().mmap(fd, length, at)
        self.mappings[address] = (length, os.fstat(self.doorbells.get(fd, fd)).st_ino)
        return address

    def munmap(self, address: int, length: int) -> None:
        assert self.mappings.pop(address)[0] == length, "not as it was mapped"
        super().munmap(address, length)
        self._collect()

    def replace_by_private(self, address: int, length: int) -> None:
        assert self.mappings.pop(address)[0] == length
        super().replace_by_private(address, length)
        self._collect()

    def leaks(self) -> list[str]:
        """What a process that let go of everything left behind."""
        left = [f"descriptor {fd} of {kind}" for fd, (kind, _) in self.files.items()]
        left += [f"mapping of {size} bytes" for size, _ in self.mappings.values()]
        left += [f"handle {handle:#x}" for handle in self.handles]
        left += [f"buffer of {size} bytes" for size in self.sizes.values()]
        left += [f"address space with {len(s.mapped)} buffers" for s in self.spaces]
        return left + [f"GPU of channel {gpu.name}" for gpu in self.gpus if gpu.running]

    # ---- nvmap ----

    def _nvmap_ioc_create(self, _: object, a: abi.NvmapCreate) -> None:
        a.handle = self._create(a.size)

    def _nvmap_ioc_create_64(self, _: object, a: abi.NvmapCreate64) -> None:
        a.size_or_handle = self._create(a.size_or_handle)

    def _create(self, size: int) -> int:
        require(size)
        handle, self.next_handle = self.next_handle, self.next_handle + 1
        self.handles[handle] = Buffer(-(-size // PAGE) * PAGE)
        return handle

    def _nvmap_ioc_alloc(self, _: object, a: abi.NvmapAlloc) -> None:
        buffer = self._handle(a.handle)
        require(a.align & (a.align - 1) == 0 and a.numa_nid >= -1)
        require(buffer.fd < 0, errno.EEXIST)
        require(a.heap_mask & abi.HEAP_IOVMM, errno.ENOMEM)
        if not a.flags >> abi.TAG_SHIFT:
            self.warnings.append("nvmap: a buffer without a tag")
        require(self.used + buffer.size <= self.memory_bytes, errno.ENOMEM)
        self.allocated.append(abi.NvmapAlloc.from_buffer_copy(a))
        buffer.fd = os.memfd_create("dmabuf")
        os.ftruncate(buffer.fd, buffer.size)
        # Whoever had these pages before wrote to them.
        if not a.flags & abi.ZEROED and buffer.size <= 1 << 20:
            os.pwrite(buffer.fd, b"\xaa" * buffer.size, 0)
        self.sizes[os.fstat(buffer.fd).st_ino] = buffer.size
        self.used += buffer.size

    def _nvmap_ioc_get_fd(self, _: object, a: abi.NvmapGetFd) -> None:
        buffer = self._handle(a.handle)
        require(buffer.fd >= 0)
        a.fd = os.dup(buffer.fd)
        self.files[a.fd] = ("dmabuf", buffer)

    def _nvmap_ioc_free(self, _: object, handle: int) -> None:
        buffer = self._handle(handle & 0xFFFF_FFFF)
        del self.handles[handle & 0xFFFF_FFFF]
        if buffer.fd >= 0:
            os.close(buffer.fd)
        self._collect()

    def _handle(self, handle: int) -> Buffer:
        require(handle in self.handles)
        return self.handles[handle]

    # ---- nvgpu: control ----

    def _nvgpu_gpu_ioctl_get_characteristics(self, _: object, a: abi.GetCharacteristics) -> None:
        found = abi.Characteristics(
            arch=0x170,
            impl=0xB,
            num_gpc=1,
            l2_cache_size=4 << 20,
            num_tpc_per_gpc=MULTIPROCESSORS // 2,
            flags=self.gpu_flags,
            compute_class=COMPUTE_CLASS,
            gpfifo_class=0xC76F,
            dma_copy_class=COPY_CLASS,
            gpc_mask=1,
            sm_version=self.sm_version,
            warp_count=96,
            gpu_va_bit_count=40,
            chipname=b"ga10b",
        )
        ctypes.memmove(a.address, ctypes.addressof(found), min(a.size, sizeof(found)))
        a.size = self.characteristics_bytes

    def _nvgpu_gpu_ioctl_num_vsms(self, _: object, a: abi.NumVsms) -> None:
        a.num_vsms = MULTIPROCESSORS

    def _nvgpu_gpu_ioctl_get_memory_state(self, _: object, a: abi.MemoryState) -> None:
        a.total_free_bytes = self.memory_bytes - self.used

    def _nvgpu_gpu_ioctl_flush_l2(self, _: object, a: abi.FlushL2) -> None:
        require(a.flags & ~7 == 0 and (a.flags & abi.L2_FLUSH or not a.flags & abi.L2_INVALIDATE))

    def _nvgpu_gpu_ioctl_alloc_as(self, _: object, a: abi.AllocAs) -> None:
        require(a.flags == abi.AS_UNIFIED_VA and a.reserved == 0 and a.va_range_split == 0)
        require(a.big_page_size == 0)
        start, end = a.va_range_start, a.va_range_end
        require(0 < start < end <= 1 << 49 and start % PDE_BYTES == 0 and end % PDE_BYTES == 0)
        self.spaces.append(space := Space(start, end))
        a.as_fd = self._descriptor("as", space)

    def _nvgpu_gpu_ioctl_open_tsg(self, _: object, a: abi.OpenTsg) -> None:
        require(a.flags == 0 and a.share_token == 0)
        a.tsg_fd = self._descriptor("tsg", Tsg())

    def _nvgpu_gpu_ioctl_open_channel(self, _: object, a: abi.OpenChannel) -> None:
        require(a.runlist_id_or_fd == abi.RUNLIST_GR)
        channel, self.next_channel = Channel(self.next_channel), self.next_channel - 1
        a.runlist_id_or_fd = self._descriptor("channel", channel)

    # ---- nvgpu: address space ----

    def _nvgpu_as_ioctl_bind_channel(self, space: Space, a: abi.BindChannel) -> None:
        channel = self._of("channel", a.channel_fd)
        require(channel.space is None)
        channel.space = space

    def _nvgpu_as_ioctl_alloc_space(self, space: Space, a: abi.AllocSpace) -> None:
        require(a.page_size == PAGE and a.flags & ~3 == 0)
        size = a.pages * PAGE
        try:
            if a.flags & abi.SPACE_FIXED_OFFSET:
                space.user.alloc_fixed(a.offset, size)
            else:
                a.offset = space.user.alloc(size)
        except Full:
            raise refuse(errno.EINVAL if a.flags & abi.SPACE_FIXED_OFFSET else errno.ENOMEM) from None
        space.reserved[a.offset] = size

    def _nvgpu_as_ioctl_map_buffer_ex(self, space: Space, a: abi.MapBufferEx) -> None:
        buffer = self._of("dmabuf", a.dmabuf_fd)
        require(a.flags & ~(4 | 1 << 9) == 0)  # fixed addresses are not simulated
        require(a.compr_kind == -1 and a.incompr_kind == 0 and a.page_size == PAGE)
        require(a.offset == 0 and a.buffer_offset == 0 and a.mapping_size == 0)
        inode = os.fstat(a.dmabuf_fd).st_ino
        assert inode not in space.fds.values(), "mapping a buffer twice is not simulated"
        try:
            a.offset = space.map(a.dmabuf_fd, buffer.size, inode)
        except Full:
            raise refuse(errno.ENOMEM) from None

    def _nvgpu_as_ioctl_unmap_buffer(self, space: Space, a: abi.UnmapBuffer) -> None:
        require(a.offset in space.mapped)
        space.unmap(a.offset)
        self._collect()

    def _nvgpu_as_ioctl_get_va_regions(self, space: Space, a: abi.GetVaRegions) -> None:
        pages = (space.user.end - space.user.base) // PAGE
        region = abi.VaRegion(offset=space.user.base, page_size=PAGE, pages=pages)
        ctypes.memmove(a.address, ctypes.addressof(region), min(a.size, sizeof(region)))
        a.size = sizeof(region)

    # ---- nvgpu: time slice group and channel ----

    def _nvgpu_tsg_ioctl_create_subcontext(self, tsg: Tsg, a: abi.CreateSubcontext) -> None:
        require(a.type == abi.SUBCONTEXT_ASYNC and a.reserved == 0)
        tsg.space = self._of("as", a.as_fd)
        a.veid = 1

    def _nvgpu_tsg_ioctl_bind_channel_ex(self, tsg: Tsg, a: abi.TsgBindChannelEx) -> None:
        channel = self._of("channel", a.channel_fd)
        require(a.subcontext_id == 1 and channel.tsg is None)
        require(channel.space is not None and channel.space is tsg.space)
        channel.tsg = tsg
        tsg.channels.append(channel)

    def _nvgpu_tsg_ioctl_read_all_sm_error_states(self, tsg: Tsg, a: abi.ReadSmErrors) -> None:
        require(a.num_sm == MULTIPROCESSORS and a.size >= MULTIPROCESSORS * sizeof(abi.SmError))
        states = (abi.SmError * MULTIPROCESSORS)()
        for state, (everywhere, warp) in zip(states, tsg.errors, strict=True):
            state.global_esr, state.warp_esr = everywhere, warp
        ctypes.memmove(a.address, ctypes.addressof(states), sizeof(states))

    def _nvgpu_ioctl_channel_wdt(self, channel: Channel, a: abi.ChannelWdt) -> None:
        require(a.wdt_status == abi.WDT_DISABLE)
        channel.watchdog = False

    def _nvgpu_ioctl_channel_setup_bind(self, channel: Channel, a: abi.SetupBind) -> None:
        require(a.flags == abi.SETUP_DETERMINISTIC | abi.SETUP_USERMODE and a.num_inflight_jobs == 0)
        require(channel.space and channel.tsg)
        require(channel.gpu is None, errno.EEXIST)
        require(not channel.watchdog)
        n = a.num_gpfifo_entries
        require(n >= 2 and n & (n - 1) == 0)
        require(a.userd_dmabuf_fd and a.gpfifo_dmabuf_fd)
        require(a.userd_dmabuf_offset == 0 and a.gpfifo_dmabuf_offset == 0)
        ring, userd = self._of("dmabuf", a.gpfifo_dmabuf_fd), self._of("dmabuf", a.userd_dmabuf_fd)
        require(ring.size >= max(PAGE, n * 8) and userd.size >= PAGE)
        self._own(channel, ring.size)
        channel.held = [os.dup(a.gpfifo_dmabuf_fd), os.dup(a.userd_dmabuf_fd)]
        a.work_submit_token = channel.id
        channel.gpu = Gpu(
            channel.id, n, *channel.held, channel.space, lambda *fault: self._stop(channel, *fault)
        )
        channel.gpu.silent = self.silent
        self.gpus.append(channel.gpu)
        for fd in self.doorbells.values():
            channel.gpu.ring_at(fd)

    def _nvgpu_ioctl_channel_alloc_obj_ctx(self, channel: Channel, a: abi.AllocObjCtx) -> None:
        self._alive(channel)
        require(channel.gpu and a.flags == 0 and a.class_num in (COMPUTE_CLASS, COPY_CLASS))
        if not channel.objects:
            for size in _CONTEXT_BUFFERS:
                self._own(channel, size)
        channel.objects.append(a.class_num)
        channel.gpu.classes.append(a.class_num)

    def _nvgpu_ioctl_channel_set_error_notifier(self, channel: Channel, a: abi.SetErrorNotifier) -> None:
        require(a.dmabuf_fd and a.padding == 0)
        buffer = self._of("dmabuf", a.dmabuf_fd)
        require(a.offset + sizeof(abi.Notification) <= buffer.size)
        channel.notifier = os.dup(a.dmabuf_fd)
        os.pwrite(channel.notifier, bytes(sizeof(abi.Notification)), 0)

    def _own(self, channel: Channel, size: int) -> None:
        """A buffer of nvgpu's own in the kernel's part of the address space."""
        va = channel.space.kernel.alloc(size)
        if va + size > REACH:
            self.warnings.append(f"nvgpu: a context buffer at {va:#x}, beyond 40 bits")

    def _alive(self, channel: Channel) -> None:
        require(channel.gpu is None or channel.gpu.fault is None, errno.ETIMEDOUT)

    def _stop(self, channel: Channel, code: int, warp_esr: int) -> None:
        """What nvgpu does after a fault: it writes the notifier, and the channel serves nobody any more."""
        if warp_esr:
            channel.tsg.errors[3] = (0x24, warp_esr)
        if channel.notifier >= 0:
            note = abi.Notification(time_ns=1, info32=code, status=0xFFFF)
            os.pwrite(channel.notifier, bytes(note), 0)

    def _close_channel(self, channel: Channel) -> None:
        if channel.gpu is not None:
            channel.gpu.stop()
        for fd in (*channel.held, channel.notifier):
            if fd >= 0:
                os.close(fd)
        channel.held, channel.notifier = [], -1
        if channel.tsg is not None:
            channel.tsg.channels.remove(channel)
        channel.space = None

    # ---- common ----

    def _count(self, name: str) -> None:
        self.calls.append(name)
        if self._failing is None:
            return
        which, number = self._failing
        if which == len(self.calls) - 1 or (isinstance(which, str) and name.endswith(which)):
            self._failing = None
            raise refuse(number)

    def _descriptor(self, kind: str, thing: object) -> int:
        fd = os.eventfd(0)
        self.files[fd] = (kind, thing)
        return fd

    def _of(self, kind: str, fd: int):
        require(fd in self.files, errno.EBADF)
        found, thing = self.files[fd]
        require(found == kind)
        return thing

    def _collect(self) -> None:
        """Address spaces go with the last descriptor or channel; buffers with the last reference of any kind."""
        users = [t for _, t in self.files.values()]
        users += [t.space for _, t in self.files.values() if isinstance(t, Channel | Tsg)]
        for space in [s for s in self.spaces if not any(s is u for u in users)]:
            self.spaces.remove(space)
            space.close()
        held = {os.fstat(b.fd).st_ino for b in self.handles.values() if b.fd >= 0}
        held |= {os.fstat(fd).st_ino for fd, (kind, _) in self.files.items() if kind == "dmabuf"}
        held |= {inode for space in self.spaces for inode in space.fds.values()}
        for _, thing in self.files.values():
            if isinstance(thing, Channel):
                held |= {os.fstat(fd).st_ino for fd in (*thing.held, thing.notifier) if fd >= 0}
        held |= {inode for _, inode in self.mappings.values()}
        for inode in [i for i in self.sizes if i not in held]:
            self.used -= self.sizes.pop(inode)
