"""Who asks. A request's `client` is `WORD@ADDRESS` where a client says for whom it asks, else `ADDRESS`. Addresses take
turns, and the words of one address take turns among themselves: no client gets more by calling itself many names.

Many programs cannot say for whom they ask. Those of one address are told apart by their connections, but are at most
`UNNAMED` clients: one that opens hundreds of connections does not get hundreds of turns before one with a name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

UNNAMED = 16


def address_of(client: str) -> str:
    return client.rpartition("@")[2]


def whose_turn(client: str, connection: int) -> str:
    """The client whose turn a request takes. `connection` is a number that it shares with others of its connection,
    such as a port; those of one system's are often all odd or all even."""
    return client if "@" in client else f"{connection // 2 % UNNAMED}@{client}"


class Share(NamedTuple):
    """What a client has had of something, and what all of its address have had."""

    of_address: float
    own: float


def order_of(held: Share, turn: Share) -> tuple[float, ...]:
    """The client goes first whose tuple is the least: that of the address that holds least, or whose last turn is
    longest ago; among those of an address likewise."""
    return held.of_address, turn.of_address, held.own, turn.own


class Held:
    """How many of something each client holds."""

    def __init__(self, clients: Iterable[str]) -> None:
        self._clients = Counter(clients)
        self._addresses = Counter[str]()
        for client, n in self._clients.items():
            self._addresses[address_of(client)] += n

    def __getitem__(self, client: str) -> Share:
        return Share(self._addresses[address_of(client)], self._clients[client])

    def rival(self, client: str) -> str | None:
        """The client that is to give a slot up for `client`, if any: one of an address that holds several if that of
        `client` holds none, or one of the same address that holds several if `client` has none."""
        own, address = self[client], address_of(client)
        if own.own:
            return None
        others = self._clients if not own.of_address else [
            other for other in self._clients if address_of(other) == address
        ]  # fmt: skip
        rival = max(others, key=self.__getitem__)
        has_several = self[rival].own > 1 if own.of_address else self[rival].of_address > 1
        return rival if has_several else None


class Turns:
    """When each client had its last turn."""

    def __init__(self) -> None:
        self._clients: dict[str, float] = {}
        self._addresses: dict[str, float] = {}

    def __getitem__(self, client: str) -> Share:
        return Share(self._addresses.get(address_of(client), 0.0), self._clients.get(client, 0.0))

    def served(self, client: str, at: float) -> None:
        """`at` grows from turn to turn."""
        self._clients[client] = self._addresses[address_of(client)] = at

    def forget(self, client: str) -> None:
        """It has no requests any more."""
        self._clients.pop(client, None)
        address = address_of(client)
        if all(address_of(other) != address for other in self._clients):
            self._addresses.pop(address, None)

    def clear(self) -> None:
        self._clients.clear()
        self._addresses.clear()
