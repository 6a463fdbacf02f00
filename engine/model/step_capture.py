"""Compiles and captures the steps of a runner before somebody waits for them.

A step that is not captured here is captured at its first use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain

import numpy as np

from engine.errors import PreemptedError
from engine.kernels import compilers
from engine.kernels.compilation import interruptible
from engine.model.busy_preparation import BusyPreparation
from engine.protocol.events import Sampling
from engine.runtime.assistant_drafter import AssistantDrafter
from engine.runtime.head_drafter import HeadDrafter
from engine.runtime.model_runner import Drawing, ModelRunner, Slot, Want
from engine.runtime.pictures import PictureEncoder
from engine.runtime.scheduler import Scheduler


class StepCapture:
    """The steps that are left. All sequences are empty before and after each."""

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        context_length: int,
        embeds: bool,
        guesses: bool,
        head: HeadDrafter | AssistantDrafter | None,
        encoder: PictureEncoder | None,
        replies: bool,
    ) -> None:
        """`embeds`: texts may be asked for as vectors; without `replies`, for nothing else. `guesses`: steps check
        guesses of next tokens, which a `head` may make. The `encoder` is that of pictures."""
        self._runner, self._scheduler, self._context_length = runner, scheduler, context_length
        self._replies = replies
        self._embeds, self._guesses, self._head, self._encoder = embeds, guesses, head, encoder
        self._interrupted: Callable[[], bool] = lambda: False
        self.again()

    def again(self) -> None:
        """Begins anew: a search has changed kernels."""
        self._left = self._steps()
        self._later = chain(self._checks(), self._pictures())
        self.while_busy = BusyPreparation(self._compilations())

    def first(self) -> None:
        """Captures a decode step with its logits: it shows that the device works."""
        next(self._left)

    def steps(self) -> None:
        """Captures all steps of prompts and replies."""
        for _ in self._left:
            pass

    def rest(self, interrupted: Callable[[], bool]) -> Iterator[None]:
        """Captures what is left, one a turn, until `interrupted`. Compiler processes end when nothing is left."""
        self._interrupted = interrupted
        turns = chain(self._left, self._later)
        while not interrupted():
            if next(turns, self) is self:
                compilers.end()
                return
            yield

    def _steps(self) -> Iterator[None]:
        """Captures each step of the runner by running it, one a turn, if there are free blocks for it. The first is a
        decode step with its logits: it shows that the device works."""
        runner = self._runner
        self._run(1, 0)
        runner.logits()
        yield
        # The smallest size does for all until they are compiled.
        for size in dict.fromkeys((runner.chunk_sizes[0], *self._sizes_to_compile())):
            if runner.captures and self._replies:
                yield from self._prepare(partial(runner.prepare, size))
                self._run(0, size // 2 + 1)
                yield
            if self._embeds:
                yield from self._prepare(partial(self._run, 0, size // 2 + 1, want="hidden"))
                yield
        if not (runner.captures and self._replies):
            return
        for drawing in (None, *_drawings()) if runner.sampler else (None,):
            for count in runner.row_counts:
                yield from self._prepare(partial(runner.prepare_rows, count))
                for depth in self._depths(count):
                    self._run(min(count, runner.parallel), 0, depth, drawing)
                    yield
            if runner.precompiled and not drawing:
                yield from self._mixed_steps()

    def _compilations(self) -> Iterator[Callable[[], None]]:
        """What compiles the kernels of steps, those first that make most of a difference."""
        runner = self._runner
        if runner.precompiled and runner.captures:
            largest, *sizes = self._sizes_to_compile()
            yield partial(runner.prepare, largest)
            yield from (partial(runner.prepare_rows, count) for count in runner.row_counts)
            yield from (partial(runner.prepare, size) for size in sizes)

    def _sizes_to_compile(self) -> Iterable[int]:
        """The sizes of a prompt's steps. The largest comes first: long prompts gain most."""
        sizes = self._runner.chunk_sizes
        return dict.fromkeys((sizes[-1], *sizes))

    def _mixed_steps(self) -> Iterator[None]:
        """Captures steps of prompts and replies."""
        runner = self._runner
        for count in runner.row_counts[1:]:
            rows = min(count, runner.parallel - 1)  # one sequence is that of the prompt
            for size in runner.piece_sizes(rows)[:-1]:
                for depth in self._depths(count):
                    self._run(rows, size, depth)
                    yield

    def _checks(self) -> Iterator[None]:
        """Captures steps that check guesses of the next tokens of one reply."""
        if not self._guesses:
            return
        for rows in self._runner.check_rows:
            yield from self._prepare(partial(self._runner.prepare_check, rows))
            yield
            for drawing in (None, *_drawings())[: 2 if self._runner.sampler else 1]:
                for depth in self._runner.decode_depths(rows):
                    self._run(rows, 0, depth, drawing, checks=True)
                    yield
        if head := self._head:
            for size in self._runner.chunk_sizes if head.reads_of_prompt else ():
                yield from self._prepare(partial(self._run, 0, size // 2 + 1, want="hidden"))
                yield
            yield from self._prepare(head.prepare)
            yield

    def _pictures(self) -> Iterator[None]:
        """Compiles what pictures need."""
        for prepare in self._encoder.preparations() if self._encoder else ():
            yield from self._prepare(prepare)
            yield

    def _prepare(self, prepare: Callable[[], None]) -> Iterator[None]:
        """Compiles the kernels of a step. A turn ends early if that is interrupted, and the next one goes on."""
        while True:
            try:
                with interruptible(self._interrupted):
                    return prepare()
            except PreemptedError:
                yield

    def _depths(self, rows: int) -> tuple[int, ...]:
        """The positions at which steps of so many replies are captured. There are many steps of several."""
        depths = self._runner.decode_depths(rows)
        return depths if rows == 1 else depths[:2]

    def _run(
        self,
        rows: int,
        prompt_tokens: int,
        position: int = 0,
        drawing: Drawing | None = None,
        checks: bool = False,
        want: Want = "none",
    ) -> None:
        """Runs a step of so many replies at a position and a prompt's piece, if there are free blocks for it. All
        sequences are empty before and after. `drawing`: what the first reply is drawn with. If it `checks`, all rows
        are of that. `want`: of the piece."""
        lengths = [position + rows] if checks else [position + 1] * rows
        lengths += [prompt_tokens] * (prompt_tokens > 0)
        if max(lengths) > self._context_length or not self._scheduler.blocks.has_free(lengths):
            return
        is_drawn = drawing and self._runner.sampler and self._runner.sampler.prepare(0, drawing)
        places = [(0, position + i) if checks else (i, position) for i in range(rows)]
        slots = [Slot(sequence, (0,), place, draw=bool(is_drawn)) for sequence, place in places]
        if prompt_tokens:
            slots.insert(0, Slot(rows, (0,) * prompt_tokens, 0, want))
        with self._scheduler.blocks.room(*lengths):
            self._runner.run(slots)


def _drawings() -> Iterator[Drawing]:
    """For each way in which a step draws tokens, one that needs it: with and without penalties, and those that need
    most, with masks and log-probabilities."""
    for penalty, top in ((1.0, 0), (1.1, 0), (1.1, 1)):
        yield Drawing(Sampling(repeat_penalty=penalty), [0], np.zeros(1), top=top, masks=top > 0)
