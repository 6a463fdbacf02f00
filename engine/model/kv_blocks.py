"""The KV cache in blocks of tokens, for several sequences at a time.

A layer has a pool of physical blocks, and each sequence a table of those that hold its tokens: token t lies at place
`table[t // BLOCK] * BLOCK + t % BLOCK` of the layer's keys and values. So sequences of any lengths share a pool, and
sequences that begin alike share blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

BLOCK = 32
"""Tokens of a block."""


@dataclass(frozen=True)
class KVGroup:
    """Layers that keep the same tokens, so they share tables. With a `window` they keep the tokens that a later one
    sees through it, and some before. `blocks`: those in the pool of each of its layers."""

    window: int | None
    blocks: int


class BlockStore(Protocol):
    """The memory of the blocks. Calls take effect in the order in which they and the steps are made."""

    parallel: int
    """The number of sequences."""

    kv_groups: tuple[KVGroup, ...]

    def assign(self, sequence: int, tables: Sequence[Sequence[int]]) -> None:
        """Sets the tables of a sequence, one for each group: the physical block of each BLOCK tokens, -1 where none
        is kept (behind a window). Steps read no token whose block is -1."""
        ...

    def copy_block(self, group: int, source: int, target: int) -> None:
        """Copies the keys and values of a block in all layers of a group."""
        ...
