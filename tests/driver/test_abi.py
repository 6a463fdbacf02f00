"""Our structures against what a C compiler made of the headers of L4T r36.4.4, and nvgpu's addresses as seen."""

import ctypes
import errno

import pytest

from engine.tegra import abi
from tests.driver.buddy import Buddy, Full
from tests.driver.kernel import REQUESTS

# Printed by a C program compiled against the headers: number, bytes, and the offset and size of fields.
GOLDEN = {
    "NVMAP_IOC_CREATE": (0xC0084E00, 8, {"size": (0, 4), "handle": (4, 4)}),
    "NVMAP_IOC_CREATE_64": (0xC0084E01, 8, {"size_or_handle": (0, 8)}),
    "NVMAP_IOC_ALLOC": (
        0x40144E03,
        20,
        {"handle": (0, 4), "heap_mask": (4, 4), "flags": (8, 4), "align": (12, 4), "numa_nid": (16, 4)},
    ),
    "NVMAP_IOC_FREE": (0x00004E04, 0, {}),
    "NVMAP_IOC_GET_FD": (0xC0084E0F, 8, {"fd": (0, 4), "handle": (4, 4)}),
    "NVGPU_GPU_IOCTL_GET_CHARACTERISTICS": (0xC0104705, 16, {"size": (0, 8), "address": (8, 8)}),
    "NVGPU_GPU_IOCTL_ALLOC_AS": (
        0xC0404708,
        64,
        {
            "big_page_size": (0, 4),
            "as_fd": (4, 4),
            "flags": (8, 4),
            "reserved": (12, 4),
            "va_range_start": (16, 8),
            "va_range_end": (24, 8),
            "va_range_split": (32, 8),
            "padding": (40, 24),
        },
    ),
    "NVGPU_GPU_IOCTL_OPEN_TSG": (
        0xC0184709,
        24,
        {"tsg_fd": (0, 4), "flags": (4, 4), "source_device_instance_id": (8, 8), "share_token": (16, 8)},
    ),
    "NVGPU_GPU_IOCTL_OPEN_CHANNEL": (0xC004470B, 4, {"runlist_id_or_fd": (0, 4)}),
    "NVGPU_GPU_IOCTL_FLUSH_L2": (0xC005470C, 5, {"flags": (0, 1)}),
    "NVGPU_GPU_IOCTL_NUM_VSMS": (0xC0084712, 8, {"num_vsms": (0, 4)}),
    "NVGPU_GPU_IOCTL_GET_MEMORY_STATE": (0xC0284721, 40, {"total_free_bytes": (0, 8)}),
    "NVGPU_AS_IOCTL_BIND_CHANNEL": (0xC0044101, 4, {"channel_fd": (0, 4)}),
    "NVGPU_AS_IOCTL_UNMAP_BUFFER": (0xC0084105, 8, {"offset": (0, 8)}),
    "NVGPU_AS_IOCTL_ALLOC_SPACE": (
        0xC0204106,
        32,
        {"pages": (0, 8), "page_size": (8, 4), "flags": (12, 4), "offset": (16, 8)},
    ),
    "NVGPU_AS_IOCTL_MAP_BUFFER_EX": (
        0xC0284107,
        40,
        {
            "flags": (0, 4),
            "compr_kind": (4, 2),
            "incompr_kind": (6, 2),
            "dmabuf_fd": (8, 4),
            "page_size": (12, 4),
            "buffer_offset": (16, 8),
            "mapping_size": (24, 8),
            "offset": (32, 8),
        },
    ),
    "NVGPU_AS_IOCTL_GET_VA_REGIONS": (0xC0104108, 16, {"address": (0, 8), "size": (8, 4)}),
    "NVGPU_TSG_IOCTL_BIND_CHANNEL_EX": (
        0xC018540B,
        24,
        {"channel_fd": (0, 4), "subcontext_id": (4, 4), "reserved": (8, 16)},
    ),
    "NVGPU_TSG_IOCTL_READ_ALL_SM_ERROR_STATES": (
        0xC0185411,
        24,
        {"num_sm": (0, 4), "address": (8, 8), "size": (16, 8)},
    ),
    "NVGPU_TSG_IOCTL_CREATE_SUBCONTEXT": (
        0xC0105412,
        16,
        {"type": (0, 4), "as_fd": (4, 4), "veid": (8, 4), "reserved": (12, 4)},
    ),
    "NVGPU_IOCTL_CHANNEL_ALLOC_OBJ_CTX": (
        0xC010486C,
        16,
        {"class_num": (0, 4), "flags": (4, 4), "obj_id": (8, 8)},
    ),
    "NVGPU_IOCTL_CHANNEL_SET_ERROR_NOTIFIER": (
        0xC018486F,
        24,
        {"offset": (0, 8), "size": (8, 8), "dmabuf_fd": (16, 4), "padding": (20, 4)},
    ),
    "NVGPU_IOCTL_CHANNEL_WDT": (0x40084877, 8, {"wdt_status": (0, 4), "timeout_ms": (4, 4)}),
    "NVGPU_IOCTL_CHANNEL_SETUP_BIND": (
        0xC0684880,
        104,
        {
            "num_gpfifo_entries": (0, 4),
            "num_inflight_jobs": (4, 4),
            "flags": (8, 4),
            "userd_dmabuf_fd": (12, 4),
            "gpfifo_dmabuf_fd": (16, 4),
            "work_submit_token": (20, 4),
            "userd_dmabuf_offset": (24, 8),
            "gpfifo_dmabuf_offset": (32, 8),
            "gpfifo_gpu_va": (40, 8),
            "userd_gpu_va": (48, 8),
            "usermode_mmio_gpu_va": (56, 8),
            "reserved": (64, 36),
        },
    ),
}
# Structures that a request points to.
POINTED_TO = {
    abi.Characteristics: (
        328,
        {
            "arch": (0, 4),
            "impl": (4, 4),
            "num_gpc": (12, 4),
            "l2_cache_size": (24, 8),
            "num_tpc_per_gpc": (40, 4),
            "big_page_size": (48, 4),
            "flags": (64, 8),
            "compute_class": (80, 4),
            "gpfifo_class": (84, 4),
            "dma_copy_class": (92, 4),
            "gpc_mask": (96, 4),
            "sm_version": (100, 4),
            "warp_count": (108, 4),
            "gpu_va_bit_count": (122, 1),
            "chipname": (160, 8),
            "max_freq": (200, 8),
            "max_gpfifo_entries": (308, 4),
        },
    ),
    abi.SmError: (24, {"global_esr": (0, 4), "warp_esr": (4, 4), "warp_pc": (8, 8)}),
    abi.VaRegion: (24, {"offset": (0, 8), "page_size": (8, 4), "pages": (16, 8)}),
    abi.Notification: (16, {"time_ns": (0, 8), "info32": (8, 4), "info16": (12, 2), "status": (14, 2)}),
}


def layout(structure, names):
    return {n: (getattr(structure, n).offset, getattr(structure, n).size) for n in names}


def test_every_request_is_in_the_table():
    assert {request.name for request in REQUESTS} == set(GOLDEN)


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda r: r.name)
def test_requests(request_):
    number, n_bytes, fields = GOLDEN[request_.name]
    assert request_.number == number
    assert n_bytes == (ctypes.sizeof(request_.argument) if request_.argument else 0)
    assert layout(request_.argument, fields) == fields


@pytest.mark.parametrize("structure", POINTED_TO, ids=lambda s: s.__name__)
def test_structures_that_requests_point_to(structure):
    n_bytes, fields = POINTED_TO[structure]
    assert ctypes.sizeof(structure) == n_bytes and layout(structure, fields) == fields


def test_the_buddy_allocator_gives_the_addresses_seen_on_a_board():
    """With the range of the first port, on an AGX Orin: one buffer after another, and the eighth of 512 MiB."""
    board = Buddy(0x200000, 0xFFFFE00000)
    sizes = [4 << 10, 4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20]
    seen = [0xFFFFA00000, 0xFFFFA01000, 0xFFFFA10000, 0xFFFFB00000, 0xFFFE200000, 0xFFF8200000]
    assert [board.alloc(size) for size in sizes] == seen
    board = Buddy(0x200000, 0xFFFFE00000)
    assert [board.alloc(512 << 20) for _ in range(8)][-1] == 0xFE00200000


def test_the_buddy_allocator_takes_back_what_it_gave():
    buddy = Buddy(0x200000, 0x4000000)
    fresh = {order: sorted(blocks) for order, blocks in buddy._free.items()}
    buddy.alloc_fixed(0x2000000, 0x300000)
    given = [buddy.alloc(size) for size in (1, 8192, 12288, 1 << 20, 5 << 20)]
    assert not any(0x2000000 <= address < 0x2300000 for address in given)
    with pytest.raises(Full):
        buddy.alloc_fixed(0x22FF000, 0x2000)
    with pytest.raises(Full):
        buddy.alloc(1 << 30)
    for address in [*given, 0x2000000]:
        buddy.free(address)
    assert {order: sorted(blocks) for order, blocks in buddy._free.items()} == fresh


def test_a_refusal_says_what_failed_and_what_to_do():
    from engine.errors import BackendError
    from engine.tegra.errors import DriverMemoryError, driver_error

    error = driver_error("Opening /dev/nvmap", OSError(errno.EACCES, ""))
    assert isinstance(error, BackendError) and isinstance(error, RuntimeError)
    assert "EACCES" in error.message and "video" in error.hint
    assert "EPERM" in str(driver_error("X", OSError(errno.EPERM, ""))) and "ENOTTY" in str(
        driver_error("X", OSError(errno.ENOTTY, ""))
    )
    for number in (errno.ENOMEM, errno.EMFILE):
        error = driver_error("NVMAP_IOC_ALLOC", OSError(number, ""))
        assert isinstance(error, DriverMemoryError) and isinstance(error, MemoryError)
