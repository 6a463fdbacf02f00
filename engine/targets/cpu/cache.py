"""Where a CPU keeps keys and values: in blocks of tokens (`engine.runtime.kv_blocks`)."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

import numpy as np
from numpy.typing import NDArray
from tinygrad import Tensor, dtypes

from engine.description.spec import ModelSpec
from engine.devices.system_files import meminfo
from engine.formats.kv_format import KVFormat
from engine.runtime.kv_blocks import BLOCK, KVGroup, blocks_of_one
from engine.runtime.prefix_store import CHUNK
from engine.targets.cpu.export import CachedLayer, export_blocks, import_blocks
from engine.targets.cpu.kernels import memory
from engine.targets.cpu.kernels.rope import HeadLanes


class CPUCache:
    """Each layer has one block more than its group: it takes the tokens that fill a tile, and stands where a table has
    no block. The tables have one row more than there are sequences, in which it stands everywhere."""

    def __init__(
        self, spec: ModelSpec, context: int, max_chunk: int, lanes: int, parallel: int, kv: KVFormat
    ) -> None:
        assert BLOCK % lanes == 0
        self.entries = ceil((context + max_chunk) / BLOCK)
        """The entries of a sequence in the tables."""
        self.positions = self.entries * BLOCK
        """The positions that a step may compute, those that fill its last tile included."""
        self._windows = sorted({self.window(part.window) for part in spec.attention})
        one = {window: blocks_of_one(window, context, max_chunk) for window in self._windows}
        self.groups = tuple(
            KVGroup(window or None, _n_blocks(spec, window, blocks, parallel, kv))
            for window, blocks in one.items()
        )
        self.dtype = dtypes.int8 if kv.is_quantized else dtypes.float32 if spec.is_float32 else dtypes.float16
        self.layers: list[CachedLayer] = []
        self._caches: list[list[Tensor]] = []  # by attention, what it reads
        self._groups: list[int] = []  # by attention, the group of that
        self._tables = [memory.zeros(2 + (parallel + 1) * self.entries, dtypes.int32) for _ in self.groups]
        self._rows = [memory.view(table)[2:].reshape(parallel + 1, self.entries) for table in self._tables]
        for group, table, rows in zip(self.groups, self._tables, self._rows, strict=True):
            memory.view(table)[:2] = self.entries, group.blocks + 1
            rows[:] = group.blocks

    # --- what the layers have ----------------------------------------------------------------------------

    def window(self, window: int) -> int:
        """The `window` of the `HeadLanes` of attention with a window, or with none (0)."""
        return window if window < self.positions else 0

    def add(self, heads: HeadLanes, cache_of: int | None) -> tuple[list[Tensor], Tensor]:
        """The cache that one more attention reads (`HeadLanes.cached`), its own or that of the attention `cache_of`,
        and the tables."""
        group = self._windows.index(heads.window) if cache_of is None else self._groups[cache_of]
        if cache_of is None:
            sizes = heads.cached(self.groups[group].blocks + 1)
            self._caches.append([memory.zeros(n, dtype, sparse=True) for n, dtype in sizes])
            self.layers.append((heads, [memory.view(t) for t in self._caches[-1]]))
        else:
            self._caches.append(self._caches[cache_of])
        self._groups.append(group)
        return self._caches[-1], self._tables[group]

    def _group(self, heads: HeadLanes) -> int:
        return self._windows.index(heads.window)

    # --- what changes from step to step ------------------------------------------------------------------

    def assign(self, sequence: int, tables: Sequence[Sequence[int]]) -> None:
        """See `BlockStore.assign`."""
        for group, rows, table in zip(self.groups, self._rows, tables, strict=True):
            row = rows[sequence]
            row[: len(table)] = table
            row[len(table) :] = -1
            row[row < 0] = group.blocks

    def has_blocks(self, sequence: int, position: int) -> bool:
        """Whether a token has a block in every group."""
        entry = position // BLOCK
        return all(
            rows[sequence, entry] < group.blocks for group, rows in zip(self.groups, self._rows, strict=True)
        )

    def copy_block(self, group: int, source: int, target: int) -> None:
        """See `BlockStore.copy_block`."""
        for heads, cached in self.layers:
            if self._group(heads) == group:
                for buffer in cached:  # a head's elements of a block lie together in all of them
                    blocks = buffer.reshape(heads.kv, self.groups[group].blocks + 1, -1)
                    blocks[:, target] = blocks[:, source] if source >= 0 else 0

    def export_blocks(self, tables: Sequence[Sequence[int]]) -> NDArray[np.uint8]:
        """See `ModelRunner.export_blocks`."""
        return export_blocks(self.layers, self._chunks(tables))

    def import_blocks(self, tables: Sequence[Sequence[int]], export: NDArray[np.uint8]) -> None:
        """See `ModelRunner.import_blocks`."""
        import_blocks(self.layers, self._chunks(tables), export)

    def _chunks(self, tables: Sequence[Sequence[int]]) -> list[NDArray[np.intp]]:
        """The blocks of a chunk in each layer. The block beside the group's stands where there is none."""
        assert all(len(table) == CHUNK // BLOCK for table in tables)
        of_groups = [
            np.where(np.less(table, 0), group.blocks, table)
            for group, table in zip(self.groups, tables, strict=True)
        ]
        return [of_groups[self._group(heads)] for heads, _ in self.layers]


def _n_blocks(spec: ModelSpec, window: int, one: int, parallel: int, kv: KVFormat) -> int:
    """The blocks of a pool, if a sequence needs `one`: so many that all find room, and beside several as many windows
    of earlier ones; but the pools of layers without a window take no more than half of the memory, if one fits."""
    if window:
        return (2 * parallel - 1) * one
    free = meminfo().get("MemAvailable", 0) - spec.weight_bytes_per_token
    block_bytes = BLOCK * spec.kv_bytes_per_token(windowed=False, kv=kv) or 1
    return max(one, min(parallel * one, free // 2 // block_bytes))
