"""The pane of a mixture of experts: how often each expert was chosen in the last minute, one block an expert."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from widgets.dashboard.pane import FittedPane, Line
from widgets.labels import LABELS
from widgets.text import longest_fitting

_BLOCKS = "▁▂▃▄▅▆▇█"
_NEVER = "·"
_LABEL = 4  # cells before the blocks of a layer


@dataclass(frozen=True)
class ExpertUse:
    """`layers`: for each layer of experts, how often each was chosen. A token chooses `used` of a layer."""

    layers: tuple[tuple[int, ...], ...]
    used: int


class ExpertStrip(FittedPane[ExpertUse]):
    """A block stands for the experts of all layers that have the same number. With the whole screen, each layer has
    blocks of its own."""

    BORDER_TITLE = "experts, last minute"
    LABELS = LABELS["experts"]

    def draw(self, data: ExpertUse, width: int, height: int) -> list[Line]:
        short = strip(data, width)
        room = height - len(short) - 1
        return [*short, [("by layer", "dim")], *by_layer(data, width, room)] if room > 1 else short

    def rows(self, data: ExpertUse, width: int) -> int:
        return len(strip(data, width))


def strip(use: ExpertUse, width: int) -> list[Line]:
    """A sentence, and a block for each expert, in as many rows as the width asks for."""
    sums = [sum(counts) for counts in zip(*use.layers, strict=True)]
    sentence = textwrap.wrap(longest_fitting(_sentences(use), width), max(8, width))
    return [*([(line, "")] for line in sentence), *_rows(sums, width)]


def by_layer(use: ExpertUse, width: int, height: int) -> list[Line]:
    """The blocks of each layer; a last line says how many layers there is no room for."""
    lines, shown = list[Line](), 0
    for i, counts in enumerate(use.layers):
        rows = _rows(counts, max(1, width - _LABEL))
        rest = len(use.layers) - i - 1
        if len(lines) + len(rows) + bool(rest) > height:
            break
        labels = [f"{i:>{_LABEL - 1}} ", *[" " * _LABEL] * (len(rows) - 1)]
        lines += [[(label, "dim"), *row] for label, row in zip(labels, rows, strict=True)]
        shown += 1
    if left := len(use.layers) - shown:
        lines.append([(f"{left} more layers: no room", "dim")])
    return lines


def _sentences(use: ExpertUse) -> list[str]:
    """What the blocks show in words and figures, in ever fewer cells."""
    n, layers = len(use.layers[0]), len(use.layers)
    each = f"{n} experts{f' in each of {layers} layers' if layers > 1 else ''}, {use.used} a token"
    short = f"{n} experts, {use.used} a token"
    shares = [max(counts) * use.used / sum(counts) for counts in use.layers if any(counts)]
    if not shares:
        return [f"{each} · none chosen", f"{short} · none chosen"]
    most = f"{100 * max(shares):.{0 if max(shares) > 0.0995 else 1}f} %"
    never = sum(counts.count(0) for counts in use.layers)
    return [
        f"{each} · most chosen by {most} of a layer's tokens · {never:,} of {n * layers:,} never chosen",
        f"{each} · most chosen by {most} of tokens · {never:,} of {n * layers:,} never",
        f"{short} · most chosen by {most} of tokens · {never:,} never",
        f"{n} experts · most {most} · {never:,} never",
    ]


def _rows(counts: Sequence[int], width: int) -> list[Line]:
    """Blocks in rows of the same length, in eighths of the largest; a dot for an expert that was never chosen."""
    most = max(counts)
    n = -(-len(counts) // max(1, width))
    each = -(-len(counts) // n)
    blocks = [_BLOCKS[max(0, -(-8 * count // most) - 1)] if count else _NEVER for count in counts]
    rows = [blocks[start : start + each] for start in range(0, len(blocks), each)]
    return [
        [("".join(run), "dim" if is_never else "value") for is_never, run in groupby(row, _NEVER.__eq__)]
        for row in rows
    ]
