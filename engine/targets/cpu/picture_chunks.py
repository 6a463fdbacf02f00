"""The chunks of whole tiles in which the patches of a picture go through a sublayer on a CPU."""

from __future__ import annotations

from collections.abc import Iterator

from engine.description.vision import VisionSpec
from engine.targets.cpu.kernels.lanes import MOST_TILES


def most_rows(spec: VisionSpec, lanes: int) -> int:
    """The rows of the largest picture, with those that fill its chunks."""
    return max(chunk.stop for chunk in chunks_of(spec.most_patches, lanes)) + MOST_TILES * lanes


def chunks_of(n: int, lanes: int) -> Iterator[range]:
    """The rows of n patches in chunks of the same number of tiles."""
    tiles = -(-n // lanes)
    count = -(-tiles // MOST_TILES)
    rows = -(-tiles // count) * lanes
    return (range(i * rows, (i + 1) * rows) for i in range(count))
