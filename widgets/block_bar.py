"""The pane of a KV cache in blocks: how many of them are held, kept and free."""

from __future__ import annotations

from textual.geometry import Size

from engine.events import BlockCounts
from widgets.pane import Line, Pane
from widgets.text import longest_fitting

_HELD, _KEPT, _FREE = "█", "▒", "·"


class BlockBar(Pane[tuple[BlockCounts, ...]]):
    """An entry for layers that keep all tokens, and one for each window."""

    BORDER_TITLE = "cache blocks"

    def draw(self, data: tuple[BlockCounts, ...], width: int, height: int) -> list[Line]:
        return lines(data, width)

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return 0 if self.data is None else 2 * len(self.data)

    def watch_data(
        self, before: tuple[BlockCounts, ...] | None, after: tuple[BlockCounts, ...] | None
    ) -> None:
        if len(before or ()) != len(after or ()):
            self.refresh(layout=True)


def lines(groups: tuple[BlockCounts, ...], width: int) -> list[Line]:
    """For each group a bar and the words for its parts."""
    return [line for counts in groups for line in (_bar(counts, width), _words(counts, width))]


def _bar(counts: BlockCounts, width: int) -> Line:
    total = counts.held + counts.cached + counts.free or 1
    held = -(-counts.held * width // total)  # one held block is seen
    kept = min(width - held, -(-counts.cached * width // total))
    return [(_HELD * held, "value"), (_KEPT * kept, "hatched"), (_FREE * (width - held - kept), "dim")]


def _words(counts: BlockCounts, width: int) -> Line:
    figures = f"{counts.held:,} held", f"{counts.cached:,} kept", f"{counts.free:,} free"
    marked = " · ".join(f"{mark} {text}" for mark, text in zip((_HELD, _KEPT, _FREE), figures, strict=True))
    return [(longest_fitting([marked, ", ".join(figures), f"{counts.free:,} free"], width), "dim")]
