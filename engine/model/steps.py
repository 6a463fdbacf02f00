"""The two steps a model takes on a device, captured and replayed: prefill of a chunk, decode of a token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from tinygrad import Device, Tensor, TinyJit, UOp, dtypes
from tinygrad.uop.ops import Ops

from engine.errors import UsageError
from engine.events import KernelPath, Sampling, Search, Step
from engine.fixes import cuda_binaries, matvec_heuristic, search_trials
from engine.measure.profile import Replay
from engine.model.cache import KVCache
from engine.model.sampling import Logits
from engine.model.transformer import Transformer
from engine.model.weights import Weights

SECONDS_A_WIDTH = 20.0  # how long a search for schedules may take, where no one says


class Steps(Protocol):
    """What generation needs of a model on a device. Positions count from 0; tokens are ids. Entries of the KV
    cache before `position` must be those of the tokens before."""

    chunk: int
    compiled: bool
    """Whether the first use of a step compiles nothing: it holds no one up for more than a few hundredths."""

    @property
    def chunks(self) -> tuple[int, ...]:
        """The sizes of prefill that have a captured step of their own."""
        ...

    @property
    def depths(self) -> tuple[int, ...]:
        """The positions from which on decode is another captured step."""
        ...

    def prefill(self, tokens: Sequence[int], position: int) -> None:
        """Stores the keys and values of 1 to `chunk` tokens from `position` on."""
        ...

    def decode(self, token: int, position: int, ahead: bool = False) -> int:
        """Runs `token` at `position` and returns the most probable next token. `ahead` says that the caller is
        going to ask for that token's step next, and does not need logits: it may be started now."""
        ...

    def logits(self) -> Logits:
        """The last decode's logits: float32 (vocab,), to be used before the next step."""
        ...

    def replay(self, step: Step, position: int) -> Replay:
        """A step at `position` for `engine.measure.profile`; it spoils the KV cache from there on. Raises
        UsageError where there is no such step."""
        ...


@runtime_checkable
class DrawingSteps(Steps, Protocol):
    """Steps that can also draw the next token themselves, as `engine.model.sampling` does, and so run ahead."""

    def prepare(self, sampling: Sampling, tokens: Sequence[int], numbers: NDArray[np.float64]) -> bool:
        """Gets ready for `draw` to continue `tokens`; `numbers` in [0, 1), float64, are what tokens are drawn with,
        one each (`Sampler.numbers`). False where `sampling` has to be the host's business."""
        ...

    def draw(self, token: int, position: int, ahead: bool = False) -> int:
        """As `decode`, but returns a token that was drawn, and leaves no logits."""
        ...


@runtime_checkable
class SearchableSteps(Steps, Protocol):
    """Steps whose kernels can be cut in several ways."""

    def search(
        self,
        width: int,
        seconds: float,
        report: Callable[[int, int, int, Search], None],
        again: bool = False,
    ) -> None:
        """Finds the fastest for the device at hand, as far as `seconds` allow; see `engine.model.fused.search`. To be
        called before anything is in the KV cache."""
        ...


class GraphSteps:
    """The transformer as plain tensor graphs, scheduled by tinygrad."""

    compiled = False
    chunks: tuple[int, ...] = (32,)
    depths: tuple[int, ...] = (0,)
    chunk = 32  # a prompt's last chunk is padded to this: one captured step serves every length

    def __init__(self, weights: Weights, context_length: int) -> None:
        matvec_heuristic.apply()
        search_trials.apply()
        # Padding is stored too, beyond the prompt, and overwritten before any token sees it.
        self._transformer = Transformer(weights, KVCache(weights.config, context_length + self.chunk))
        self._position = UOp.variable("position", 0, context_length - 1)
        self._prefill, self._decode = TinyJit(self._prefill_step), TinyJit(self._decode_step)
        self._prefill.cnt = self._decode.cnt = 1  # capture at the first call: there is nothing to try out
        self._logits = Tensor.zeros(1)

    def prefill(self, tokens: Sequence[int], position: int) -> None:
        padded = [*tokens, *[0] * (self.chunk - len(tokens))]
        self._prefill(_ids(padded), self._position.bind(position))

    def decode(self, token: int, position: int, ahead: bool = False) -> int:
        best, self._logits = self._decode(_ids([token]), self._position.bind(position))
        return int(best.item())

    def logits(self) -> Logits:
        return np.asarray(self._logits.numpy(), np.float32)

    def replay(self, step: Step, position: int) -> Replay:
        jit = self._decode if step == "decode" else self._prefill
        n = 1 if step == "decode" else self.chunk
        tokens, bound = _ids([0] * n), self._position.bind(position)
        return Replay(
            calls=[kernel for call in jit.captured.linear.src for kernel in _kernels(call)],
            uses=self._transformer.uses(),
            tokens=n,
            run=lambda: jit(tokens, bound),
            variables={"position": position},
            inputs=(tokens.uop.base,),
        )

    def _prefill_step(self, tokens: Tensor, position: UOp) -> None:
        self._transformer.store(tokens, position).realize()

    def _decode_step(self, token: Tensor, position: UOp) -> tuple[Tensor, Tensor]:
        logits = self._transformer.logits(self._transformer(token, position)).reshape(-1)
        best = logits.argmax().cast(dtypes.int32)
        Tensor.realize(best, logits)
        return best, logits


FUSED = ("CPU", "CUDA", "NV")  # devices with quantized kernels of our own


def open_steps(
    weights: Weights, context_length: int, kernels: KernelPath = "auto", keep_packed: bool = False
) -> Steps:
    """The steps that suit the default device: quantized kernels of our own where there are some, else graphs; or
    those that `kernels` names. Raises UsageError for a device that does not have them."""
    device = Device.DEFAULT.split(":")[0]
    if device == "CUDA":
        cuda_binaries.apply()
    if kernels == "fused" and device not in FUSED:
        raise UsageError(
            f"There are no fused kernels for {device}.", 'Choose a preset with kernels = "graph" or "auto".'
        )
    if kernels != "graph" and device == "CPU":
        from engine.model.cpu_steps import CoreSteps

        return CoreSteps(weights, context_length, keep_packed)
    if kernels != "graph" and device in FUSED:
        from engine.model.fused import FusedSteps

        return FusedSteps(weights, context_length)
    return GraphSteps(weights, context_length)


def _kernels(call: UOp) -> tuple[UOp, ...]:
    """The kernels of a call, which may be a graph of many."""
    ast = call.src[0]
    is_graph = ast.op is Ops.CUSTOM_FUNCTION and ast.arg == "graph"
    return ast.src[0].src if is_graph else (call,)


def _ids(tokens: Sequence[int]) -> Tensor:
    return Tensor(np.asarray(tokens, np.int32)).realize()
