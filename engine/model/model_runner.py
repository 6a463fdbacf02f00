"""What text generation needs of a model on a device: prefill of a chunk of the prompt, decode of one token.

The runners capture both steps once and replay them: `graph_runner` for every device of tinygrad, `cpu_runner` for
CPUs, `fused.runner` for NVIDIA GPUs. `open_runner` chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from engine.events import Sampling, Search, Step
from engine.measure.profile import Replay
from engine.model.kv_blocks import BlockStore
from engine.model.sampling import Logits

SearchReport = Callable[[int, int, int, Search], None]
"""Called as (shapes done, shapes in all, shapes known from earlier searches, the shape at hand)."""


def varied_tokens(n: int, vocab: int) -> list[int]:
    """`n` tokens for a step that is replayed. A prompt of equal ones would choose few experts."""
    return [i * 1009 % vocab for i in range(n)]


class ModelRunner(Protocol):
    """A model on a device, with its KV cache. Positions count from 0, tokens are ids. A step at `position` needs the
    keys and values of all tokens before it in the cache."""

    precompiled: bool
    """Whether all kernels are compiled already: the first use of a step then takes no more than some 20 ms longer."""

    max_chunk: int
    """The most tokens that `prefill` takes at once."""

    @property
    def max_rewind(self) -> int | None:
        """The number of tokens by which a sequence may be cut back, to continue it from there. Layers with a sliding
        window keep no older ones. None: any number."""
        ...

    @property
    def chunk_sizes(self) -> tuple[int, ...]:
        """The sizes for which a prefill step is captured, ascending; smaller chunks use the next larger one."""
        ...

    @property
    def decode_depths(self) -> tuple[int, ...]:
        """The positions from which on decode uses another captured step, ascending from 0."""
        ...

    def prefill(self, tokens: Sequence[int], position: int) -> None:
        """Stores the keys and values of 1 to `max_chunk` tokens at `position` and after it."""
        ...

    def decode(self, token: int, position: int, run_ahead: bool = False) -> int:
        """Runs `token` at `position`; returns the most probable next token. With `run_ahead`, the caller is going to
        decode that token next and does not need the logits, so the next step may be launched already."""
        ...

    def logits(self) -> Logits:
        """The logits of the last decode step, float32 (vocab,), valid until the next step."""
        ...

    def expert_choices(self) -> list[NDArray[np.int32]]:
        """How often each expert of each mixture of experts was chosen since the runner was made, in prompts too: int32
        (experts,) each, counted on the device. [] if the model has no experts, or if the runner does not count. Waits
        for the device."""
        ...

    def replay(self, step: Step, position: int) -> Replay:
        """A captured step at `position` for `engine.measure.profile`. Running it overwrites the KV cache from there
        on. Raises UsageError if the runner has no such step."""
        ...


@runtime_checkable
class PrefixRunner(ModelRunner, Protocol):
    """A runner whose KV cache can be copied to the host and back, in chunks of `prefix_store.CHUNK` tokens."""

    export_layout: str
    """What `export_chunk` and `export_state` give: only a runner with the same layout may import it. "" if it cannot
    export."""

    state_bytes: int
    """Bytes of the recurrent state of a sequence, 0 if the model has none."""

    widest_window: int
    """Tokens of the widest sliding window of a layer, 0 if there is none."""

    def oldest_in_windows(self, stored: int) -> int:
        """The first token that layers with a window still hold after tokens up to `stored` were stored."""
        ...

    def export_chunk(self, position: int) -> NDArray[np.uint8]:
        """The keys and values of the chunk from `position` on, a multiple of `prefix_store.STEP`, uint8 (bytes,), valid
        until the next call."""
        ...

    def import_chunk(self, position: int, export: NDArray[np.uint8]) -> None:
        """Stores the chunk from `position` on as `export_chunk` gave it."""
        ...

    def export_state(self, slot: int) -> NDArray[np.uint8]:
        """The recurrent state in a slot (see `StateStore`), uint8 (state_bytes,)."""
        ...

    def import_state(self, slot: int, position: int, export: NDArray[np.uint8]) -> None:
        """Fills a slot with a state after `position` tokens, as `export_state` gave it."""
        ...


@runtime_checkable
class SamplingRunner(ModelRunner, Protocol):
    """A runner that can sample on the device, as `engine.model.sampling` does on the host: so it can run ahead."""

    def prepare_sampling(
        self, sampling: Sampling, tokens: Sequence[int], uniforms: NDArray[np.float64]
    ) -> bool:
        """Makes `decode_and_sample` continue `tokens` with `uniforms` (`Sampler.uniforms`), float64 (n,), one number
        a token. False if the device cannot sample with these settings, so the host has to."""
        ...

    def decode_and_sample(self, token: int, position: int, run_ahead: bool = False) -> int:
        """As `decode`, but returns a sampled token; `logits` are not valid after it."""
        ...


@runtime_checkable
class TunableRunner(ModelRunner, Protocol):
    """A runner that can search for faster schedules of its kernels."""

    def search(self, width: int, seconds: float, report: SearchReport, again: bool = False) -> None:
        """Searches for `seconds` at most and keeps the best schedules; `fused.schedule_search` explains the
        parameters. Overwrites the KV cache."""
        ...


@runtime_checkable
class EarlyRunner(ModelRunner, Protocol):
    """A runner that is ready before the kernels of prefill are compiled: until then short prompts go token by token,
    and the first long one waits."""

    def prepare_prefill(self, size: int) -> None:
        """Compiles and captures prefill of one of `chunk_sizes`, unless it is."""
        ...


@dataclass(frozen=True)
class Row:
    """One token of a batched decode step: at `position` of the sequence with this row in the block tables. The token
    after it is the most probable one, or one that the device samples (`RowSampler`)."""

    token: int
    position: int
    sequence: int
    is_sampled: bool = False


@runtime_checkable
class BatchRunner(ModelRunner, BlockStore, Protocol):
    """A runner whose KV cache has blocks, for `parallel` sequences (`engine.model.kv_blocks`). A step needs blocks for
    its tokens and for all that they see. `decode` is the step of one row of sequence 0; `replay` uses that sequence
    too, and overwrites its blocks."""

    @property
    def row_counts(self) -> tuple[int, ...]:
        """The numbers of rows for which a step is captured, ascending; fewer rows use the next larger one."""
        ...

    def prefill(self, tokens: Sequence[int], position: int, sequence: int = 0) -> None:
        """As `ModelRunner.prefill`, for a sequence."""
        ...

    def decode_rows(self, rows: Sequence[Row], ahead: bool = False) -> NDArray[np.int32]:
        """Runs 1 to `parallel` rows of different sequences; returns the next token of each, int32 (rows,). With
        `ahead`, the sequences have blocks for one more token each, and the caller is going to decode the tokens that it
        gets and does not need the logits, so the next step may be launched already. It may then ask for fewer of these
        rows, as sequences end, or do anything else: steps that it launches later come after that one."""
        ...

    def row_logits(self, rows: Sequence[int] | None = None) -> Logits:
        """The logits of these rows of the last `decode_rows`, by their place in it, or of all: float32 (rows, vocab),
        valid until the next step. Those of a row that was sampled are not."""
        ...


@runtime_checkable
class RowSampler(Protocol):
    """What a `BatchRunner` has too if it can sample rows on the device."""

    def prepare_row_sampling(
        self, sequence: int, sampling: Sampling, tokens: Sequence[int], uniforms: NDArray[np.float64]
    ) -> bool:
        """As `SamplingRunner.prepare_sampling`, for the rows of a sequence that are sampled."""
        ...
