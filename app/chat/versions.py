"""Versions of a chat: what Ctrl+R and F2 replace stays in the history, as another branch of a tree.

A version at a prompt is one of the prompts that stood in its place, with one of its replies.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple


class Node(NamedTuple):
    """A message: its id, that of the message before it (0: none), and whether it is in the version that is shown."""

    id: int
    parent: int
    role: str
    shown: bool


class Versions:
    def __init__(self, nodes: Sequence[Node]) -> None:
        self._nodes = {node.id: node for node in _without_cycles(nodes)}
        self._after: dict[int, list[Node]] = defaultdict(list)
        for _, node in sorted(self._nodes.items()):
            self._after[node.parent].append(node)

    def at(self, prompt: int) -> tuple[list[tuple[int, ...]], int]:
        """The versions at the prompt with this id, oldest first: the ids of a prompt and its reply, if it has one; and
        the place of the one that is shown."""
        found: list[tuple[int, ...]] = []
        for node in self._after[self._nodes[prompt].parent]:
            if node.role == "user":
                found += [(node.id, reply.id) for reply in self._after[node.id]] or [(node.id,)]
        found.sort(key=max)
        shown = [version for version in found if self._nodes[version[-1]].shown]
        return found, found.index(shown[0]) if shown else 0

    def mark(self, prompt: int) -> tuple[int, int]:
        """Which version is shown at a prompt, counted from 1, and of how many."""
        versions, shown = self.at(prompt)
        return shown + 1, len(versions)

    def beside(self, prompt: int, step: int) -> list[int] | None:
        """The ids of the messages of the chat in the version before (-1) or after (1) the one that is shown at a
        prompt; None if there is none."""
        versions, shown = self.at(prompt)
        if not 0 <= shown + step < len(versions):
            return None
        return self.through(versions[shown + step][-1])

    def is_shown(self, message: int) -> bool:
        return self._nodes[message].shown

    def through(self, message: int) -> list[int]:
        """The ids of the messages of the newest version that holds a message."""
        before, id = [], message
        while id in self._nodes:
            before.append(id)
            id = self._nodes[id].parent
        path, last = before[::-1], message
        while self._after[last]:
            last = self._after[last][-1].id
            path.append(last)
        return path


def _without_cycles(nodes: Sequence[Node]) -> list[Node]:
    """Each after its parent. What the disk has changed into a cycle begins with its lowest id."""
    after: dict[int, list[Node]] = defaultdict(list)
    ids = {node.id for node in nodes}
    for node in nodes:
        after[node.parent if node.parent in ids else 0].append(node)
    left = {node.id: node for node in sorted(nodes)}
    found = list[Node]()
    waiting = after[0]
    while left:
        waiting = waiting or [left[min(left)]._replace(parent=0)]
        while waiting:
            node = waiting.pop()
            if left.pop(node.id, None):
                found.append(node)
                waiting += after[node.id]
    return found
