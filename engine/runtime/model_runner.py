"""What answers need of a model on a device: steps over slots.

A slot is a piece of one sequence: tokens of a prompt, or the last token of a reply. The keys and values of a sequence
are in blocks (`engine.runtime.kv_blocks`), its recurrent state, if the model has one, in a memory of its own
(`engine.runtime.checkpoints`). There is a runner for each kind of device: in `engine.targets`, `graph` for
every device of tinygrad, `cpu` for CPUs, `nvidia` for NVIDIA GPUs. `engine.model.open_runner` chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from engine.errors import ModelFileError
from engine.measure.profile import Replay
from engine.protocol.events import Sampling, Search, Step
from engine.runtime.checkpoints import StateStore
from engine.runtime.kv_blocks import BlockStore
from engine.runtime.pictures import Pictures
from engine.runtime.sampling import Logits, LogProbabilities

SearchReport = Callable[[int, int, int, Search], None]
"""Called as (shapes done, shapes in all, shapes known from earlier searches, the shape at hand)."""

Interrupted = Callable[[], bool]
"""Whether what is done while nothing else is to be done should end."""


@dataclass(frozen=True)
class SearchRequest:
    """A search for faster schedules. `width` sets how many candidates are tried, in `seconds` at most; `report` gets
    the progress after each. Shapes that were searched before with this width are skipped, unless `again`. A search
    that may be `interrupted` ends soon after that returns True, and leaves the shape at hand as it was."""

    width: int
    seconds: float
    report: SearchReport
    again: bool = False
    interrupted: Interrupted | None = None


Want = Literal["none", "last", "hidden"]
"""What a step is to give of a slot: nothing (the keys and values of a prompt's piece are stored), the token after its
last input, or what embeddings are made of (`ModelRunner.hidden`)."""


class Slot(NamedTuple):
    """What a step computes of one sequence: `inputs`, token ids, at `position` and the places after it. With `want`
    "last" it is one, else these are 1 to `ModelRunner.max_chunk`. `draw`: the device draws the token that is wanted
    (`RowSampler`); else it is the most probable one. `pictures`: those of the sequence, whose embeddings take the place
    of inputs with negative ids. If a layer's tokens see those after them in a picture, no picture's tokens are in two
    slots, but for those that were in the cache before."""

    sequence: int
    inputs: tuple[int, ...]
    position: int
    want: Want = "last"
    draw: bool = False
    pictures: Pictures | None = None


class Following(NamedTuple):
    """The step that follows one with replies. It has the next tokens of these, but for the sequences that have `ended`,
    and other `slots`: pieces of prompts (`want` "none"), and the first tokens of replies that begin."""

    slots: Sequence[Slot] = ()
    ended: Collection[int] = ()


Ahead = Callable[[], "Following | None"]
"""Called once when a step is launched, before the host waits for its tokens. Gives what follows it; None if that may
not be launched yet."""


def same_rows() -> Following:
    """An `Ahead`: the next step has the same replies, and nothing else."""
    return Following()


class Drawing(NamedTuple):
    """How the device draws tokens that continue `tokens`. `uniforms`: a number for each (`Sampler.uniforms`), float64
    (n,). `bias`: what is added to the logits of tokens before that (`sampling.Bias`). `top`: how many of the most
    probable tokens are asked for with their log-probabilities, and that of the token drawn; 0: none. `masks`: before
    each step, `RowSampler.allow` says what may be drawn."""

    sampling: Sampling
    tokens: Sequence[int]
    uniforms: NDArray[np.float64]
    bias: Sequence[tuple[int, float]] = ()
    top: int = 0
    masks: bool = False


class RowSampler(Protocol):
    """Draws the tokens of slots with `draw` on the device."""

    def prepare(self, sequence: int, drawing: Drawing) -> bool:
        """Makes slots of a sequence draw so, of which no step is running. False if the device cannot, so the host has
        to."""
        ...

    def allow(self, sequence: int, words: NDArray[np.uint32] | None) -> None:
        """The tokens that the next step may draw for a sequence that `masks`: a bit for each, the lowest first, uint32
        (words,); None: all. The step before has been taken, and the next one may have been launched ahead."""
        ...

    def log_probabilities(self, sequence: int, position: int, n: int) -> LogProbabilities:
        """As `sampling.log_probabilities`, of the token after `position`, which the last `run` returned. `n`: at most
        the `top` of the sequence."""
        ...


def varied_tokens(n: int, vocab: int) -> list[int]:
    """`n` tokens for a step that is replayed. A prompt of equal ones would choose few experts."""
    return [i * 1009 % vocab for i in range(n)]


class ModelRunner(BlockStore, StateStore, Protocol):
    """A model on a device, with its KV cache, for `parallel` sequences. Positions count from 0. A step at a position
    needs the keys and values of all tokens before it in the cache, blocks for its own tokens, and, if the model has
    recurrent states, the state after just the tokens before it."""

    @property
    def sampler(self) -> RowSampler | None:
        """None if the host samples."""
        ...

    precompiled: bool
    """Whether all kernels are compiled already: the first use of a step then takes no more than some 20 ms longer."""

    captures: bool
    """Whether the first use of a step takes longer than later ones."""

    max_chunk: int
    """The most inputs of a slot."""

    export_layout: str
    """What `export_blocks` and `export_state` give: only a runner with the same layout may import it. "" if it cannot
    export."""

    @property
    def chunk_sizes(self) -> tuple[int, ...]:
        """The sizes for which a prefill step is captured, ascending; smaller pieces use the next larger one."""
        ...

    def piece_sizes(self, rows: int) -> tuple[int, ...]:
        """How many tokens of prompts a step has room for that takes so many slots that want a token, in each of the
        forms in which it is captured, ascending. All pieces but the last one count as whole blocks."""
        ...

    @property
    def row_counts(self) -> tuple[int, ...]:
        """The numbers of slots that want a token for which a step is captured, ascending; fewer use the next larger
        one."""
        ...

    def decode_depths(self, rows: int) -> tuple[int, ...]:
        """The positions from which on decode of so many slots uses another captured step, ascending from 0."""
        ...

    def prepare(self, size: int) -> None:
        """Compiles and captures prefill of one of `chunk_sizes`, if the runner was ready before that. Until then short
        prompts go token by token, and the first long one waits."""
        ...

    check_rows: tuple[int, ...]
    """How many slots that want a token a step may have if some are of one sequence, at places that follow each other,
    ascending: so guesses of the next tokens are checked. () if that cannot be."""

    def can_check(self, count: int) -> bool:
        """Whether checks of one of `check_rows` are compiled."""
        ...

    def prepare_check(self, count: int) -> None:
        """Compiles them."""
        ...

    def prepare_rows(self, count: int) -> None:
        """Compiles steps of one of `row_counts`, if the runner was ready before that. Until then steps of more slots
        serve."""
        ...

    def run(self, slots: Sequence[Slot], ahead: Ahead | None = None) -> NDArray[np.int32]:
        """Runs slots of different sequences, but for checks (`check_rows`). Returns the next token of each that wants
        one, int32 (slots that want,), negative where logits are no finite numbers (`not_finite`).
        With `ahead`, the caller is going to run the tokens that it gets and does not need the logits: so the next step
        may be launched already, as `ahead` says. All its sequences have blocks for its tokens. A runner that does not
        do so need not call it. The caller may then ask for fewer of these slots, as sequences end, or do anything else:
        steps that it launches later come after that one."""
        ...

    def not_finite(self, slot: Slot) -> ModelFileError:
        """Why the logits of a slot are no finite numbers, which the last `run` had: runs it once more to find the
        sublayer whose output is the first that is not finite."""
        ...

    def logits(self, rows: Sequence[int] | None = None) -> Logits:
        """The logits of these slots of the last `run`, by their place among those that wanted a token, or of all of
        them: float32 (rows, vocab), valid until the next step."""
        ...

    def streams(self, rows: int) -> NDArray[np.float32] | None:
        """The residual stream after the last sublayer of the first `rows` slots of the last `run` that wanted a token,
        float32 (rows, dim). None if a step that is ahead has overwritten it."""
        ...

    def hidden(self) -> list[NDArray[np.float32]]:
        """The residual stream after the last sublayer of each slot of the last `run` that wanted it ("hidden"), float32
        (inputs, dim) each. The kernels for this may be compiled when they are first used."""
        ...

    def expert_choices(self) -> list[NDArray[np.int32]]:
        """How often each expert of each mixture of experts was chosen since the runner was made, in prompts too: int32
        (experts,) each, counted on the device. [] if the model has no experts, or if the runner does not count. Waits
        for the device."""
        ...

    def replay(self, step: Step, position: int) -> Replay:
        """A captured step of sequence 0 at `position` for `engine.measure.profile`. The sequence has blocks for it;
        running it overwrites what they hold from there on, and the state of the sequence. Raises UsageError if the
        runner has no such step."""
        ...

    def search(self, request: SearchRequest) -> bool:
        """Searches for faster schedules and keeps the best ones, if the runner has kernels whose schedules can be
        chosen. Needs `search_tokens` tokens of room in sequence 0, and overwrites them. Returns whether steps must be
        captured anew."""
        ...

    search_tokens: int
    """0 if there is nothing to search for."""

    def export_blocks(self, tables: Sequence[Sequence[int]]) -> NDArray[np.uint8]:
        """The keys and values of `prefix_store.CHUNK` tokens, uint8 (bytes,), valid until the next call. `tables`: for
        each group the physical blocks that hold them, -1 for one that is not kept, whose bytes mean nothing."""
        ...

    def import_blocks(self, tables: Sequence[Sequence[int]], export: NDArray[np.uint8]) -> None:
        """Stores in blocks what `export_blocks` gave, except where `tables` have -1."""
        ...

    def export_state(self, slot: int) -> NDArray[np.uint8]:
        """The recurrent state in a checkpoint's slot (see `StateStore`), uint8 (state_bytes,)."""
        ...

    def import_state(self, slot: int, position: int, export: NDArray[np.uint8]) -> None:
        """Fills a checkpoint's slot with a state after `position` tokens, as `export_state` gave it."""
        ...
