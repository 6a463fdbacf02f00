"""The pane of a KV cache in blocks: how many of them are held, kept and free."""

from engine.protocol.events import BlockCounts, Slots
from widgets.dashboard.pane import FittedPane, Line
from widgets.text import longest_fitting

_HELD, _KEPT, _FREE = "█", "▒", "·"


class BlockBar(FittedPane[Slots]):
    """An entry for layers that keep all tokens, one for each window, and a line for recurrent states."""

    BORDER_TITLE = "cache blocks"

    def draw(self, data: Slots, width: int, height: int) -> list[Line]:
        """For each group a bar and the words for its parts."""
        groups = [line for counts in data.blocks for line in (_bar(counts, width), _words(counts, width))]
        return [*groups, *([_checkpoints(data, width)] if any(data.checkpoints) else [])]

    def rows(self, data: Slots, width: int) -> int:
        return 2 * len(data.blocks) + any(data.checkpoints)


def _checkpoints(data: Slots, width: int) -> Line:
    used, slots = data.checkpoints
    kept = f"{used} of {slots}"
    return [(longest_fitting([f"{kept} checkpoints of states", f"{kept} checkpoints", kept], width), "dim")]


def _bar(counts: BlockCounts, width: int) -> Line:
    total = counts.held + counts.cached + counts.free or 1
    held = -(-counts.held * width // total)  # one held block is seen
    kept = min(width - held, -(-counts.cached * width // total))
    return [(_HELD * held, "value"), (_KEPT * kept, "hatched"), (_FREE * (width - held - kept), "dim")]


def _words(counts: BlockCounts, width: int) -> Line:
    figures = f"{counts.held:,} held", f"{counts.cached:,} kept", f"{counts.free:,} free"
    marked = " · ".join(f"{mark} {text}" for mark, text in zip((_HELD, _KEPT, _FREE), figures, strict=True))
    return [(longest_fitting([marked, ", ".join(figures), f"{counts.free:,} free"], width), "dim")]
