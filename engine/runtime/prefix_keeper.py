"""Moves the keys and values of long conversations between the KV cache and the disk, and recurrent states with them.

What is read becomes blocks in the tree of known texts (`kv_blocks`), where a prompt finds them as it finds those of
another conversation.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray
from tinygrad import Device

from engine.runtime.checkpoints import Checkpoints
from engine.runtime.kv_blocks import BLOCK, KVBlocks, PoolFullError
from engine.runtime.model_runner import ModelRunner
from engine.runtime.prefix_store import CHUNK, PrefixStore, StoredChunk, StoredState

_LEAST = 2048  # tokens: a shorter conversation is prefilled soon enough
_READERS = 4
_BLOCKS = CHUNK // BLOCK
_TIMED = 128  # tokens that are computed at least, to know how fast the device is


def reads_faster(read_s: float, compute_s: float) -> bool:
    """Whether to go on reading chunks, which took so many seconds each, if computing one takes `compute_s`."""
    return read_s <= compute_s


class PrefixKeeper:
    """What `store` keeps for the KV cache of `runner`, whose recurrent states have these checkpoints, if it has any."""

    def __init__(
        self, runner: ModelRunner, blocks: KVBlocks, store: PrefixStore, states: Checkpoints | None
    ) -> None:
        self.runner, self.blocks, self.store, self.states = runner, blocks, store, states
        self.readers = ThreadPoolExecutor(_READERS, "prefixes")
        self._ended: list[tuple[list[int], int]] = []  # conversations that `keep` has to look at

    # --- from the disk -----------------------------------------------------------------------------------

    def restore(self, tokens: Sequence[int], cached: int) -> Restore | None:
        """What reads the rest of `tokens`, of which `cached` are in the KV cache; None if too little is stored."""
        chunks, state = self.store.find(tokens), None
        if self.states and chunks:
            stored = (s for s in self.store.states(tokens) if s.length // CHUNK <= len(chunks))
            state = next(stored, None)
            chunks = chunks[: state.length // CHUNK] if state else []
        chunks = self._usable(chunks)
        if len(chunks) * CHUNK - cached < _LEAST:
            return None
        return Restore(self, tokens, chunks, -(-(cached + _TIMED) // CHUNK), state)

    def _usable(self, chunks: list[StoredChunk]) -> list[StoredChunk]:
        """The first of the chunks: as many as end with windows that were exported."""
        windows = [group for group in self.runner.kv_groups if group.window]
        while windows and chunks:
            seen = min(group.first_seen(len(chunks) * CHUNK) for group in windows)
            needed = enumerate(chunks[seen // CHUNK :], seen // CHUNK)
            if all(chunk.window_from <= max(seen, i * CHUNK) for i, chunk in needed):
                break
            chunks = chunks[:-1]
        return chunks

    # --- to the disk -------------------------------------------------------------------------------------

    def note(self, tokens: list[int], messages_end: int) -> None:
        """Says that a conversation has ended with `tokens` in the KV cache, of which its messages are the first
        `messages_end`."""
        if len(tokens) >= _LEAST:
            others = [(t, end) for t, end in self._ended if tokens[: len(t)] != t]
            self._ended = [*others, (tokens, messages_end)][-self.runner.parallel :]

    def keep(self, interrupted: Callable[[], bool]) -> None:
        """Stores what is not stored yet of the conversations that have ended, until `interrupted`."""
        while self._ended and self.store.writable and not interrupted():
            if self._keep(*self._ended[0], interrupted):
                self._ended.pop(0)

    def _keep(self, tokens: list[int], messages_end: int, interrupted: Callable[[], bool]) -> bool:
        """Stores chunks of a conversation; False if that was interrupted. A recurrent state is stored as it was after
        the messages, or a little before, and chunks up to there: who goes on with a conversation often leaves out what
        the model thought after them."""
        slot = -1
        if self.states:
            length, slot = self.states.last(tokens, messages_end)
            tokens = tokens[:length]
        if len(tokens) < _LEAST:
            return True
        path, held = self.blocks.path(tokens)
        whole = held // CHUNK
        for number in range(len(self.store.find(tokens)), whole):
            if interrupted():
                return False
            blocks = path[number * _BLOCKS :][:_BLOCKS]
            if not self._is_whole(blocks):
                return True
            lacking = [i for i, of_groups in enumerate(blocks, 1) if min(of_groups) < 0]
            window_from = number * CHUNK + BLOCK * max(lacking, default=0)
            export = self.runner.export_blocks(self._tables(blocks))
            if not self.store.write(tokens[: (number + 1) * CHUNK], window_from, export):
                return True
        if slot >= 0 and held == len(tokens) and not interrupted():
            known = max((state.length for state in self.store.states(tokens)), default=0)
            if len(tokens) - known >= CHUNK and self._is_whole(path[whole * _BLOCKS :]):
                tail = self.runner.export_blocks(self._tables(path[whole * _BLOCKS :])).copy()
                self.store.write_state(tokens, self.runner.export_state(slot), tail)
        return True

    def _is_whole(self, blocks: list[list[int]]) -> bool:
        """Whether layers without a window have these blocks."""
        groups = self.runner.kv_groups
        return all(b >= 0 or groups[g].window for of_groups in blocks for g, b in enumerate(of_groups))

    def _tables(self, blocks: list[list[int]]) -> list[list[int]]:
        """As `ModelRunner.export_blocks` takes blocks of all groups, of which there may be fewer than in a chunk."""
        absent = [-1] * (_BLOCKS - len(blocks))
        return [[b[g] for b in blocks] + absent for g in range(len(self.runner.kv_groups))]


class Restore:
    """Reads what is stored of a prompt. The tokens up to position `first` are computed, to know how long that takes: a
    fast device computes faster than a disk reads, and then the rest is left to it."""

    def __init__(
        self,
        keeper: PrefixKeeper,
        tokens: Sequence[int],
        chunks: list[StoredChunk],
        first: int,
        state: StoredState | None,
    ) -> None:
        """`chunks`: those of the beginning of `tokens`; what is before number `first` is computed. `state`: what is
        read after them."""
        self.first, self.is_reading = first * CHUNK, False
        self._keeper, self._tokens, self._chunks, self._state = keeper, tokens, chunks, state
        self._end = state.length if state else len(chunks) * CHUNK
        self._next = first  # the number of the next chunk
        self._reads: deque[Future[NDArray[np.uint8] | None]] = deque()  # of it and those after it
        self._state_read: Future[tuple[NDArray[np.uint8], NDArray[np.uint8]] | None] | None = None
        self._computed, self._computed_s = 0, 0.0  # tokens, and how long they took
        self._read, self._read_s = 0, 0.0  # chunks, and how long they took here

    def time(self, run: Callable[[], object], position: int, tokens: int) -> None:
        """Computes so many tokens at a position before `first`."""
        device = Device[Device.DEFAULT]
        device.synchronize()
        started = time.perf_counter()
        run()
        device.synchronize()
        self._computed_s += time.perf_counter() - started
        self._computed += tokens
        if position + tokens == self.first:
            self.is_reading = True
            if self._state:
                read, state_bytes = self._state.read, self._keeper.runner.state_bytes
                self._state_read = self._keeper.readers.submit(read, self._tokens, state_bytes)
            self._ask()

    def step(self, waits: bool) -> bool:
        """Stores the next chunk in the KV cache, unless it is not there yet and nobody `waits`. False once nothing more
        is to be read."""
        if not waits and self._reads and not self._reads[0].done():
            return True
        started = time.perf_counter()
        goes_on = self._step()
        self._read, self._read_s = self._read + 1, self._read_s + time.perf_counter() - started
        return goes_on

    def _step(self) -> bool:
        if self._state_read and self._state_read.result() is None:
            return False
        if not self._reads:
            self._store_state()
            return False
        compute_s = self._computed_s / self._computed * CHUNK
        is_known = self._read >= _READERS  # the first reads come all at once
        if is_known and not reads_faster(self._read_s / self._read, compute_s):
            return False
        export, number = self._reads.popleft().result(), self._next
        self._next += 1
        self._ask()
        return export is not None and self._store(
            (number + 1) * CHUNK, number * _BLOCKS, self._chunks[number].window_from, export
        )

    def _ask(self) -> None:
        """Lets the readers be a few chunks ahead."""
        while len(self._reads) < _READERS and (number := self._next + len(self._reads)) < len(self._chunks):
            tokens = self._tokens[number * CHUNK : (number + 1) * CHUNK]
            self._reads.append(self._keeper.readers.submit(self._chunks[number].read, tokens))

    def _store(self, end: int, first: int, window_from: int, export: NDArray[np.uint8]) -> bool:
        """Makes blocks of an export: from number `first` to the end of `end` tokens. False if there is no room."""
        groups, last = self._keeper.runner.kv_groups, -(-end // BLOCK)
        since = -(-window_from // BLOCK)
        kept = [max(since, group.first_kept(self._end)) if group.window else 0 for group in groups]
        try:
            tables = self._keeper.blocks.adopt(self._tokens[:end], first, last, kept)
        except PoolFullError:
            return False
        absent = [-1] * (_BLOCKS - (last - first))
        self._keeper.runner.import_blocks([table + absent for table in tables], export)
        return True

    def _store_state(self) -> None:
        """Makes a checkpoint of the state, and blocks of the tokens after the chunks."""
        states, runner, state, read = self._keeper.states, self._keeper.runner, self._state, self._state_read
        exports = read.result() if read else None
        if not (states and state and exports):
            return
        done, first = len(self._chunks) * CHUNK, len(self._chunks) * _BLOCKS
        if done < state.length and not self._store(state.length, first, done, exports[1]):
            return
        if states.find(self._tokens, state.length) < state.length:
            runner.import_state(states.add(self._tokens[: state.length]), state.length, exports[0])
