"""A model as tinygrad's tensor graphs: runs on every device that tinygrad supports."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from tinygrad import Tensor, TinyJit, UOp, dtypes
from tinygrad.uop.ops import Ops

from engine.events import Step
from engine.fixes import matvec_heuristic, search_trials
from engine.formats.kv_format import KVFormat
from engine.measure.profile import Replay
from engine.model.lower.graph import Transformer
from engine.model.model_runner import varied_tokens
from engine.model.sampling import Logits
from engine.model.weights import Weights


class GraphRunner:
    """Implements `ModelRunner`. Chunks of a prompt are padded to `max_chunk`, so one captured step serves all."""

    precompiled = False
    max_chunk = 32
    chunk_sizes: tuple[int, ...] = (max_chunk,)
    decode_depths: tuple[int, ...] = (0,)
    max_rewind: int | None = None

    def __init__(self, weights: Weights, context_length: int, kv: KVFormat = KVFormat.F16) -> None:
        matvec_heuristic.apply()
        search_trials.apply()
        # The cache also holds the padding after a prompt, which later tokens overwrite before any token attends to it.
        self._transformer = Transformer(weights, context_length + self.max_chunk, context_length, kv)
        self._position = UOp.variable("position", 0, context_length - 1)
        self._prefill, self._decode = TinyJit(self._prefill_step), TinyJit(self._decode_step)
        self._prefill.cnt = self._decode.cnt = 1  # capture at the first call, not at the second
        self._logits = Tensor.zeros(1)

    def prefill(self, tokens: Sequence[int], position: int) -> None:
        padded = [*tokens, *[0] * (self.max_chunk - len(tokens))]
        self._prefill(_ids(padded), self._position.bind(position))

    def decode(self, token: int, position: int, run_ahead: bool = False) -> int:
        best, self._logits = self._decode(_ids([token]), self._position.bind(position))
        return int(best.item())

    def logits(self) -> Logits:
        return np.asarray(self._logits.numpy(), np.float32)

    def expert_choices(self) -> list[NDArray[np.int32]]:
        return []  # not counted

    def replay(self, step: Step, position: int) -> Replay:
        jit, n = (self._decode, 1) if step == "decode" else (self._prefill, self.max_chunk)
        ids = varied_tokens(n, self._transformer.spec.vocab)
        tokens, bound = _ids(ids), self._position.bind(position)
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


def _kernels(call: UOp) -> tuple[UOp, ...]:
    """The kernels of a captured call, which may be a graph of many."""
    ast = call.src[0]
    is_graph = ast.op is Ops.CUSTOM_FUNCTION and ast.arg == "graph"
    return ast.src[0].src if is_graph else (call,)


def _ids(tokens: Sequence[int]) -> Tensor:
    return Tensor(np.asarray(tokens, np.int32)).realize()
