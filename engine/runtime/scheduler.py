"""Continuous batching: conversations share the steps of one runner. A chat is the case of one.

A round is a step of the runner: the next token of every reply, and pieces of prompts. Of a prompt that ends with its
piece, the first token of the reply is in the same step. The step of the next round runs ahead, pieces of prompts and
replies that begin included: the runner launches it before the host has this one's tokens. If a reply ends unexpectedly,
its row is of no use but does no harm: its blocks are free at once, as what others store there is stored after it.

The prompt with the least to read goes first, but a long one is overtaken only for a while (`PATIENCE`). A prompt
slows replies down by a bound (`pace`). Only those wait for it that had hardly begun when it came: their prompts and
this one came together, and the first tokens of all come soonest so.

A request gets a slot, one of the runner's sequences, as soon as one is free, and leaves it when it ends. Clients take
turns, however many requests each has and whatever it calls itself (`fairness`). If the KV cache is too small for all
slots, the latest request gives its slot back and goes on later.

What the disk has of a long prompt is read into the KV cache (`prefix_keeper`), a chunk in place of a piece.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from engine.errors import ContextFullError
from engine.protocol.events import TOKEN_GAP, Finished, Slots, Speculate
from engine.protocol.fairness import Held
from engine.runtime.answer import Answer, Late
from engine.runtime.checkpoints import Checkpoints
from engine.runtime.embedding import Embedding, read_streams
from engine.runtime.jobs import Job, Piece, going_on, makes_room, room_of
from engine.runtime.known_tokens import end_of_piece, find_known, keep_state
from engine.runtime.kv_blocks import BLOCK, KVBlocks, PoolFullError
from engine.runtime.model_runner import Ahead, Following, ModelRunner
from engine.runtime.pace import Pace
from engine.runtime.picture_embeddings import PictureEmbeddings
from engine.runtime.pictures import PictureEncoder
from engine.runtime.prefix_keeper import PrefixKeeper
from engine.runtime.prefix_store import PrefixStore
from engine.runtime.sampling import Logits
from engine.runtime.speculation import AnyDrafter, Check, Speculation
from engine.runtime.waiting import Waiting

REPORT_S = 0.25
PATIENCE = 4
"""A prompt of n tokens lets shorter ones pass until so many times n tokens of them are read."""
_FULL = "The KV cache has no room for more of this conversation."
TOGETHER_S = 0.05
"""Prompts that come within this time come together. Then a reply waits for those that read no more than it did."""


class Scheduler:
    """Answers requests over a runner, in rounds. The caller's thread calls `step` while there is work."""

    def __init__(
        self,
        runner: ModelRunner,
        report: Callable[[Slots], None],
        store: PrefixStore | None = None,
        token_gap: float = TOKEN_GAP,
        speculate: Speculate = "auto",
        encoder: PictureEncoder | None = None,
        drafter: AnyDrafter | None = None,
    ) -> None:
        """`report` gets what is at work, a few times a second. `store`: where long conversations are kept. `token_gap`
        and `speculate`: see `engine.protocol.events.EngineOptions`. Without an `encoder` no prompt has pictures. A
        `drafter` guesses next tokens."""
        self._runner, self._report = runner, report
        self.blocks = KVBlocks(runner)
        self._states = Checkpoints(runner) if runner.state_slots else None
        self._keeper = PrefixKeeper(runner, self.blocks, store, self._states) if store else None
        self._pictures = PictureEmbeddings(encoder)
        self._slots: list[Job | None] = [None] * runner.parallel
        self._waiting = Waiting()
        self._pace = Pace(token_gap)
        self._speculation = Speculation(runner, speculate, drafter)
        self._late: Late = []
        self._report_due_s = 0.0
        # the pieces of the next step, and its room, once they are chosen
        self._next: tuple[list[Piece], int] | None = None
        self._last: list[int] = []  # the tokens in the KV cache of the conversation that ended last
        self._n_read = 0  # tokens of all prompts so far
        self._step = 0, 0, 0  # rows of the last step, its tokens of prompts, and the room for these

    # --- requests ----------------------------------------------------------------------------------------

    def add(
        self,
        answer: Answer,
        cancelled: Callable[[], bool],
        end: Callable[[Finished | Exception], None],
        came_s: float | None = None,
    ) -> None:
        """Answers a request in later rounds. `end` gets `Finished`, or why it failed. `came_s`: when the request came
        (`time.perf_counter`), if not now."""
        came_s = time.perf_counter() if came_s is None else came_s
        job = Job(answer, cancelled, end, self._waiting.number(), came_s)
        job.guesser = self._speculation.guesser(answer.request)
        if answer.reason:  # no token is wanted
            end(answer.finished())
        else:
            self._waiting.add(job)

    @property
    def busy(self) -> bool:
        """Whether a request is answered or waits."""
        return any(self._slots) or len(self._waiting) > 0

    def step(self) -> None:
        """A round. An error of the runner ends all requests that have a slot."""
        self._end_cancelled()
        self._admit()
        try:
            self._round()
        except Exception as error:
            self._next = None
            for sequence, job in self._live():
                self._leave(sequence, is_whole=False)
                job.end(error)
        if not self.busy or time.perf_counter() >= self._report_due_s:
            self._report_due_s = time.perf_counter() + REPORT_S
            self._report(self._state())

    def keep(self, interrupted: Callable[[], bool]) -> None:
        """Stores on disk what is to be kept of the conversations that have ended, until `interrupted`."""
        if self._keeper:
            self._keeper.keep(interrupted)

    @contextmanager
    def room_after_last(self, tokens: int, context: int) -> Iterator[int]:
        """Room in sequence 0 for a step of so many tokens that is only measured, where the conversation that ended last
        has its end, or as far before it as the context asks for. No request may be at work."""
        position = self.blocks.match(0, self._last[: max(0, context - tokens)])
        try:
            self.blocks.reserve(0, min(tokens, context - position))
            yield position
        finally:
            self.blocks.drop(0)

    def _round(self) -> None:
        started = time.perf_counter()
        pieces, room = self._next or self._pieces()
        self._next = None
        for sequence, _ in self._ready():
            self._reserve(sequence, 1)
        pieces = [piece for piece in pieces if self._is_due(piece)]
        ready = self._ready(pieces)
        self._step = len(ready), sum(len(piece.slot.inputs) for piece in pieces), room
        check, may_be_ahead = self._speculation.begin([] if pieces else ready, self.blocks)
        chosen = self._run(pieces, ready, check, may_be_ahead)
        self._end_embeddings(pieces)
        if ready:
            self._take_tokens(ready, chosen, check)
            seconds = time.perf_counter() - started
            plain_s = 0.0 if pieces else self._speculation.measured(check, len(ready), seconds)
            for _, job in ready:
                job.answer.timed(seconds, plain_s)
            if not check.rows:
                room, passes = room_of(pieces, self._runner.piece_sizes(len(ready)))
                self._pace.measured(room, seconds / passes)

    def _run(
        self, pieces: Sequence[Piece], ready: Sequence[tuple[int, Job]], check: Check, may_be_ahead: bool
    ) -> NDArray[np.int32]:
        """Runs a step; returns the next token of each reply that is `ready`, and of each guess in a check after its
        own. A piece that is timed runs before, and so does one after which the recurrent state is kept. The next step
        `may_be_ahead`."""
        slots = [piece.slot for piece in pieces]
        rows = [slot for n, (i, job) in enumerate(ready) for slot in job.rows(i, check.of(n))]
        restore = pieces[0].job.restore if pieces else None
        if restore or (self._states and any(piece.is_last for piece in pieces)):
            if restore:
                restore.time(lambda: self._runner.run(slots), slots[0].position, len(slots[0].inputs))
            else:
                self._runner.run(slots)
            read_streams(self._runner, pieces, self._speculation.saw)
            self._end_pieces(list(pieces))
            pieces, slots = [], []
        if not (slots or rows):
            return np.zeros(0, np.int32)
        unended = list(pieces)
        ahead = self._ahead(unended, ready) if may_be_ahead else None

        def launched() -> Following | None:
            self._tell()
            return ahead() if ahead else None

        chosen = self._runner.run([*slots, *rows], launched if ahead or self._late else None)
        self._tell()
        read_streams(self._runner, pieces, self._speculation.saw)
        self._speculation.read(ready, len(chosen))
        self._end_pieces(unended)
        return chosen

    def _tell(self) -> None:
        """Reports the tokens of a check, while the next step runs if there is one."""
        while self._late:
            self._late.pop(0)()

    def _end_embeddings(self, pieces: Sequence[Piece]) -> None:
        """Ends those whose last pieces are computed."""
        for job, sequence in [(piece.job, piece.slot.sequence) for piece in pieces if piece.is_last]:
            if isinstance(job.answer, Embedding) and job.answer.end():
                self._leave(sequence).end(job.answer.finished())
            elif isinstance(job.answer, Embedding):
                self._clear(sequence, job)

    def _live(self) -> Iterator[tuple[int, Job]]:
        return ((sequence, job) for sequence, job in enumerate(list(self._slots)) if job)

    # --- slots -------------------------------------------------------------------------------------------

    def _end_cancelled(self) -> None:
        for sequence, job in self._live():
            if job.cancelled():
                job.answer.cancel()
                self._leave(sequence).end(job.answer.finished())
        for job in self._waiting.take_cancelled():
            job.answer.cancel()
            job.end(job.answer.finished())
            self._waiting.tidy(job.client, self._clients())

    def _admit(self) -> None:
        """Gives free slots to those that wait. A client without a slot gets one of a client that has several. Who has
        to wait longer counts as coming later."""
        self._give_slots()
        for job in self._waiting:
            job.came_s = time.perf_counter()

    def _give_slots(self) -> None:
        while self._waiting:
            held = Held(self._clients())
            job = self._waiting.first(held)
            if None not in self._slots:
                if (rival := held.rival(job.client)) is None:
                    return
                self._pause(max((j.number, i) for i, j in self._live() if j.client == rival)[1])
            if any(self._slots) and not self.blocks.has_room(len(job.answer.tokens)):
                return
            self._waiting.take(job)
            sequence = self._slots.index(None)
            self._slots[sequence] = job
            job.to_read = len(job.stored) - self.blocks.known(sequence, job.stored)
            job.due = self._n_read + PATIENCE * job.to_read
            if self._states:
                self._states.load([], 0, sequence)

    def _leave(self, sequence: int, is_whole: bool = True) -> Job:
        """Takes the job out of a slot. `is_whole`: the steps of its sequence have not failed."""
        self._tell()
        self._speculation.end(sequence)
        job = self._slots[sequence]
        assert job
        if self._states and is_whole:
            # Who goes on with a reply that was stopped may begin a token earlier: no turn has ended.
            ends_turn = job.answer.reason != "cancelled"
            keep_state(self.blocks, self._states, sequence, job.answer.tokens, ends_turn)
        self._last = job.answer.tokens[: self.blocks.length(sequence)]
        if self._keeper and is_whole and job.answer.replies and not job.answer.request.fresh:
            self._keeper.note(self._last, job.answer.messages_end)
        self.blocks.drop(sequence)
        self._slots[sequence] = None
        self._waiting.tidy(job.client, self._clients())
        return job

    def _pause(self, sequence: int, is_whole: bool = True) -> None:
        """Lets a job wait again. What it has computed stays in the KV cache, until its room is needed. `is_whole`: see
        `_leave`."""
        job = self._leave(sequence, is_whole)
        job.has_begun, job.was_paused = False, True
        self._waiting.put_back(job)

    def _clients(self) -> list[str]:
        """The clients that have slots, each as often as it has one."""
        return [job.client for _, job in self._live()]

    def _reserve(self, sequence: int, n: int) -> bool:
        """Makes room for n more tokens; the latest requests give theirs up. False if this was one of them."""
        while self._slots[sequence]:
            try:
                self.blocks.reserve(sequence, n)
                return True
            except PoolFullError:
                if sum(1 for _ in self._live()) > 1:
                    self._pause(max((other.number, i) for i, other in self._live())[1])
                else:
                    self._leave(sequence).end(ContextFullError(_FULL))
        return False

    # --- steps -------------------------------------------------------------------------------------------

    def _is_prefilled(self, sequence: int, job: Job) -> bool:
        return job.has_begun and self.blocks.length(sequence) == job.answer.stored_n

    def _ready(self, pieces: Sequence[Piece] = ()) -> list[tuple[int, Job]]:
        """The replies of a step with these pieces, with their sequences."""
        ending = [piece.job for piece in pieces if piece.is_last]
        replying = [(i, job) for i, job in self._live() if job.answer.replies]
        return [(i, job) for i, job in replying if job in ending or self._is_prefilled(i, job)]

    def _pieces(self) -> tuple[list[Piece], int]:
        """The next step's pieces of the prompts with the least to read, for which it makes room, and its budget."""
        todo = [(i, job) for i, job in self._live() if not self._is_prefilled(i, job)]
        pieces, budget, most = list[Piece](), 0, self._runner.max_chunk
        room: int | None = None  # what is left of the budget; the first prompt decides
        for n, (sequence, job) in enumerate(sorted(todo, key=lambda at: at[1].due)):
            if room is not None and room <= 0:
                break
            if not job.has_begun:
                self._begin(sequence, job)
            if job.restore and job.restore.is_reading:
                is_last = n == len(todo) - 1
                if not job.restore.step(waits=is_last and not self._ready()):
                    job.restore = None
                continue
            if room is None:
                budget = room = self._room(job)
            elif job.restore:  # its piece is timed, so it goes alone
                continue
            if room and (piece := self._piece(sequence, job, min(room, most), pieces)):
                pieces.append(piece)
                left = room if piece.is_last else min(room, most)  # more passes are for prompts that end
                room = 0 if job.restore else left - piece.rounded
        return pieces, budget

    def _piece(self, sequence: int, job: Job, room: int, others: Sequence[Piece]) -> Piece | None:
        """The next piece of a prompt, of about `room` tokens at most. None if there is no room in the KV cache, if all
        is there already, or if one of the `others` computes the same."""
        answer, wanted = job.answer, job.stored
        done = find_known(self.blocks, self._states, sequence, job)
        end = end_of_piece(self._states, sequence, job, done, room)
        if not self._try(sequence, lambda: self._pictures.sees(job.answer, done, end)):
            return None
        if not job.was_paused:
            answer.report_prefill(done)
        if self._is_prefilled(sequence, job):
            self._begin_reply(sequence, job)
        if any(other.shares_block(wanted, done) for other in others):
            return None
        if done == end or (end - done > room and others):  # the next step has room for a whole picture
            return None
        reads = not others and not self._ready() and self._speculation.reads_prompt(job, end)
        piece = Piece(job, job.slot(sequence, done, end, reads))
        if piece.is_last:
            self._begin_reply(sequence, job)
        return piece if self._reserve(sequence, end - done + piece.is_last) else None

    def _is_due(self, piece: Piece) -> bool:
        """Whether a piece is still what comes next in its sequence."""
        job, (sequence, _, position, *_) = piece
        return self._slots[sequence] is job and job.has_begun and self.blocks.length(sequence) == position

    def _end_pieces(self, pieces: list[Piece]) -> None:
        """Once the step of these pieces is launched. Takes them out of the list."""
        while pieces:
            job, (sequence, inputs, position, *_) = pieces.pop(0)
            end = position + len(inputs)
            self.blocks.commit(sequence, inputs)
            if self._states:
                is_end = end in (*job.answer.checkpoint_ends, job.answer.stored_n)
                self._states.save(job.stored[:end], is_end, sequence)
            self._n_read += len(inputs)

    def _begin_reply(self, sequence: int, job: Job) -> None:
        self._try(sequence, lambda: job.begin_reply(sequence, self._runner.sampler))

    def _try(self, sequence: int, do: Callable[[], bool | None]) -> bool:
        """False if it gives False, or fails: the error, of a grammar for example, ends the job."""
        try:
            return do() is not False
        except Exception as error:
            self._leave(sequence).end(error)
            return False

    def _begin(self, sequence: int, job: Job) -> None:
        """Its first piece since it has its slot."""
        job.has_begun = True
        if not job.was_paused:
            job.answer.start()
        if job.answer.request.fresh:
            for size in self._runner.chunk_sizes:  # what is measured must not wait for a compiler
                self._runner.prepare(size)
        elif self._keeper and job.answer.replies:
            job.restore = self._keeper.restore(job.stored, self.blocks.known(sequence, job.stored))

    def _room(self, job: Job) -> int:
        """The most tokens of prompts in the next step, of which `job`'s is the first."""
        replies = self._ready()
        sizes = self._runner.piece_sizes(len(replies))
        waits = all(reply.waits_for(job, TOGETHER_S) for _, reply in replies)
        return self._pace.burst(sizes[-1]) if waits else self._pace.room(sizes)

    def _take_tokens(self, ready: Sequence[tuple[int, Job]], chosen: NDArray[np.int32], check: Check) -> None:
        """Gives replies their next tokens, those that the runner has `chosen` unless the host chooses them."""
        rows, first = list[range](), 0  # of each reply
        for n in range(len(ready)):
            rows.append(range(first, first := first + 1 + len(check.of(n))))
        host = [row for n, (_, job) in enumerate(ready) if job.needs_logits for row in rows[n]]
        logits = dict(zip(host, self._runner.logits(host), strict=True)) if host else {}
        late = self._late if check.rows else None
        for n, (sequence, job) in enumerate(ready):
            guesses, text = check.of(n), job.answer.tokens
            right, length = 0, len(text)
            job.answer.draft_n += len(guesses)
            for row, guess in itertools.zip_longest(rows[n], guesses):
                if chosen[row] < 0 and right:  # the next step finds out why
                    break
                job.guess = guess
                if not self._take(sequence, job, int(chosen[row]), logits.get(row), late):
                    break
                if text[-1] != guess:
                    break
                right += 1
            if guesses:
                job.checked(check.guesses[n], right)
            elif (other := check.others.get(n)) and length < len(text):
                job.compared(other)

    def _take(self, sequence: int, job: Job, chosen: int, logits: Logits | None, late: Late | None) -> bool:
        """Gives a reply its next token. False if it does not go on."""
        if chosen < 0:
            self._clear(sequence, job)
            return False
        self.blocks.commit(sequence, job.answer.tokens[-1:])
        if self._states and late is not None:
            self._states.cut(sequence, self.blocks.length(sequence))
        if self._states and self._states.is_due(sequence):
            passed = [*job.answer.tokens, chosen][: self._states.position(sequence)]
            self._states.save(passed, sequence=sequence)
        if self._try(sequence, lambda: job.take(sequence, chosen, logits, late)) and job.answer.reason:
            self._leave(sequence).end(job.answer.finished())
        return self._slots[sequence] is job

    def _clear(self, sequence: int, job: Job) -> None:
        """After a step whose logits are no finite numbers. An earlier conversation may have left such keys and values
        beside those of this one, so it is computed once more, with blocks that are cleared."""
        why = self._runner.not_finite(job.last(sequence)) if job.was_cleared else None
        self.blocks.clear(sequence)
        if self._states:
            self._states.forget(job.answer.tokens)
        if why:
            self._leave(sequence, is_whole=False)
            job.end(why)
        else:
            job.was_cleared = True
            self._pause(sequence, is_whole=False)

    def _ahead(self, unended: list[Piece], ready: Sequence[tuple[int, Job]]) -> Ahead | None:
        """What chooses the pieces of the next step, and the replies that begin there. `unended`: the pieces of this
        one."""
        going = going_on(ready, self.blocks)

        def ahead() -> Following | None:
            self._end_pieces(unended)
            # nobody may be paused for pieces while the step of its row runs: `_pieces` makes room for so many tokens
            most = self._pace.burst(self._runner.max_chunk) + BLOCK * self._runner.parallel
            reads = any(not self._is_prefilled(*at) for at in self._live())
            if any(job.restore for _, job in self._live()) or (reads and not self.blocks.has_room(most)):
                return None
            self._next = self._pieces()
            pieces, _ = self._next
            if any(piece.job.restore or piece.slot.want == "hidden" for piece in pieces):
                return None
            begins = [at for at in self._ready(pieces) if at not in ready]
            # recurrent states are kept after a prompt's last piece, before the step of the first token
            host = self._states or any(job.needs_logits for _, job in begins)
            if begins and (host or not makes_room(begins, self.blocks)):
                return None
            self._speculation.goes_ahead()
            ended = {i for i, _ in ready} - {i for i, _ in going}
            return Following([*(p.slot for p in pieces), *(job.last(i) for i, job in begins)], ended)

        return ahead if going else None

    def _state(self) -> Slots:
        (rows, prompt_tokens, room), length = self._step if self.busy else (0, 0, 0), self.blocks.length
        return Slots(
            slots=tuple(job.answer.slot(length(i)) if job else None for i, job in enumerate(self._slots)),
            waiting=len(self._waiting),
            blocks=self.blocks.counts(),
            checkpoints=self._states.counts() if self._states else (0, 0),
            rows=rows,
            prompt_tokens=prompt_tokens,
            room=room,
        )
