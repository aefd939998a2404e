"""Open connections, with the idle ones in the order in which they became idle."""

from __future__ import annotations

import ipaddress
from collections.abc import Hashable
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)
_NETWORK = 64
"""One customer usually has a whole IPv6 /64, so its addresses count as one."""


class IdleConnections(Generic[T]):
    """Every operation takes constant time. Busy connections are never closed."""

    def __init__(self, max_idle_of_one: int) -> None:
        self._max_idle_of_one = max_idle_of_one
        self._addresses: dict[T, str] = {}
        self._idle: dict[T, None] = {}
        self._idle_of: dict[str, dict[T, None]] = {}

    def __len__(self) -> int:
        return len(self._addresses)

    def add(self, one: T, address: str) -> T | None:
        """Add a new, idle connection. Returns the connection to close for it, if any."""
        self._addresses[one] = address
        return self.mark_idle(one)

    def mark_idle(self, one: T) -> T | None:
        """Mark as idle; an idle one keeps its position. Returns the connection to close, if any."""
        if one in self._idle or one not in self._addresses:
            return None
        address = self._addresses[one]
        neighbours = self._idle_of.setdefault(address, {})
        self._idle[one] = neighbours[one] = None
        return next(iter(neighbours)) if len(neighbours) > self._max_idle_of_one else None

    def mark_busy(self, one: T) -> None:
        """Mark as busy."""
        if one in self._idle:
            del self._idle[one]
            neighbours = self._idle_of[self._addresses[one]]
            del neighbours[one]
            if not neighbours:
                del self._idle_of[self._addresses[one]]

    def remove(self, one: T) -> None:
        self.mark_busy(one)
        self._addresses.pop(one, None)

    def longest_idle(self, address: str) -> T | None:
        """The longest idle connection of this address, else of any; None if all are busy."""
        return next(iter(self._idle_of.get(address) or self._idle), None)


def origin_of(peer: object) -> str:
    """The address that connections are counted by: an IPv4 address, or an IPv6 /64."""
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
