"""Which states of a model with recurrent state are kept, so that a text can be gone back to.

Keys and values have positions: a sequence is cut back by forgetting the last ones. A recurrent state has none. It is
that after all tokens so far, and no token can be taken out of it again. So copies of it are kept, checkpoints. A
sequence that is cut back goes on after the last checkpoint before that place; the tokens between are computed again.

There are slots for a few checkpoints. Ends of turns get one, as who regenerates or edits a message goes back there, and
so do places in long turns. When all slots are taken, the checkpoint is given up that is worth least. What it is worth
are the tokens that it saves, those after the checkpoint before it, divided by the tokens that were run since it was
last of use. So checkpoints are the rarer the farther back they lie: who goes back a little never computes much again.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

EVERY = 32
"""Tokens after which a checkpoint is saved, even within a turn."""

WORTH_A_STEP = 128
"""A prefill step ends early at the end of a turn, for a checkpoint that saves so many tokens."""

WORTH_AN_EDIT = 16
"""The same where the last message begins: who edits it waits for the tokens before it too."""

_OF_A_TURN = 64  # how much more likely a return to the end of a turn is than to another place


def checkpoint_slots(parallel: int) -> int:
    """The checkpoints for which a runner of a model with recurrent state has room, for so many sequences."""
    return 8 if parallel == 1 else 4 * parallel


@runtime_checkable
class StateStore(Protocol):
    """What a runner has too that can run models with recurrent state: the memory of the states. A sequence has one,
    which is that after all its tokens so far: a step at a position needs the state after exactly so many tokens. A step
    at position 0 begins with zeros. Checkpoints are copies, in slots 0 to `state_slots` - 1. Calls take effect in the
    order in which they and the steps are made.

    A step that ran ahead may have changed the state. Then the caller asks for just that step, goes on after it, loads a
    state, or begins the sequence anew."""

    state_slots: int
    """0 if the model has no recurrent state."""

    state_bytes: int
    """Bytes of a state."""

    def state_position(self, sequence: int = 0) -> int:
        """The number of tokens after which the state of a sequence is. If a step that ran ahead has changed it, its
        token counts: the one that the step before it returned. Any number after a replay."""
        ...

    def save_state(self, slot: int, sequence: int = 0) -> None:
        """Copies the state of a sequence to a slot, on the device."""
        ...

    def load_state(self, slot: int, sequence: int = 0) -> None:
        """Gives a sequence the state in a slot, with its position."""
        ...

    def cut_state(self, sequence: int, position: int) -> None:
        """After a check of guesses (`ModelRunner.check_rows`): the state of a sequence is that after `position` tokens,
        of the rows of that step."""
        ...


@dataclass(eq=False)
class _Checkpoint:
    """The state after a text (its tokens as int32), and that of the longest beginning of it, if there is one. `used`:
    when it was saved or loaded last."""

    text: bytes
    slot: int
    ends_turn: bool
    used: int
    parent: _Checkpoint | None

    @property
    def length(self) -> int:
        """Its length in tokens."""
        return len(self.text) // _ITEM

    @property
    def saves(self) -> int:
        """The tokens that need not be computed again."""
        return self.length - (self.parent.length if self.parent else 0)

    def worth(self, now: int) -> float:
        ago = now - self.used + 1
        if self.ends_turn:
            # Exactly this place is likely, so a whole step is saved, which takes time however short it is.
            return _OF_A_TURN * (self.saves + WORTH_A_STEP) / ago
        return self.saves / ago


class Checkpoints:
    """Keeps states of `store`, which has slots for some."""

    def __init__(self, store: StateStore) -> None:
        self._store = store
        self._free = list(range(store.state_slots - 1, -1, -1))
        self._kept: list[_Checkpoint] = []
        self._now = 0  # the tokens that were run
        self._last: dict[int, int] = {}  # where each sequence was saved or loaded last

    def counts(self) -> tuple[int, int]:
        """How many checkpoints there are, and how many there may be."""
        return len(self._kept), self._store.state_slots

    def position(self, sequence: int = 0) -> int:
        """See `StateStore.state_position`."""
        return self._store.state_position(sequence)

    def cut(self, sequence: int, position: int) -> None:
        """See `StateStore.cut_state`."""
        self._store.cut_state(sequence, position)

    def is_due(self, sequence: int = 0) -> bool:
        """Whether `save` would keep the state of a sequence in the middle of a turn."""
        return self.position(sequence) - self._last.get(sequence, 0) >= EVERY

    def find(self, tokens: Sequence[int], most: int) -> int:
        """The length of the longest beginning of `tokens`, at most `most` of them, after which there is a checkpoint; 0
        if there is none."""
        found = self._find(_text(tokens, most))
        return found.length if found else 0

    def load(self, tokens: Sequence[int], most: int, sequence: int = 0) -> int:
        """Gives a sequence the state of the checkpoint that `find` finds; returns its length. With 0, the sequence has
        to begin anew."""
        found = self._find(_text(tokens, most))
        if found:
            found.used = self._now
            self._store.load_state(found.slot, sequence)
        length = self._last[sequence] = found.length if found else 0
        return length

    def last(self, tokens: Sequence[int], most: int) -> tuple[int, int]:
        """As `find`, and the slot of the checkpoint, -1 if there is none."""
        found = self._find(_text(tokens, most))
        return (found.length, found.slot) if found else (0, -1)

    def add(self, tokens: Sequence[int]) -> int:
        """A slot for the state after `tokens`, the end of a turn, which the caller fills. There is no checkpoint after
        these tokens yet."""
        return self._add(_text(tokens, len(tokens)), ends_turn=True).slot

    def save(self, tokens: Sequence[int], ends_turn: bool = False, sequence: int = 0) -> None:
        """Keeps the state of a sequence, which is after `tokens`, if they end a turn or there is no checkpoint after
        one of the last EVERY tokens."""
        if not tokens or not (ends_turn or self.is_due(sequence)):
            return
        assert self.position(sequence) == len(tokens)
        self._now += len(tokens) - self._last.get(sequence, 0)
        self._last[sequence] = len(tokens)
        text = _text(tokens, len(tokens))
        parent = self._find(text)
        if parent and parent.length == len(tokens):
            parent.used, parent.ends_turn = self._now, parent.ends_turn or ends_turn
            return
        self._store.save_state(self._add(text, ends_turn).slot, sequence)

    def forget(self, tokens: Sequence[int]) -> None:
        """Gives up the checkpoints within a text."""
        text = _text(tokens, len(tokens))
        for checkpoint in [c for c in self._kept if text.startswith(c.text)]:
            self._give_up(checkpoint)

    def end_of_step(self, done: int, end: int, turns: Sequence[int], sequence: int) -> int:
        """Where a prefill step from `done` to `end` should end, so that a checkpoint can be saved where one of `turns`
        ends (`Answer.checkpoint_ends`): at the first that saves enough tokens, else at `end`."""
        last = self._last.get(sequence, 0)
        saved = dict.fromkeys(turns, WORTH_A_STEP) | dict.fromkeys(turns[-2:-1], WORTH_AN_EDIT)
        places = (place for place, least in saved.items() if max(done + 1, last + least) <= place < end)
        return min(places, default=end)

    def _add(self, text: bytes, ends_turn: bool) -> _Checkpoint:
        if not self._free:
            self._give_up(min(self._kept, key=lambda c: c.worth(self._now)))
        parent = self._find(text)
        new = _Checkpoint(text, self._free.pop(), ends_turn, self._now, parent)
        for other in self._kept:
            if other.parent is parent and other.text.startswith(text):
                other.parent = new
        self._kept.append(new)
        return new

    def _find(self, text: bytes) -> _Checkpoint | None:
        """The checkpoint of the longest beginning of a text."""
        return max((c for c in self._kept if text.startswith(c.text)), key=lambda c: c.length, default=None)

    def _give_up(self, checkpoint: _Checkpoint) -> None:
        self._kept.remove(checkpoint)
        self._free.append(checkpoint.slot)
        for other in self._kept:
            if other.parent is checkpoint:
                other.parent = checkpoint.parent


_ITEM = array("i").itemsize


def _text(tokens: Sequence[int], n: int) -> bytes:
    """The first n tokens, to be compared at once."""
    return array("i", tokens[:n]).tobytes()
