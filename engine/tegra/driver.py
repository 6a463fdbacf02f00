"""The calls of nvmap and nvgpu as typed functions. Every refusal is a DriverError (engine.tegra.errors).

Order matters to nvgpu: an address space, a time slice group (TSG) with a subcontext, a channel, which is bound to the
address space and then to the group, loses its watchdog, and gets its ring; only then can it have a compute object.
`engine.tegra.device` keeps that order.
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
from engine.tegra.errors import DriverError, refused


class System:
    """The kernel's calls, in one place: tests put a simulated kernel here. All raise OSError."""

    def open(self, path: str) -> int:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)

    def close(self, fd: int) -> None:
        os.close(fd)

    def ioctl(self, fd: int, number: int, argument: Structure | int) -> None:
        fcntl.ioctl(fd, number, argument)

    def mmap(self, fd: int, length: int, at: int = 0) -> int:
        """A shared mapping of all of a file, at any address or at one where nothing lies: the address."""
        protection = constants.PROT_READ | constants.PROT_WRITE
        kind = constants.MAP_SHARED | (_MAP_FIXED_NOREPLACE if at else 0)
        address = _libc.mmap(at, length, protection, kind, fd, 0)
        if address == _MAP_FAILED:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return int(address)

    def munmap(self, address: int, length: int) -> None:
        _libc.munmap(address, length)

    def blank(self, address: int, length: int) -> None:
        """Puts memory of this process alone, zeroed, in the place of a mapping."""
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
    """A descriptor of the driver's, closed at most once."""

    def __init__(self, fd: int, name: str) -> None:
        self.fd, self.name = fd, name

    def call(self, request: abi.Request, argument: T) -> T:
        """The argument as the driver left it. Raises DriverError."""
        with _named(request.name):
            system.ioctl(self.fd, request.number, argument)
        return argument

    def close(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            system.close(fd)


def unmap(address: int, length: int) -> None:
    system.munmap(address, length)


def blank(address: int, length: int) -> None:
    """What lay there is unmapped; the addresses stay this process's, and read as ones in all bits."""
    system.blank(address, length)
    ctypes.memset(address, 0xFF, length)


class Dmabuf(File):
    """A buffer's descriptor, and its handle. Mappings hold the buffer, so that this can be closed once they are
    made."""

    def __init__(self, fd: int, nvmap: Nvmap, handle: int) -> None:
        super().__init__(fd, "dmabuf")
        self._nvmap, self._handle = nvmap, handle

    def close(self) -> None:
        if self.fd >= 0:
            super().close()
            self._nvmap.free(self._handle)

    def map(self, length: int, wish: int = 0) -> int:
        """The address of all of it in this process: `wish`, where nothing lies there yet."""
        with contextlib.suppress(OSError):
            if wish:
                return system.mmap(self.fd, length, wish)
        with _named("mmap of a buffer"):
            return system.mmap(self.fd, length)


class Nvmap(File):
    """Where buffers come from."""

    def __init__(self) -> None:
        super().__init__(_open(abi.NVMAP), abi.NVMAP)

    def buffer(self, size: int, align: int, cache: int = abi.INNER_CACHEABLE, zero: bool = False) -> Dmabuf:
        """`size` bytes, a multiple of 4096, in pages that begin at multiples of `align`. Raises DriverMemoryError
        where there is no memory."""
        if size < 1 << 32:
            handle = self.call(abi.NVMAP_CREATE, abi.NvmapCreate(size=size)).handle
        else:
            large = self.call(abi.NVMAP_CREATE_64, abi.NvmapCreate64(size_or_handle=size))
            handle = large.size_or_handle & 0xFFFF_FFFF
        try:
            flags = _TAG << abi.TAG_SHIFT | cache | (abi.ZEROED if zero else 0)
            wanted = abi.NvmapAlloc(handle=handle, heap_mask=abi.HEAP_IOVMM, flags=flags, align=align)
            self.call(abi.NVMAP_ALLOC, wanted)
            fd = self.call(abi.NVMAP_GET_FD, abi.NvmapGetFd(handle=handle)).fd
        except DriverError:
            self.free(handle)
            raise
        return Dmabuf(fd, self, handle)

    def free(self, handle: int) -> None:
        """What cannot be freed goes when this is closed."""
        with contextlib.suppress(OSError):
            system.ioctl(self.fd, abi.NVMAP_FREE.number, ctypes.c_int32(handle).value)


_TAG = 0x0C47


class Control(File):
    """nvgpu's control node."""

    def __init__(self) -> None:
        super().__init__(_open(abi.CTRL), abi.CTRL)

    def characteristics(self) -> abi.Characteristics:
        """Raises DriverError where the driver's structure has another size than ours."""
        found = abi.Characteristics()
        request = abi.GetCharacteristics(size=sizeof(found), address=addressof(found))
        size = self.call(abi.GET_CHARACTERISTICS, request).size
        if size != sizeof(found):
            raise DriverError(
                f"nvgpu describes the GPU in {size} bytes, where {abi.L4T} takes {sizeof(found)}.",
                "Use a release of JetPack 6 (L4T r36), or the CUDA backend.",
            )
        return found

    def multiprocessors(self) -> int:
        """How many there are now: power modes switch some of them off."""
        return int(self.call(abi.NUM_VSMS, abi.NumVsms()).num_vsms)

    def free_bytes(self) -> int:
        return int(self.call(abi.GET_MEMORY_STATE, abi.MemoryState()).total_free_bytes)

    def flush_caches(self) -> None:
        """Writes the GPU's L2 cache back and empties it."""
        self.call(abi.FLUSH_L2, abi.FlushL2(flags=abi.L2_FLUSH | abi.L2_INVALIDATE))

    def address_space(self, start: int, end: int) -> AddressSpace:
        """One whose buffers get addresses in [start, end). The driver's own come right above `end`."""
        wanted = abi.AllocAs(flags=abi.AS_UNIFIED_VA, va_range_start=start, va_range_end=end)
        return AddressSpace(self.call(abi.ALLOC_AS, wanted).as_fd, "address space")

    def tsg(self) -> Tsg:
        return Tsg(self.call(abi.OPEN_TSG, abi.OpenTsg()).tsg_fd, "time slice group")

    def channel(self) -> Channel:
        opened = self.call(abi.OPEN_CHANNEL, abi.OpenChannel(runlist_id_or_fd=abi.RUNLIST_GR))
        return Channel(opened.runlist_id_or_fd, "channel")

    def doorbell(self) -> int:
        """The address of the page that starts channels. A forked child does not have it."""
        with _named("mmap of the doorbell"):
            return system.mmap(self.fd, abi.DOORBELL_BYTES)


class AddressSpace(File):
    def bind(self, channel: Channel) -> None:
        self.call(abi.AS_BIND_CHANNEL, abi.BindChannel(channel_fd=channel.fd))

    def map(self, buffer: Dmabuf) -> int:
        """The GPU's address of all of the buffer."""
        wanted = abi.MapBufferEx(compr_kind=abi.NOT_COMPRESSIBLE, dmabuf_fd=buffer.fd, page_size=abi.PAGE)
        return int(self.call(abi.AS_MAP_BUFFER_EX, wanted).offset)

    def unmap(self, address: int) -> None:
        self.call(abi.AS_UNMAP_BUFFER, abi.UnmapBuffer(offset=address))

    def reserve(self, address: int, size: int) -> None:
        """No buffer will be mapped there. Raises DriverError if something is there, or it is out of range."""
        flags = abi.SPACE_FIXED_OFFSET
        wanted = abi.AllocSpace(pages=size // abi.PAGE, page_size=abi.PAGE, flags=flags, offset=address)
        self.call(abi.AS_ALLOC_SPACE, wanted)

    def regions(self) -> list[range]:
        """The addresses that buffers may get."""
        found = (abi.VaRegion * 4)()
        request = abi.GetVaRegions(address=addressof(found), size=sizeof(found))
        count = self.call(abi.AS_GET_VA_REGIONS, request).size // sizeof(abi.VaRegion)
        return [range(r.offset, r.offset + r.pages * r.page_size) for r in found[:count]]


class Tsg(File):
    def subcontext(self, space: AddressSpace) -> int:
        wanted = abi.CreateSubcontext(type=abi.SUBCONTEXT_ASYNC, as_fd=space.fd)
        return int(self.call(abi.TSG_CREATE_SUBCONTEXT, wanted).veid)

    def bind(self, channel: Channel, subcontext: int) -> None:
        bound = abi.TsgBindChannelEx(channel_fd=channel.fd, subcontext_id=subcontext)
        self.call(abi.TSG_BIND_CHANNEL_EX, bound)

    def sm_errors(self, multiprocessors: int) -> list[abi.SmError]:
        """What each multiprocessor says about the fault that stopped it."""
        errors = (abi.SmError * multiprocessors)()
        request = abi.ReadSmErrors(num_sm=multiprocessors, address=addressof(errors), size=sizeof(errors))
        self.call(abi.TSG_READ_SM_ERRORS, request)
        return list(errors)


class Channel(File):
    def disable_watchdog(self) -> None:
        """Before `setup`: a deterministic channel cannot have one."""
        self.call(abi.CHANNEL_WDT, abi.ChannelWdt(wdt_status=abi.WDT_DISABLE))

    def setup(self, entries: int, ring: Dmabuf, userd: Dmabuf) -> int:
        """Gives the channel its ring of `entries` (a power of two) and its page of positions; the token that
        starts it when it is written to the doorbell."""
        wanted = abi.SetupBind(
            num_gpfifo_entries=entries,
            flags=abi.SETUP_DETERMINISTIC | abi.SETUP_USERMODE,
            userd_dmabuf_fd=userd.fd,
            gpfifo_dmabuf_fd=ring.fd,
        )
        return int(self.call(abi.CHANNEL_SETUP_BIND, wanted).work_submit_token)

    def create_object(self, class_number: int) -> None:
        """A graphics context, the first time: about a second."""
        self.call(abi.CHANNEL_ALLOC_OBJ_CTX, abi.AllocObjCtx(class_num=class_number))

    def report_errors_to(self, buffer: Dmabuf) -> None:
        """The driver writes an `abi.Notification` to the buffer's begin when the channel stops."""
        size = sizeof(abi.Notification)
        self.call(abi.CHANNEL_SET_ERROR_NOTIFIER, abi.SetErrorNotifier(size=size, dmabuf_fd=buffer.fd))


def _open(path: str) -> int:
    with _named(f"Opening {path}"):
        return system.open(path)


@contextlib.contextmanager
def _named(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise refused(what, error) from error
