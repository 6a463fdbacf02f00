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
from engine.model.checkpoints import checkpoint_slots
from engine.model.lower.delta_graph import StateCopies
from engine.model.lower.graph import Transformer
from engine.model.model_runner import varied_tokens
from engine.model.sampling import Logits
from engine.model.weights import Weights


class GraphRunner:
    """Implements `ModelRunner` and `StateStore`. Chunks of a prompt are padded to `max_chunk`, so one captured step
    serves all."""

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
        self._count = UOp.variable("count", 1, self.max_chunk)
        self._prefill, self._decode = TinyJit(self._prefill_step), TinyJit(self._decode_step)
        self._prefill.cnt = self._decode.cnt = 1  # capture at the first call, not at the second
        self._logits = Tensor.zeros(1)
        self.state_bytes = weights.spec.state_bytes
        self.state_slots = checkpoint_slots(1) if self.state_bytes else 0
        self._states = StateCopies(self._transformer.states, self.state_slots)
        self._positions = [0] * (self.state_slots + 1)  # those of the checkpoints, and of the state

    def prefill(self, tokens: Sequence[int], position: int) -> None:
        self._begin(position)
        padded = [*tokens, *[0] * (self.max_chunk - len(tokens))]
        rows = self._transformer.rows_of(padded)
        self._prefill(_ids(padded), rows, self._position.bind(position), self._count.bind(len(tokens)))
        self._positions[-1] = position + len(tokens)

    def decode(self, token: int, position: int, run_ahead: bool = False) -> int:
        self._begin(position)
        rows = self._transformer.rows_of([token])
        best, self._logits = self._decode(_ids([token]), rows, self._position.bind(position))
        self._positions[-1] = position + 1
        return int(best.item())

    def _begin(self, position: int) -> None:
        if position == 0:
            self._states.clear()

    def state_position(self, sequence: int = 0) -> int:
        return self._positions[-1]

    def save_state(self, slot: int, sequence: int = 0) -> None:
        self._states.save(slot)
        self._positions[slot] = self._positions[-1]

    def load_state(self, slot: int, sequence: int = 0) -> None:
        self._states.load(slot)
        self._positions[-1] = self._positions[slot]

    def logits(self) -> Logits:
        return np.asarray(self._logits.numpy(), np.float32)

    def expert_choices(self) -> list[NDArray[np.int32]]:
        return []  # not counted

    def replay(self, step: Step, position: int) -> Replay:
        jit, n = (self._decode, 1) if step == "decode" else (self._prefill, self.max_chunk)
        ids = varied_tokens(n, self._transformer.spec.vocab)
        bound = [self._position.bind(position), *([] if step == "decode" else [self._count.bind(n)])]
        tokens, rows = _ids(ids), self._transformer.rows_of(ids)
        return Replay(
            calls=[kernel for call in jit.captured.linear.src for kernel in _kernels(call)],
            uses=self._transformer.uses(),
            tokens=n,
            run=lambda: jit(tokens, rows, *bound),
            variables={"position": position, "count": n},
            inputs=(tokens.uop.base, rows.uop.base),
        )

    def _prefill_step(self, tokens: Tensor, rows: Tensor, position: UOp, count: UOp) -> None:
        self._transformer.store(tokens, rows, position, count).realize()

    def _decode_step(self, token: Tensor, rows: Tensor, position: UOp) -> tuple[Tensor, Tensor]:
        logits = self._transformer.logits(self._transformer(token, rows, position)).reshape(-1)
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
