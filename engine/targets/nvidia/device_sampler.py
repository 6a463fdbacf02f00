"""The end of a decode step that samples its token, with the kernels of `kernels.sampling`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from tinygrad import Tensor, dtypes

from engine.kernels.device_memory import device_zeros, overwrite, to_device
from engine.protocol.events import Sampling
from engine.runtime.sampling import penalizes
from engine.targets.nvidia.kernels.kernel_sequence import KernelSequence
from engine.targets.nvidia.kernels.logit_changes import (
    MAX_BIASES,
    MAX_REPEAT_LAST_N,
    add_bias,
    copied,
    penalize,
)
from engine.targets.nvidia.kernels.sampling import (
    SETTINGS,
    Shortlist,
    StepRows,
    draw,
    leaders,
    ranked,
    settings_of,
)

_BELOW_ONE = np.nextafter(np.float32(1), np.float32(0))


class DeviceSampler:
    """Holds what sampling depends on, on the device, of each of `sequences`: the settings, the tokens so far, and a
    random number for each position. Steps have at most `rows` rows. `changing`: the sequences whose logits are changed
    before a token is drawn, by penalties or biases."""

    def __init__(self, shortlist: Shortlist, context: int, sequences: int = 1, rows: int = 1) -> None:
        self._shortlist, self._context, self._sequences = shortlist, context, sequences
        # a step before the first settings come, as when it is captured, takes the most probable token
        self._settings = to_device(np.tile(settings_of(Sampling(temperature=0)), sequences))
        self._uniforms = device_zeros(sequences * context)
        self._tokens = device_zeros(sequences * (context + 1), dtypes.int32)
        levels = range(len(shortlist.spans) + 1)
        self._values = [device_zeros(rows * shortlist.entries(level)) for level in levels]
        self._ids = [device_zeros(v.numel(), dtypes.int32) for v in self._values]
        self._changed = device_zeros(rows * shortlist.vocab)
        self._bias_ids = to_device(np.full(sequences * MAX_BIASES, -1, np.int32), dtypes.int32)
        self._biases = device_zeros(sequences * MAX_BIASES)
        self.changing: set[int] = set()

    def prepare(
        self,
        sampling: Sampling,
        tokens: Sequence[int],
        uniforms: NDArray[np.float64],
        bias: Sequence[tuple[int, float]] = (),
        sequence: int = 0,
    ) -> bool:
        """As `ModelRunner.prepare_sampling`; no step that samples the sequence may be running."""
        biases = {id: value for id, value in bias if id < self._shortlist.vocab}
        looks_far = penalizes(sampling) and sampling.repeat_last_n > MAX_REPEAT_LAST_N
        if not self._shortlist.suffices(sampling) or looks_far or len(biases) > MAX_BIASES:
            return False
        (self.changing.add if penalizes(sampling) or biases else self.changing.discard)(sequence)
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

    def add_to(
        self, step: KernelSequence, logits: Tensor, state: Tensor, out: Tensor, changes: bool, rows: int = 1
    ) -> None:
        """Adds the kernels that end a decode step, in place of `kernels.sampling.next_token` or `next_tokens`.
        `changes`: whether any of its sequences is `changing`."""
        shortlist, context, of = self._shortlist, self._context, StepRows(rows, self._sequences)
        vocab, settings, so_far = shortlist.vocab, self._settings, self._tokens
        if changes:
            step.add(copied(vocab, of), out=self._changed, logits=logits)
            logits = self._changed
            step.add(add_bias(vocab, of), logits=logits, ids=self._bias_ids, biases=self._biases, state=state)
            kernel = penalize(vocab, context, rows=of)
            step.add(kernel, logits=logits, settings=settings, state=state, so_far=so_far)
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
        step.add(
            draw(shortlist, context, of),
            state=state,
            tokens=out,
            so_far=so_far,
            values=self._values[-1],
            ids=self._ids[-1],
            settings=settings,
            uniforms=self._uniforms,
        )
