"""Copies blocks of a GPU's KV cache out and in, for `engine.runtime.prefix_store`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray
from tinygrad import Tensor, UOp, dtypes

from engine.kernels.device_memory import device_zeros, overwrite
from engine.runtime.kv_blocks import BLOCK
from engine.runtime.prefix_store import CHUNK
from engine.targets.nvidia.kernels.attention.kv_export import export_sizes, export_tokens, import_tokens
from engine.targets.nvidia.kernels.kernel_sequence import KernelSequence
from engine.targets.nvidia.sublayers.attention import AttentionHandler


class CacheExport:
    """Exports as `engine.targets.cpu.export` has them, of `layers` whose windows are among `windows`, one for each
    group. The kernels are compiled at their first use, and the buffer of an export is kept from then on."""

    def __init__(self, layers: Sequence[AttentionHandler], windows: Sequence[int]) -> None:
        self._layers, self._windows = layers, windows

    def export_blocks(self, tables: Sequence[Sequence[int]]) -> NDArray[np.uint8]:
        """See `ModelRunner.export_blocks`."""
        self._send(tables)
        self._export()
        return np.asarray(self._staging.uop.base.buffer.numpy(), np.uint8)

    def import_blocks(self, tables: Sequence[Sequence[int]], export: NDArray[np.uint8]) -> None:
        """See `ModelRunner.import_blocks`."""
        self._send(tables)
        overwrite(self._staging, export)
        self._import()

    def _send(self, tables: Sequence[Sequence[int]]) -> None:
        for blocks, table in zip(self._blocks.values(), tables, strict=True):
            overwrite(blocks, np.asarray(table, np.int32))

    @functools.cached_property
    def _blocks(self) -> dict[int, Tensor]:
        """The blocks of a chunk, by window."""
        return {window: device_zeros(CHUNK // BLOCK, dtypes.int32) for window in self._windows}

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
            blocks = self._blocks[a.heads.window]
            sequence.add(export_tokens(a.heads, CHUNK), cache=a.cache, blocks=blocks, **parts)
        return sequence.capture()

    @functools.cached_property
    def _import(self) -> Callable[[], None]:
        sequence = KernelSequence()
        for a, parts in zip(self._layers, self._parts, strict=True):
            blocks = self._blocks[a.heads.window]
            sequence.add(import_tokens(a.heads, CHUNK), cache=a.cache, blocks=blocks, **parts)
        return sequence.capture()
