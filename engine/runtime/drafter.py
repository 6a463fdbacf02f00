"""Guesses by a draft model: a smaller one with the same vocabulary, whose most probable tokens are checked.

It has a runner and a KV cache of its own, with a sequence for each of the model's. What it stores of its guesses counts
only once they are known to be right, so nothing has to be taken back.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from engine.runtime.guesser import DraftTimes
from engine.runtime.kv_blocks import KVBlocks, PoolFullError
from engine.runtime.model_runner import ModelRunner, Slot, same_rows

MOST = 32
"""How many tokens are guessed at once."""
_FEW = 4
"""Guesses are timed if no more tokens were to be read before."""


class Drafter(DraftTimes):
    """Guesses with `runner`, whose texts have at most `context` tokens. Ids from `vocab` on are none of the model's."""

    reads_streams = False
    reads_of_prompt = 0
    is_ready = True

    def __init__(self, runner: ModelRunner, vocab: int, context: int) -> None:
        super().__init__()
        self._runner, self._vocab, self._context = runner, vocab, context
        self._blocks = KVBlocks(runner)
        self._guessed: dict[int, list[int]] = {}
        """What is stored of each sequence after what is certain of it: its last token then, and guesses."""

    def has_room(self, length: int) -> bool:
        """Whether a text of so many tokens is short enough."""
        return length + MOST <= self._context

    def guess(self, sequence: int, text: Sequence[int], n: int) -> tuple[int, ...]:
        """At most `n` tokens, up to `MOST`, that may follow `text`, the text of a sequence, which only grows until
        `end`; none if the KV cache has no room."""
        started = time.perf_counter()
        try:
            read = self._follow(sequence, text)
            self._blocks.reserve(sequence, n + 1)
        except PoolFullError:
            self.end(sequence)
            return ()
        position, tokens = len(text) - 1, [text[-1]]
        for i in range(n):
            row = Slot(sequence, (tokens[-1],), position + i)
            token = int(self._runner.run([row], same_rows if i < n - 1 else None)[0])
            if not 0 <= token < self._vocab:
                break
            tokens.append(token)
        self._guessed[sequence] = tokens[:-1]
        if read <= _FEW:
            self.drafted(time.perf_counter() - started, n)
        return tuple(tokens[1:])

    def saw(self, sequence: int, text: Sequence[int], position: int, streams: NDArray[np.float32]) -> None:
        """It reads no streams (`HeadDrafter.saw`)."""

    def end(self, sequence: int) -> None:
        """The next text of a sequence is another one."""
        self._guessed.pop(sequence, None)
        self._blocks.drop(sequence)

    def _follow(self, sequence: int, text: Sequence[int]) -> int:
        """Stores all tokens of a text but the last; returns how many were read for that. Raises PoolFullError."""
        blocks, guessed = self._blocks, self._guessed.pop(sequence, [])
        first, end = blocks.length(sequence), len(text) - 1
        pairs = zip(guessed, text[first:end], strict=False)
        right = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(guessed), end - first))
        blocks.commit(sequence, guessed[:right])
        if not first:
            blocks.match(sequence, text[:end])
        known = blocks.length(sequence)
        while (done := blocks.length(sequence)) < end:
            piece = text[done : min(end, done + self._runner.max_chunk)]
            blocks.reserve(sequence, len(piece))
            self._runner.run([Slot(sequence, tuple(piece), done, "none")])
            blocks.commit(sequence, list(piece))
        return end - known
