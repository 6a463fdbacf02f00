"""A runner with one sequence, run step by step."""

from collections.abc import Sequence

from engine.runtime.kv_blocks import KVBlocks
from engine.runtime.model_runner import ModelRunner, Slot
from engine.runtime.sampling import Logits


class LoneSequence:
    """Sequence 0 of a runner. A step may go back to any earlier position."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner, self.blocks = runner, KVBlocks(runner)

    def prefill(self, tokens: Sequence[int], position: int) -> None:
        """Stores tokens, in pieces of at most `max_chunk`."""
        for first in range(0, len(tokens), self.runner.max_chunk):
            piece = tuple(tokens[first : first + self.runner.max_chunk])
            self._run(Slot(0, piece, position + first, "none"))

    def decode(self, token: int, position: int) -> int:
        """The most probable token after it."""
        [best] = self._run(Slot(0, (token,), position))
        return best

    def logits(self) -> Logits:
        """Those of the last step of one token, float32 (vocab,)."""
        [logits] = self.runner.logits()
        return logits  # type: ignore[no-any-return]

    def _run(self, slot: Slot) -> list[int]:
        if slot.position < self.blocks.length(0):
            self.blocks.cut(0, slot.position)
        self.blocks.reserve(0, len(slot.inputs))
        best: list[int] = self.runner.run([slot]).tolist()
        self.blocks.commit(0, list(slot.inputs))
        return best
