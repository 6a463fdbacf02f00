"""The end of a decode step that samples its token, with the kernels of `kernels.sampling`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from tinygrad import Tensor, dtypes

from engine.kernels.device_memory import device_zeros, overwrite, to_device
from engine.protocol.events import Sampling
from engine.targets.nvidia.kernels.kernel_sequence import KernelSequence
from engine.targets.nvidia.kernels.sampling import (
    SETTINGS,
    Shortlist,
    StepRows,
    draw,
    leaders,
    penalize,
    ranked,
    settings_of,
)

_BELOW_ONE = np.nextafter(np.float32(1), np.float32(0))


class DeviceSampler:
    """Holds what sampling depends on, on the device, of each of `sequences`: the settings, the tokens so far, and a
    random number for each position. Steps have at most `rows` rows. `penalizing`: the sequences whose settings have a
    repetition penalty."""

    def __init__(self, shortlist: Shortlist, context: int, sequences: int = 1, rows: int = 1) -> None:
        self._shortlist, self._context, self._sequences = shortlist, context, sequences
        # a step before the first settings come, as when it is captured, takes the most probable token
        self._settings = to_device(np.tile(settings_of(Sampling(temperature=0)), sequences))
        self._uniforms = device_zeros(sequences * context)
        self._tokens = device_zeros(sequences * (context + 1), dtypes.int32)
        levels = range(len(shortlist.spans) + 1)
        self._values = [device_zeros(rows * shortlist.entries(level)) for level in levels]
        self._ids = [device_zeros(v.numel(), dtypes.int32) for v in self._values]
        self.penalizing: set[int] = set()

    def prepare(
        self, sampling: Sampling, tokens: Sequence[int], uniforms: NDArray[np.float64], sequence: int = 0
    ) -> bool:
        """As `ModelRunner.prepare_sampling`; no step that samples the sequence may be running."""
        if not self._shortlist.suffices(sampling):
            return False
        (self.penalizing.add if sampling.repeat_penalty != 1 else self.penalizing.discard)(sequence)
        overwrite(self._settings, settings_of(sampling), sequence * SETTINGS)
        overwrite(self._tokens, np.asarray(tokens, np.int32), sequence * (self._context + 1))
        first = len(tokens) - 1
        numbers = np.minimum(uniforms[: self._context - first], _BELOW_ONE).astype(np.float32)
        overwrite(self._uniforms, numbers, sequence * self._context + first)
        return True

    def add_to(
        self, step: KernelSequence, logits: Tensor, state: Tensor, out: Tensor, penalizes: bool, rows: int = 1
    ) -> None:
        """Adds the kernels that end a decode step, in place of `kernels.sampling.next_token` or
        `next_tokens`."""
        shortlist, context, of = self._shortlist, self._context, StepRows(rows, self._sequences)
        if penalizes:
            kernel = penalize(shortlist.vocab, context, rows=of)
            step.add(kernel, logits=logits, settings=self._settings, state=state, so_far=self._tokens)
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
            so_far=self._tokens,
            values=self._values[-1],
            ids=self._ids[-1],
            settings=self._settings,
            uniforms=self._uniforms,
        )
