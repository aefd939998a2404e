"""Who is connected: the idle in the order in which they became idle, so that the longest idle goes first, at once."""

from __future__ import annotations

import ipaddress
from collections.abc import Hashable
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)
_NETWORK = 64
"""One customer has a whole IPv6 network of this size, so its addresses count as one."""


class Crowd(Generic[T]):
    """Every step takes the same time, however many there are. The busy are never in the way of anybody."""

    def __init__(self, max_idle_of_one: int) -> None:
        self._max_idle_of_one = max_idle_of_one
        self._addresses: dict[T, str] = {}
        self._idle: dict[T, None] = {}
        self._idle_of: dict[str, dict[T, None]] = {}

    def __len__(self) -> int:
        return len(self._addresses)

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    def join(self, one: T, address: str) -> T | None:
        """A new connection, on which nothing was asked yet. Returns who has to leave for it, if anybody."""
        self._addresses[one] = address
        return self.rest(one)

    def rest(self, one: T) -> T | None:
        """Nothing is asked on it any more; who is idle already keeps its place. Returns who has to leave."""
        if one in self._idle or one not in self._addresses:
            return None
        address = self._addresses[one]
        neighbours = self._idle_of.setdefault(address, {})
        self._idle[one] = neighbours[one] = None
        return next(iter(neighbours)) if len(neighbours) > self._max_idle_of_one else None

    def work(self, one: T) -> None:
        """Something is asked on it."""
        if one in self._idle:
            del self._idle[one]
            neighbours = self._idle_of[self._addresses[one]]
            del neighbours[one]
            if not neighbours:
                del self._idle_of[self._addresses[one]]

    def leave(self, one: T) -> None:
        self.work(one)
        self._addresses.pop(one, None)

    def longest_idle(self, address: str) -> T | None:
        """Who makes room for somebody from this address: one from there, else from anywhere; None: all are busy."""
        return next(iter(self._idle_of.get(address) or self._idle), None)


def origin_of(peer: object) -> str:
    """What counts as one address, from what a socket says of its other end."""
    host = str(peer[0]) if isinstance(peer, tuple) and peer else ""
    try:
        found = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(found, ipaddress.IPv4Address):
        return str(found)
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return str(ipaddress.ip_network((found, _NETWORK), strict=False))
