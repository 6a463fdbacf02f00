"""The device on the simulated driver: opening, kernels, the ring, faults and what is said about them, closing."""

import ctypes
import errno
import gc
import struct
import threading
import time
import weakref

import pytest
from tinygrad.device import BufferSpec
from tinygrad.runtime.ops_nv import NVComputeQueue

from engine.tegra import abi, memory
from engine.tegra.errors import DriverError, HangError
from engine.tegra.queue import ENTRIES, TegraComputeQueue
from tests.driver.buddy import PAGE
from tests.driver.conftest import INT, buffer, contents, held, program
from tests.driver.test_memory import FIRST_PORT, MIB
from tests.thorough import rarely

FILL = "  *(data0+(blockIdx.x*blockDim+threadIdx.x)) = n;".replace("blockDim", "32")
INCREMENT = "  *(data0+threadIdx.x) = (*(data0+threadIdx.x))+1;"
SUM = """\
  __shared__ __align__(16) int buf0[32];
  *(buf0+threadIdx.x) = (*(data1+((blockIdx.x<<5)+threadIdx.x)));
  __syncthreads();
  int acc = 0;
  for (int i = 0; i < 8; i++) { int4 v = (*((int4*)((buf0+(i<<2))))); acc = acc+v.x+v.y+v.z+v.w; }
  if (threadIdx.x == 0) { *(data0+blockIdx.x) = acc*scale; }"""


def run(prg, *buffers, grid=(1, 1, 1), block=(32, 1, 1), vals=()):
    prg(*buffers, global_size=grid, local_size=block, vals=vals, wait=False)


def impatient(monkeypatch, ms):
    """tinygrad's own patience is 30 seconds, read once from the environment."""
    short = lambda name, default=0: ms if name == "HCQDEV_WAIT_TIMEOUT_MS" else default
    monkeypatch.setattr("tinygrad.runtime.support.hcq.getenv", short)
    monkeypatch.setattr("engine.tegra.queue.getenv", short)


# ---- opening and closing ----


def test_it_opens_in_the_drivers_order(board):
    device = board.open()
    calls = [c for c in board.kernel.calls if not c.startswith(("NVMAP", "mmap dmabuf", "open"))]
    assert calls[:14] == [
        "NVGPU_GPU_IOCTL_GET_CHARACTERISTICS",
        "NVGPU_GPU_IOCTL_NUM_VSMS",
        "NVGPU_GPU_IOCTL_ALLOC_AS",
        "NVGPU_AS_IOCTL_GET_VA_REGIONS",
        "NVGPU_GPU_IOCTL_OPEN_TSG",
        "NVGPU_TSG_IOCTL_CREATE_SUBCONTEXT",
        "NVGPU_GPU_IOCTL_OPEN_CHANNEL",
        "NVGPU_AS_IOCTL_BIND_CHANNEL",
        "NVGPU_TSG_IOCTL_BIND_CHANNEL_EX",
        "NVGPU_IOCTL_CHANNEL_WDT",
        "NVGPU_IOCTL_CHANNEL_SETUP_BIND",
        "NVGPU_IOCTL_CHANNEL_ALLOC_OBJ_CTX",
        "NVGPU_IOCTL_CHANNEL_SET_ERROR_NOTIFIER",
        "mmap ctrl",
    ]
    assert (device.arch, device.sass_version, device.iface.multiprocessors) == ("sm_87", 0x87, 8)
    assert board.gpu.windows == {"local": memory.LOCAL_WINDOW.start, "shared": memory.SHARED_WINDOW.start}
    assert board.kernel.warnings == []
    assert board.kernel.used < 32 * MIB  # stock NV takes 160


def test_closed_it_holds_nothing_and_what_comes_later_does_nothing(board):
    gc.collect()
    before = held()
    device = board.open()
    prg, made = (
        program(device, "fill", "int* data0, const int n", FILL, values=(INT,)),
        buffer(device, size=128),
    )
    signal = device.new_signal(value=0)
    run(prg, made, vals=(7,))
    device.finalize()
    device.iface.device_fini()
    assert signal.value == (1 << 64) - 1  # nobody waits for it any more
    device.allocator.free(made, made.size, BufferSpec(nolru=True))
    device.synchronize()
    del prg
    gc.collect()
    assert board.kernel.leaks() == [] and held() == before


def test_tinygrad_keeps_nothing_of_a_closed_device(board):
    device = board.open()
    closed = weakref.ref(device)
    device.finalize()
    board.devices.clear()
    del device
    gc.collect()
    assert closed() is None


def test_it_opens_again_after_it_was_closed(board):
    for n in (3, 4):
        device = board.open()
        made = buffer(device, size=128)
        run(program(device, "fill", "int* data0, const int n", FILL, values=(INT,)), made, vals=(n,))
        assert contents(device, made) == [n] * 32
        device.finalize()


@pytest.mark.parametrize(
    ("node", "number", "advice"),
    [
        (abi.NVMAP, errno.EACCES, "video"),
        (abi.CTRL, errno.EPERM, "render"),
        (abi.NVMAP, errno.ENOENT, "nvgpu"),
    ],
)
def test_nodes_that_do_not_open(board, node, number, advice):
    board.kernel.fail_at(f"open {node}", number)
    with pytest.raises(DriverError, match=f"Opening {node} failed: {errno.errorcode[number]}") as caught:
        from engine.tegra.device import TEGRAIface

        TEGRAIface(None, 0)
    assert advice in caught.value.hint


def test_what_a_boards_driver_says_is_what_is_reported(board):
    """DEV=NV tries tinygrad's other interfaces as well; what they say helps nobody on a board."""
    from engine.tegra.device import NVDevice, TEGRAIface

    class OTHERIface:
        def __init__(self, dev, device_id):
            raise FileNotFoundError("/dev/nvidiactl")

    NVDevice.ifaces = [TEGRAIface, OTHERIface]
    board.kernel.fail_at("ALLOC_AS", errno.EPERM)
    with pytest.raises(DriverError, match="ALLOC_AS failed: EPERM"):
        NVDevice("NV")
    board.kernel.nodes = ()
    with pytest.raises(ExceptionGroup):
        NVDevice("NV")


def test_without_coherence_buffers_stay_out_of_the_cpus_caches(board):
    board.open()
    assert {a.flags & 3 for a in board.kernel.allocated[3:]} == {abi.INNER_CACHEABLE}
    board.kernel.gpu_flags &= ~abi.IO_COHERENCE
    first = len(board.kernel.allocated)
    board.open()
    assert {a.flags & 3 for a in board.kernel.allocated[first:]} == {abi.WRITE_COMBINE, abi.INNER_CACHEABLE}
    assert {a.flags & 3 for a in board.kernel.allocated[first + 3 :]} == {abi.WRITE_COMBINE}


def test_another_release_of_the_driver_is_refused(board):
    from engine.tegra.device import TEGRAIface

    board.kernel.characteristics_bytes = 336
    with pytest.raises(DriverError, match=r"in 336 bytes; r36\.4 uses 328"):
        TEGRAIface(None, 0)
    board.kernel.characteristics_bytes = 328
    board.kernel.fail_at("SETUP_BIND", errno.ENOTTY)
    with pytest.raises(DriverError, match="SETUP_BIND failed: ENOTTY") as caught:
        TEGRAIface(None, 0)
    assert "another version" in caught.value.hint
    with pytest.raises(DriverError, match="no GPU 1"):
        TEGRAIface(None, 1)


# ---- kernels ----


def test_a_kernel_gets_its_buffers_variables_grid_and_block(board):
    device = board.open()
    out = buffer(device, size=4 * 32 * 5)
    run(
        program(device, "fill", "int* data0, const int n", FILL, values=(INT,)),
        out,
        grid=(5, 1, 1),
        vals=(-9,),
    )
    assert contents(device, out, ctypes.c_int32) == [-9] * 160
    body = "  *(data0+(((blockIdx.z*3+blockIdx.y)*2+blockIdx.x)*24+(threadIdx.z*3+threadIdx.y)*4+threadIdx.x)) = 1;"
    out = buffer(device, bytes(4 * 24 * 12))
    run(program(device, "places", "int* data0", body), out, grid=(2, 3, 2), block=(4, 3, 2))
    assert contents(device, out) == [1] * 288


def test_threads_of_a_block_share_memory_and_meet_at_barriers(board):
    device = board.open()
    numbers = list(range(96))
    source, out = buffer(device, struct.pack("<96i", *numbers)), buffer(device, size=12)
    prg = program(device, "sums", "int* data0, int* data1, const int scale", SUM, values=(INT,))
    run(prg, out, source, grid=(3, 1, 1), vals=(2,))
    assert contents(device, out) == [2 * sum(numbers[i : i + 32]) for i in (0, 32, 64)]


@pytest.mark.parametrize("is_in_time", [True, False])
def test_warps_run_ahead_of_each_other_in_either_order(board, monkeypatch, is_in_time):
    device, found, barrier = board.open(), [], "  __syncthreads();\n"
    body = "  __shared__ __align__(16) int a[64];\n  *(a+threadIdx.x) = threadIdx.x;\n"
    read = "  *(data0+threadIdx.x) = *(a+(63-threadIdx.x));\n"
    body += barrier + read if is_in_time else read + barrier
    for backwards in (False, True):
        monkeypatch.setattr("tests.driver.program.backwards", backwards)
        out = buffer(device, bytes(256))
        run(program(device, "turn", "int* data0", body, threads=64), out, block=(64, 1, 1))
        found.append(contents(device, out) == list(range(63, -1, -1)))
    assert found == [is_in_time] * 2


def test_dependent_kernels_run_in_order_and_are_chained(board):
    """As a captured graph submits them: one submission, each launch descriptor naming the next."""
    device = board.open()
    made, prg = buffer(device, bytes(128)), program(device, "increment", "int* data0", INCREMENT)
    queue = TegraComputeQueue().wait(device.timeline_signal, device.timeline_value - 1).memory_barrier()
    for _ in range(100):
        queue.exec(prg, prg.fill_kernargs((made,)), (1, 1, 1), (32, 1, 1))
    queue.signal(device.timeline_signal, device.next_timeline()).submit(device)
    assert contents(device, made) == [100] * 32
    assert board.gpu.chained == 99 and board.gpu.qmd_releases == 0


def test_signals_never_lie_in_launch_descriptors_where_tinygrad_puts_them(board):
    device = board.open()
    made, prg = buffer(device, bytes(128)), program(device, "increment", "int* data0", INCREMENT)
    counts = []
    for kind in (TegraComputeQueue, NVComputeQueue):
        queue = kind().exec(prg, prg.fill_kernargs((made,)), (1, 1, 1), (32, 1, 1))
        queue.signal(device.timeline_signal, device.next_timeline()).submit(device)
        device.synchronize()
        counts.append(board.gpu.qmd_releases)
    assert counts == [0, 1]


def test_local_memory_is_there_before_a_kernel_that_needs_it(board):
    device = board.open()
    assert device.shader_local_mem is None
    program(device, "increment", "int* data0", INCREMENT)
    device.synchronize()
    tpcs, warps = 4, 96
    assert board.gpu.local_bytes >= device.slm_per_thread * 32 * warps * 2
    assert device.shader_local_mem.size >= board.gpu.local_bytes * tpcs


def test_caches_are_flushed_for_measurements(board):
    device = board.open()
    device.invalidate_caches()
    assert board.kernel.calls[-1] == "NVGPU_GPU_IOCTL_FLUSH_L2"


# ---- the ring ----


@pytest.mark.parametrize("silent", [rarely(False), True], ids=["the GPU says how far it is", "it does not"])
def test_a_full_ring_is_waited_for(board, silent):
    """More submissions than it holds, to a GPU that looks at none for a while."""
    board.kernel.silent = silent
    device = board.open()
    made, prg = buffer(device, bytes(128)), program(device, "increment", "int* data0", INCREMENT)
    ring = device.compute_gpfifo
    assert ring.gpu_writes_position is not silent
    first, n = ring.put_value, ENTRIES * 3 // 2
    board.gpu.paused.set()
    resumed = []

    def resume_when_full():
        deadline = time.monotonic() + 60
        while ring.put_value - first < ENTRIES - 8 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.2)  # it goes as far as it can
        resumed.append(ring.put_value)
        board.gpu.paused.clear()

    threading.Thread(target=resume_when_full).start()
    for _ in range(n):
        run(prg, made)
    assert contents(device, made) == [n] * 32
    assert ENTRIES - 8 <= resumed[0] - first < ENTRIES  # it waited: nothing that was not read was overwritten
    assert board.gpu.submissions == ring.put_value


# ---- faults ----


def test_the_window_fault_with_the_first_ports_range_and_none_with_ours(board, monkeypatch):
    """A kernel writes to each of eight buffers of 512 MiB."""
    board.kernel.memory_bytes = 16 << 30

    def write_to_all():
        device = board.open()
        prg = program(device, "fill", "int* data0, const int n", FILL, values=(INT,))
        buffers = [device.iface.memory.allocate(512 * MIB).va for _ in range(8)]
        view = device.iface.alloc(4096)
        original = view.va_addr
        for i, va in enumerate(buffers):
            view.va_addr = va
            run(prg, view, vals=(i,))
        view.va_addr = original
        device.synchronize()
        return buffers

    assert all(va in memory.BUFFERS for va in write_to_all())
    assert board.gpu.fault is None and board.kernel.warnings == []

    with monkeypatch.context() as patch:  # as the first port was
        patch.setattr("engine.tegra.device.BUFFERS", FIRST_PORT)
        patch.setattr(memory, "check_addresses", lambda addresses: None)
        with_guard = write_to_all()
        assert board.gpu.fault is None
        assert not any(va in memory.SHARED_WINDOW or va in memory.LOCAL_WINDOW for va in with_guard)
        assert "beyond 40 bits" in board.kernel.warnings[0]  # its contexts, which froze boards
        patch.setattr(memory, "reserve_windows", lambda space: None)
        with pytest.raises(HangError, match="invalid address space") as caught:
            write_to_all()
    assert "0x10" not in str(caught.value) and "multiprocessor 3" in str(caught.value)
    assert board.gpu.fault.address in memory.SHARED_WINDOW


def test_an_address_that_is_not_mapped(board):
    device = board.open()
    made = buffer(device, size=4096)
    prg = program(device, "beyond", "int* data0", "  *(data0+(threadIdx.x+1000000000)) = 1;")
    run(prg, made)
    with pytest.raises(HangError, match="memory that is not mapped"):
        device.synchronize()
    with pytest.raises(HangError, match="memory that is not mapped"):  # and it stays so
        device.synchronize()


def test_a_misaligned_vector(board):
    device = board.open()
    made = buffer(device, size=4096)
    prg = program(
        device, "vector", "float* data0", "  *((float4*)((data0+1))) = make_float4(1.0f,2.0f,3.0f,4.0f);"
    )
    run(prg, made)
    with pytest.raises(HangError, match="misaligned address"):
        device.synchronize()


def test_commands_that_make_no_sense(board):
    device = board.open()
    queue = TegraComputeQueue()
    queue.nvm(1, 0x0F00, 1)
    queue.signal(device.timeline_signal, device.next_timeline()).submit(device)
    with pytest.raises(HangError, match="commands are damaged"):
        device.synchronize()


def test_a_gpu_that_does_nothing_is_told_from_one_that_failed(board, monkeypatch):
    device = board.open()
    impatient(monkeypatch, 250)
    board.gpu.paused.set()
    made = buffer(device, size=128)
    with pytest.raises(HangError, match="reports no fault"):
        prg = program(device, "increment", "int* data0", INCREMENT)
        run(prg, made)
        device.synchronize()


def test_a_full_ring_of_a_gpu_that_stopped(board, monkeypatch):
    device = board.open()
    made, prg = buffer(device, size=128), program(device, "increment", "int* data0", INCREMENT)
    impatient(monkeypatch, 250)
    board.gpu.paused.set()
    with pytest.raises(HangError, match="does not answer"):
        for _ in range(ENTRIES + 1):
            run(prg, made)


def test_a_fault_of_which_no_more_is_known(board):
    device = board.open()
    made = buffer(device, size=4096)
    prg = program(device, "beyond", "int* data0", "  *(data0+1000000000) = 1;")
    run(prg, made)
    time.sleep(0.05)
    board.kernel.fail_at("READ_ALL_SM_ERROR_STATES", errno.ETIMEDOUT)
    with pytest.raises(HangError, match="no state of the multiprocessors"):
        device.synchronize()


def test_buffers_of_other_devices_are_refused(board):
    device = board.open()
    other = buffer(device, size=PAGE)
    with pytest.raises(RuntimeError, match="cannot map"):
        device.allocator._do_map(other)
