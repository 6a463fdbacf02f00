"""The kernels of a step of prompts and replies on a GPU, which reads the weights once for both:

    embed . those of the sublayers' handlers . norm . head . next tokens

Its last rows are replies, as in a step of `batch`, and those before are pieces, as in prefill.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from engine.kernels.device_memory import overwrite
from engine.runtime.model_runner import Slot
from engine.runtime.pictures import PictureRoom, Pictures
from engine.targets.nvidia.batch import BatchKernels
from engine.targets.nvidia.device_sampler import Ending
from engine.targets.nvidia.input_scales import InputScales
from engine.targets.nvidia.kernels.kernel_sequence import KernelSequence
from engine.targets.nvidia.kernels.pieces import PIECE_ROWS, rows_of, state_of
from engine.targets.nvidia.kernels.residual_stream.embedding import reply_tokens
from engine.targets.nvidia.prefill import PrefillKernels
from engine.targets.nvidia.prompt_step import MixedStep
from engine.targets.nvidia.weights import GPUModel


class MixedKernels(PrefillKernels):
    """Builds the kernels of prefill steps, and of steps that have replies too. Of these, the state of the replies, the
    logits and the next tokens are those of `batch`."""

    def __init__(
        self,
        model: GPUModel,
        input_scales: InputScales,
        chunk: int,
        batch: BatchKernels,
        room: PictureRoom | None = None,
    ) -> None:
        super().__init__(model, input_scales, chunk, room)
        self._batch = batch
        self._piece_rows: dict[int, int] = {}
        self._has_later_parts = False  # of pictures, that a step has to forget

    def mixed_step(self, tokens: int, rows: int, limit: int, ending: Ending) -> KernelSequence:
        """The kernels for up to `rows` replies and `tokens` - `rows` tokens of prompts. The rest as in
        `BatchKernels.rows_step`."""
        layers, batch, storing = self._model.layers, self._batch, self.last_storing
        step = MixedStep(self, tokens, self.order(tokens), batch.state(rows), batch.prompt, rows, limit)
        replies = step.replies
        places = {"places": self.places} if self.spec.positions else {}
        kernel = reply_tokens(rows, step.first_reply, bool(places))
        step.add(kernel, ids=self.ids, state=replies.state, **places)
        self._embed(step, self.ids, layers, self.places)
        if self._model.layer_tables:
            replies.layer_embeddings = step.layer_embeddings
        for layer in layers[: storing.start]:
            layer.add_to(step, layer.handler.mixed)
        for layer in layers[storing.start : storing.stop]:
            layer.add_to(step, layer.handler.last_mixed, replies)
        for layer in layers[storing.stop :]:
            layer.add_to(replies, layer.handler.rows)
        batch.finish(replies, ending)
        return step.sequence

    def piece_rows(self, tokens: int) -> int:
        """In a step of so many tokens without replies, pieces begin at multiples of this."""
        if tokens not in self._piece_rows:
            spans = [a.tiling(tokens).span(a.heads) or tokens for a in self._model.attention]
            self._piece_rows[tokens] = tokens if self._model.recurrent else max([PIECE_ROWS, *spans])
        return self._piece_rows[tokens]

    def fits(self, tokens: int, pieces: Sequence[Slot], rows: int = 0) -> bool:
        """Whether a step of so many tokens has room for these pieces, beside `rows` replies."""
        unit = PIECE_ROWS if rows else self.piece_rows(tokens)
        *others, last = [len(piece.inputs) for piece in pieces]
        return sum(rows_of(n, unit) for n in others) + last <= tokens - rows

    def send(self, tokens: int, pieces: Sequence[Slot], replies: int = 0, rows: int = 0) -> None:
        """Writes the state of a step of so many tokens, which is for `rows` replies, of which the first `replies` are
        used."""
        unit = PIECE_ROWS if replies else self.piece_rows(tokens)
        ids, positions = np.zeros((2, self.chunk), np.int32)
        first, places = 0, []
        self._forget_pictures()
        for piece in pieces:
            count = len(piece.inputs)
            ids[first : first + count] = piece.inputs
            positions[first : first + count] = range(piece.position, piece.position + count)
            places.append((first, piece.position, count, piece.sequence))
            self._send_pictures(piece, first)
            first += rows_of(count, unit)
        overwrite(self.prompt, state_of(self.chunk, places, replies, tokens - rows if replies else 0))
        overwrite(self.ids, ids)
        if self.spec.positions:
            overwrite(self.places, positions)

    def _send_pictures(self, piece: Slot, first: int) -> None:
        """Writes the embeddings of a piece, whose rows begin at `first`, and what its tokens see."""
        if not self.pictures:
            return
        pictures, n = piece.pictures or Pictures([]), len(piece.inputs)
        if self.seen is not None:
            overwrite(self.seen, pictures.seen(piece.position, n), first)
        if (embeddings := pictures.embeddings(piece.position, n)) is not None:
            dim = self.spec.dim
            for i, part in enumerate(self.pictures):
                overwrite(part, np.ascontiguousarray(embeddings[:, i * dim : (i + 1) * dim]), first * dim)
            self._has_later_parts = True

    def _forget_pictures(self) -> None:
        """Makes zeros of the parts of pictures that steps add to all tokens."""
        if self._has_later_parts:
            for part in self.pictures[1:]:
                overwrite(part, np.zeros(self.chunk * self.spec.dim, np.float32))
            self._has_later_parts = False

    def streams(
        self, pieces: Sequence[Slot], sizes: Sequence[int], launch: Callable[[int], None]
    ) -> Iterator[NDArray[np.float32]]:
        """The residual stream of each of the pieces after the last sublayer, float32 (inputs, dim). As many as fit
        go in a `whole_step` of one of `sizes`, ascending, which `launch` runs."""
        while pieces:
            some = ((n, size) for n in range(len(pieces), 0, -1) for size in sizes)
            n, size = next(s for s in some if self.fits(s[1], pieces[: s[0]]))
            self.send(size, pieces[:n])
            launch(size)
            whole: NDArray[np.float32] = self.buffer("h", size * self.spec.dim).numpy().reshape(size, -1)
            first = 0
            for piece in pieces[:n]:
                count = len(piece.inputs)
                yield whole[first : first + count]
                first += rows_of(count, self.piece_rows(size))
            pieces = pieces[n:]
