"""The kernels of a decode step of several sequences at once on a GPU:

    embed . those of the sublayers' handlers . norm . head . next tokens

Its rows are the tokens of different sequences, or guesses of the next tokens too, a small prompt whose products are
bound by memory as in decode (`small_batch`). Attention is decode's, of each row over the blocks of its own sequence.
What lies between is prefill's: a product leaves its sums, and the norm before the next one adds them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from tinygrad import Tensor, dtypes

from engine.kernels.device_memory import device_zeros, overwrite
from engine.runtime.model_runner import Slot
from engine.targets.nvidia.device_sampler import Ending
from engine.targets.nvidia.input_scales import InputScales
from engine.targets.nvidia.kernels.kernel_sequence import KernelSequence
from engine.targets.nvidia.kernels.pieces import state_of
from engine.targets.nvidia.kernels.products.small_batch import as_logits, n_blocks
from engine.targets.nvidia.kernels.residual_stream.joining import copy_hidden
from engine.targets.nvidia.kernels.sampling.sampling import StepRows, next_tokens
from engine.targets.nvidia.kernels.token_slots import HostRows
from engine.targets.nvidia.prefill import PrefillKernels
from engine.targets.nvidia.prompt_step import RowsStep
from engine.targets.nvidia.sublayers.recurrent import CHECKED
from engine.targets.nvidia.weights import GPUModel

ROW_COUNTS = (4, 8, 16, 32)
"""Rows of the steps that are captured. One of 4 rows takes as long as one of 2."""

_CHECK_ROWS = 8, 16
_SHORT = 256
"""Tokens of the shortest context for which a step is captured. Each other one is four times as long."""


def check_rows(model: GPUModel, parallel: int) -> tuple[int, ...]:
    """See `ModelRunner.check_rows`. A step of 8 rows takes about as long as one of fewer. With recurrent states, only
    those of one sequence are kept for each row."""
    if model.recurrent:
        return (CHECKED,) if parallel == 1 else ()
    return _CHECK_ROWS if parallel >= _CHECK_ROWS[0] else _CHECK_ROWS[:1]


class BatchKernels(PrefillKernels):
    """Builds the kernels of steps of so many `rows`. A step reads its state, int32 (4, rows): tokens, positions,
    sequences, and what each row is (`StepRows`). It writes the next tokens, also to its state, whose positions advance,
    and `logits`."""

    def __init__(self, model: GPUModel, input_scales: InputScales, context: int, rows: Sequence[int]) -> None:
        super().__init__(model, input_scales, max(rows, default=1))
        self.context_limits = [_SHORT]
        while self.context_limits[-1] < context:
            self.context_limits.append(4 * self.context_limits[-1])
        self._states = {n: device_zeros(4 * n, dtypes.int32) for n in rows}
        # the residual stream of the last steps, if a draft head may read it
        self.hidden_rows = {n: HostRows(2 * n * model.spec.dim) for n in rows if model.spec.draft_head}
        self.logits = {n: device_zeros(n * model.spec.vocab) for n in rows}

    def rows_step(self, rows: int, limit: int, ending: Ending, checks: bool = False) -> KernelSequence:
        """The kernels of a step of `rows` rows after fewer than `limit` tokens each, one of `context_limits`. The next
        tokens are at `StepRows.token_slot`. If it `checks`, some rows are of one sequence, at places that follow each
        other."""
        model, state = self._model, self.state(rows)
        step = RowsStep(self, state, rows, limit, checks)
        self._embed(step, state, model.layers, state, rows)
        for layer in model.layers:
            layer.add_to(step, layer.handler.rows)
        self.finish(step, ending)
        return step.sequence

    def finish(self, step: RowsStep, ending: Ending) -> None:
        """Adds what follows the sublayers (`rows_step`)."""
        model, state, rows = self._model, step.state, step.tokens
        step.norm(model.output_norm)
        if self.hidden_rows:
            step.add(
                copy_hidden(rows, self.spec.dim),
                out=self.hidden_rows[rows].tensor,
                stream=step.h,
                state=state,
            )
        part, logits, (_, best) = model.head.single_matrix, self.logits[rows], self._best(step)
        epilogue = as_logits(model.spec.softcap, model.head_bias is not None)
        step.multiply(part, step.tiles(part), epilogue, "head", logits=logits, **best, bias=model.head_bias)
        self._choose(step, ending)

    def choice(self, rows: int, ending: Ending) -> KernelSequence:
        """The kernels that choose the next tokens of a step of `rows` rows that has ended without."""
        step = RowsStep(self, self.state(rows), rows, self.context_limits[0])
        self._choose(step, ending)
        return step.sequence

    def _choose(self, step: RowsStep, ending: Ending) -> None:
        """Adds what chooses the next tokens, unless another graph does."""
        state, rows, (next_ids, sampler, choice) = step.state, step.tokens, ending
        if choice and choice.draws:
            sampler.add_to(step.sequence, self.logits[rows], state, next_ids, choice, rows)
        elif choice:
            blocks, best = self._best(step)
            step.add(next_tokens(blocks, rows), state=state, tokens=next_ids, **best)

    def _best(self, step: RowsStep) -> tuple[int, dict[str, Tensor]]:
        """How many blocks compute the logits of a step, and the buffers of the largest of each (`as_logits`)."""
        part = self._model.head.single_matrix
        blocks = n_blocks(part.rows, step.tiles(part))
        kinds = ("largest", dtypes.float32), ("largest_rows", dtypes.int32)
        return blocks, {name: self.buffer(name, blocks * step.tokens, dtype) for name, dtype in kinds}

    def limit(self, position: int) -> int:
        """The one of `context_limits` for a step up to `position`."""
        return next(limit for limit in self.context_limits if position < limit)

    def state(self, rows: int) -> Tensor:
        """What a step of `rows` rows reads."""
        return self._states[rows]

    def send(
        self,
        rows: int,
        tokens: Sequence[int],
        positions: Sequence[int],
        sequences: Sequence[int],
        sampled: Sequence[bool],
    ) -> None:
        """Writes the state of a step of `rows` rows, of which the first are used."""
        state = np.zeros((4, rows), np.int32)
        kinds = [*map(_kind, sampled)]
        state[:, : len(tokens)] = tokens, positions, sequences, kinds
        overwrite(self._states[rows], state.reshape(-1))
        # Recurrent states take the rows of a check as a piece.
        is_one = self.spec.state_bytes and len({*sequences}) == 1
        pieces = [(0, positions[0], len(tokens), sequences[0])] if is_one else []
        if self.spec.experts or pieces:
            overwrite(self.prompt, state_of(self.chunk, pieces, len(tokens)))

    def change(self, rows: int, changed: Mapping[int, Slot | None], used: int) -> None:
        """Gives places of the state of a step of `rows` rows to other rows, or to none. `used`: its rows up to the last
        one that is used then."""
        state = self._states[rows]
        for place, row in changed.items():
            numbers = (*row.inputs, row.position, row.sequence, _kind(row.draw)) if row else (0, 0, 0, 0)
            for i, number in enumerate(numbers):
                overwrite(state, np.asarray([number], np.int32), i * rows + place)
        if self.spec.experts:
            overwrite(self.prompt, state_of(self.chunk, [], used))


def _kind(draws: bool) -> int:
    """What a row is whose next token is drawn, or not."""
    return StepRows.SAMPLED if draws else StepRows.USED
