"""A runner with one sequence, run step by step."""

from collections.abc import Sequence

from engine.model.kv_blocks import KVBlocks
from engine.model.model_runner import ModelRunner, Slot
from engine.model.sampling import Logits


class LoneSequence:
    """Sequence 0 of a runner. A step may go back to any earlier position."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner, self.blocks = runner, KVBlocks(runner)

    def prefill(self, tokens: Sequence[int], position: int) -> None:
        self._run(Slot(0, tuple(tokens), position, "none"))

    def decode(self, token: int, position: int) -> int:
        """The most probable token after it."""
        return self._run(Slot(0, (token,), position))

    def logits(self) -> Logits:
        logits: Logits = self.runner.logits()[0]
        return logits

    def _run(self, slot: Slot) -> int:
        if slot.position < self.blocks.length(0):
            self.blocks.cut(0, slot.position)
        self.blocks.reserve(0, len(slot.inputs))
        best = self.runner.run([slot])
        self.blocks.commit(0, list(slot.inputs))
        return int(best[0]) if slot.want == "last" else -1
