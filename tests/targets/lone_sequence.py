"""A runner with one sequence, run step by step."""

from collections.abc import Sequence

from engine.runtime.kv_blocks import KVBlocks
from engine.runtime.model_runner import ModelRunner, Slot
from engine.runtime.pictures import Pictures
from engine.runtime.sampling import Logits


class LoneSequence:
    """Sequence 0 of a runner. A step may go back to any earlier position."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner, self.blocks = runner, KVBlocks(runner)

    def prefill(self, tokens: Sequence[int], position: int, pictures: Pictures | None = None) -> None:
        """Stores tokens, in pieces of at most `max_chunk`. `pictures`: those of all tokens from 0 on."""
        first = 0
        while first < len(tokens):
            end = min(first + self.runner.max_chunk, len(tokens))
            end = pictures.end_of_piece(first, end) if pictures else end
            self._run(Slot(0, tuple(tokens[first:end]), position + first, "none", pictures=pictures))
            first = end

    def decode(self, token: int, position: int, pictures: Pictures | None = None) -> int:
        """The most probable token after it."""
        [best] = self._run(Slot(0, (token,), position, pictures=pictures))
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
