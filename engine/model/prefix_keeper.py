"""Moves a conversation's keys and values between the KV cache and the disk."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine.model.model_runner import PrefixRunner
from engine.model.prefix_store import CHUNK, PrefixStore

_LEAST = 2048  # tokens: a shorter conversation is prefilled soon enough


class PrefixKeeper:
    """What `store` keeps for the KV cache of `runner`."""

    def __init__(self, runner: PrefixRunner, store: PrefixStore) -> None:
        self._runner, self._store = runner, store

    def restore(self, tokens: Sequence[int], cached: int, cancelled: Callable[[], bool]) -> int:
        """Reads what is stored of `tokens`, of which `cached` are in the KV cache. Returns how many are there then. A
        layer with a window has no more than the last one before that place."""
        if len(tokens) - cached < _LEAST:
            return cached
        chunks, window = self._store.find(tokens), self._runner.widest_window
        while len(chunks) * CHUNK > cached:
            first_seen = max(0, len(chunks) * CHUNK - window) if window else 0
            needed = enumerate(chunks[first_seen // CHUNK :], first_seen // CHUNK)
            if not window or all(c.window_from <= max(first_seen, i * CHUNK) for i, c in needed):
                break
            chunks.pop()
        if len(chunks) * CHUNK - cached < _LEAST:
            return cached
        done = cached
        for i in range(cached // CHUNK, len(chunks)):
            ids = tokens[i * CHUNK : (i + 1) * CHUNK]
            export = None if cancelled() else chunks[i].read(ids)
            if export is None:  # a layer with a window would lack the tokens before this place
                return 0 if window else done
            self._runner.import_chunk(i * CHUNK, export)
            done = (i + 1) * CHUNK
        return done

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
