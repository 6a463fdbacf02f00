"""Drives a runner token by token: blocks are reserved and committed as the scheduler would."""

from collections.abc import Sequence

from engine.model.kv_blocks import KVBlocks
from engine.model.model_runner import ModelRunner, Slot
from engine.model.sampling import Logits


class Stepper:
    """A runner and the blocks of its sequences. A step at a position before a sequence's end cuts it there."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner, self.blocks = runner, KVBlocks(runner)

    def prefill(self, tokens: Sequence[int], position: int = 0, sequence: int = 0) -> None:
        """Stores tokens, in pieces of at most `max_chunk`."""
        self._cut(position, sequence)
        for first in range(0, len(tokens), self.runner.max_chunk):
            piece = tuple(tokens[first : first + self.runner.max_chunk])
            self.blocks.reserve(sequence, len(piece))
            self.runner.run([Slot(sequence, piece, position + first, "none")])
            self.blocks.commit(sequence, piece)

    def decode(
        self, token: int, position: int, ahead: bool = False, sequence: int = 0, draw: bool = False
    ) -> int:
        """The next token after one at a position."""
        self._cut(position, sequence)
        self.blocks.reserve(sequence, 1 + ahead)
        [chosen] = self.runner.run([Slot(sequence, (token,), position, draw=draw)], ahead)
        self.blocks.commit(sequence, [token])
        return int(chosen)

    def logits(self) -> Logits:
        """Those of the last step, of one row: float32 (vocab,)."""
        [logits] = self.runner.logits()
        return logits  # type: ignore[no-any-return]

    def _cut(self, position: int, sequence: int) -> None:
        if position < self.blocks.length(sequence):
            self.blocks.cut(sequence, position)
        assert position == self.blocks.length(sequence)
