"""Moves a conversation's keys and values between the KV cache and the disk."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from tinygrad import Device

from engine.model.model_runner import PrefixRunner
from engine.model.prefix_store import CHUNK, PrefixStore, StoredChunk

_LEAST = 2048  # tokens: a shorter conversation is prefilled soon enough
_READERS = 4


class PrefixKeeper:
    """What `store` keeps for the KV cache of `runner`."""

    def __init__(self, runner: PrefixRunner, store: PrefixStore) -> None:
        self._runner, self._store = runner, store

    def restore(self, tokens: Sequence[int], cached: int, cancelled: Callable[[], bool]) -> tuple[int, int]:
        """Reads what is stored of `tokens`, of which `cached` are in the KV cache. Returns how many are there then, and
        how many of these were read: none at all if reading ends early and a layer has a window, else a layer with a
        window has no more than the last one before that place. One chunk
        is computed first: a fast device computes faster than a disk reads, and then the rest is left to it."""
        chunks = self._usable(self._store.find(tokens), cached)
        first = cached // CHUNK
        if (len(chunks) - first) * CHUNK < _LEAST or cancelled():
            return cached, 0
        compute_s = _seconds(lambda: self._compute(tokens, first * CHUNK))
        done, read = (first + 1) * CHUNK, 0
        with ThreadPoolExecutor(_READERS) as readers:
            ids = {i: tokens[i * CHUNK : (i + 1) * CHUNK] for i in range(first + 1, len(chunks))}
            exports = {i: readers.submit(chunks[i].read, ids[i]) for i in list(ids)[:_READERS]}
            started = time.perf_counter()
            for i in ids:
                export = None if cancelled() else exports.pop(i).result()
                took_s = (time.perf_counter() - started) / (read // CHUNK + 1)
                is_slow = read >= _READERS * CHUNK and took_s > compute_s  # the first reads come all at once
                if export is None or is_slow:
                    # What was read overwrote the windows before this place, so these layers can go on from nowhere.
                    return (0, 0) if self._runner.widest_window else (done, read)
                if i + _READERS in ids:
                    exports[i + _READERS] = readers.submit(chunks[i + _READERS].read, ids[i + _READERS])
                self._runner.import_chunk(i * CHUNK, export)
                done, read = done + CHUNK, read + CHUNK
        return done, read

    def keep(self, tokens: Sequence[int], stored: int, interrupted: Callable[[], bool]) -> None:
        """Stores the chunks of `tokens`, which are in the KV cache, that are not stored yet, until `interrupted`.
        `stored`: the most tokens that were in the cache since it was empty."""
        if len(tokens) < _LEAST:
            return
        done = len(self._store.find(tokens))
        oldest = self._runner.oldest_in_windows(stored)
        while (done + 1) * CHUNK <= len(tokens) and self._store.writable and not interrupted():
            first, end = done * CHUNK, (done + 1) * CHUNK
            export = self._runner.export_chunk(first)
            self._store.write(tokens[:end], max(first, oldest), export)
            done += 1

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
