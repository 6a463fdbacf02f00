"""tinygrad's allocator on shared memory: every buffer has an address for the CPU too, and copies are memmove."""

import ctypes
from typing import Any

from tinygrad.device import BufferSpec
from tinygrad.helpers import cpu_profile, from_mv, to_mv
from tinygrad.runtime.ops_nv import NVAllocator
from tinygrad.runtime.support.hcq import HCQBuffer


class TegraAllocator(NVAllocator):  # type: ignore[misc]
    """It has no staging buffers and no copy queue. After a fault it frees nothing: closing the device frees all."""

    def __init__(self, dev: Any) -> None:
        super().__init__(dev, batch_cnt=0, supports_copy_from_disk=False, supports_transfer=False)

    def _copyin(self, dest: HCQBuffer, src: memoryview) -> None:
        self._copy(dest.cpu_view().addr, from_mv(src), src.nbytes, f"TINY -> {self.dev.device}")

    def _copyout(self, dest: memoryview, src: HCQBuffer) -> None:
        self._copy(from_mv(dest), src.cpu_view().addr, dest.nbytes, f"{self.dev.device} -> TINY")

    def _copy(self, dest: Any, src: Any, n_bytes: int, profile_name: str) -> None:
        self.dev.synchronize()
        with cpu_profile(profile_name, f"{self.dev.device}:COPY"):
            ctypes.memmove(dest, src, n_bytes)

    def _as_buffer(self, src: HCQBuffer) -> memoryview:
        view: memoryview = to_mv(src.cpu_view().addr, src.size)
        return view

    def _do_map(self, buf: HCQBuffer) -> HCQBuffer:
        raise RuntimeError("A Tegra GPU cannot map a buffer of another device.")

    def _free(self, opaque: HCQBuffer, options: BufferSpec | None = None) -> None:
        if not self.dev.closed and self.dev.error_state is None:
            super()._free(opaque, options)
