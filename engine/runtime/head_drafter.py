"""Guesses by the draft head of a model's file: a layer that reads what the model made of the tokens so far.

The head reads pairs: a token, and the model's residual stream of the token before it. Each pair gives a guess of the
token after, and keys and values for later pairs. The streams come from steps of the model, of prompts too. Those of
some tokens are missing: of beginnings that were known already, and of steps that ran ahead. Then the pairs that there
are follow each other in the head's cache.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Sequence
from itertools import takewhile
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine.runtime.guesser import DraftTimes

Streams = NDArray[np.float32]
_MOST = 32
"""How many tokens of the head's cache are left free for guesses."""
_CAUGHT_UP = 64
"""So many pairs are stored at most of the tokens that came while nothing was guessed: more would delay a reply whose
guesses may not pay."""


def normed(streams: Streams, weight: Streams, eps: float) -> Streams:
    """What a head reads of residual streams: their RMS norm, float32 (tokens, dim) or (dim,)."""
    size = np.sqrt((streams * streams).mean(-1, keepdims=True) + np.float32(eps))
    return np.asarray(streams / size * weight, np.float32)


class DraftHead(Protocol):
    """The draft head of a model on a device, for one sequence of up to `places` pairs. `streams`: the model's residual
    stream after the last sublayer of the token before each, zeros before the first, float32 (tokens, dim)."""

    places: int
    rows: int
    """The most pairs of a draft."""

    @property
    def is_ready(self) -> bool:
        """Whether its kernels are compiled."""
        ...

    def prepare(self) -> None:
        """Compiles them."""
        ...

    def store(self, place: int, tokens: Sequence[int], streams: Streams) -> None:
        """Stores pairs in the cache, from `place` on."""
        ...

    def draft(self, place: int, tokens: Sequence[int], streams: Streams, n: int) -> list[int]:
        """Stores pairs, and guesses at most `n` tokens after the last of them."""
        ...


class HeadDrafter(DraftTimes):
    """Guesses with a `head`. Tokens from `vocab` on are none of the model's."""

    reads_streams = True
    reads_of_prompt = 1024
    """So many tokens of a prompt, the last ones: each takes time before the first token of the reply, and guesses
    depend on near tokens most."""

    def __init__(self, head: DraftHead, vocab: int) -> None:
        super().__init__()
        self._head, self._vocab = head, vocab
        self._sequence = -1
        self._text: Sequence[int] = ()
        self._is_new = True
        self._stored = list[int]()  # where in the text the tokens of the pairs in the cache are
        self._streams = dict[int, Streams]()  # of the last tokens whose pairs are not stored, by their place

    @property
    def is_ready(self) -> bool:
        return self._head.is_ready

    def prepare(self) -> None:
        """Compiles its kernels."""
        self._head.prepare()

    def has_room(self, length: int) -> bool:
        """Whether a text of so many tokens is short enough, and the head can guess at all."""
        return self.is_ready and length + _MOST <= self._head.places

    def end(self, sequence: int) -> None:
        """The next text of a sequence is another one."""
        self._is_new = self._is_new or sequence == self._sequence

    def saw(self, sequence: int, text: Sequence[int], position: int, streams: Streams) -> None:
        """The model's residual stream of tokens from `position` on, float32 (tokens, dim): of a text, and of guesses of
        how it goes on. What was known of these places was of wrong guesses."""
        self._follow(sequence, text)
        first = position - _CAUGHT_UP - self._head.rows
        self._streams = {place: row for place, row in self._streams.items() if first < place < position}
        if len(streams) > self._head.rows:  # of a prompt
            self._store(text, position, streams)
        else:
            self._streams.update((position + i, row) for i, row in enumerate(streams))

    def guess(self, sequence: int, text: Sequence[int], n: int) -> tuple[int, ...]:
        """At most `n` tokens that may follow `text`, which only grows until `end`; none if the model's stream of the
        token before the last one is not known."""
        self._follow(sequence, text)
        known, last = self._streams, len(text) - 1
        count = sum(1 for _ in takewhile(known.__contains__, range(last - 1, -1, -1)))
        self._streams = {}
        if not count:
            return ()
        rows = np.stack([known[place] for place in range(last - count, last)])
        if count > (most := self._head.rows):
            self._store(text, last - count, rows[:-most])
            rows, count = rows[-most:], most
        started = time.perf_counter()  # a guess after the next step has nothing to catch up with
        pairs = range(last - count + 1, last + 1)
        del self._stored[bisect_left(self._stored, pairs[0]) :]  # those that the model has read once more
        place = len(self._stored)
        drafts = self._head.draft(place, [text[at] for at in pairs], rows, n)
        self._stored += pairs
        tokens = tuple(takewhile(lambda token: 0 <= token < self._vocab, drafts))
        self.drafted(time.perf_counter() - started, len(tokens))
        return tokens

    def _store(self, text: Sequence[int], position: int, streams: Streams) -> None:
        """Stores the pairs of tokens after those with these streams, as far as they are in the text and new."""
        if position == 0:  # the first token's pair has no stream
            position, streams = -1, np.concatenate([np.zeros_like(streams[:1]), streams])
        first = max(position + 1, self._stored[-1] + 1 if self._stored else 0)
        end = min(position + 1 + len(streams), len(text))
        pairs = range(first, end)
        if pairs and len(self._stored) + len(pairs) <= self._head.places:
            rows = streams[first - position - 1 : end - position - 1]
            self._head.store(len(self._stored), [text[at] for at in pairs], rows)
            self._stored += pairs

    def _follow(self, sequence: int, text: Sequence[int]) -> None:
        """What is stored of the last text is kept as far as this one begins as that did."""
        if self._is_new or sequence != self._sequence:
            pairs = zip(self._text, text, strict=False)
            same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            del self._stored[bisect_left(self._stored, same) :]
            self._streams = {}
        self._sequence, self._text, self._is_new = sequence, text, False
