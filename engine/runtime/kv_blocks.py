"""The KV cache in blocks of tokens, for several sequences at a time.

A layer has a pool of physical blocks, and each sequence a table of those that hold its tokens: token t lies at place
`table[t // BLOCK] * BLOCK + t % BLOCK` of the layer's keys and values. So sequences of any lengths share a pool, and
sequences that begin alike share blocks.

Full blocks never change. They form a tree by their tokens: a path from its root is a text, and what hangs below is how
known texts go on. A new prompt follows the tree as far as it goes, and computes only the rest. The last block of a
sequence is its own until it is full. Blocks outlive their sequences, until their room is needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from engine.protocol.events import BlockCounts

BLOCK = 32
"""Tokens of a block."""

REWIND = 512
"""Tokens by which a sequence may be cut back at least, in a layer with a window."""

_ABSENT = -1


@dataclass(frozen=True)
class KVGroup:
    """Layers that keep the same tokens, so they share tables. With a `window` they keep the tokens that a later one
    sees through it, and REWIND before. `blocks`: those in the pool of each of its layers."""

    window: int | None
    blocks: int

    def first_seen(self, position: int) -> int:
        """The first token that the one at `position` sees."""
        return max(0, position - self.window + 1) if self.window else 0

    def first_kept(self, length: int) -> int:
        """The first block that a sequence of `length` tokens keeps."""
        return max(0, self.first_seen(length) - REWIND) // BLOCK


def blocks_of_one(window: int, context: int, chunk: int) -> int:
    """The blocks that a sequence of up to `context` tokens needs in a layer with a window, or with none (0), and one
    that is a copy. A step stores up to `chunk` tokens before those that the window leaves behind are given back."""
    kept = min(window + REWIND + chunk + BLOCK, context) if window else context
    return -(-kept // BLOCK) + 1


class BlockStore(Protocol):
    """The memory of the blocks. Calls take effect in the order in which they and the steps are made."""

    parallel: int
    """The number of sequences."""

    kv_groups: tuple[KVGroup, ...]

    def assign(self, sequence: int, tables: Sequence[Sequence[int]]) -> None:
        """Sets the tables of a sequence, one for each group: the physical block of each BLOCK tokens, -1 where none
        is kept (behind a window). Steps read no token whose block is -1. Empty ones end the sequence."""
        ...

    def copy_block(self, group: int, source: int, target: int) -> None:
        """Copies the keys and values of a block in all layers of a group. With a `source` of -1 they become zeros."""
        ...


class PoolFullError(Exception):
    """Live sequences hold nearly all blocks of a group, so there are too few for what was asked."""


@dataclass(eq=False)
class _Node:
    """A block in the tree: its tokens (fewer than BLOCK only where a sequence ended), the physical block in each group
    (_ABSENT where it was thrown out), and for each group the number of live sequences that hold it. `users`: those that
    have it on their path."""

    parent: _Node | None
    tokens: tuple[int, ...]
    blocks: list[int]
    holders: list[int]
    users: int = 0
    children: dict[int, list[_Node]] = field(default_factory=dict)  # by their first token

    def best_child(self, tokens: Sequence[int]) -> tuple[_Node, int]:
        """The child that has most tokens in common with `tokens` at their start, and how many these are; the node
        itself and 0 if there is none."""
        found = ((node, _common(node.tokens, tokens)) for node in self.children.get(tokens[0], ()))
        return max(found, key=lambda pair: pair[1], default=(self, 0))


@dataclass
class _Sequence:
    """A live sequence: its tokens; its full blocks, of which each group holds those from `first` on; and the blocks
    after these, which are its own: for each the physical block in each group."""

    first: list[int]
    tokens: list[int] = field(default_factory=list)
    nodes: list[_Node] = field(default_factory=list)
    tail: list[list[int]] = field(default_factory=list)


class KVBlocks:
    """Gives the blocks of `store` to sequences 0 to `store.parallel` - 1, and tells it their tables. Each method is
    done as a whole or, if it raises PoolFullError, not at all."""

    def __init__(self, store: BlockStore) -> None:
        self._store, self._groups = store, store.kv_groups
        self._windowed = [(g, group) for g, group in enumerate(self._groups) if group.window]
        self._free = [list(range(group.blocks - 1, -1, -1)) for group in self._groups]
        # The nodes of each group whose block no live sequence holds: the first is thrown out first. A group without a
        # window has a node's children before the node, so what is thrown out is the end of a text.
        self._unheld: list[dict[_Node, None]] = [{} for _ in self._groups]
        self._root = _Node(None, (), [], [])
        self._sequences = [self._empty() for _ in range(store.parallel)]

    # --- what a sequence has -----------------------------------------------------------------------------

    def length(self, sequence: int) -> int:
        """The tokens of a sequence that are in the cache."""
        return len(self._sequences[sequence].tokens)

    def tables(self, sequence: int) -> list[list[int]]:
        """See `BlockStore.assign`."""
        s = self._sequences[sequence]
        return [
            [_ABSENT] * first + [node.blocks[g] for node in s.nodes[first:]] + [own[g] for own in s.tail]
            for g, first in enumerate(s.first)
        ]

    def counts(self) -> tuple[BlockCounts, ...]:
        """The counts of each group."""
        return tuple(
            BlockCounts(free=len(free), held=group.blocks - len(free) - len(unheld), cached=len(unheld))
            for group, free, unheld in zip(self._groups, self._free, self._unheld, strict=True)
        )

    def has_room(self, tokens: int) -> bool:
        """Whether a new sequence of so many tokens fits beside the live ones, even if it shares nothing."""
        return all(
            len(free) + len(unheld) >= -(-tokens // BLOCK) - group.first_kept(tokens)
            for group, free, unheld in zip(self._groups, self._free, self._unheld, strict=True)
        )

    def has_free(self, lengths: Sequence[int]) -> bool:
        """Whether new sequences of these lengths fit, and nothing that is kept has to go for them."""
        wanted = sum(-(-n // BLOCK) for n in lengths)
        return all(wanted <= len(free) for free in self._free)

    # --- growing -----------------------------------------------------------------------------------------

    def known(self, sequence: int, tokens: Sequence[int]) -> int:
        """The length of a sequence after `match`, which is not done."""
        s = self._sequences[sequence]
        if len(s.tokens) % BLOCK:
            return len(s.tokens)
        known = self._known(s, tokens)
        n, _ = self._usable(known)
        return max(len(s.tokens), sum(common for _, common in known[:n]))

    def match(self, sequence: int, tokens: Sequence[int]) -> int:
        """Continues a sequence with blocks in the tree that hold the next of `tokens`, all that it is to hold from
        its first on; returns its length. Shares full blocks. Of the block in which `tokens` part from known texts, it
        copies what they have in common. Does nothing if the last block of the sequence is not full."""
        s = self._sequences[sequence]
        if len(s.tokens) % BLOCK == 0:
            known = self._known(s, tokens)
            n, first = self._usable(known)
            if n > len(s.nodes):
                self._follow(s, known[:n], first, tokens)
                self._assign(sequence)
        return len(s.tokens)

    def reserve(self, sequence: int, n: int) -> None:
        """Makes room for `n` tokens after those of a sequence. Throws out blocks that no live sequence holds. Raises
        PoolFullError."""
        s = self._sequences[sequence]
        wanted = -(-(len(s.tokens) + n) // BLOCK) - len(s.nodes) - len(s.tail)
        if wanted > 0:
            s.tail += self._take(wanted)
            self._assign(sequence)

    def commit(self, sequence: int, tokens: Sequence[int]) -> None:
        """Says that a step has stored `tokens` after those of a sequence, in room that was reserved."""
        s = self._sequences[sequence]
        s.tokens += tokens
        changed = False
        while len(s.tokens) >= (len(s.nodes) + 1) * BLOCK:
            own, at = s.tail.pop(0), len(s.nodes) * BLOCK
            node = self._insert(s.nodes[-1] if s.nodes else self._root, tuple(s.tokens[at : at + BLOCK]), own)
            changed |= node.blocks != own
            node.users += 1
            s.nodes.append(node)
            for g in range(len(self._groups)):
                self._hold(node, g)
        changed |= self._leave_windows(s)
        if changed:
            self._assign(sequence)

    @contextmanager
    def room(self, *tokens: int) -> Iterator[None]:
        """Room for steps that are only measured: so many tokens in each of the first sequences, which must be empty."""
        for sequence, n in enumerate(tokens):
            self.reserve(sequence, n)
        try:
            yield
        finally:
            for sequence in range(len(tokens)):
                self.drop(sequence)

    # --- blocks that are kept elsewhere too ---------------------------------------------------------------

    def path(self, tokens: Sequence[int]) -> tuple[list[list[int]], int]:
        """The blocks in the tree that hold the beginning of `tokens`, for each the physical block in each group, -1
        where it was thrown out; and how many of the tokens they hold."""
        path = self._path(tokens)
        return [node.blocks for node, _ in path], sum(common for _, common in path)

    def adopt(self, tokens: Sequence[int], first: int, end: int, kept: Sequence[int]) -> list[list[int]]:
        """Adds blocks `first` to `end` - 1 of a text to the tree, which has those before them: the caller fills them.
        `tokens`: all those of the text, of which the last block may hold fewer than BLOCK. `kept`: for each group the
        first block of the text that it is to have. Returns for each group the physical blocks, -1 where there is
        nothing to fill. Raises PoolFullError."""
        known = [node for node, common in self._path(tokens[: first * BLOCK]) if common == BLOCK]
        if len(known) < first:  # those before were thrown out meanwhile
            raise PoolFullError
        node = known[-1] if known else self._root
        wanted = [max(0, end - max(first, since)) for since in kept]
        self._check_room(wanted)
        node.users += 1  # so it stays in the tree, even if its own block is thrown out to make room
        taken = [[self._take_one(g) for _ in range(n)] for g, n in enumerate(wanted)]
        node.users -= 1
        filled: list[list[int]] = [[] for _ in self._groups]
        for number in range(first, end):
            own = [of.pop() if number >= since else _ABSENT for of, since in zip(taken, kept, strict=True)]
            node = self._insert(node, tuple(tokens[number * BLOCK :][:BLOCK]), own)
            for blocks, block, of_node in zip(filled, own, node.blocks, strict=True):
                blocks.append(block if of_node == block else _ABSENT)
        return filled

    # --- ending ------------------------------------------------------------------------------------------

    def cut(self, sequence: int, length: int) -> None:
        """Leaves a sequence its first `length` tokens. Raises PoolFullError, and ValueError if tokens that a window
        shows there are gone: `length` may be REWIND less than that of the sequence, but not less than `match` has
        found."""
        s = self._sequences[sequence]
        n, rest = divmod(length, BLOCK)
        new = _Sequence(list(s.first), s.tokens[:length], s.nodes[:n])
        for g, group in enumerate(self._groups):
            if s.first[g] > group.first_seen(length) // BLOCK:
                raise ValueError(f"The tokens before {length} are no longer in the cache.")
        if rest:
            source = s.nodes[n].blocks if n < len(s.nodes) else s.tail[0]
            new.tail = self._take(1)
            self._copy(source, new.tail[0])
        for node in new.nodes:
            node.users += 1
        for g, first in enumerate(new.first):
            for node in new.nodes[first:]:
                self._hold(node, g)
        self.drop(sequence)
        self._sequences[sequence] = new
        self._assign(sequence)

    def drop(self, sequence: int) -> None:
        """Ends a sequence. Its blocks stay in the tree until their room is needed."""
        s = self._sequences[sequence]
        self._sequences[sequence] = self._empty()
        self._assign(sequence)
        if ended := tuple(s.tokens[len(s.nodes) * BLOCK :]):
            node = self._insert(s.nodes[-1] if s.nodes else self._root, ended, s.tail.pop(0))
            for unheld in self._unheld:
                if node in unheld:  # it is the latest now
                    unheld[node] = unheld.pop(node)
        self._give_back(s.tail)
        for g, (group, first) in enumerate(zip(self._groups, s.first, strict=True)):
            held = s.nodes[first:]
            for node in held if group.window else reversed(held):  # of a window, the end is worth most
                self._release(node, g)
        for node in reversed(s.nodes):
            node.users -= 1
            self._prune(node)

    def clear(self, sequence: int) -> None:
        """Ends a sequence whose keys and values are no numbers, so that nobody reads them: what is known of its text
        that no other sequence has is forgotten, and its blocks are zeros. Where a step leaves a place of a block
        out, it multiplies what is there by 0, which does not help if that is no number."""
        tokens = self._sequences[sequence].tokens
        own = [{b for b in table if b != _ABSENT} for table in self.tables(sequence)]
        self.drop(sequence)
        broken = [node for node, _ in self._path(tokens) if not node.users][:1]
        while broken:  # and the texts that go on with it
            node = broken.pop()
            broken += [child for children in node.children.values() for child in children]
            for g in range(len(self._groups)):
                own[g].add(node.blocks[g])
                self._remove_block(node, g)
            self._prune(node)
        for g, free in enumerate(self._free):
            for block in own[g].intersection(free):
                self._store.copy_block(g, _ABSENT, block)

    # --- the tree ----------------------------------------------------------------------------------------

    def _known(self, s: _Sequence, tokens: Sequence[int]) -> list[tuple[_Node, int]]:
        """The blocks of a sequence and those that continue it with `tokens`, each with the number of its tokens that
        are wanted: fewer than BLOCK only in the last one, which is to be copied."""
        known = self._path(tokens, s.nodes)
        if known and known[-1][1] < BLOCK and not self._has_room_beside(known):
            known.pop()
        return known

    def _path(self, tokens: Sequence[int], known: Sequence[_Node] = ()) -> list[tuple[_Node, int]]:
        """The blocks in the tree that go on after `known` with `tokens`, and those, each with the number of its tokens
        that are wanted."""
        path = [(node, BLOCK) for node in known]
        node, common = known[-1] if known else self._root, BLOCK
        while common == BLOCK and (rest := tokens[len(path) * BLOCK :][:BLOCK]):
            node, common = node.best_child(rest)
            if common:
                path.append((node, common))
        return path

    def _has_room_beside(self, known: list[tuple[_Node, int]]) -> bool:
        """Whether a block can be had without throwing out any of these."""
        return all(
            free or len(unheld) > sum(node in unheld for node, _ in known)
            for free, unheld in zip(self._free, self._unheld, strict=True)
        )

    def _usable(self, known: list[tuple[_Node, int]]) -> tuple[int, list[int]]:
        """How many of these blocks can be used, so that every window finds its tokens; and for each group, from
        which one on they are all there."""
        first, length = [0] * len(self._groups), 0
        best = 0, first
        for n, (node, common) in enumerate(known, 1):
            length += common
            first = [n if block == _ABSENT else f for f, block in zip(first, node.blocks, strict=True)]
            seen = (group.first_seen(length) // BLOCK for group in self._groups)
            if all(f <= wanted for f, wanted in zip(first, seen, strict=True)):
                best = n, first
        return best

    def _follow(
        self, s: _Sequence, known: list[tuple[_Node, int]], first: list[int], tokens: Sequence[int]
    ) -> None:
        """Continues a sequence with blocks of the tree. `first`: see `_usable`."""
        length = sum(common for _, common in known)
        old, s.nodes, s.tokens = s.nodes, [node for node, _ in known], list(tokens[:length])
        for g, group in enumerate(self._groups):
            kept = max(s.first[g], first[g], group.first_kept(length))
            for node in s.nodes[max(kept, len(old)) :]:
                self._hold(node, g)
            for node in old[s.first[g] : kept]:
                self._release(node, g)
            s.first[g] = kept
        self._give_back(s.tail)
        s.tail = []
        if length % BLOCK:
            s.tail, part = self._take(1), s.nodes.pop()
            self._copy(part.blocks, s.tail[0])
            for g in range(len(self._groups)):
                self._release(part, g)
        for node in s.nodes[len(old) :]:
            node.users += 1

    def _insert(self, parent: _Node, tokens: tuple[int, ...], own: list[int]) -> _Node:
        """The node of these tokens after those of `parent`: a new one with the blocks `own`, or the one that is there.
        That one takes the blocks that it lacks; the others are free again."""
        siblings = parent.children.setdefault(tokens[0], [])
        for node in siblings:
            if node.tokens[: len(tokens)] == tokens:
                for g, block in enumerate(own):
                    if block == _ABSENT:
                        continue
                    if node.blocks[g] == _ABSENT and len(node.tokens) == len(tokens):
                        node.blocks[g] = block
                        self._unheld[g][node] = None
                    else:
                        self._free[g].append(block)
                return node
        # Ends of sequences whose tokens the new node has too.
        for node in [node for node in siblings if tokens[: len(node.tokens)] == node.tokens]:
            for g in range(len(self._groups)):
                self._remove_block(node, g)
            self._prune(node)
        node = _Node(parent, tokens, list(own), [0] * len(own))
        parent.children.setdefault(tokens[0], []).append(node)
        for unheld, block in zip(self._unheld, own, strict=True):
            if block != _ABSENT:
                unheld[node] = None
        return node

    def _prune(self, node: _Node) -> None:
        """Takes a node that nothing needs out of the tree, and its parents likewise."""
        while node.parent and not (node.users or node.children or any(b >= 0 for b in node.blocks)):
            siblings = node.parent.children[node.tokens[0]]
            siblings.remove(node)
            if not siblings:
                del node.parent.children[node.tokens[0]]
            node = node.parent

    # --- blocks ------------------------------------------------------------------------------------------

    def _empty(self) -> _Sequence:
        return _Sequence([0] * len(self._groups))

    def _assign(self, sequence: int) -> None:
        self._store.assign(sequence, self.tables(sequence))

    def _copy(self, sources: list[int], targets: list[int]) -> None:
        for g, (source, target) in enumerate(zip(sources, targets, strict=True)):
            self._store.copy_block(g, source, target)

    def _take(self, n: int) -> list[list[int]]:
        """n blocks of each group: [n][groups]. Raises PoolFullError."""
        self._check_room([n] * len(self._groups))
        return [[self._take_one(g) for g in range(len(self._groups))] for _ in range(n)]

    def _check_room(self, wanted: Sequence[int]) -> None:
        """Raises PoolFullError unless each group has so many blocks that no live sequence holds."""
        if any(len(f) + len(u) < n for n, f, u in zip(wanted, self._free, self._unheld, strict=True)):
            raise PoolFullError

    def _take_one(self, g: int) -> int:
        if not self._free[g]:
            self._throw_out(g)
        return self._free[g].pop()

    def _give_back(self, tail: list[list[int]]) -> None:
        for own in tail:
            for free, block in zip(self._free, own, strict=True):
                free.append(block)

    def _throw_out(self, g: int) -> None:
        """Frees the block of a group that was used least recently. Without the tokens that a group keeps for all time,
        a node is of no use, so then those of the other groups are freed too."""
        node = next(iter(self._unheld[g]))
        for other in range(len(self._groups)) if self._groups[g].window is None else [g]:
            self._remove_block(node, other)
        self._prune(node)

    def _remove_block(self, node: _Node, g: int) -> None:
        if node.blocks[g] != _ABSENT:
            self._free[g].append(node.blocks[g])
            node.blocks[g] = _ABSENT
            del self._unheld[g][node]

    def _hold(self, node: _Node, g: int) -> None:
        if not node.holders[g]:
            del self._unheld[g][node]
        node.holders[g] += 1

    def _release(self, node: _Node, g: int) -> None:
        node.holders[g] -= 1
        if not node.holders[g]:
            self._unheld[g][node] = None

    def _leave_windows(self, s: _Sequence) -> bool:
        """Releases the blocks that lie behind the windows; returns whether there were any."""
        changed = False
        for g, group in self._windowed:
            first = group.first_kept(len(s.tokens))
            for node in s.nodes[s.first[g] : first]:
                self._release(node, g)
                changed = True
            s.first[g] = max(s.first[g], first)
        return changed


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many elements two sequences have in common at their start."""
    n = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        n += 1
    return n
