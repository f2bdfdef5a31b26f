"""Connections of strangers: how many there may be, how long a silent or slow one is kept, how large a head may be.

uvicorn bounds none of this: requests that are sent ahead on one connection are all parsed at once, a header may be of
any length, and a connection that says nothing stays for ever.
"""

from __future__ import annotations

import asyncio
import logging
import resource
from asyncio import TimerHandle
from collections import Counter, OrderedDict
from functools import partial
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from cellar.server.config import LimitConfig

logger = logging.getLogger(__name__)

MAX_AHEAD = 8
"""Requests that a client may send before the first of them is answered; no client of today sends one."""

_RESERVED_DESCRIPTORS = 256
"""For everything that is not a connection: files, the engine, processes."""

_STATUS = {
    408: (b"408 Request Timeout", b"the request did not come to its end in time; send it faster."),
    431: (
        b"431 Request Header Fields Too Large",
        b"the head of the request is too large; send shorter headers.",
    ),
    503: (b"503 Service Unavailable", b"there are too many connections; come back later."),
}


class Doors:
    """The open connections of one front.

    Where there are as many as may be, in all or from one address, the one that has been silent for longest makes room;
    if all of them are being answered, a new one is turned away.
    """

    def __init__(self, max_connections: int, max_per_address: int | None) -> None:
        self.max_connections = max_connections
        self.max_per_address = max_per_address
        self._open: set[Connection] = set()
        self._silent: OrderedDict[Connection, None] = OrderedDict()
        self._addresses: Counter[str] = Counter()

    def enter(self, connection: Connection) -> bool:
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

    def _let_in(self, connection: Connection) -> bool:
        self._open.add(connection)
        self._addresses[connection.address] += 1
        self.silent(connection)
        return True

    def leave(self, connection: Connection) -> None:
        """It is gone; a second time, or one that was not let in, changes nothing."""
        if connection not in self._open:
            return
        self._open.remove(connection)
        self._silent.pop(connection, None)
        self._addresses[connection.address] -= 1
        if not self._addresses[connection.address]:
            del self._addresses[connection.address]

    def silent(self, connection: Connection) -> None:
        """No request of it is being answered."""
        if connection in self._open:
            self._silent[connection] = None
            self._silent.move_to_end(connection)

    def speaks(self, connection: Connection) -> None:
        """A whole head has come."""
        self._silent.pop(connection, None)

    def __len__(self) -> int:
        return len(self._open)


class Connection(HttpToolsProtocol):
    """uvicorn's protocol within the limits."""

    def __init__(self, *args: Any, doors: Doors, limits: LimitConfig, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._doors = doors
        self._limits = limits
        self._head_bytes = 0
        self._in_head = True
        self._timer: TimerHandle | None = None

    @property
    def address(self) -> str:
        """Of the client; a Unix socket has none."""
        return self.client[0] if self.client else ""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self._doors.enter(self):
            self._time_out_in(self._limits.upload_timeout)
        else:
            self._refuse(503)

    def connection_lost(self, exc: Exception | None) -> None:
        self._doors.leave(self)
        self._no_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._head_bytes += len(data)
            if self._timer is None:
                self._time_out_in(self._limits.upload_timeout)
        super().data_received(data)
        if self._in_head and self._head_bytes > self._limits.max_head_bytes and not self.transport.is_closing():
            self._refuse(431)

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= MAX_AHEAD:
            raise ValueError("too many requests ahead")  # the parser stops, and the connection ends with a 400
        super().on_message_begin()
        self._in_head = True

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._head_bytes = 0
        self._doors.speaks(self)
        self._time_out_in(self._limits.upload_timeout)
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._no_timer()
        self._in_head = True
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle is None or self.cycle.response_complete:
            self._doors.silent(self)

    def _time_out_in(self, seconds: float) -> None:
        self._no_timer()
        self._timer = self.loop.call_later(seconds, self._timed_out)

    def _no_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _timed_out(self) -> None:
        self._timer = None
        answering = self.cycle is not None and not self.cycle.response_complete
        if self._in_head and answering:  # the next request may take as long as the answer to this one
            self._time_out_in(self._limits.upload_timeout)
        elif (self._in_head and self._head_bytes == 0) or (answering and self.cycle.response_started):
            self.transport.close()  # it never said anything, or is in the middle of an answer
        else:
            self._refuse(408)

    def _refuse(self, status: int) -> None:
        line, text = _STATUS[status]
        logger.warning("%s: %s", self.address or "a connection", text.decode().rstrip("."))
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True  # whoever works on it is told
            self.cycle.message_event.set()
        headers = b"content-type: text/plain; charset=utf-8\r\nconnection: close\r\ncontent-length: %d" % len(text)
        self.transport.write(b"HTTP/1.1 %b\r\n%b\r\n\r\n%b" % (line, headers, text))
        self.transport.close()


def connections(limits: LimitConfig) -> Any:
    """What uvicorn makes connections by; the limits hold for all of one call together."""
    most = limits.max_connections or most_connections()
    return partial(Connection, doors=Doors(most, limits.max_connections_per_address), limits=limits)


def most_connections() -> int:
    """As many as there are descriptors for, once the process has all that it may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return max(16, min(hard, 2**20) - _RESERVED_DESCRIPTORS)
