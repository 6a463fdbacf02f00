"""Copies chunks of a GPU's KV cache out and in, for `engine.model.prefix_store`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray
from tinygrad import Tensor, UOp, dtypes

from engine.kernels.gpu.device_memory import device_zeros, overwrite
from engine.kernels.gpu.kernel_sequence import KernelSequence
from engine.kernels.gpu.kv_export import export_sizes, export_tokens, import_tokens
from engine.model.lower.gpu_layers import Attention
from engine.model.prefix_store import CHUNK


class CacheExport:
    """Exports as `engine.model.lower.cpu_export` has them. The kernels are compiled at their first use, and the buffer
    of an export is kept from then on."""

    def __init__(self, layers: Sequence[Attention]) -> None:
        self._layers = layers

    def export_chunk(self, position: int) -> NDArray[np.uint8]:
        overwrite(self._position, np.asarray([position], np.int32))
        self._export()
        return np.asarray(self._staging.uop.base.buffer.numpy(), np.uint8)

    def import_chunk(self, position: int, export: NDArray[np.uint8]) -> None:
        overwrite(self._position, np.asarray([position], np.int32))
        overwrite(self._staging, export)
        self._import()

    @functools.cached_property
    def _position(self) -> Tensor:
        return device_zeros(1, dtypes.int32)

    @functools.cached_property
    def _sizes(self) -> list[tuple[int, int]]:
        return [export_sizes(a.heads, CHUNK) for a in self._layers]

    @functools.cached_property
    def _staging(self) -> Tensor:
        """Quants of all layers, then scales."""
        return device_zeros(sum(n + 2 * scales for n, scales in self._sizes), dtypes.uint8)

    @functools.cached_property
    def _parts(self) -> list[dict[str, Tensor]]:
        """The quants and the scales of each layer in the staging buffer."""
        whole, parts = self._staging.uop.base.buffer, []
        at, scales_at = 0, sum(n for n, _ in self._sizes)
        for n, scales in self._sizes:
            buffers = whole.view(n, dtypes.int8, at), whole.view(scales, dtypes.float16, scales_at)
            quants, scale = (Tensor(UOp.from_buffer(b.ensure_allocated())) for b in buffers)
            parts.append({"quants": quants, "scales": scale})
            at, scales_at = at + n, scales_at + 2 * scales
        return parts

    @functools.cached_property
    def _export(self) -> Callable[[], None]:
        sequence = KernelSequence()
        for a, parts in zip(self._layers, self._parts, strict=True):
            sequence.add(export_tokens(a.heads, CHUNK), cache=a.cache, position=self._position, **parts)
        return sequence.capture()

    @functools.cached_property
    def _import(self) -> Callable[[], None]:
        sequence = KernelSequence()
        for a, parts in zip(self._layers, self._parts, strict=True):
            sequence.add(import_tokens(a.heads, CHUNK), cache=a.cache, position=self._position, **parts)
        return sequence.capture()
