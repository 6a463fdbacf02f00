"""Guesses by an assistant: a small model that reads what the model made of the last token, and the model's KV cache.

It keeps nothing of a text itself. So a guess needs the model's step before alone, and prompts need not be read for it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import takewhile
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine.runtime.guesser import DraftTimes

Streams = NDArray[np.float32]


class Assistant(Protocol):
    """An assistant on the device of the model whose cache it reads."""

    @property
    def is_ready(self) -> bool:
        """Whether its kernels are compiled."""
        ...

    def prepare(self) -> None:
        """Compiles them."""
        ...

    def draft(self, sequence: int, position: int, token: int, stream: Streams, n: int) -> list[int]:
        """Guesses at most `n` tokens after `token`, which follows the one at `position` of a sequence, the last in the
        cache. `stream`: the model's residual stream of that one after the last sublayer, float32 (dim,)."""
        ...


class AssistantDrafter(DraftTimes):
    """Guesses with an `assistant`. Tokens from `vocab` on are none of the model's."""

    reads_streams = True
    reads_of_prompt = 0

    def __init__(self, assistant: Assistant, vocab: int) -> None:
        super().__init__()
        self._assistant, self._vocab = assistant, vocab
        self._sequence = -1
        self._streams = dict[int, Streams]()  # of the last step, by the places of its tokens in the text

    @property
    def is_ready(self) -> bool:
        return self._assistant.is_ready

    def prepare(self) -> None:
        """Compiles its kernels."""
        self._assistant.prepare()

    def has_room(self, length: int) -> bool:
        """Whether it can guess at all: its texts may be as long as the model's."""
        return self.is_ready

    def end(self, sequence: int) -> None:
        """The next text of a sequence is another one."""
        if sequence == self._sequence:
            self._streams = {}

    def saw(self, sequence: int, text: Sequence[int], position: int, streams: Streams) -> None:
        """See `HeadDrafter.saw`."""
        self._sequence = sequence
        self._streams = {position + i: row for i, row in enumerate(streams)}

    def guess(self, sequence: int, text: Sequence[int], n: int) -> tuple[int, ...]:
        """At most `n` tokens that may follow `text`; none if the model's stream of the token before the last one is not
        known."""
        started, position = time.perf_counter(), len(text) - 2
        if sequence != self._sequence or position not in self._streams:
            return ()
        drafts = self._assistant.draft(sequence, position, text[-1], self._streams[position], n)
        tokens = tuple(takewhile(lambda token: 0 <= token < self._vocab, drafts))
        self.drafted(time.perf_counter() - started, len(tokens))
        return tokens
