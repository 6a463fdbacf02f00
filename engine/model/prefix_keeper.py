"""Moves a conversation's keys and values between the KV cache and the disk, and a recurrent state with them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from tinygrad import Device

from engine.model.checkpoints import Checkpoints
from engine.model.model_runner import PrefixRunner
from engine.model.prefix_store import CHUNK, PrefixStore, StoredChunk, tail_of

_LEAST = 2048  # tokens: a shorter conversation is prefilled soon enough
_READERS = 4


class PrefixKeeper:
    """What `store` keeps for the KV cache of `runner`, whose recurrent states have these checkpoints, if it has any."""

    def __init__(self, runner: PrefixRunner, store: PrefixStore, states: Checkpoints | None) -> None:
        self._runner, self._store, self._states = runner, store, states

    def restore(self, tokens: Sequence[int], cached: int, cancelled: Callable[[], bool]) -> tuple[int, int]:
        """Reads what is stored of `tokens`, of which `cached` are in the KV cache. Returns how many are there then, and
        how many of these were not computed: none at all if reading ends early and a layer has a window, else a layer
        with a window has no more than the last one before that place. One chunk is computed first: a fast device
        computes faster than a disk reads, and then the rest is left to it."""
        chunks = self._store.find(tokens)
        if self._states:
            return self._restore_state(self._states, chunks, tokens, cached, cancelled)
        chunks, first = self._usable(chunks, cached), cached // CHUNK
        if (len(chunks) - first) * CHUNK < _LEAST or cancelled():
            return cached, cached
        compute_s = _seconds(lambda: self._compute(tokens, first * CHUNK))
        done = self._read(chunks, first + 1, tokens, compute_s, cancelled)
        if done < len(chunks) * CHUNK and self._runner.widest_window:
            return 0, 0  # what was read overwrote the windows before this place
        return done, cached + done - (first + 1) * CHUNK

    def _restore_state(
        self,
        states: Checkpoints,
        chunks: list[StoredChunk],
        tokens: Sequence[int],
        cached: int,
        cancelled: Callable[[], bool],
    ) -> tuple[int, int]:
        """As `restore`: reads the longest state, and the chunks before it. The first chunk begins the sequence anew,
        and if reading ends early, it is all that there is."""
        stored = next((s for s in self._store.states(tokens) if s.length // CHUNK <= len(chunks)), None)
        if stored is None or stored.length - cached < _LEAST or cancelled():
            return cached, cached
        started = time.perf_counter()
        exports = stored.read(tokens, self._runner.state_bytes)
        state_s = time.perf_counter() - started
        if exports is None:
            return cached, cached
        n = stored.length // CHUNK
        compute_s = _seconds(lambda: self._compute(tokens, 0)) - state_s / n
        if self._read(chunks[:n], 1, tokens, compute_s, cancelled) < n * CHUNK:
            return CHUNK, 0
        self._runner.import_chunk(stored.tail, exports[1])
        if states.find(tokens, stored.length) < stored.length:
            slot = states.add(tokens[: stored.length])
            self._runner.import_state(slot, stored.length, exports[0])
        done = states.load(tokens, stored.length)
        return done, done - CHUNK

    def _read(
        self,
        chunks: list[StoredChunk],
        first: int,
        tokens: Sequence[int],
        compute_s: float,
        cancelled: Callable[[], bool],
    ) -> int:
        """Reads the chunks from number `first` on, until one is damaged or reading takes longer than `compute_s` a
        chunk. Returns how many tokens are in the KV cache then."""
        done, read = first * CHUNK, 0
        with ThreadPoolExecutor(_READERS) as readers:
            ids = {i: tokens[i * CHUNK : (i + 1) * CHUNK] for i in range(first, len(chunks))}
            exports = {i: readers.submit(chunks[i].read, ids[i]) for i in list(ids)[:_READERS]}
            started = time.perf_counter()
            for i in ids:
                export = None if cancelled() else exports.pop(i).result()
                took_s = (time.perf_counter() - started) / (read // CHUNK + 1)
                is_slow = read >= _READERS * CHUNK and took_s > compute_s  # the first reads come all at once
                if export is None or is_slow:
                    break
                if i + _READERS in ids:
                    exports[i + _READERS] = readers.submit(chunks[i + _READERS].read, ids[i + _READERS])
                self._runner.import_chunk(i * CHUNK, export)
                done, read = done + CHUNK, read + CHUNK
        return done

    def keep(self, tokens: Sequence[int], stored: int, prompt: int, interrupted: Callable[[], bool]) -> None:
        """Stores the chunks of `tokens`, which are in the KV cache, that are not stored yet, until `interrupted`.
        `stored`: the most tokens that were in the cache since it was empty. A recurrent state is stored as it was after
        `prompt` tokens, or a little before, and chunks up to there: who goes on with a conversation often leaves out
        what the model thought after them."""
        slot = -1
        if self._states:
            length, slot = self._states.last(tokens, prompt)
            tokens = tokens[:length]
        if len(tokens) < _LEAST:
            return
        done = len(self._store.find(tokens))
        oldest = self._runner.oldest_in_windows(stored)
        while (done + 1) * CHUNK <= len(tokens) and self._store.writable and not interrupted():
            first, end = done * CHUNK, (done + 1) * CHUNK
            export = self._runner.export_chunk(first)
            self._store.write(tokens[:end], max(first, oldest), export)
            done += 1
        is_whole = (done + 1) * CHUNK > len(tokens)
        if slot >= 0 and is_whole and self._store.writable and not interrupted():
            known = max((state.length for state in self._store.states(tokens)), default=0)
            if len(tokens) - known >= CHUNK:
                tail = self._runner.export_chunk(tail_of(len(tokens))).copy()
                self._store.write_state(tokens, self._runner.export_state(slot), tail)

    def _usable(self, chunks: list[StoredChunk], cached: int) -> list[StoredChunk]:
        """So many of the chunks that the last window before their end was exported."""
        window = self._runner.widest_window
        while window and len(chunks) * CHUNK > cached:
            first_seen = max(0, len(chunks) * CHUNK - window)
            needed = enumerate(chunks[first_seen // CHUNK :], first_seen // CHUNK)
            if all(chunk.window_from <= max(first_seen, i * CHUNK) for i, chunk in needed):
                break
            chunks = chunks[:-1]
        return chunks

    def _compute(self, tokens: Sequence[int], first: int) -> None:
        """Prefills a chunk."""
        for at in range(first, first + CHUNK, self._runner.max_chunk):
            self._runner.prefill(tokens[at : min(at + self._runner.max_chunk, first + CHUNK)], at)


def _seconds(work: Callable[[], None]) -> float:
    """How long the device takes."""
    Device[Device.DEFAULT].synchronize()
    started = time.perf_counter()
    work()
    Device[Device.DEFAULT].synchronize()
    return time.perf_counter() - started
