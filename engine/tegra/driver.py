"""The calls of nvmap and nvgpu as typed functions. They raise DriverError (engine.tegra.errors).

nvgpu wants them in this order: open an address space, a time slice group (TSG) with a subcontext, and a channel; bind
the channel to the address space, then to the group; disable its watchdog; set up its ring; create its compute object.
`engine.tegra.device` keeps this order.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap as constants
import os
from collections.abc import Iterator
from ctypes import Structure, addressof, sizeof
from typing import TypeVar

from engine.tegra import abi
from engine.tegra.errors import DriverError, driver_error


class System:
    """The system calls, which tests replace by a simulated kernel. All raise OSError."""

    def open(self, path: str) -> int:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)

    def close(self, fd: int) -> None:
        os.close(fd)

    def ioctl(self, fd: int, number: int, argument: Structure | int) -> None:
        fcntl.ioctl(fd, number, argument)

    def mmap(self, fd: int, length: int, at: int = 0) -> int:
        """Maps a file, shared, and returns the address. `at` 0 takes any; at another one, nothing may be mapped."""
        protection = constants.PROT_READ | constants.PROT_WRITE
        kind = constants.MAP_SHARED | (_MAP_FIXED_NOREPLACE if at else 0)
        address = _libc.mmap(at, length, protection, kind, fd, 0)
        if address == _MAP_FAILED:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return int(address)

    def munmap(self, address: int, length: int) -> None:
        _libc.munmap(address, length)

    def replace_by_private(self, address: int, length: int) -> None:
        """Replaces a mapping by zeroed memory of this process."""
        protection = constants.PROT_READ | constants.PROT_WRITE
        kind = constants.MAP_PRIVATE | constants.MAP_ANONYMOUS | _MAP_FIXED
        _libc.mmap(address, length, protection, kind, -1, 0)


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_MAP_FIXED, _MAP_FIXED_NOREPLACE = 0x10, 0x100000
_MAP_FAILED = ctypes.c_void_p(-1).value

system = System()
T = TypeVar("T", bound=Structure)


class File:
    """An open file of the driver. It is closed at most once."""

    def __init__(self, fd: int, name: str) -> None:
        self.fd, self.name = fd, name

    def call(self, request: abi.Request, argument: T) -> T:
        """Makes the request and returns `argument`, which the driver has filled in. Raises DriverError."""
        with _driver_errors(request.name):
            system.ioctl(self.fd, request.number, argument)
        return argument

    def close(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            system.close(fd)


def unmap(address: int, length: int) -> None:
    system.munmap(address, length)


def replace_with_ones(address: int, length: int) -> None:
    """Unmaps what is there. The addresses stay mapped to memory of this process, which reads as ones in all bits."""
    system.replace_by_private(address, length)
    ctypes.memset(address, 0xFF, length)


class Dmabuf(File):
    """The file descriptor and the nvmap handle of a buffer. Mappings keep the buffer alive: it can be closed once they
    are made."""

    def __init__(self, fd: int, nvmap: Nvmap, handle: int) -> None:
        super().__init__(fd, "dmabuf")
        self._nvmap, self._handle = nvmap, handle

    def close(self) -> None:
        if self.fd >= 0:
            super().close()
            self._nvmap.free(self._handle)

    def map(self, length: int, preferred_address: int = 0) -> int:
        """Maps the buffer into this process and returns the address: the preferred one, if nothing is mapped there."""
        with contextlib.suppress(OSError):
            if preferred_address:
                return system.mmap(self.fd, length, preferred_address)
        with _driver_errors("mmap of a buffer"):
            return system.mmap(self.fd, length)


class Nvmap(File):
    """The driver that allocates buffers."""

    def __init__(self) -> None:
        super().__init__(_open(abi.NVMAP), abi.NVMAP)

    def buffer(self, size: int, align: int, cache: int = abi.INNER_CACHEABLE, zero: bool = False) -> Dmabuf:
        """A buffer of `size` bytes, a multiple of 4096, in pages whose addresses are multiples of `align`. Raises
        DriverMemoryError if there is no memory."""
        if size < 1 << 32:
            handle = self.call(abi.NVMAP_CREATE, abi.NvmapCreate(size=size)).handle
        else:
            large = self.call(abi.NVMAP_CREATE_64, abi.NvmapCreate64(size_or_handle=size))
            handle = large.size_or_handle & 0xFFFF_FFFF
        try:
            flags = _TAG << abi.TAG_SHIFT | cache | (abi.ZEROED if zero else 0)
            request = abi.NvmapAlloc(handle=handle, heap_mask=abi.HEAP_IOVMM, flags=flags, align=align)
            self.call(abi.NVMAP_ALLOC, request)
            fd = self.call(abi.NVMAP_GET_FD, abi.NvmapGetFd(handle=handle)).fd
        except DriverError:
            self.free(handle)
            raise
        return Dmabuf(fd, self, handle)

    def free(self, handle: int) -> None:
        """Errors are ignored: closing nvmap frees every handle."""
        with contextlib.suppress(OSError):
            system.ioctl(self.fd, abi.NVMAP_FREE.number, ctypes.c_int32(handle).value)


_TAG = 0x0C47


class Control(File):
    """nvgpu's control node, which opens everything else."""

    def __init__(self) -> None:
        super().__init__(_open(abi.CTRL), abi.CTRL)

    def characteristics(self) -> abi.Characteristics:
        """Raises DriverError if the driver's structure has another size than ours."""
        gpu = abi.Characteristics()
        request = abi.GetCharacteristics(size=sizeof(gpu), address=addressof(gpu))
        size = self.call(abi.GET_CHARACTERISTICS, request).size
        if size != sizeof(gpu):
            raise DriverError(
                f"nvgpu describes the GPU in {size} bytes; {abi.L4T} uses {sizeof(gpu)}.",
                "Take the CUDA backend, or a release of JetPack 6 (L4T r36).",
            )
        return gpu

    def multiprocessors(self) -> int:
        """How many multiprocessors are on: the power mode turns some off."""
        return int(self.call(abi.NUM_VSMS, abi.NumVsms()).num_vsms)

    def free_bytes(self) -> int:
        return int(self.call(abi.GET_MEMORY_STATE, abi.MemoryState()).total_free_bytes)

    def flush_caches(self) -> None:
        """Writes the GPU's L2 cache back and empties it."""
        self.call(abi.FLUSH_L2, abi.FlushL2(flags=abi.L2_FLUSH | abi.L2_INVALIDATE))

    def address_space(self, start: int, end: int) -> AddressSpace:
        """A new address space whose buffers get addresses in [start, end). The driver's own buffers follow `end`."""
        request = abi.AllocAs(flags=abi.AS_UNIFIED_VA, va_range_start=start, va_range_end=end)
        return AddressSpace(self.call(abi.ALLOC_AS, request).as_fd, "address space")

    def tsg(self) -> Tsg:
        return Tsg(self.call(abi.OPEN_TSG, abi.OpenTsg()).tsg_fd, "time slice group")

    def channel(self) -> Channel:
        opened = self.call(abi.OPEN_CHANNEL, abi.OpenChannel(runlist_id_or_fd=abi.RUNLIST_GR))
        return Channel(opened.runlist_id_or_fd, "channel")

    def doorbell(self) -> int:
        """Maps the doorbell, to which a channel's token is written to start it. A forked child does not inherit it."""
        with _driver_errors("mmap of the doorbell"):
            return system.mmap(self.fd, abi.DOORBELL_BYTES)


class AddressSpace(File):
    def bind(self, channel: Channel) -> None:
        self.call(abi.AS_BIND_CHANNEL, abi.BindChannel(channel_fd=channel.fd))

    def map(self, buffer: Dmabuf) -> int:
        """Maps the buffer and returns its address for the GPU."""
        request = abi.MapBufferEx(compr_kind=abi.NOT_COMPRESSIBLE, dmabuf_fd=buffer.fd, page_size=abi.PAGE)
        return int(self.call(abi.AS_MAP_BUFFER_EX, request).offset)

    def unmap(self, address: int) -> None:
        self.call(abi.AS_UNMAP_BUFFER, abi.UnmapBuffer(offset=address))

    def reserve(self, address: int, size: int) -> None:
        """Keeps buffers out of these addresses. Raises DriverError if one is there, or they are out of range."""
        flags = abi.SPACE_FIXED_OFFSET
        request = abi.AllocSpace(pages=size // abi.PAGE, page_size=abi.PAGE, flags=flags, offset=address)
        self.call(abi.AS_ALLOC_SPACE, request)

    def regions(self) -> list[range]:
        """The ranges of addresses for buffers."""
        regions = (abi.VaRegion * 4)()
        request = abi.GetVaRegions(address=addressof(regions), size=sizeof(regions))
        count = self.call(abi.AS_GET_VA_REGIONS, request).size // sizeof(abi.VaRegion)
        return [range(r.offset, r.offset + r.pages * r.page_size) for r in regions[:count]]


class Tsg(File):
    def subcontext(self, space: AddressSpace) -> int:
        request = abi.CreateSubcontext(type=abi.SUBCONTEXT_ASYNC, as_fd=space.fd)
        return int(self.call(abi.TSG_CREATE_SUBCONTEXT, request).veid)

    def bind(self, channel: Channel, subcontext: int) -> None:
        request = abi.TsgBindChannelEx(channel_fd=channel.fd, subcontext_id=subcontext)
        self.call(abi.TSG_BIND_CHANNEL_EX, request)

    def sm_errors(self, multiprocessors: int) -> list[abi.SmError]:
        """The error state of each multiprocessor after a fault."""
        errors = (abi.SmError * multiprocessors)()
        request = abi.ReadSmErrors(num_sm=multiprocessors, address=addressof(errors), size=sizeof(errors))
        self.call(abi.TSG_READ_SM_ERRORS, request)
        return list(errors)


class Channel(File):
    def disable_watchdog(self) -> None:
        """To be called before `setup`: a deterministic channel cannot have a watchdog."""
        self.call(abi.CHANNEL_WDT, abi.ChannelWdt(wdt_status=abi.WDT_DISABLE))

    def setup(self, entries: int, ring: Dmabuf, userd: Dmabuf) -> int:
        """Gives the channel its ring of `entries` (a power of two) and its page of positions (USERD). Returns the token
        that starts the channel when it is written to the doorbell."""
        request = abi.SetupBind(
            num_gpfifo_entries=entries,
            flags=abi.SETUP_DETERMINISTIC | abi.SETUP_USERMODE,
            userd_dmabuf_fd=userd.fd,
            gpfifo_dmabuf_fd=ring.fd,
        )
        return int(self.call(abi.CHANNEL_SETUP_BIND, request).work_submit_token)

    def create_object(self, class_number: int) -> None:
        """Creates an engine object. The first one of a channel creates its context too: about a second."""
        self.call(abi.CHANNEL_ALLOC_OBJ_CTX, abi.AllocObjCtx(class_num=class_number))

    def set_error_notifier(self, buffer: Dmabuf) -> None:
        """When the channel stops, the driver writes an `abi.Notification` to the start of the buffer."""
        size = sizeof(abi.Notification)
        self.call(abi.CHANNEL_SET_ERROR_NOTIFIER, abi.SetErrorNotifier(size=size, dmabuf_fd=buffer.fd))


def _open(path: str) -> int:
    with _driver_errors(f"Opening {path}"):
        return system.open(path)


@contextlib.contextmanager
def _driver_errors(call: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise driver_error(call, error) from error
