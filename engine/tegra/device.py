"""tinygrad's device NV on a Jetson: `install` puts it in the place of tinygrad's own, which goes on serving desktop
GPUs. DEV=NV takes the Jetson's driver where there is one and nvidia.ko elsewhere; DEV=TEGRA+NV insists on the former.

Nothing of a desktop driver's resource manager is imitated: what tinygrad's NVDevice asks it for at start is done here
with nvgpu's calls, and the parts that need none (queues, programs, launch descriptors) are tinygrad's.
"""

from __future__ import annotations

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
from engine.tegra.errors import DriverError, HangError
from engine.tegra.memory import BUFFERS, LOCAL_WINDOW, SHARED_WINDOW, Memory
from engine.tegra.notifier import ErrorNotifier, report
from engine.tegra.queue import ENTRIES, Ring, TegraComputeQueue, TegraSignal

_COMMANDS, _ARGUMENTS = 2 << 20, 8 << 20  # bytes; for each of the ring's submissions 2 and 8 KiB
_SM_PER_TPC = 2
_serial = itertools.count()
_Stock: Any = ops_nv.NVDevice
renderers = [CUDARenderer, PTXRenderer, NVCCRenderer, NAKRenderer]


def install() -> None:
    """Makes Device["NV"] the one of this module; to be called before a device is opened. Raises BackendError where
    another tinygrad is installed."""
    require_tinygrad("The Tegra interface of NV")
    ops_nv.NVDevice = NVDevice


class TEGRAIface:
    """What tinygrad's NV backend calls an interface: one GPU of a Jetson, opened. Its name is what DEV selects."""

    count = 1
    viddec_class = None

    def __init__(self, dev: Any, device_id: int) -> None:
        """Raises DriverError, with everything closed again."""
        if device_id:
            raise DriverError(f"There is no GPU {device_id}: a Jetson has one.", "Take NV or NV:0.")
        self.dev, self.closed = dev, False
        self.peer_group = f"TEGRA{next(_serial)}"  # so that no signal outlives its device in tinygrad's pool
        with ExitStack() as opened:
            self._open(opened)
            self._opened = opened.pop_all()

    def _open(self, opened: ExitStack) -> None:
        """The order is the driver's: see `engine.tegra.driver`. Closing goes the other way."""
        nvmap = opened.enter_context(closing(Nvmap()))
        self.control = control = opened.enter_context(closing(Control()))
        gpu = self.characteristics = control.characteristics()
        self.multiprocessors = control.multiprocessors()
        self.compute_class, self.dma_class = gpu.compute_class, gpu.dma_copy_class

        space = opened.enter_context(closing(control.address_space(BUFFERS.start, BUFFERS.stop)))
        coherent = gpu.flags & abi.IO_COHERENCE  # then the GPU sees what lies in the CPU's caches
        cache = abi.INNER_CACHEABLE if coherent else abi.WRITE_COMBINE
        self.memory = opened.enter_context(closing(Memory(nvmap, space, cache)))
        self.tsg = opened.enter_context(closing(control.tsg()))
        subcontext = self.tsg.subcontext(space)
        channel = opened.enter_context(closing(control.channel()))
        space.bind(channel)
        self.tsg.bind(channel, subcontext)
        channel.disable_watchdog()
        self.ring = _ring(nvmap, channel, opened)
        channel.create_object(gpu.compute_class)
        self.notifier = opened.enter_context(closing(ErrorNotifier(nvmap, channel)))
        doorbell = control.doorbell()
        opened.callback(driver.unmap, doorbell, abi.DOORBELL_BYTES)
        self.doorbell = MMIOInterface(doorbell, abi.DOORBELL_BYTES, fmt="I")

    def alloc(self, size: int, zero: bool = False, **_: object) -> HCQBuffer:
        """Every buffer is mapped for both, and says the size that was asked for. Raises DriverMemoryError when there
        is no room."""
        mapping = self.memory.allocate(size, zero)
        view = MMIOInterface(mapping.address, size, fmt="B")
        return HCQBuffer(mapping.va, size, meta=mapping, view=view, owner=self.dev)

    def free(self, buffer: HCQBuffer) -> None:
        self.memory.free(buffer.meta)

    def sleep(self, _ms: int) -> None:
        """Called while a signal is late. Raises HangError as soon as the driver reports a fault."""
        if self.notifier.read() is not None:
            raise self.hang()
        time.sleep(0.0005)

    def hang(self) -> HangError:
        """Why nothing happens any more. What another process may have done to the GPU is not told apart."""
        cause = report(self.notifier.read(), self.tsg, self.multiprocessors)
        return HangError(
            cause, "Restart the engine; the kernel's log (sudo dmesg) has the driver's own words."
        )

    def device_fini(self) -> None:
        """Closes everything, once. Signals are looked at even later, by graphs on their way out: where they were,
        each reads as long passed."""
        if self.closed:
            return
        self.closed = True
        for page in HCQCompiled.signal_pages.pop(self.peer_group, []):
            self.memory.bury(page.meta)
        HCQCompiled.signal_pool.pop(self.peer_group, None)
        HCQCompiled.peer_groups.pop(self.peer_group, None)
        self._opened.close()


def _ring(nvmap: Nvmap, channel: driver.Channel, opened: ExitStack) -> Ring:
    """The channel's ring, and the page with how far GPU and CPU are in it. Neither lies in the address space of the
    kernels; the driver maps the ring in its own part."""
    n_bytes = max(abi.PAGE, ENTRIES * 8)
    ring = nvmap.buffer(n_bytes, abi.PAGE, abi.WRITE_COMBINE, zero=True)
    try:
        userd = nvmap.buffer(abi.PAGE, abi.PAGE, abi.WRITE_COMBINE, zero=True)
        try:
            places = []
            for buffer, size in ((ring, n_bytes), (userd, abi.PAGE)):
                places.append(buffer.map(size))
                opened.callback(driver.unmap, places[-1], size)
            token = channel.setup(ENTRIES, ring, userd)
        finally:
            userd.close()
    finally:
        ring.close()
    entries, positions = places
    return Ring(
        ring=MMIOInterface(entries, ENTRIES * 8, fmt="Q"),
        gpput=MMIOInterface(positions + abi.USERD_GP_PUT, 4, fmt="I"),
        entries_count=ENTRIES,
        token=token,
        gpget=MMIOInterface(positions + abi.USERD_GP_GET, 4, fmt="I"),
    )


class NVDevice(_Stock):  # type: ignore[misc]
    """tinygrad knows a device by its class's name. On other interfaces it is tinygrad's own."""

    ifaces = [TEGRAIface, *_Stock.ifaces]  # noqa: RUF012  # tinygrad's attribute
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
        if "iface" in self.__dict__:  # asked again by the class below
            return self.iface
        try:
            return super()._select_iface(device)
        except ExceptionGroup as group:  # on a Jetson its driver's word is what matters
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
        self.cmdq_page = iface.alloc(_COMMANDS)
        self.cmdq = self.cmdq_page.cpu_view().view(fmt="I")
        self.cmdq_allocator = BumpAllocator(_COMMANDS, base=self.cmdq_page.va_addr, wrap=True)

        gpu = iface.characteristics
        self.pma_enabled, self.num_sm_per_tpc = False, _SM_PER_TPC
        # For local memory: at least as many as there are; how they are spread over the GPC does not matter.
        tpcs = -(-iface.multiprocessors // _SM_PER_TPC)
        self.num_gpcs, self.num_tpc_per_gpc = 1, max(tpcs, gpu.num_gpc * gpu.num_tpc_per_gpc)
        self.max_warps_per_sm = gpu.warp_count  # probably a pair's: then local memory is twice what is needed
        major, minor = gpu.sm_version >> 8 & 0xFF, gpu.sm_version & 0xFF
        self.sm_version, self.arch, self.sass_version = (
            gpu.sm_version,
            f"sm_{major}{minor}",
            major << 4 | minor,
        )

        HCQCompiled.__init__(
            self,
            device,
            TegraAllocator(self),
            renderers,
            NVProgram,
            TegraSignal,
            TegraComputeQueue,
            None,  # the copy engine is slower than memmove, and copies in graphs hung
            kernargs_size=_ARGUMENTS,
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
        iface.ring.probe()

    @property
    def closed(self) -> bool:
        return bool(getattr(self.iface, "closed", False))

    def synchronize(self, timeout: int | None = None) -> None:
        if not self.closed:
            super().synchronize(timeout)

    def _ensure_has_local_memory(self, required: int) -> None:
        if isinstance(self.iface, TEGRAIface) and self.slm_per_thread < required:
            self.synchronize()  # nothing may use what is about to be replaced
        super()._ensure_has_local_memory(required)

    def invalidate_caches(self) -> None:
        if isinstance(self.iface, TEGRAIface):
            self.iface.control.flush_caches()
        else:
            super().invalidate_caches()

    def on_device_hang(self) -> None:
        if isinstance(self.iface, TEGRAIface):
            if not isinstance(self.error_state, HangError):  # else what was said first is what is true
                self.error_state = self.iface.hang()
            raise self.error_state
        super().on_device_hang()
