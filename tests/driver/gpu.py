"""A GPU in a thread: it follows a channel's ring, obeys the methods in the pushbuffers, and launches kernels.

Everything is found the way the hardware finds it: ring entries through the doorbell and GPPut, commands and launch
descriptors (QMD) at their GPU addresses through the page table, programs and arguments where the descriptor says.
What it does not know is a fault. It is strictly in order: nothing here proves anything about races or caches.
"""

from __future__ import annotations

import ctypes
import struct
import threading
import time
from collections.abc import Callable

from tinygrad.runtime.autogen import nv_570 as nv

from engine.tegra import abi
from tests.driver.program import Fault, Launch, run
from tests.driver.space import Space, Unmapped, map_pages, unmap_pages

GR_EXCEPTION, MMU_FAULT, PBDMA_ERROR = 13, 31, 32
_QUIET = 0xFFFF_FFFF  # what the doorbell reads as when nobody has rung

_PREFIX = "NVC6C0_QMDV03_00_"
_FIELDS = {
    n.removeprefix(_PREFIX): v for n, v in vars(nv).items() if n.startswith(_PREFIX) and isinstance(v, tuple)
}
_INDEXED = {n.removeprefix(_PREFIX): v for n, v in vars(nv).items() if n.startswith(_PREFIX) and callable(v)}
QMD_BYTES = 256

_SEM_ADDR_LO, _SEM_EXECUTE = nv.NVC56F_SEM_ADDR_LO, nv.NVC56F_SEM_EXECUTE
_IGNORED = {nv.NVC56F_NON_STALL_INTERRUPT, nv.NVC6C0_INVALIDATE_SHADER_CACHES_NO_WFI}
_WINDOWS = {
    nv.NVC6C0_SET_SHADER_LOCAL_MEMORY_WINDOW_A: "local",
    nv.NVC6C0_SET_SHADER_SHARED_MEMORY_WINDOW_A: "shared",
}
# Whether a semaphore's value lets the channel go on, from the value, the one given, and 2 to the number of its bits.
_PASSES = {
    nv.NVC56F_SEM_EXECUTE_OPERATION_ACQ_CIRC_GEQ: lambda there, given, limit: (
        (there - given) % limit < limit // 2
    ),
    nv.NVC56F_SEM_EXECUTE_OPERATION_ACQ_AND: lambda there, given, limit: there & given,
    nv.NVC56F_SEM_EXECUTE_OPERATION_ACQ_NOR: lambda there, given, limit: ~(there | given) % limit,
}


class Illegal(Exception):
    """Commands that make no sense."""


class Qmd:
    """A launch descriptor, version 3."""

    def __init__(self, data: bytes):
        self._bits = int.from_bytes(data, "little")

    def __getitem__(self, name: str) -> int:
        return self._at(_FIELDS[name])

    def at(self, name: str, i: int) -> int:
        return self._at(_INDEXED[name](i))

    def _at(self, place: tuple[int, int]) -> int:
        high, low = place
        return self._bits >> low & (1 << high - low + 1) - 1

    def address(self, name: str, i: int | None = None) -> int:
        at = self.__getitem__ if i is None else lambda n: self.at(n, i)
        return at(f"{name}_UPPER") << 32 | at(f"{name}_LOWER")


class Gpu:
    """One channel of `entries`. `on_fault` gets a notifier's code and a warp error."""

    def __init__(
        self,
        token: int,
        entries: int,
        ring: int,
        userd: int,
        space: Space,
        on_fault: Callable[[int, int], None],
    ):
        self.name, self._token, self._n, self._space, self._on_fault = token, token, entries, space, on_fault
        self._ring_bytes = max(abi.PAGE, entries * 8)
        self._ring, self._userd = map_pages(ring, self._ring_bytes), map_pages(userd, abi.PAGE)
        self._ring_words = (ctypes.c_uint64 * entries).from_address(self._ring)
        self._get = ctypes.c_uint32.from_address(self._userd + abi.USERD_GP_GET)
        self._put = ctypes.c_uint32.from_address(self._userd + abi.USERD_GP_PUT)
        self._get.value = self._put.value = 0
        self._doorbell = self._at = 0
        self.silent = False  # does not say how far it is
        self.classes: list[int] = []
        self.fault: Exception | None = None
        self.windows: dict[str, int] = {}
        self.local_base = self.local_bytes = 0
        self._pcas = 0
        self.launches = self.chained = self.qmd_releases = self.submissions = self.accesses = 0
        self.paused = threading.Event()  # set: the GPU looks at nothing
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"GPU {token}", daemon=True)
        self._thread.start()

    def ring_at(self, doorbell_fd: int) -> None:
        address = map_pages(doorbell_fd, abi.DOORBELL_BYTES)
        ctypes.c_uint32.from_address(address + abi.DOORBELL).value = _QUIET
        self._doorbell = address

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()
        unmap_pages(self._ring, self._ring_bytes)
        unmap_pages(self._userd, abi.PAGE)
        if self._doorbell:
            unmap_pages(self._doorbell, abi.DOORBELL_BYTES)

    # ---- the ring ----

    def _run(self) -> None:
        rung = 0.0
        while not self._stopping.is_set():
            if self.paused.is_set() or not self._doorbell or self.fault:
                time.sleep(0.001)
                continue
            bell = ctypes.c_uint32.from_address(self._doorbell + abi.DOORBELL)
            if bell.value != self._token:
                # woken less often the longer nothing happens: kernels are being compiled
                time.sleep(min(max(20e-6, (time.monotonic() - rung) / 20), 0.005))
                continue
            rung = time.monotonic()
            bell.value = _QUIET  # before looking at the ring, so that no later ring is missed
            try:
                while self._at != self._put.value and not self._stopping.is_set():
                    self._entry(self._ring_words[self._at])
                    self._at = (self._at + 1) % self._n
                    self._get.value = 0 if self.silent else self._at
                    self.submissions += 1
            except (Unmapped, Illegal, Fault) as error:
                self.fault = error
                code = {Unmapped: MMU_FAULT, Illegal: PBDMA_ERROR}.get(type(error), GR_EXCEPTION)
                self._on_fault(code, error.warp_esr if isinstance(error, Fault) else 0)

    def _entry(self, word: int) -> None:
        address, n = word & 0xFF_FFFF_FFFC, word >> 42 & 0x1F_FFFF
        if not word >> 41 & 1 or not n:
            raise Illegal(f"ring entry {word:#x}")
        words = struct.unpack(f"<{n}I", self._space.read(address, n * 4))
        at = 0
        while at < n:
            header = words[at]
            count, subchannel, method = header >> 16 & 0x1FFF, header >> 13 & 7, (header & 0xFFF) << 2
            if header >> 29 != 1 or at + 1 + count > n:
                raise Illegal(f"method header {header:#x}")
            self._methods(subchannel, method, words[at + 1 : at + 1 + count])
            at += 1 + count

    # ---- methods ----

    def _methods(self, subchannel: int, method: int, data: tuple[int, ...]) -> None:
        if method == _SEM_ADDR_LO and len(data) == 5:
            low, high, value_low, value_high, execute = data
            self._execute(high << 32 | low, value_high << 32 | value_low, execute)
        elif method == nv.NVC6C0_SET_OBJECT:
            if data[0] not in self.classes:
                raise Illegal(f"class {data[0]:#x} has no object")
        elif method in _WINDOWS:
            self.windows[_WINDOWS[method]] = data[0] << 32 | data[1]
        elif method == nv.NVC6C0_SET_SHADER_LOCAL_MEMORY_A:
            self.local_base = data[0] << 32 | data[1]
        elif method == nv.NVC6C0_SET_SHADER_LOCAL_MEMORY_NON_THROTTLED_A:
            self.local_bytes = data[0] << 32 | data[1]
        elif method == nv.NVC6C0_SEND_PCAS_A:
            self._pcas = data[0]
        elif method == nv.NVC6C0_SEND_SIGNALING_PCAS2_B:
            self._chain(self._pcas << 8)
        elif method not in _IGNORED:
            raise Illegal(f"method {method:#x} on subchannel {subchannel}")

    def _execute(self, address: int, value: int, how: int) -> None:
        """NVC56F_SEM_EXECUTE: bits 2:0 the operation, 20 wait for idle, 24 64 bits, 25 timestamp."""
        operation, wide, stamped = how & 7, how >> 24 & 1, how >> 25 & 1
        size, form = (8, "<Q") if wide else (4, "<I")
        if operation == nv.NVC56F_SEM_EXECUTE_OPERATION_RELEASE:
            if stamped:
                self._space.write(address + 8, struct.pack("<Q", time.perf_counter_ns()))
            self._space.write(address, struct.pack(form, value & (1 << 8 * size) - 1))
        elif operation in _PASSES:
            limit = 1 << 8 * size
            while not _PASSES[operation](
                struct.unpack(form, self._space.read(address, size))[0], value, limit
            ):
                if self._stopping.is_set():
                    return
                time.sleep(20e-6)
        else:
            raise Illegal(f"semaphore operation {operation}")

    # ---- launches ----

    def _chain(self, address: int) -> None:
        """A descriptor, and those that wait for it."""
        first = True
        while address:
            qmd = Qmd(self._space.read(address, QMD_BYTES))
            self._launch(qmd)
            self.chained += not first
            for i in (0, 1):
                if qmd[f"RELEASE{i}_ENABLE"]:
                    self._release(qmd, i)
            first = False
            address = qmd["DEPENDENT_QMD0_POINTER"] << 8 if qmd["DEPENDENT_QMD0_ENABLE"] else 0

    def _release(self, qmd: Qmd, i: int) -> None:
        """A semaphore of four words: value, nothing, time."""
        self.qmd_releases += 1
        words = struct.pack("<QQ", qmd[f"RELEASE{i}_PAYLOAD_LOWER"], time.perf_counter_ns())
        self._space.write(qmd.address(f"RELEASE{i}_ADDRESS"), words)

    def _launch(self, qmd: Qmd) -> None:
        self.launches += 1
        if qmd["QMD_MAJOR_VERSION"] != 3 or qmd["SASS_VERSION"] != 0x87 or not qmd["REGISTER_COUNT_V"]:
            raise Illegal("launch descriptor")
        if not qmd.at("CONSTANT_BUFFER_VALID", 0) or set(self.windows) != {"local", "shared"}:
            raise Illegal("no constants, or no windows")
        local = qmd["SHADER_LOCAL_MEMORY_HIGH_SIZE"]
        if local and (not self.local_base or self.local_bytes < local * 32):
            raise Illegal(f"{local} bytes of local memory for a thread, and {self.local_bytes} in all")
        if self.local_base:
            self._space.at(self.local_base, self.local_bytes)
        self.accesses += run(
            self._space,
            Launch(
                program=qmd.address("PROGRAM_ADDRESS"),
                constants=qmd.address("CONSTANT_BUFFER_ADDR", 0),
                constant_bytes=qmd.at("CONSTANT_BUFFER_SIZE_SHIFTED4", 0) << 4,
                shared_bytes=qmd["SHARED_MEMORY_SIZE"],
                grid=(qmd["CTA_RASTER_WIDTH"], qmd["CTA_RASTER_HEIGHT"], qmd["CTA_RASTER_DEPTH"]),
                block=tuple(qmd[f"CTA_THREAD_DIMENSION{i}"] for i in range(3)),
                windows=(self.windows["local"], self.windows["shared"]),
            ),
        )
