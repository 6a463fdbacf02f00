"""Decode steps of several sequences, of which one may run ahead of the host.

A step leaves its next tokens on the device, as the rows of the step after it, and in slots for the host. So that
step can be launched before the host has read them, and the device does not wait for the host. If it needs masks, which
follow from these tokens, it is launched up to its logits, and its choice of tokens when it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray
from tinygrad import Tensor

from engine.kernels.device_memory import overwrite, read_rows
from engine.runtime.model_runner import Slot
from engine.runtime.sampling import Logits
from engine.targets.nvidia.batch import BatchKernels
from engine.targets.nvidia.decode import DecodeKernels
from engine.targets.nvidia.device_sampler import Choice, DeviceSampler, Ending
from engine.targets.nvidia.kernels.kernel_sequence import KernelSequence
from engine.targets.nvidia.kernels.token_slots import TokenSlots
from engine.targets.nvidia.mixed import MixedKernels

Rows = dict[int, Slot]
"""The slots of a step, by their rows on the device."""
Follow = Callable[[], tuple[Rows, int] | None]
"""Called when a step is launched. The rows of the step after it (`RowSteps.following`), and its size, 0 without pieces
of prompts; None if it is not to be launched yet."""
_ENDED = (-1,)  # the token of a row that nobody will ask for
_BEST = Choice()
Key = tuple[Hashable, ...]
Launch = Callable[[Key, Callable[[], KernelSequence]], None]
"""Launches the graph with a key, and the kernels that it has when it is first captured."""


class RowSteps:
    """Launches steps of one row, by `one`, of up to so many as one of `counts`, ascending, or of `most` in checks, by
    `batch`, and of those that have pieces of prompts too, by `mixed`. `sampler` draws the tokens of rows that are
    sampled."""

    def __init__(
        self,
        one: DecodeKernels,
        batch: BatchKernels,
        mixed: MixedKernels,
        sampler: DeviceSampler,
        counts: Sequence[int],
        most: int,
        context: int,
        launch: Launch,
    ) -> None:
        self._one, self._batch, self._mixed, self._sampler = one, batch, mixed, sampler
        self._counts, self._launch_graph = counts, launch
        self._one_token_slots = TokenSlots(context)
        self._token_slots = TokenSlots(2 * most)  # a step and the one ahead of it use different halves
        self._rows: Rows = {}  # what the device has as the rows of the next step,
        self._rows_count = 1  # one for so many rows
        self._is_ahead = False  # whether that step is launched
        self._chooses: Choice | None = None  # what is not launched yet of a step that is
        # for how many rows the graph of the last step is, and the places and positions of those that were wanted
        self._last: tuple[int, list[tuple[int, int]]] = (1, [])

    # ---- the steps ----

    def is_launched(self, rows: Sequence[Slot]) -> bool:
        """Whether the step that is ahead has these rows."""
        return self._is_ahead and {*self._rows.values()} >= {*rows}

    def following(self, rows: Iterable[Slot], begin: Sequence[Slot], size: int) -> Rows | None:
        """The rows of a step of `size` that follows the one that is launched: `rows` of this go on, and others `begin`.
        The inputs of those that go on are not known yet: (). None if the step is one for another number of rows, or has
        no place for one."""
        going, count = {*rows}, self._rows_count
        if self.count(len(going) + len(begin), size) != count or (count == 1 and begin):
            return None
        found = {place: _next(row) for place, row in self._rows.items() if row in going}
        for row in begin:
            free = (place for place in range(count) if place not in found and self._can_take(place, row))
            if (place := next(free, None)) is None:
                return None
            found[place] = row
        return found

    def _can_take(self, place: int, row: Slot) -> bool:
        """Whether the step that is launched leaves no token where that of a row is to be."""
        last = self._rows.get(place)
        return not last or last.position % 2 != row.position % 2

    def decode(self, rows: Sequence[Slot], ahead: Follow | None, size: int = 0) -> list[int]:
        """The next token of each row. `size`: if pieces of prompts are to be in the same step (`MixedKernels.send`),
        the tokens of such a step. With `ahead`, the step after this one is launched too, if it can follow."""
        if not self.is_launched(rows):
            self.finish()
            self._send(rows, self.count(len(rows), size))
            self._launch(self._rows, size)
        self._choose()  # its masks are there
        step, self._is_ahead = self._rows, False
        places = {row: place for place, row in step.items()}
        after = {place: _next(row) for place, row in step.items()}
        if ahead and (following := ahead()):
            self._is_ahead = True
            after, size = following
            self._change(after)
            self._launch(after, size)
        tokens = self._take(step)
        self._rows = {
            place: row if row.inputs else row._replace(inputs=(tokens[place],))
            for place, row in after.items()
        }
        self._last = self._rows_count, [(places[row], row.position) for row in rows]
        return [tokens[places[row]] for row in rows]

    def check(self, rows: Sequence[Slot], count: int, launched: Callable[[], object] | None) -> list[int]:
        """The next token of each row, of which some are guesses, in a step for `count` rows. `launched` is called then,
        before the host waits."""
        self.finish()
        self._send(rows, count)
        self._launch(checked := self._rows, checks=True)
        self._choose()
        if launched:
            launched()
        tokens = self._take(checked)
        self._rows = {}  # the next step has other rows than the device
        self._last = count, [(place, row.position) for place, row in checked.items()]
        return [*tokens.values()]

    def logits(self, rows: Sequence[int] | None = None) -> Logits:
        """The logits of these rows of the last step, or of all, float32 (rows, vocab), unless one is ahead."""
        count, last = self._last
        places = [place for place, _ in last]
        return read_rows(
            self._logits(count), count, places if rows is None else [places[row] for row in rows]
        )

    def streams(self, rows: int) -> NDArray[np.float32] | None:
        """The residual stream of the first rows of the last step after the last sublayer, float32 (rows, dim); None if
        that would wait for one that is ahead."""
        count, last = self._last
        hidden_rows = self._one.hidden_rows if count == 1 else self._batch.hidden_rows.get(count)
        if hidden_rows is None or (self._is_ahead and not hidden_rows.is_mapped):
            return None
        places = [position % 2 * count + place for place, position in last[:rows]]
        return hidden_rows.read(self._one.spec.dim, places)

    def end(self, sequence: int) -> None:
        """Says that the next row of a sequence is another one than the device has, even if it looks the same."""
        for place, row in self._rows.items():
            if row.sequence == sequence:
                self._rows[place] = row._replace(inputs=_ENDED)

    def finish(self) -> None:
        """Waits for a step that is ahead and not needed: its tokens must not come later."""
        if self._is_ahead:
            if not self._chooses:
                self._take(self._rows)
            self._rows, self._is_ahead, self._chooses = {}, False, None

    def launch(
        self, count: int, limit: int, choice: Choice | None = _BEST, size: int = 0, checks: bool = False
    ) -> None:
        """Launches a step of what the device has, for `count` rows after fewer than `limit` tokens each."""
        step = count, limit, choice, size, checks
        self._launch_graph(step, lambda: self.kernels(*step))

    def kernels(
        self, count: int, limit: int, choice: Choice | None = _BEST, size: int = 0, checks: bool = False
    ) -> KernelSequence:
        """The kernels of a step that `launch` launches."""
        ending = Ending(self._slots(count).tensor, self._sampler, choice)
        if count == 1:
            return self._one.step(limit, ending)
        if size:
            return self._mixed.mixed_step(size, count, limit, ending)
        return self._batch.rows_step(count, limit, ending, checks)

    def short_kernels(self) -> KernelSequence:
        """The kernels of a step of one row that has a few layers (`DecodeKernels.short_step`)."""
        return self._one.short_step(Ending(self._slots(1).tensor, self._sampler, _BEST))

    def choice_kernels(self, count: int, choice: Choice) -> KernelSequence:
        """The kernels that choose the tokens of a step of `count` rows."""
        sequence, out = KernelSequence(), self._slots(count).tensor
        if count > 1:
            return self._batch.choice(count, Ending(out, self._sampler, choice))
        self._sampler.add_to(sequence, self._one.logits, self._one.state, out, choice)
        return sequence

    def outputs(self, row: Slot) -> Iterator[NDArray[np.float32]]:
        """Runs the step of one row again, and gives the residual stream after each part of it (`DecodeKernels`)."""
        self.finish()
        self._send([row], 1)
        self._rows = {}
        ending = Ending(self._one_token_slots.tensor, self._sampler, None)
        return self._one.outputs(self.limit(1, row.position), ending)

    def limits(self, count: int) -> list[int]:
        """The numbers of tokens that the attention of a step of `count` rows is split for."""
        return (self._one if count == 1 else self._batch).context_limits

    def limit(self, count: int, position: int) -> int:
        """The limit of a step up to `position`."""
        return next(limit for limit in self.limits(count) if position < limit)

    # ---- host and device ----

    def count(self, rows: int, size: int = 0) -> int:
        """For how many rows a step of `rows` is; one with pieces of prompts is for several. 0 if none has so many."""
        return next((n for n in self._counts if rows <= n and not (size and n == 1)), 0)

    def _send(self, rows: Sequence[Slot], count: int) -> None:
        """Sends rows to the device for a step of `count` rows, unless it has them already."""
        wanted = dict(enumerate(rows))
        if self._rows == wanted and self._rows_count == count:
            return
        self._rows, self._rows_count = wanted, count
        if count == 1:
            (row,) = rows
            overwrite(self._one.state, np.asarray([*row.inputs, row.position, row.sequence], np.int32))
        else:
            fields = ((*r.inputs, r.position, r.sequence, r.draw) for r in rows)
            self._batch.send(count, *zip(*fields, strict=True))

    def _change(self, after: Rows) -> None:
        """Makes the rows of the step that is launched those of the step `after` it: some end, and some begin."""
        changed: dict[int, Slot | None] = dict.fromkeys(self._rows.keys() - after.keys())
        changed |= {place: row for place, row in after.items() if row.inputs}
        if changed:
            self._batch.change(self._rows_count, changed, max(after) + 1)

    def _launch(self, rows: Rows, size: int = 0, checks: bool = False) -> None:
        box, slots = self._slots_of(rows)
        for slot in slots.values():
            box.expect(slot)
        count = self._rows_count
        limit = self.limit(count, max(row.position for row in rows.values()))
        drawn = [row.sequence for row in rows.values() if row.draw]
        choice = self._sampler.choice(drawn)
        # Steps with prompts are of many sizes: with a choice apart, each is one graph, whatever their rows draw.
        if not (size or choice.is_apart):
            self.launch(count, limit, choice, size, checks)
            return
        for row in rows.values() if choice.tells else ():
            self._sampler.expect(row.sequence, row.position)
        self.launch(count, limit, None, size, checks)
        self._chooses = choice
        if not choice.masks:
            self._choose()

    def _choose(self) -> None:
        """Launches the choice of a step that is launched without."""
        if choice := self._chooses:
            self._chooses, count = None, self._rows_count
            self._launch_graph(("choice", count, choice), lambda: self.choice_kernels(count, choice))

    def _take(self, rows: Rows) -> dict[int, int]:
        """Waits for the next tokens of all rows of a launched step; returns them by place."""
        box, slots = self._slots_of(rows)
        return {place: box.take(slot) for place, slot in slots.items()}

    def _logits(self, count: int) -> Tensor:
        """The logits of a step of `count` rows."""
        return self._one.logits if count == 1 else self._batch.logits[count]

    def _slots(self, count: int) -> TokenSlots:
        """Where such a step leaves its next tokens."""
        return self._one_token_slots if count == 1 else self._token_slots

    def _slots_of(self, rows: Rows) -> tuple[TokenSlots, dict[int, int]]:
        """Where the step that is launched leaves the next tokens of its rows, by their places."""
        if (count := self._rows_count) == 1:
            return self._slots(1), {0: rows[0].position}
        slots = {place: row.position % 2 * count + place for place, row in rows.items()}
        return self._slots(count), slots


def _next(row: Slot) -> Slot:
    """The row of the token after that of a row, which is not known yet."""
    return row._replace(inputs=(), position=row.position + 1)
