"""The end of a decode step that samples its token, with the kernels of `engine.kernels.gpu.sampling`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from tinygrad import Tensor, dtypes

from engine.events import Sampling
from engine.kernels.gpu.device_memory import device_zeros, overwrite
from engine.kernels.gpu.kernel_sequence import KernelSequence
from engine.kernels.gpu.sampling import Shortlist, draw, leaders, penalize, ranked, settings_of

_BELOW_ONE = np.nextafter(np.float32(1), np.float32(0))


class DeviceSampler:
    """Holds what sampling depends on, on the device: the settings, the tokens so far, and a random number for each
    position. `penalizes`: whether the settings have a repetition penalty."""

    def __init__(self, shortlist: Shortlist, context: int) -> None:
        self._shortlist, self._context = shortlist, context
        self._settings, self._uniforms = device_zeros(settings_of(Sampling()).size), device_zeros(context)
        self._tokens = device_zeros(context + 1, dtypes.int32)
        levels = range(len(shortlist.spans) + 1)
        self._values = [device_zeros(shortlist.entries(level)) for level in levels]
        self._ids = [device_zeros(v.numel(), dtypes.int32) for v in self._values]
        self.penalizes = False

    def prepare(self, sampling: Sampling, tokens: Sequence[int], uniforms: NDArray[np.float64]) -> bool:
        """As `SamplingRunner.prepare_sampling`; no step may be running."""
        if not self._shortlist.suffices(sampling):
            return False
        self.penalizes = sampling.repeat_penalty != 1
        overwrite(self._settings, settings_of(sampling))
        padded = np.zeros(self._context + 1, np.int32)
        padded[: len(tokens)] = tokens
        overwrite(self._tokens, padded)
        by_position = np.zeros(self._context, np.float32)
        positions = slice(len(tokens) - 1, len(tokens) - 1 + len(uniforms))
        by_position[positions] = np.minimum(uniforms[: by_position[positions].size], _BELOW_ONE)
        overwrite(self._uniforms, by_position)
        return True

    def add_to(
        self, step: KernelSequence, logits: Tensor, state: Tensor, history: Tensor, penalizes: bool
    ) -> None:
        """Adds the kernels that end a decode step, in place of `engine.kernels.gpu.sampling.next_token`."""
        shortlist, context = self._shortlist, self._context
        if penalizes:
            kernel = penalize(shortlist.vocab, context)
            step.add(kernel, logits, self._settings, state, self._tokens)
        step.add(leaders(shortlist), self._values[0], logits)
        last = len(shortlist.spans) - 1
        for level in range(last + 1):
            ids = [self._ids[level]] if level else []
            source = [logits] if level < last else []
            outs = self._values[level + 1], self._ids[level + 1]
            step.add(ranked(shortlist, level), *outs, self._values[level], *ids, *source)
        ranked_tokens = self._values[-1], self._ids[-1]
        buffers = state, history, self._tokens, *ranked_tokens, self._settings, self._uniforms
        step.add(draw(shortlist, context), *buffers)
