"""The binary interface of the drivers nvmap and nvgpu: `ioctl` requests and their structures.

Source: the headers nvmap.h (of nvidia-oot), nvgpu-ctrl.h, nvgpu-as.h and nvgpu.h in include/uapi/linux of L4T r36.4.4.
Each section below names its header. All fields have fixed widths, so the layout is the same on every machine. Tests
compare it with a table that a C compiler made from these headers.
"""

import ctypes
from ctypes import Structure, sizeof
from ctypes import c_int16 as s16
from ctypes import c_int32 as s32
from ctypes import c_uint8 as u8
from ctypes import c_uint16 as u16
from ctypes import c_uint32 as u32
from ctypes import c_uint64 as u64
from dataclasses import dataclass

L4T = "r36.4"
NVMAP, CTRL = "/dev/nvmap", "/dev/nvgpu/igpu0/ctrl"

_WRITE, _READ = 1, 2


@dataclass(frozen=True)
class Request:
    """One `ioctl`: its name in the headers, its request number, and its argument's structure (None: an integer)."""

    name: str
    number: int
    argument: type[Structure] | None


def _request(
    name: str, magic: str, nr: int, argument: type[Structure] | None, direction: int = _READ | _WRITE
) -> Request:
    """As the macro _IOC of linux/ioctl.h: direction 31:30, size 29:16, magic 15:8, nr 7:0."""
    size = sizeof(argument) if argument is not None else 0
    return Request(name, direction << 30 | size << 16 | ord(magic) << 8 | nr, argument)


# ---- nvmap.h: buffers, on /dev/nvmap ----


class NvmapCreate(Structure):
    """struct nvmap_create_handle. In: the size in bytes. Out: the handle, in the second word."""

    _fields_ = (("size", u32), ("handle", u32))


class NvmapCreate64(Structure):
    """The same for 4 GiB and more. In: the size in bytes. Out: the handle, in the lower word."""

    _fields_ = (("size_or_handle", u64),)


class NvmapAlloc(Structure):
    _fields_ = (("handle", u32), ("heap_mask", u32), ("flags", u32), ("align", u32), ("numa_nid", s32))


class NvmapGetFd(Structure):
    _fields_ = (("fd", s32), ("handle", u32))


NVMAP_CREATE = _request("NVMAP_IOC_CREATE", "N", 0, NvmapCreate)
NVMAP_CREATE_64 = _request("NVMAP_IOC_CREATE_64", "N", 1, NvmapCreate64)
NVMAP_ALLOC = _request("NVMAP_IOC_ALLOC", "N", 3, NvmapAlloc, _WRITE)
NVMAP_FREE = _request("NVMAP_IOC_FREE", "N", 4, None, 0)  # the argument is the handle itself
NVMAP_GET_FD = _request("NVMAP_IOC_GET_FD", "N", 15, NvmapGetFd)

HEAP_IOVMM = 1 << 30  # pages from anywhere in memory, mapped by the SMMU
WRITE_COMBINE, INNER_CACHEABLE = 1, 2  # bits 1:0 of the flags
ZEROED = 1 << 5
TAG_SHIFT = 16  # bits 31:16 of the flags; the kernel logs a warning for a buffer without a tag


# ---- nvgpu-ctrl.h: the control node, /dev/nvgpu/igpu0/ctrl ----


class GetCharacteristics(Structure):
    """In: the size and the address of a `Characteristics`. Out: the size of the kernel's own structure."""

    _fields_ = (("size", u64), ("address", u64))


class Characteristics(Structure):
    """struct nvgpu_gpu_characteristics. Fields of no use here are padding."""

    _fields_ = (
        ("arch", u32), ("impl", u32), ("_rev", u32), ("num_gpc", u32), ("_numa", u8 * 8),
        ("l2_cache_size", u64), ("_memory", u8 * 8), ("num_tpc_per_gpc", u32), ("_bus", u32),
        ("big_page_size", u32), ("_pages", u8 * 12), ("flags", u64), ("_classes", u8 * 8),
        ("compute_class", u32), ("gpfifo_class", u32), ("_copy", u32), ("dma_copy_class", u32),
        ("gpc_mask", u32), ("sm_version", u32), ("_spa", u32), ("warp_count", u32), ("_ioctls", u8 * 10),
        ("gpu_va_bit_count", u8), ("_reserved", u8 * 37), ("chipname", ctypes.c_char * 8),
        ("_clocks", u8 * 32), ("max_freq", u64), ("_more", u8 * 100), ("max_gpfifo_entries", u32),
        ("_last", u8 * 16),
    )  # fmt: skip


IO_COHERENCE = 1 << 20  # of `Characteristics.flags`


class AllocAs(Structure):
    _fields_ = (
        ("big_page_size", u32), ("as_fd", s32), ("flags", u32), ("reserved", u32), ("va_range_start", u64),
        ("va_range_end", u64), ("va_range_split", u64), ("padding", u32 * 6),
    )  # fmt: skip


class OpenTsg(Structure):
    _fields_ = (("tsg_fd", s32), ("flags", u32), ("source_device_instance_id", u64), ("share_token", u64))


class OpenChannel(Structure):
    """A union. In: the runlist. Out: the channel's file descriptor."""

    _fields_ = (("runlist_id_or_fd", s32),)


class FlushL2(Structure):
    """struct nvgpu_gpu_l2_fb_args: packed, five bytes; the request number contains this size."""

    _pack_ = 1
    _fields_ = (("flags", u8), ("reserved", u32))


class NumVsms(Structure):
    _fields_ = (("num_vsms", u32), ("reserved", u32))


class MemoryState(Structure):
    _fields_ = (("total_free_bytes", u64), ("reserved", u64 * 4))


GET_CHARACTERISTICS = _request("NVGPU_GPU_IOCTL_GET_CHARACTERISTICS", "G", 5, GetCharacteristics)
ALLOC_AS = _request("NVGPU_GPU_IOCTL_ALLOC_AS", "G", 8, AllocAs)
OPEN_TSG = _request("NVGPU_GPU_IOCTL_OPEN_TSG", "G", 9, OpenTsg)
OPEN_CHANNEL = _request("NVGPU_GPU_IOCTL_OPEN_CHANNEL", "G", 11, OpenChannel)
FLUSH_L2 = _request("NVGPU_GPU_IOCTL_FLUSH_L2", "G", 12, FlushL2)
NUM_VSMS = _request("NVGPU_GPU_IOCTL_NUM_VSMS", "G", 18, NumVsms)
GET_MEMORY_STATE = _request("NVGPU_GPU_IOCTL_GET_MEMORY_STATE", "G", 33, MemoryState)

AS_UNIFIED_VA = 2
RUNLIST_GR = -1
L2_FLUSH, L2_INVALIDATE = 1, 2
DOORBELL_BYTES, DOORBELL = 0x10000, 0x90  # the mapping of the node; the offset for a channel's token in it


# ---- nvgpu-as.h: address spaces ----


class BindChannel(Structure):
    _fields_ = (("channel_fd", s32),)


class AllocSpace(Structure):
    _fields_ = (("pages", u64), ("page_size", u32), ("flags", u32), ("offset", u64), ("padding", u32 * 2))


class MapBufferEx(Structure):
    _fields_ = (
        ("flags", u32), ("compr_kind", s16), ("incompr_kind", s16), ("dmabuf_fd", s32), ("page_size", u32),
        ("buffer_offset", u64), ("mapping_size", u64), ("offset", u64),
    )  # fmt: skip


class UnmapBuffer(Structure):
    _fields_ = (("offset", u64),)


class VaRegion(Structure):
    _fields_ = (("offset", u64), ("page_size", u32), ("reserved", u32), ("pages", u64))


class GetVaRegions(Structure):
    _fields_ = (("address", u64), ("size", u32), ("reserved", u32))


AS_BIND_CHANNEL = _request("NVGPU_AS_IOCTL_BIND_CHANNEL", "A", 1, BindChannel)
AS_UNMAP_BUFFER = _request("NVGPU_AS_IOCTL_UNMAP_BUFFER", "A", 5, UnmapBuffer)
AS_ALLOC_SPACE = _request("NVGPU_AS_IOCTL_ALLOC_SPACE", "A", 6, AllocSpace)
AS_MAP_BUFFER_EX = _request("NVGPU_AS_IOCTL_MAP_BUFFER_EX", "A", 7, MapBufferEx)
AS_GET_VA_REGIONS = _request("NVGPU_AS_IOCTL_GET_VA_REGIONS", "A", 8, GetVaRegions)

SPACE_FIXED_OFFSET = 1
NOT_COMPRESSIBLE = -1
PAGE = 4096  # the size of the GPU's pages in bytes; there are no others, as big_page_size is 0


# ---- nvgpu.h: time slice groups (TSG) and channels ----


class CreateSubcontext(Structure):
    _fields_ = (("type", u32), ("as_fd", s32), ("veid", u32), ("reserved", u32))


class TsgBindChannelEx(Structure):
    _fields_ = (("channel_fd", s32), ("subcontext_id", u32), ("reserved", u8 * 16))


class ReadSmErrors(Structure):
    """`num_sm` must be the GPU's number of multiprocessors. The buffer gets a `SmError` for each."""

    _fields_ = (("num_sm", u32), ("reserved", u32), ("address", u64), ("size", u64))


class SmError(Structure):
    """struct nvgpu_tsg_sm_error_state_record. ESR: exception status register."""

    _fields_ = (
        ("global_esr", u32), ("warp_esr", u32), ("warp_pc", u64), ("global_report_mask", u32),
        ("warp_report_mask", u32),
    )  # fmt: skip


class ChannelWdt(Structure):
    _fields_ = (("wdt_status", u32), ("timeout_ms", u32))


class SetupBind(Structure):
    _fields_ = (
        ("num_gpfifo_entries", u32), ("num_inflight_jobs", u32), ("flags", u32), ("userd_dmabuf_fd", s32),
        ("gpfifo_dmabuf_fd", s32), ("work_submit_token", u32), ("userd_dmabuf_offset", u64),
        ("gpfifo_dmabuf_offset", u64), ("gpfifo_gpu_va", u64), ("userd_gpu_va", u64),
        ("usermode_mmio_gpu_va", u64), ("reserved", u32 * 9), ("_padding", u32),
    )  # fmt: skip


class AllocObjCtx(Structure):
    _fields_ = (("class_num", u32), ("flags", u32), ("obj_id", u64))


class SetErrorNotifier(Structure):
    _fields_ = (("offset", u64), ("size", u64), ("dmabuf_fd", u32), ("padding", u32))


class Notification(Structure):
    """struct nvgpu_notification, which the driver writes into the error notifier's buffer (16 bytes)."""

    _fields_ = (("time_ns", u64), ("info32", u32), ("info16", u16), ("status", u16))


TSG_BIND_CHANNEL_EX = _request("NVGPU_TSG_IOCTL_BIND_CHANNEL_EX", "T", 11, TsgBindChannelEx)
TSG_READ_SM_ERRORS = _request("NVGPU_TSG_IOCTL_READ_ALL_SM_ERROR_STATES", "T", 17, ReadSmErrors)
TSG_CREATE_SUBCONTEXT = _request("NVGPU_TSG_IOCTL_CREATE_SUBCONTEXT", "T", 18, CreateSubcontext)
CHANNEL_ALLOC_OBJ_CTX = _request("NVGPU_IOCTL_CHANNEL_ALLOC_OBJ_CTX", "H", 108, AllocObjCtx)
CHANNEL_SET_ERROR_NOTIFIER = _request("NVGPU_IOCTL_CHANNEL_SET_ERROR_NOTIFIER", "H", 111, SetErrorNotifier)
CHANNEL_WDT = _request("NVGPU_IOCTL_CHANNEL_WDT", "H", 119, ChannelWdt, _WRITE)
CHANNEL_SETUP_BIND = _request("NVGPU_IOCTL_CHANNEL_SETUP_BIND", "H", 128, SetupBind)

SUBCONTEXT_ASYNC = 1  # for compute and copies only
WDT_DISABLE = 1
SETUP_DETERMINISTIC, SETUP_USERMODE = 1 << 1, 1 << 3
USERD_GP_GET, USERD_GP_PUT = 0x88, 0x8C  # offsets of u32 ring positions, in entries: the GPU's, and ours
