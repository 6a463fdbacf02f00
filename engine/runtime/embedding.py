"""Requests for the embedding of a prompt: one vector for all of it, in place of a reply.

It is pooled from the residual stream after the last sublayer, which pieces of the prompt give that want it (`Slot`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.errors import ContextFullError, UsageError
from engine.formats.templates.prompt import PromptEncoder
from engine.formats.templates.template import Prompt
from engine.protocol.events import Embedded, Event, Generate, Pooling
from engine.runtime.answer import Answer
from engine.runtime.model_runner import ModelRunner, Want
from engine.runtime.pictures import WholeText

if TYPE_CHECKING:
    from engine.runtime.jobs import Job, Piece


class Step(NamedTuple):
    """What is made of a pooled vector x: `matrix` x + `bias`, float32 (rows, cols) and (rows,), and of that the tanh if
    it is `tanh` (`engine.description.spec.Projection`)."""

    matrix: NDArray[np.float32]
    bias: NDArray[np.float32] | None = None
    tanh: bool = False

    def of(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        y = self.matrix @ x if self.bias is None else self.matrix @ x + self.bias
        return np.tanh(y) if self.tanh else y


class Pooler:
    """What a model makes of the residual stream: `norm` is the weight of its last norm, float32 (dim,), if it has one,
    and `bias` what is added then; `projections` follow on pooling, and `classes` in their place, if it ranks documents.
    If it goes `both_ways`, its tokens attend to all of a text, which is read as a whole."""

    def __init__(
        self,
        norm: NDArray[np.float32] | None,
        eps: float,
        classes: Sequence[Step] = (),
        bias: NDArray[np.float32] | None = None,
        projections: Sequence[Step] = (),
        both_ways: bool = False,
    ) -> None:
        self._norm, self._eps, self._classes, self._projections = norm, np.float32(eps), classes, projections
        self._bias = np.float32(0) if bias is None else bias
        self.both_ways = both_ways

    def check(self, pooling: Pooling) -> None:
        """Raises UsageError if the model cannot pool so."""
        if pooling == "rank" and not self._classes:
            raise UsageError(
                "This model does not rank documents: its file has no classes.",
                "Choose a model that is made for it, such as Qwen3-Reranker.",
            )

    def normed(self, stream: NDArray[np.float32]) -> NDArray[np.float32]:
        """(n, dim) -> (n, dim)."""
        if self._norm is None:
            return stream
        with np.errstate(all="ignore"):  # what is not finite is noticed later
            size = np.sqrt((stream * stream).mean(-1, keepdims=True) + self._eps)
            return np.asarray(stream / size * self._norm + self._bias, np.float32)

    def projected(self, hidden: NDArray[np.float32], pooling: Pooling) -> NDArray[np.float32]:
        """The embedding of a pooled vector, (dim,) -> (dim,); or of its classes the probabilities (classes,), and where
        there is one, or all of a text is attended to, what these are made of."""
        for step in self._classes if pooling == "rank" else self._projections:
            hidden = step.of(hidden)
        if pooling == "rank" and len(hidden) > 1 and not self.both_ways:
            powers = np.exp(hidden - hidden.max())
            hidden = powers / powers.sum()
        return np.asarray(hidden, np.float32)


class Embedding(Answer):
    """A request for an embedding, which ends with its prompt."""

    replies = False

    def __init__(
        self,
        request: Generate,
        prompt: Prompt,
        prompts: PromptEncoder,
        pooler: Pooler,
        report: Callable[[Event], None],
    ) -> None:
        """Raises UsageError."""
        whole = WholeText(len(prompt.ids)) if pooler.both_ways else None
        super().__init__(request, prompt, prompts, 1, report, whole)
        assert request.pooling
        self._pooler, self._pooling = pooler, request.pooling
        self._sum: NDArray[np.float64] = np.zeros(0)
        pooler.check(self._pooling)

    @property
    def stored_n(self) -> int:
        return len(self.tokens)

    @property
    def reusable(self) -> list[int]:
        """The tokens whose keys and values may be known already: all that are not pooled. Those that are need the
        residual stream, which is not kept."""
        is_last = self._pooling in ("last", "rank") and not self._pooler.both_ways
        return self.tokens[:-1] if is_last else []

    @property
    def needs_logits(self) -> bool:
        return False

    def want(self, start: int, end: int) -> Want:
        match self._pooling:
            case "mean":
                is_wanted = True
            case "cls":
                is_wanted = start == 0
            case "last" | "rank":
                is_wanted = end == len(self.tokens)
        return "hidden" if is_wanted else "none"

    def read(self, position: int, stream: NDArray[np.float32]) -> None:
        """Takes the stream of the tokens from `position` on, (n, dim). After a pause, they come again from the
        first."""
        rows = {"mean": slice(None), "cls": slice(1)}.get(self._pooling, slice(-1, None))
        if self._pooling == "rank" and self._pooler.both_ways:
            rows = slice(1)
        added = self._pooler.normed(stream[rows]).sum(0, dtype=np.float64)
        self._sum = added if position == 0 or self._pooling != "mean" else self._sum + added

    def end(self) -> bool:
        """Reports the embedding, once all tokens are read. False if its numbers are not finite."""
        if not np.isfinite(self._sum).all():
            return False
        self._first_token = self._last_token = time.perf_counter()
        self.report_prefill(self.prompt_n)
        hidden = (self._sum / (self.prompt_n if self._pooling == "mean" else 1)).astype(np.float32)
        values = self._pooler.projected(hidden, self._pooling)
        self._report(Embedded(request_id=self.request.request_id, values=values.astype("<f4").tobytes()))
        self.reason = "stop"
        return True


class Embeddings:
    """Makes the embeddings of one model."""

    def __init__(self, prompts: PromptEncoder, context_length: int, pooler: Pooler) -> None:
        self._prompts, self._context_length, self._pooler = prompts, context_length, pooler

    def begin(self, request: Generate, report: Callable[[Event], None]) -> Embedding:
        """A request with `pooling`. Raises ContextFullError, TemplateError and UsageError."""
        most = self._context_length
        prompt = self._prompts.encode(request.prompt, most=most)
        if prompt.pictures:
            raise UsageError(
                "Only texts have embeddings, and this one has pictures.", "Leave the pictures out."
            )
        if len(prompt.ids) > most:
            raise ContextFullError(
                f"The text has {len(prompt.ids):,} tokens and the context holds {most:,}.",
                "Cut it into parts, or choose a longer context.",
                tokens=len(prompt.ids),
                most=most,
            )
        return Embedding(request, prompt, self._prompts, self._pooler, report)


def read_streams(
    runner: ModelRunner, pieces: Iterable[Piece], saw: Callable[[int, Job, int, NDArray[np.float32]], None]
) -> None:
    """Gives embeddings the streams of the pieces of a step that has been run. `saw` gets those of other requests, with
    their sequences and the positions."""
    wanting = [piece for piece in pieces if piece.slot.want == "hidden"]
    for (job, slot), stream in zip(wanting, runner.hidden() if wanting else (), strict=True):
        if isinstance(job.answer, Embedding):
            job.answer.read(slot.position, stream)
        else:
            saw(slot.sequence, job, slot.position, stream)
