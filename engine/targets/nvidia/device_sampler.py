"""The end of a decode step that draws its tokens, with the kernels of `kernels.sampling`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from tinygrad import Tensor, dtypes

from engine.kernels.device_memory import device_zeros, overwrite, to_device
from engine.protocol.events import Sampling, TopToken
from engine.runtime.model_runner import Drawing
from engine.runtime.sampling import LogProbabilities, penalizes
from engine.targets.nvidia.kernels.kernel_sequence import KernelSequence
from engine.targets.nvidia.kernels.sampling.log_probabilities import NUMBERS, TOP, exp_sums, n_sums, told
from engine.targets.nvidia.kernels.sampling.logit_changes import (
    MAX_BIASES,
    MAX_REPEAT_LAST_N,
    add_bias,
    allowed,
    copied,
    n_words,
    penalize,
)
from engine.targets.nvidia.kernels.sampling.sampling import (
    SETTINGS,
    Shortlist,
    StepRows,
    draw,
    leaders,
    ranked,
    settings_of,
)
from engine.targets.nvidia.kernels.token_slots import HostWords, TokenSlots

_BELOW_ONE = np.nextafter(np.float32(1), np.float32(0))


class Choice(NamedTuple):
    """How a step chooses its tokens: the most probable ones, unless some rows are drawn; whether the logits of any of
    these are changed before by penalties or biases, or by masks, and whether log-probabilities are told of any."""

    draws: bool = False
    changes: bool = False
    masks: bool = False
    tells: bool = False

    @property
    def is_apart(self) -> bool:
        """Whether the choice is a graph of its own, launched after that of the step: it waits for masks, or it is too
        seldom for a graph of each step that may come before it."""
        return self.masks or self.tells


class DeviceSampler:
    """Implements `RowSampler` for `sequences`. It holds what drawing depends on, on the device: the settings, the
    tokens so far, a random number for each position, biases and masks. Steps have at most `rows` rows."""

    def __init__(self, shortlist: Shortlist, context: int, sequences: int = 1, rows: int = 1) -> None:
        self._shortlist, self._context, self._sequences = shortlist, context, sequences
        # a step before the first settings come, as when it is captured, takes the most probable token
        self._settings = to_device(np.tile(settings_of(Sampling(temperature=0)), sequences))
        self._uniforms = device_zeros(sequences * context)
        self._tokens = device_zeros(sequences * (context + 1), dtypes.int32)
        self._of_logits, self._of_changed = _Sorted(shortlist, rows), _Sorted(shortlist, rows)
        self._changed = device_zeros(rows * shortlist.vocab)
        self._bias_ids = to_device(np.full(sequences * MAX_BIASES, -1, np.int32), dtypes.int32)
        self._biases = device_zeros(sequences * MAX_BIASES)
        self._words = HostWords(sequences * n_words(shortlist.vocab))
        self._sums = device_zeros(rows * n_sums(shortlist.vocab))
        self._told = TokenSlots(2 * sequences * NUMBERS)
        self._changing, self._masking, self._telling = set[int](), set[int](), set[int]()

    # --- what a sequence draws ---------------------------------------------------------------------------

    def prepare(self, sequence: int, drawing: Drawing) -> bool:
        sampling, tokens, uniforms, bias, top, masks = drawing
        biases = {id: value for id, value in bias if id < self._shortlist.vocab}
        looks_far = penalizes(sampling) and sampling.repeat_last_n > MAX_REPEAT_LAST_N
        is_too_much = looks_far or len(biases) > MAX_BIASES or top > TOP
        if not self._shortlist.suffices(sampling) or is_too_much:
            return False
        changes = penalizes(sampling) or bool(biases)
        for kind, is_one in ((self._changing, changes), (self._masking, masks), (self._telling, top > 0)):
            (kind.add if is_one else kind.discard)(sequence)
        self.allow(sequence, None)
        rest = MAX_BIASES - len(biases)
        overwrite(self._bias_ids, np.asarray([*biases, *[-1] * rest], np.int32), sequence * MAX_BIASES)
        values = np.asarray([*biases.values(), *[0] * rest], np.float32)
        overwrite(self._biases, values, sequence * MAX_BIASES)
        overwrite(self._settings, settings_of(sampling), sequence * SETTINGS)
        overwrite(self._tokens, np.asarray(tokens, np.int32), sequence * (self._context + 1))
        first = len(tokens) - 1
        numbers = np.minimum(uniforms[: self._context - first], _BELOW_ONE).astype(np.float32)
        overwrite(self._uniforms, numbers, sequence * self._context + first)
        return True

    def allow(self, sequence: int, words: NDArray[np.uint32] | None) -> None:
        n = n_words(self._shortlist.vocab)
        mask = np.full(n, 0 if words is not None else 0xFFFFFFFF, np.uint32)
        if words is not None:  # the vocabulary of a grammar may be another one than that of the logits
            mask[: words.size] = words[:n]
        self._words.write(sequence * n, mask)

    def choice(self, sequences: Iterable[int]) -> Choice:
        """The choice of a step that draws the tokens of these sequences."""
        drawn = set(sequences)
        return Choice(bool(drawn), *(bool(drawn & s) for s in (self._changing, self._masking, self._telling)))

    # --- log-probabilities -------------------------------------------------------------------------------

    def expect(self, sequence: int, position: int) -> None:
        """Before the launch of a choice that tells of a sequence."""
        self._told.expect(self._told_place(sequence, position), NUMBERS)

    def log_probabilities(self, sequence: int, position: int, n: int) -> LogProbabilities:
        numbers = self._told.take_all(self._told_place(sequence, position), NUMBERS)
        ids, logs = numbers[1 : TOP + 1].tolist(), numbers.view(np.float32)[[0, *range(TOP + 1, NUMBERS)]]
        chosen, *top = logs.tolist()
        pairs = [(id, log) for id, log in zip(ids, top, strict=True) if id < self._shortlist.vocab]
        return chosen, tuple(TopToken(id=id, logprob=log) for id, log in pairs[:n])

    def _told_place(self, sequence: int, position: int) -> int:
        return (position % 2 * self._sequences + sequence) * NUMBERS

    # --- the kernels -------------------------------------------------------------------------------------

    def add_to(
        self, step: KernelSequence, logits: Tensor, state: Tensor, out: Tensor, choice: Choice, rows: int = 1
    ) -> None:
        """Adds the kernels of a choice, in place of `kernels.sampling.next_token` or `next_tokens`."""
        shortlist, context, of = self._shortlist, self._context, StepRows(rows, self._sequences)
        vocab, settings, so_far = shortlist.vocab, self._settings, self._tokens
        leading, left, kinds = self._of_logits, logits, state if of.differ else None
        if choice.tells:
            leading.add_to(step, logits, rows)
            step.add(exp_sums(shortlist, rows), out=self._sums, logits=logits, values=leading.values)
        if choice.changes or choice.masks:
            leading, left = self._of_changed, self._changed
        if choice.masks:
            kernel = allowed(vocab, of)
            step.add(kernel, out=left, logits=logits, words=self._words.tensor, state=kinds)
        elif choice.changes:
            step.add(copied(vocab, of), out=left, logits=logits)
        if choice.changes:
            step.add(add_bias(vocab, of), logits=left, ids=self._bias_ids, biases=self._biases, state=kinds)
            kernel = penalize(vocab, context, rows=of)
            step.add(kernel, logits=left, settings=settings, state=state, so_far=so_far)
        if leading is self._of_changed or not choice.tells:
            leading.add_to(step, left, rows)
        step.add(
            draw(shortlist, context, of),
            state=state,
            tokens=out,
            so_far=so_far,
            values=leading.values,
            ids=leading.ids,
            settings=settings,
            uniforms=self._uniforms,
        )
        if choice.tells:
            step.add(
                told(shortlist, context, of),
                out=self._told.tensor,
                sums=self._sums,
                logits=logits,
                values=self._of_logits.values,
                ids=self._of_logits.ids,
                state=state,
            )


class Ending(NamedTuple):
    """How a step ends: the next tokens go to `tokens` by a choice; None: that is another graph's."""

    tokens: Tensor
    sampler: DeviceSampler
    choice: Choice | None


class _Sorted:
    """The most probable tokens of each row: `values`, their logits, float32 (rows, length), and `ids`, int32."""

    def __init__(self, shortlist: Shortlist, rows: int) -> None:
        levels = range(len(shortlist.spans) + 1)
        self._shortlist = shortlist
        self._values = [device_zeros(rows * shortlist.entries(level)) for level in levels]
        self._ids = [device_zeros(v.numel(), dtypes.int32) for v in self._values]
        self.values, self.ids = self._values[-1], self._ids[-1]

    def add_to(self, step: KernelSequence, logits: Tensor, rows: int) -> None:
        """Adds the kernels that find them."""
        shortlist = self._shortlist
        step.add(leaders(shortlist, rows), out=self._values[0], logits=logits)
        last = len(shortlist.spans) - 1
        for level in range(last + 1):
            step.add(
                ranked(shortlist, level, rows=rows),
                out=self._values[level + 1],
                out_ids=self._ids[level + 1],
                values=self._values[level],
                ids=self._ids[level] if level else None,
                logits=logits if level < last else None,
            )
