"""Guess and check: which tokens a step checks beside the last ones of replies.

A step takes the last token of a reply and guesses of what follows. The token after each of them is chosen as always; a
guess that is just the token chosen saves a step. So the text is the same as without guesses, drawn tokens included:
the draw of a token depends on its logits and its place alone. (A step of several rows rounds otherwise than one of a
single row, so logits may differ in the fourth digit, and the choice between two tokens that are as near as that.)

A guess has to pay: a step of more rows takes longer. What steps take is measured, and so is how many of the guesses
were right, by the length of the match that they come from (`lookup`): also of those that are not checked, when the next
token comes. So text that misleads costs nothing. Where checks take too long, one is made only now and then, to measure
that again.

For a single reply, a draft model guesses too (`drafter`), the draft head of the model's file (`head_drafter`), or an
assistant (`assistant_drafter`), if there is one and that promises more: its tokens take time, too.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.protocol.events import Generate, Speculate
from engine.runtime.assistant_drafter import AssistantDrafter
from engine.runtime.drafter import Drafter
from engine.runtime.guesser import DRAFT_SHARE, Guesser, StepTimes
from engine.runtime.head_drafter import HeadDrafter
from engine.runtime.jobs import Job
from engine.runtime.kv_blocks import KVBlocks, PoolFullError
from engine.runtime.lookup import DRAFTED, Guess
from engine.runtime.model_runner import ModelRunner

WORTH = 1.05
"""A check has to promise so many times the rate of a plain step."""
_UNMEASURED = 2**0.5
"""A check is taken to last so many plain steps until it is measured, or when it is to be measured again,"""
_PROBE_EVERY, _PROBE_SELDOM = 64, 4096
"""after so many steps that might have been checks: twice as many each time, up to the second number, until one pays."""
_BUBBLE = 0.15
"""A step that is not launched ahead takes about so much longer."""
_UNMEASURED_DRAFT = 0.2
"""A token of a draft model is taken to last so many plain steps until it is measured."""


AnyDrafter = Drafter | HeadDrafter | AssistantDrafter
"""`reads_streams`: it reads what steps of the model make of tokens; also of the last `reads_of_prompt` of a prompt."""


class Check(NamedTuple):
    """A step of so many `rows` checks `guesses` of the next tokens of replies, by their places; 0: it checks none.
    `others` are guesses that it does not check. A draft model is to make so many `drafts` of the only reply first."""

    guesses: dict[int, Guess]
    rows: int
    others: dict[int, Guess]
    drafts: int = 0

    def of(self, place: int) -> tuple[int, ...]:
        """The guesses of a reply."""
        guess = self.guesses.get(place)
        return guess.tokens if guess else ()


NO_CHECK = Check({}, 0, {})
_NO_STREAMS = np.zeros((0, 0), np.float32)


class _Found(NamedTuple):
    place: int
    guesser: Guesser
    guess: Guess


class Speculation:
    """Decides which guesses a step of `runner` checks. `speculate` says who guesses: what followed before in the text,
    a `drafter` if there is one, both, or nobody."""

    def __init__(self, runner: ModelRunner, speculate: Speculate, drafter: AnyDrafter | None) -> None:
        self._check_rows = () if speculate == "off" else runner.check_rows
        self._can_check, self._drafter, self._runner = runner.can_check, drafter, runner
        self._looks_up = speculate in ("auto", "lookup")
        self._drafting_s = 0.0  # of this step
        self.times = StepTimes()
        # whether the runner may have launched this step before, or the next one, and whether it ever does
        self._was_ahead = self._is_ahead = self._runs_ahead = False
        self._idle, self._probe_after, self._hopes = 0, _PROBE_EVERY, False

    def guesser(self, request: Generate) -> Guesser | None:
        """What guesses for a new reply; None if its next tokens are not guessed."""
        return Guesser() if self._check_rows and request.guesses else None

    def begin(self, replies: Sequence[tuple[int, Job]], blocks: KVBlocks) -> tuple[Check, bool]:
        """What a step of these replies, with their sequences, checks; and whether the next step may be launched ahead
        of it. A step that is ahead has no guesses, so with some to be checked, none is launched after it. Makes room
        for what is checked, if nobody has to be paused for that."""
        check, self._was_ahead, self._is_ahead = self.plan([job for _, job in replies]), self._is_ahead, False
        try:
            for place in check.guesses:
                blocks.reserve(replies[place][0], 1 + len(check.of(place)))
            if check.drafts:
                blocks.reserve(replies[0][0], 1 + check.drafts)
        except PoolFullError:
            return NO_CHECK, True
        if self._was_ahead:
            return Check({}, 0, {**check.guesses, **check.others}), not check.rows
        self._drafting_s = 0.0
        if check.drafts:  # without any, the step is not ahead: its stream is read for the next ones
            return self._drafted(check, *replies[0]), False
        return check, not check.rows

    def _drafted(self, check: Check, sequence: int, job: Job) -> Check:
        """A check with the guesses of the draft model, or none if it has none."""
        assert self._drafter and job.guesser
        started = time.perf_counter()
        tokens = self._drafter.guess(sequence, job.answer.tokens, check.drafts)
        self._drafting_s = time.perf_counter() - started
        if not tokens:  # as if all had been wrong
            self._idle = 0
            job.guesser.checked(Guess((0,), DRAFTED), 0)
            return NO_CHECK
        return check._replace(guesses={0: Guess(tokens, DRAFTED)}, drafts=0)

    def reads_streams(self, job: Job) -> bool:
        """Whether the drafter reads what steps make of the tokens of a request."""
        drafter, guesses = self._drafter, job.guesser is not None and not job.answer.pictures
        return guesses and drafter is not None and drafter.reads_streams and drafter.is_ready

    def reads_prompt(self, job: Job, end: int) -> bool:
        """Whether it does so of a piece of a prompt up to the token before `end`."""
        of_prompt = self._drafter.reads_of_prompt if self._drafter else 0
        return self.reads_streams(job) and job.answer.stored_n - end < of_prompt

    def read(self, replies: Sequence[tuple[int, Job]], rows: int) -> None:
        """After a step of replies, of so many rows, whose tokens have not been taken yet."""
        if len(replies) == 1 and self.reads_streams(replies[0][1]):
            sequence, job = replies[0]
            streams = self._runner.streams(rows)
            self.saw(sequence, job, len(job.answer.tokens) - 1, _NO_STREAMS if streams is None else streams)

    def saw(self, sequence: int, job: Job, position: int, streams: NDArray[np.float32]) -> None:
        """Takes the residual stream of the tokens from `position` on (`HeadDrafter.saw`)."""
        if self._drafter:
            self._drafter.saw(sequence, job.answer.tokens, position, streams)

    def end(self, sequence: int) -> None:
        """A sequence is going to have another text."""
        if self._drafter:
            self._drafter.end(sequence)

    def goes_ahead(self) -> None:
        """The next step may be launched ahead."""
        self._is_ahead = self._runs_ahead = True

    def measured(self, check: Check, rows: int, seconds: float) -> float:
        """What a step took that had no prompts. Returns what one takes that checks nothing, 0 if that is not known."""
        if check.rows:
            self.times.measured(check.rows, seconds - self._drafting_s, checks=True)
            self._idle = 0
            self._probe_after = min(2 * self._probe_after, _PROBE_SELDOM) if self._hopes else _PROBE_EVERY
        elif self._was_ahead == self._runs_ahead:
            self.times.measured(rows, seconds)
        return self.times.seconds(rows)

    def plan(self, replies: Sequence[Job]) -> Check:
        """What a step of these replies checks beside their last tokens, if that pays or has to be measured again."""
        found, rows = self._guesses(replies), len(replies)
        others = Check({}, 0, {f.place: f.guess for f in found})
        may_draft = rows == 1 and self._may_draft(replies[0])
        if not (found or may_draft) or not self.times.seconds(rows):
            return others
        widths = [n for n in self._check_rows if n > rows and self._can_check(n)]
        for hopes in (False, True):
            check, gain = self._best(found, widths, rows, hopes)
            if may_draft:
                drafted, of_drafts = self._best_draft(replies[0], others, widths, hopes)
                check, gain = (drafted, of_drafts) if of_drafts > gain else (check, gain)
            if gain > WORTH:
                self._hopes = hopes
                return check
            self._idle += not hopes
            if self._idle < self._probe_after:
                break
        return others

    def _best(
        self, found: Sequence[_Found], widths: Sequence[int], rows: int, hopes: bool
    ) -> tuple[Check, float]:
        """The check of the widths that promises most, and how many times the rate of a plain step. `hopes`: what is
        known may no longer hold."""
        best, best_gain, plain_s = NO_CHECK, 0.0, self.times.seconds(rows)
        for width in widths:
            lengths, right = _shared_out(found, width - rows)
            check_s = self._check_s(width, plain_s, hopes)
            gain = (rows + right) / rows * plain_s / check_s
            if self._is_ahead:  # there is a check only if the token that comes is as guessed
                share = max(
                    (f.guesser.share(f.guess) for f, n in zip(found, lengths, strict=True) if n), default=0.0
                )
                gain = share * gain + (1 - share) * (1 - _BUBBLE)
            if gain > best_gain:
                parts = list(zip(found, lengths, strict=True))
                guesses = {f.place: f.guess.first(n) for f, n in parts if n}
                best = Check(guesses, width, {f.place: f.guess for f, n in parts if not n})
                best_gain = gain
        return best, best_gain

    def _best_draft(
        self, reply: Job, others: Check, widths: Sequence[int], hopes: bool
    ) -> tuple[Check, float]:
        """As `_best`, of guesses that the draft model is going to make of the only reply."""
        assert self._drafter and reply.guesser
        best, best_gain, plain_s = NO_CHECK, 0.0, self.times.seconds(1)
        share = DRAFT_SHARE if hopes else reply.guesser.share(Guess((), DRAFTED))
        for width in widths:
            check_s = self._check_s(width, plain_s, hopes)
            right = 1.0
            for n in range(1, min(width - 1, reply.answer.left - 1) + 1):
                right += share**n
                draft_s = _time_of(self._drafter.draft_s(n), plain_s * _UNMEASURED_DRAFT * n, hopes)
                if (gain := right * plain_s / (check_s + draft_s)) > best_gain:
                    best, best_gain = others._replace(rows=width, drafts=n), gain
        return best, best_gain

    def _may_draft(self, reply: Job) -> bool:
        if self._drafter is None or reply.guesser is None or reply.answer.pictures:  # a draft model sees none
            return False
        return reply.may_check and reply.answer.left > 1 and self._drafter.has_room(len(reply.answer.tokens))

    def _check_s(self, width: int, plain_s: float, hopes: bool) -> float:
        return _time_of(self.times.seconds(width, checks=True), plain_s * _UNMEASURED, hopes)

    def _guesses(self, replies: Sequence[Job]) -> list[_Found]:
        """The guesses of the replies that have any."""
        room = self._check_rows[-1] - len(replies) if self._check_rows and self._looks_up else 0
        found = []
        for place, job in enumerate(replies if room > 0 else ()):
            if (guesser := job.guesser) and job.may_check:
                text = job.answer.tokens
                if (guess := guesser.look_up(text, min(room, job.answer.left - 1))).tokens:
                    found.append(_Found(place, guesser, guess))
        return found


def _time_of(measured_s: float, hoped_s: float, hopes: bool) -> float:
    """What something takes: as measured, but no more than hoped if that `hopes`; as hoped if it was not measured."""
    return min(measured_s, hoped_s) if hopes and measured_s else measured_s or hoped_s


def _shared_out(found: Sequence[_Found], room: int) -> tuple[list[int], float]:
    """How many tokens of each guess are checked if there is room for so many in all, and how many of these are going to
    be right: those that are most probably so."""
    lengths, expected = [0] * len(found), 0.0
    shares = [f.guesser.share(f.guess) for f in found]
    likely = [(-share, i) for i, share in enumerate(shares)]
    heapq.heapify(likely)
    while room and likely:
        probability, i = heapq.heappop(likely)
        lengths[i] += 1
        room -= 1
        expected -= probability
        if lengths[i] < len(found[i].guess.tokens):
            heapq.heappush(likely, (probability * shares[i], i))
    return lengths, expected
