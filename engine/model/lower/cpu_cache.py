"""Where a CPU keeps keys and values: one after another for one conversation, in blocks for several."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Protocol

from tinygrad import Tensor, dtypes

from engine.devices.system_files import meminfo
from engine.formats.kv_format import KVFormat
from engine.kernels.cpu import memory
from engine.kernels.cpu.rope import Heads
from engine.model.kv_blocks import BLOCK, KVGroup
from engine.model.lower import REWIND
from engine.model.lower.cpu_export import CachedLayer
from engine.model.spec import ModelSpec


class CPUCache(Protocol):
    """The memory of keys and values, and how kernels find a token in it."""

    positions: int
    """The positions that a step may compute, those that fill its last tile included."""

    max_rewind: int | None
    """See `ModelRunner.max_rewind`."""

    sequences: list[Tensor]
    """The sequence of each token of a step, int32 (tokens,), if there are several."""

    def slots(self, window: int) -> tuple[int, int, int]:
        """The fields `length`, `window` and `table` of the `Heads` of layers with a window, or with none (0)."""
        ...

    def add(self, heads: Heads) -> list[Tensor]:
        """The cache of one more layer (`Heads.cached`)."""
        ...

    def rotating(self, heads: Heads, tile: int) -> list[Tensor]:
        """What `engine.kernels.cpu.rope.rotate` reads to find the places of tokens."""
        ...

    def attending(self, heads: Heads) -> list[Tensor]:
        """The same for `engine.kernels.cpu.attention`."""
        ...


class ContiguousCache:
    """The cache of one conversation. Layers with a window keep a ring of tokens."""

    def __init__(self, context: int, max_chunk: int, lanes: int, state: Tensor) -> None:
        self._max_chunk, self._lanes, self._state = max_chunk, lanes, state
        self.layers: list[CachedLayer] = []
        self.positions = self._whole(context + max_chunk)
        self.max_rewind: int | None = None
        self.sequences: list[Tensor] = []

    def slots(self, window: int) -> tuple[int, int, int]:
        # a step stores its tokens before it reads the first one's window
        ring = self._whole(window + self._max_chunk + REWIND)
        if window and ring < self.positions:
            self.max_rewind = REWIND
            return ring, window, 0
        return self.positions, window if window < self.positions else 0, 0

    def add(self, heads: Heads) -> list[Tensor]:
        cached = _zeros(heads)
        self.layers.append((heads, [memory.view(t) for t in cached]))
        return cached

    def rotating(self, heads: Heads, tile: int) -> list[Tensor]:
        return [self._state]

    def attending(self, heads: Heads) -> list[Tensor]:
        return [self._state]

    def _whole(self, tokens: int) -> int:
        """Tokens in whole vectors."""
        return ceil(tokens / self._lanes) * self._lanes


class BlockCache:
    """The cache of several conversations (`engine.model.kv_blocks`). Each layer has one block more than its group: it
    takes the tokens that fill a tile, and stands where a table has no block. The tables have one row more than there
    are sequences, in which it stands everywhere."""

    max_rewind: int | None = None

    def __init__(
        self,
        spec: ModelSpec,
        context: int,
        max_chunk: int,
        lanes: int,
        parallel: int,
        state: Tensor,
        kv: KVFormat,
    ) -> None:
        assert BLOCK % lanes == 0
        self._lanes, self._state, self._parallel = lanes, state, parallel
        entries = ceil((context + max_chunk) / BLOCK)
        self.positions = entries * BLOCK
        self._windows = sorted({self._window(part.window) for part in spec.attention})
        self.groups = tuple(
            KVGroup(window or None, _n_blocks(spec, window, context, max_chunk, parallel, kv))
            for window in self._windows
        )
        self._layers: list[list[CachedLayer]] = [[] for _ in self.groups]
        self._tables = [memory.zeros((parallel + 1) * entries, dtypes.int32) for _ in self.groups]
        for group, table in zip(self.groups, self._tables, strict=True):
            memory.view(table)[:] = group.blocks
        self._entries = entries
        self._places = [memory.zeros(max_chunk, dtypes.int32) for _ in self.groups]
        self._positions, self._sequences = (memory.zeros(max_chunk, dtypes.int32) for _ in range(2))
        self.sequences = [self._sequences]

    def slots(self, window: int) -> tuple[int, int, int]:
        window = self._window(window)
        return (self.groups[self._windows.index(window)].blocks + 1) * BLOCK, window, self._entries

    def add(self, heads: Heads) -> list[Tensor]:
        cached = _zeros(heads)
        self._layers[self._group(heads)].append((heads, [memory.view(t) for t in cached]))
        return cached

    def rotating(self, heads: Heads, tile: int) -> list[Tensor]:
        places = [self._places[self._group(heads)]] if heads.stored != "nothing" else []
        return [*([self._state] if tile > 1 else []), self._positions, *places]

    def attending(self, heads: Heads) -> list[Tensor]:
        return [self._tables[self._group(heads)], self._positions, self._sequences]

    # --- what changes from step to step ------------------------------------------------------------------

    def assign(self, sequence: int, tables: Sequence[Sequence[int]]) -> None:
        """See `BlockStore.assign`."""
        for group, all_tables, table in zip(self.groups, self._tables, tables, strict=True):
            row = memory.view(all_tables).reshape(-1, self._entries)[sequence]
            row[:] = group.blocks
            row[: len(table)] = table
            row[row < 0] = group.blocks

    def copy_block(self, group: int, source: int, target: int) -> None:
        """See `BlockStore.copy_block`."""
        for heads, cached in self._layers[group]:
            for buffer in cached:  # a head's elements of BLOCK slots lie together in all of them
                blocks = buffer.reshape(heads.kv, heads.length // BLOCK, -1)
                blocks[:, target] = blocks[:, source]

    def set_tokens(self, sequences: Sequence[int], positions: Sequence[int], tokens: int) -> None:
        """The sequence and the position of each token of the next step. It computes `tokens` tokens with those that
        fill its last tile, which belong to no sequence."""
        n = len(positions)
        of_sequence, at = (memory.view(t)[:tokens] for t in (self._sequences, self._positions))
        of_sequence[:n], of_sequence[n:] = sequences, self._parallel
        at[:n], at[n:] = positions, 0
        for group, table, places in zip(self.groups, self._tables, self._places, strict=True):
            blocks = memory.view(table).reshape(-1, self._entries)[of_sequence, at // BLOCK]
            assert (blocks[:n] < group.blocks).all(), "no block is assigned for a token"
            memory.view(places)[:tokens] = blocks * BLOCK + at % BLOCK

    def _window(self, window: int) -> int:
        return window if window < self.positions else 0

    def _group(self, heads: Heads) -> int:
        return self._windows.index(heads.window)


def _zeros(heads: Heads) -> list[Tensor]:
    return [memory.zeros(n, dtype, sparse=True) for n, dtype in heads.cached]


def _n_blocks(spec: ModelSpec, window: int, context: int, max_chunk: int, parallel: int, kv: KVFormat) -> int:
    """The blocks of a pool: so many that all conversations find room, and windows of earlier ones; but the pools of
    layers without a window take no more than half of the memory, if one conversation fits."""
    if window:
        return 2 * parallel * (ceil((window + REWIND + max_chunk) / BLOCK) + 2)
    one = ceil((context + max_chunk) / BLOCK) + 1
    free = meminfo().get("MemAvailable", 0) - spec.weight_bytes_per_token
    block_bytes = BLOCK * spec.kv_bytes_per_token(windowed=False, kv=kv) or 1
    return max(one, min(parallel * one, free // 2 // block_bytes))
