"""What the scheduler works on: requests, and pieces of their prompts."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from engine.protocol.events import Finished
from engine.protocol.fairness import whose_turn
from engine.runtime.answer import Answer, Late
from engine.runtime.guesser import Guesser
from engine.runtime.kv_blocks import BLOCK, KVBlocks, PoolFullError
from engine.runtime.lookup import Guess
from engine.runtime.model_runner import RowSampler, Slot, Want
from engine.runtime.prefix_keeper import Restore
from engine.runtime.sampling import Logits, LogProbabilities, log_probabilities, penalizes


@dataclass(eq=False)
class Job:
    """A request. `end` is called once, with how it ended; `number` counts requests as they come. It came at
    `came_s`, and has its first token since `reply_s` (`time.perf_counter`)."""

    answer: Answer
    cancelled: Callable[[], bool]
    end: Callable[[Finished | Exception], None]
    number: int
    came_s: float
    reply_s: float = math.inf
    has_begun: bool = False  # to prefill, since it has its slot
    to_read: int = 0  # tokens of its prompt that were not in the KV cache when it got its slot
    due: int = 0  # the sooner the fewer tokens are to be read: see `PATIENCE` in `scheduler`
    was_paused: bool = False
    was_cleared: bool = False  # its KV cache, because a step had no finite numbers
    sampler: RowSampler | None = None  # of the device, if that draws its tokens
    guesser: Guesser | None = None
    guess: int | None = None  # what its next token was guessed to be, if it was
    restore: Restore | None = None
    """What is being read of its prompt from the disk."""

    @property
    def client(self) -> str:
        """Whose turn it takes."""
        return whose_turn(self.answer.request.client, self.answer.request.connection)

    @property
    def needs_logits(self) -> bool:
        """Whether the host needs those of the next token."""
        return self.answer.needs_logits and not self.sampler

    def waits_for(self, other: Job, together_s: float) -> bool:
        """Whether this reply waits while another prompt is read with the whole device: one that came before its first
        token, or together with its own prompt, and takes no longer to read."""
        is_alike = other.came_s <= self.came_s + together_s and other.to_read <= self.to_read
        return is_alike or other.came_s <= self.reply_s

    def last(self, sequence: int) -> Slot:
        """The step of its last token."""
        return self.rows(sequence, ())[0]

    def rows(self, sequence: int, guesses: Sequence[int]) -> list[Slot]:
        """The step of its last token and of guesses of the next ones."""
        last, draws = len(self.answer.tokens) - 1, self.sampler is not None
        inputs = self.answer.tokens[-1], *guesses
        pictures = self.answer.pictures
        return [
            Slot(sequence, (token,), last + i, draw=draws, pictures=pictures)
            for i, token in enumerate(inputs)
        ]

    def slot(self, sequence: int, first: int, end: int, reads: bool = False) -> Slot:
        """The step of its prompt's tokens from `first` to `end` - 1. `reads`: a draft head reads the stream."""
        inputs, answer = tuple(self.stored[first:end]), self.answer
        want: Want = "hidden" if reads else answer.want(first, end)
        return Slot(sequence, inputs, first, want, pictures=answer.pictures)

    @property
    def may_check(self) -> bool:
        """Whether a step may choose several tokens: the host does so one by one, and the device if they do not depend
        on each other."""
        request = self.answer.request
        depends = penalizes(request.sampling) or self.answer.constraint or request.logprobs
        return not (self.sampler and depends)

    def checked(self, guess: Guess, right: int) -> None:
        """A step has checked a guess, of which the first `right` tokens were right."""
        assert self.guesser
        self.guesser.checked(guess, right)

    def compared(self, guess: Guess) -> None:
        """The token that a guess was of has come otherwise."""
        assert self.guesser
        self.guesser.checked(guess.first(1), int(self.answer.tokens[-1] == guess.tokens[0]))

    @property
    def stored(self) -> list[int]:
        """The tokens that have to be in the KV cache before the next one can be computed."""
        return self.answer.tokens[: self.answer.stored_n]

    def begin_reply(self, sequence: int, sampler: RowSampler | None) -> None:
        """Before the step of its first token, or of the next one after a pause: prepares drawing on the device, if
        `sampler` can. Raises UsageError if the grammar fails."""
        is_drawn = sampler and self.answer.needs_logits and sampler.prepare(sequence, self.answer.drawing)
        self.sampler = sampler if is_drawn else None
        self._allow(sequence)

    def take(self, sequence: int, chosen: int, logits: Logits | None, late: Late | None = None) -> None:
        """Adds the next token, which the runner has `chosen` unless the host chooses it. `logits`: its own, float32
        (vocab,), if the host needs them. `late`: see `Answer.add`. Raises UsageError if the grammar fails."""
        answer = self.answer
        if self.reply_s == math.inf:
            self.reply_s = time.perf_counter()
        if logits is not None:
            token = chosen if answer.is_best_token else answer.choose(logits)
            answer.add(token, partial(log_probabilities, logits, token), late, self.guess)
        else:
            position = len(answer.tokens) - 1
            answer.add(chosen, lambda n: self._told(sequence, position, n), late, self.guess)
        if not answer.reason:
            self._allow(sequence)

    def _told(self, sequence: int, position: int, n: int) -> LogProbabilities:
        assert self.sampler
        return self.sampler.log_probabilities(sequence, position, n)

    def _allow(self, sequence: int) -> None:
        """Says what the device may draw next."""
        if self.sampler and self.answer.constraint:
            self.sampler.allow(sequence, self.answer.constraint.allowed())


def going_on(replies: Sequence[tuple[int, Job]], blocks: KVBlocks) -> list[tuple[int, Job]]:
    """The replies that the next step has too, as far as is known, with their sequences. Makes room for it.
    [] if it may not be launched ahead: the host needs logits of this one, or there is no room."""
    going = [(sequence, job) for sequence, job in replies if job.answer.left > 1]
    needs_logits = any(job.needs_logits for _, job in replies)
    return [] if needs_logits or not makes_room(going, blocks, 1) else going


def makes_room(replies: Iterable[tuple[int, Job]], blocks: KVBlocks, more: int = 0) -> bool:
    """Makes room in the sequences of these replies for the step of their last token, and for so many `more` tokens.
    False if the KV cache has none."""
    try:
        for sequence, job in replies:
            blocks.reserve(sequence, len(job.answer.tokens) - blocks.length(sequence) + more)
    except PoolFullError:
        return False
    return True


class Piece(NamedTuple):
    """Some tokens of a prompt in a step. `is_last`: after them, the first token of the reply is computed, if there is
    one."""

    job: Job
    slot: Slot

    @property
    def is_last(self) -> bool:
        return self.slot.position + len(self.slot.inputs) == self.job.answer.stored_n

    @property
    def rounded(self) -> int:
        """What it takes of the room of a step, if another piece follows: whole blocks."""
        return -(-len(self.slot.inputs) // BLOCK) * BLOCK

    def shares_block(self, tokens: Sequence[int], done: int) -> bool:
        """Whether it computes the next block of `tokens`, of which the first `done` are computed."""
        slot, other, end = self.slot, self.job.answer.tokens, done + BLOCK
        is_computed = slot.position <= done and end <= slot.position + len(slot.inputs)
        return is_computed and other[done:end] == tokens[done:end] and other[:done] == tokens[:done]


def room_of(pieces: Sequence[Piece], sizes: Sequence[int]) -> tuple[int, int]:
    """Which of the `sizes` of a step, ascending, these pieces take, 0 without any; and in how many passes over the
    weights, if the largest is too small."""
    if not pieces:
        return 0, 1
    tokens = sum(piece.rounded for piece in pieces[:-1]) + len(pieces[-1].slot.inputs)
    return next((n for n in sizes if tokens <= n), sizes[-1]), -(-tokens // sizes[-1])
