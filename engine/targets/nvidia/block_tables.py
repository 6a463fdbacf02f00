"""The tables of sequences on a GPU, which say to steps in which blocks of the KV cache tokens lie."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from tinygrad import dtypes

from engine.kernels.device_memory import device_zeros, overwrite
from engine.runtime.kv_blocks import KVGroup
from engine.targets.nvidia.kernels.attention.kv_cache import copy_block
from engine.targets.nvidia.kernels.kernel_sequence import KernelSequence
from engine.targets.nvidia.sublayers.attention import AttentionHandler


class BlockTables:
    """The tables of `parallel` sequences, and the kernels that copy blocks. Layers with the same window are a group,
    and share tables (`engine.runtime.kv_blocks.BlockStore`)."""

    def __init__(self, layers: Sequence[AttentionHandler], parallel: int) -> None:
        by_window = {layer.heads.window: layer for layer in layers}
        self.windows = list(by_window)
        self.groups = tuple(KVGroup(window or None, a.heads.pool) for window, a in by_window.items())
        self._layers = layers
        self._tables = [layer.tables for layer in by_window.values()]
        self._host = [
            np.full((parallel, layer.heads.table_size), -1, np.int32) for layer in by_window.values()
        ]
        self._stale: set[tuple[int, int]] = set()  # the groups and sequences of tables that are to be sent
        self._copied = device_zeros(2, dtypes.int32)

    def assign(self, sequence: int, tables: Sequence[Sequence[int]]) -> None:
        """Sets the tables of a sequence, which `send` sends."""
        for group, (host, table) in enumerate(zip(self._host, tables, strict=True)):
            row = np.full(host.shape[1], -1, np.int32)
            row[: len(table)] = table
            if not np.array_equal(row, host[sequence]):
                host[sequence] = row
                self._stale.add((group, sequence))

    def send(self) -> None:
        """Sends to the device what has changed. To be called before a step."""
        for group, of in self._stale:
            table: NDArray[np.int32] = self._host[group][of]
            overwrite(self._tables[group], table, of * table.size)
        self._stale.clear()

    def choose_copy(self, source: int, target: int) -> None:
        """Says which block the kernels of `copy_kernels` copy, and to which."""
        overwrite(self._copied, np.asarray([source, target], np.int32))

    def copy_kernels(self, group: int) -> KernelSequence:
        """Copies a block in all layers of a group."""
        sequence = KernelSequence()
        for layer in self._layers:
            if layer.heads.window == self.windows[group]:
                sequence.add(copy_block(layer.heads), cache=layer.cache, blocks=self._copied)
        return sequence

    def kernels(self) -> list[KernelSequence]:
        """All kernels."""
        return [self.copy_kernels(group) for group in range(len(self.windows))]
