"""tinygrad's device NV on a Jetson: `install` replaces NVDevice by a subclass, which serves desktop GPUs as before.

DEV=NV takes the Jetson's drivers if there are any, else nvidia.ko; DEV=TEGRA+NV takes the Jetson's drivers only. The
subclass does not imitate a desktop driver's resource manager. What NVDevice asks that for at start is done with nvgpu's
calls here; queues, programs and launch descriptors, which need no driver, are tinygrad's.
"""

import errno
import itertools
import time
from contextlib import ExitStack, closing
from typing import Any

from tinygrad.renderer.cstyle import CUDARenderer, NVCCRenderer
from tinygrad.renderer.nir import NAKRenderer
from tinygrad.renderer.ptx import PTXRenderer
from tinygrad.runtime import ops_nv
from tinygrad.runtime.ops_nv import NVProgram
from tinygrad.runtime.support.hcq import BumpAllocator, HCQBuffer, HCQCompiled, MMIOInterface
from tinygrad.runtime.support.system import System as TinySystem

from engine.fixes import require_tinygrad
from engine.tegra import abi, driver
from engine.tegra.allocator import TegraAllocator
from engine.tegra.driver import Control, Nvmap
from engine.tegra.errors import RESTART, DriverError, HangError
from engine.tegra.memory import BUFFERS, LOCAL_WINDOW, SHARED_WINDOW, Memory
from engine.tegra.notifier import ErrorNotifier, report
from engine.tegra.queue import ENTRIES, Ring, TegraComputeQueue, TegraSignal

_COMMAND_BYTES, _ARGUMENT_BYTES = 2 << 20, 8 << 20  # 2 and 8 KiB for each entry of the ring
_SM_PER_TPC = 2
_serial = itertools.count()
_TinygradNVDevice: Any = ops_nv.NVDevice
renderers = [CUDARenderer, PTXRenderer, NVCCRenderer, NAKRenderer]


def install() -> None:
    """Makes Device["NV"] the device of this module. To be called before a device is opened. Raises BackendError if
    another version of tinygrad is installed."""
    require_tinygrad("The Tegra interface of NV")
    ops_nv.NVDevice = NVDevice


class TEGRAIface:
    """The GPU of a Jetson as an interface of tinygrad's NV backend. DEV selects it by the name of this class."""

    count = 1
    viddec_class = None

    def __init__(self, dev: Any, device_id: int) -> None:
        """Raises DriverError, after closing what it had opened."""
        if device_id:
            raise DriverError(f"There is no GPU {device_id}: a Jetson has one.", "Take NV or NV:0.")
        self.dev, self.closed = dev, False
        self.peer_group = f"TEGRA{next(_serial)}"  # unique, or a later device could get its signals
        with ExitStack() as resources:
            self._open(resources)
            self._resources = resources.pop_all()

    def _open(self, resources: ExitStack) -> None:
        """Opens everything in the driver's order (see `engine.tegra.driver`). It is closed in the opposite order."""
        nvmap = resources.enter_context(closing(Nvmap()))
        self.control = control = resources.enter_context(closing(Control()))
        gpu = self.characteristics = control.characteristics()
        self.multiprocessors = control.multiprocessors()
        self.compute_class, self.dma_class = gpu.compute_class, gpu.dma_copy_class

        space = resources.enter_context(closing(control.address_space(BUFFERS.start, BUFFERS.stop)))
        coherent = gpu.flags & abi.IO_COHERENCE  # the GPU sees data in the CPU's caches
        cache = abi.INNER_CACHEABLE if coherent else abi.WRITE_COMBINE
        self.memory = resources.enter_context(closing(Memory(nvmap, space, cache)))
        self.tsg = resources.enter_context(closing(control.tsg()))
        subcontext = self.tsg.subcontext(space)
        channel = resources.enter_context(closing(control.channel()))
        space.bind(channel)
        self.tsg.bind(channel, subcontext)
        channel.disable_watchdog()
        self.ring = _ring(nvmap, channel, resources)
        channel.create_object(gpu.compute_class)
        self.notifier = resources.enter_context(closing(ErrorNotifier(nvmap, channel)))
        doorbell = control.doorbell()
        resources.callback(driver.unmap, doorbell, abi.DOORBELL_BYTES)
        self.doorbell = MMIOInterface(doorbell, abi.DOORBELL_BYTES, fmt="I")

    def alloc(self, size: int, zero: bool = False, **_: object) -> HCQBuffer:
        """A buffer for CPU and GPU, whose `size` is the one asked for. Raises DriverMemoryError if there is no room."""
        mapping = self.memory.allocate(size, zero)
        view = MMIOInterface(mapping.address, size, fmt="B")
        return HCQBuffer(mapping.va, size, meta=mapping, view=view, owner=self.dev)

    def free(self, buffer: HCQBuffer) -> None:
        self.memory.free(buffer.meta)

    def sleep(self, _ms: int) -> None:
        """tinygrad calls this while it waits for a signal. Raises HangError once the driver reports a fault."""
        if self.notifier.read() is not None:
            raise self.hang_error()
        time.sleep(0.0005)

    def hang_error(self) -> HangError:
        """Why the GPU stopped. It does not say whether another process was the cause."""
        return HangError(report(self.notifier.read(), self.tsg, self.multiprocessors), RESTART)

    def device_fini(self) -> None:
        """Closes everything, once. Graphs read signals even later, when they are deleted: then each signal has the
        largest value, as if it had passed long ago."""
        if self.closed:
            return
        self.closed = True
        for page in HCQCompiled.signal_pages.pop(self.peer_group, []):
            self.memory.free_keeping_address(page.meta)
        HCQCompiled.signal_pool.pop(self.peer_group, None)
        HCQCompiled.peer_groups.pop(self.peer_group, None)
        self._resources.close()


def _ring(nvmap: Nvmap, channel: driver.Channel, resources: ExitStack) -> Ring:
    """The channel's ring, and the page (USERD) with the positions of GPU and CPU in it. Kernels cannot access them: the
    driver maps the ring in its own part of the address space."""
    n_bytes = max(abi.PAGE, ENTRIES * 8)
    ring = nvmap.buffer(n_bytes, abi.PAGE, abi.WRITE_COMBINE, zero=True)
    try:
        userd = nvmap.buffer(abi.PAGE, abi.PAGE, abi.WRITE_COMBINE, zero=True)
        try:
            addresses = []
            for buffer, size in ((ring, n_bytes), (userd, abi.PAGE)):
                addresses.append(buffer.map(size))
                resources.callback(driver.unmap, addresses[-1], size)
            token = channel.setup(ENTRIES, ring, userd)
        finally:
            userd.close()
    finally:
        ring.close()
    entries, positions = addresses
    return Ring(
        ring=MMIOInterface(entries, ENTRIES * 8, fmt="Q"),
        gpput=MMIOInterface(positions + abi.USERD_GP_PUT, 4, fmt="I"),
        entries_count=ENTRIES,
        token=token,
        gpget=MMIOInterface(positions + abi.USERD_GP_GET, 4, fmt="I"),
    )


class NVDevice(_TinygradNVDevice):  # type: ignore[misc]
    """With other interfaces than TEGRAIface it behaves as tinygrad's own. tinygrad finds it by its class name."""

    ifaces = [TEGRAIface, *_TinygradNVDevice.ifaces]  # noqa: RUF012  # tinygrad's attribute
    error_state: Exception | None

    def __init__(self, device: str = "") -> None:
        self.iface = self._select_iface(device)
        if not isinstance(self.iface, TEGRAIface):
            super().__init__(device)
            return
        try:
            self._start(device, self.iface)
        except BaseException:
            self.iface.device_fini()
            raise

    def _select_iface(self, device: str) -> Any:
        if "iface" in self.__dict__:  # the base class asks again
            return self.iface
        try:
            return super()._select_iface(device)
        except ExceptionGroup as group:  # on a Jetson, the error of its own driver matters
            for error in group.exceptions:
                if isinstance(error, DriverError) and error.errno != errno.ENOENT:
                    raise error from group
            raise

    def _start(self, device: str, iface: TEGRAIface) -> None:
        try:
            TinySystem.memory_barrier()
        except AttributeError as error:
            raise DriverError(
                "NV needs the library libatomic.", "Run: sudo apt install libatomic1"
            ) from error
        self.compute_gpfifo, self.gpu_mmio = iface.ring, iface.doorbell
        self.cmdq_page = iface.alloc(_COMMAND_BYTES)
        self.cmdq = self.cmdq_page.cpu_view().view(fmt="I")
        self.cmdq_allocator = BumpAllocator(_COMMAND_BYTES, base=self.cmdq_page.va_addr, wrap=True)

        gpu = iface.characteristics
        self.pma_enabled, self.num_sm_per_tpc = False, _SM_PER_TPC
        # These numbers size local memory. They must not be too small; how TPCs are spread over GPCs does not matter.
        tpcs = -(-iface.multiprocessors // _SM_PER_TPC)
        self.num_gpcs, self.num_tpc_per_gpc = 1, max(tpcs, gpu.num_gpc * gpu.num_tpc_per_gpc)
        # The driver's figure is probably that of a TPC. Local memory then is twice as large as needed.
        self.max_warps_per_sm = gpu.warp_count
        major, minor = gpu.sm_version >> 8 & 0xFF, gpu.sm_version & 0xFF
        self.sm_version, self.arch = gpu.sm_version, f"sm_{major}{minor}"
        self.sass_version = major << 4 | minor

        HCQCompiled.__init__(
            self,
            device,
            TegraAllocator(self),
            renderers,
            NVProgram,
            TegraSignal,
            TegraComputeQueue,
            None,  # no copy queue: the copy engine is slower than memmove, and copies in graphs hung
            kernargs_size=_ARGUMENT_BYTES,
            arch=self.arch,
        )
        self.slm_per_thread, self.shader_local_mem = 0, None
        self.local_mem_window, self.shared_mem_window = LOCAL_WINDOW.start, SHARED_WINDOW.start
        setup = TegraComputeQueue().setup(
            compute_class=iface.compute_class,
            local_mem_window=self.local_mem_window,
            shared_mem_window=self.shared_mem_window,
        )
        setup.signal(self.timeline_signal, self.next_timeline()).submit(self)
        self.synchronize()
        iface.ring.check_position()

    @property
    def closed(self) -> bool:
        return bool(getattr(self.iface, "closed", False))

    def synchronize(self, timeout: int | None = None) -> None:
        if not self.closed:
            super().synchronize(timeout)

    def _ensure_has_local_memory(self, required: int) -> None:
        if isinstance(self.iface, TEGRAIface) and self.slm_per_thread < required:
            self.synchronize()  # no kernel may use the memory that is about to be replaced
        super()._ensure_has_local_memory(required)

    def invalidate_caches(self) -> None:
        if isinstance(self.iface, TEGRAIface):
            self.iface.control.flush_caches()
        else:
            super().invalidate_caches()

    def on_device_hang(self) -> None:
        if isinstance(self.iface, TEGRAIface):
            if not isinstance(self.error_state, HangError):  # the first error is the cause of later ones
                self.error_state = self.iface.hang_error()
            raise self.error_state
        super().on_device_hang()
