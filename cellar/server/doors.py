"""Doors: how many connections a front has open, in all and from one address, and who makes room for whom."""

from __future__ import annotations

import asyncio
import resource
from collections import Counter, OrderedDict
from typing import Protocol

_RESERVED_DESCRIPTORS = 256
"""For everything that is not a connection: files, the engine, processes."""


class Guest(Protocol):
    """A connection, of which nothing else matters here."""

    transport: asyncio.Transport

    @property
    def address(self) -> str:
        """Of the client."""


class Doors:
    """The open connections of one front.

    Where there are as many as may be, in all or from one address, the one that has been silent for longest makes room;
    if all of them are being answered, a new one is turned away.
    """

    def __init__(self, max_connections: int, max_per_address: int | None) -> None:
        self.max_connections = max_connections
        self.max_per_address = max_per_address
        self._open: set[Guest] = set()
        self._silent: OrderedDict[Guest, None] = OrderedDict()
        self._addresses: Counter[str] = Counter()

    def enter(self, connection: Guest) -> bool:
        """A connection was made; it is silent. False: there is no room for it."""
        address = connection.address
        if self.max_per_address is not None and self._addresses[address] >= self.max_per_address:
            longest = next((one for one in self._silent if one.address == address), None)
        elif len(self._open) >= self.max_connections:
            longest = next(iter(self._silent), None)
        else:
            return self._let_in(connection)
        if longest is None:
            return False
        longest.transport.abort()
        self.leave(longest)
        return self._let_in(connection)

    def _let_in(self, connection: Guest) -> bool:
        self._open.add(connection)
        self._addresses[connection.address] += 1
        self.silent(connection)
        return True

    def leave(self, connection: Guest) -> None:
        """It is gone; a second time, or one that was not let in, changes nothing."""
        if connection not in self._open:
            return
        self._open.remove(connection)
        self._silent.pop(connection, None)
        self._addresses[connection.address] -= 1
        if not self._addresses[connection.address]:
            del self._addresses[connection.address]

    def silent(self, connection: Guest) -> None:
        """No request of it is being answered."""
        if connection in self._open:
            self._silent[connection] = None
            self._silent.move_to_end(connection)

    def speaks(self, connection: Guest) -> None:
        """A whole head has come."""
        self._silent.pop(connection, None)

    def __len__(self) -> int:
        return len(self._open)


def most_connections() -> int:
    """As many as there are descriptors for, once the process has all that it may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return max(16, min(hard, 2**20) - _RESERVED_DESCRIPTORS)
