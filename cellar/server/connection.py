"""Connections of strangers: how many there may be, how long a silent or slow one is kept, how large a head may be.

uvicorn bounds none of this: requests that are sent ahead on one connection are all parsed at once, a header may be of
any length, before a body or behind it, and a connection that says nothing, or never reads its answer, stays for ever.
"""

from __future__ import annotations

import asyncio
import logging
import select
import socket
from asyncio import TimerHandle
from functools import partial
from ssl import SSLContext
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from cellar.server.config import LimitConfig
from cellar.server.doors import Doors, most_connections
from cellar.server.handshake import Handshake
from cellar.server.parser import Parser

logger = logging.getLogger(__name__)

MAX_AHEAD = 8
"""Requests that a client may send before the first of them is answered; no client of today sends one."""

_AROUND_BODY = 16
"""Bytes that may stand around each byte of a body sent in chunks, beside what a head may have: a chunk of one byte has
five."""

LEAST_READ = 2**14
"""Bytes of its answer that a client must take within the time that a request may take to come."""

LAST_WORDS_SECONDS = 0.25
"""How long a connection that is to end for want of requests is still listened to: one may be on its way, or lie in the
kernel unread, since the loop looks at its clock before it looks at its sockets."""

_STATUS = {
    400: (
        b"400 Bad Request",
        b"the body's chunks are too small, or too much stands between and behind them; send larger chunks.",
    ),
    408: (b"408 Request Timeout", b"the request did not come to its end in time; send it faster."),
    431: (
        b"431 Request Header Fields Too Large",
        b"the head of the request is too large; send shorter headers.",
    ),
    503: (b"503 Service Unavailable", b"there are too many connections; come back later."),
}


class Connection(HttpToolsProtocol):
    """uvicorn's protocol within the limits."""

    def __init__(self, *args: Any, doors: Doors, limits: LimitConfig, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.parser: Parser = Parser(self)  # type: ignore[assignment]
        self._doors = doors
        self._limits = limits
        self._head_bytes = 0
        self._in_head = True
        self._around = 0  # bytes that came for a body, less those of the body itself
        self._body: list[bytes] = []  # of the data at hand
        self._timer: TimerHandle | None = None
        self._unread: int | None = None  # bytes that the client had still to take when this was looked at
        self._reading: TimerHandle | None = None
        self._ending = False  # the server drains: the next request is the last

    @property
    def address(self) -> str:
        """Of the client; a Unix socket has none."""
        return self.client[0] if self.client else ""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        _send_at_once(transport)
        super().connection_made(transport)
        if self._doors.enter(self):
            self._time_out_in(self._limits.upload_timeout)
        else:
            self._refuse(503)

    def connection_lost(self, exc: Exception | None) -> None:
        self._doors.leave(self)
        self._no_timer()
        self.resume_writing()
        super().connection_lost(exc)

    def eof_received(self) -> None:
        """The client has closed its side: nobody is written to any more, even before the loop says so."""
        self._dismiss()

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._head_bytes += len(data)
            if self._timer is None:
                self._time_out_in(self._limits.upload_timeout)
        else:
            self._around += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        self._pass_on()
        if self._in_head:
            if self._head_bytes > self._limits.max_head_bytes:
                self._refuse(431)
        elif (around := max(0, self._around)) <= self._limits.max_head_bytes:
            self._around = around  # what a large body leaves unused is no room for what stands behind it
        else:
            self._refuse(400)

    def send_400_response(self, msg: str) -> None:
        """What came is no HTTP; an earlier request of the connection may still be under way."""
        self._dismiss()
        super().send_400_response(msg)

    def _unsupported_upgrade_warning(self) -> None:
        """What follows a CONNECT is nobody's: nothing for a log."""

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= MAX_AHEAD:
            raise ValueError("too many requests ahead")  # the parser stops, and the connection ends with a 400
        super().on_message_begin()
        self._in_head = True

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # what comes behind a body is nobody's: headers have been judged when it comes
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.parser.asks:
            return
        self._in_head = False
        self._head_bytes = self._around = 0
        self._doors.speaks(self)
        self._time_out_in(self._limits.upload_timeout)
        super().on_headers_complete()
        if self._ending:
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        self._body.append(body)
        self._around -= (1 + _AROUND_BODY) * len(body)

    def on_message_complete(self) -> None:
        if self.parser.asks:
            return
        self._pass_on()
        self._no_timer()
        self._in_head = True
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle is None or self.cycle.response_complete:
            self._doors.silent(self)

    def timeout_keep_alive_handler(self) -> None:
        """It has been idle for long enough, unless what the client says now has not been read."""
        if has_unread(self.transport):
            self.timeout_keep_alive_task = self.loop.call_later(LAST_WORDS_SECONDS, self.timeout_keep_alive_handler)
        else:
            super().timeout_keep_alive_handler()

    def shutdown(self) -> None:
        """The server drains: what is under way is answered, and so is a request that comes within a moment."""
        self._ending = True
        if self.cycle is None or self.cycle.response_complete:
            self._unset_keepalive_if_required()
            self.timeout_keep_alive_task = self.loop.call_later(LAST_WORDS_SECONDS, self.timeout_keep_alive_handler)
        else:
            super().shutdown()

    def pause_writing(self) -> None:
        """More of an answer waits for the client than may wait."""
        super().pause_writing()
        self._unread = self.transport.get_write_buffer_size()
        self._reading = self.loop.call_later(self._limits.upload_timeout, self._look_at_reader)

    def resume_writing(self) -> None:
        """The client reads."""
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None
        super().resume_writing()

    def _look_at_reader(self) -> None:
        """The answer has waited for the client for as long as a request may take."""
        left = self.transport.get_write_buffer_size()
        if self._unread is not None and left > self._unread - LEAST_READ:
            logger.warning("%s: the answer is not read; the connection ends", self.address or "a connection")
            self._dismiss()
            self.transport.abort()
            return
        self._unread = left
        self._reading = self.loop.call_later(self._limits.upload_timeout, self._look_at_reader)

    def _pass_on(self) -> None:
        """Bytes of a body go to the request in one piece, however small the chunks were that they came in."""
        if self._body:
            body, self._body = b"".join(self._body), []
            super().on_body(body)

    def _dismiss(self) -> None:
        """Tell whoever works on an answer that nobody waits for it."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()

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
        elif self._in_head and self._head_bytes == 0 and has_unread(self.transport):
            self._time_out_in(LAST_WORDS_SECONDS)
        elif (self._in_head and self._head_bytes == 0) or (answering and self.cycle.response_started):
            self._dismiss()
            self.transport.close()  # it never said anything, or is in the middle of an answer
        else:
            self._refuse(408)

    def _refuse(self, status: int) -> None:
        line, text = _STATUS[status]
        logger.warning("%s: %s", self.address or "a connection", text.decode().rstrip("."))
        self._dismiss()
        headers = b"content-type: text/plain; charset=utf-8\r\nconnection: close\r\ncontent-length: %d" % len(text)
        self.transport.write(b"HTTP/1.1 %b\r\n%b\r\n\r\n%b" % (line, headers, text))
        self.transport.close()


def has_unread(transport: asyncio.Transport) -> bool:
    """Whether the kernel has something of the client's for it."""
    if transport.is_closing():
        return False
    poll = select.poll()
    poll.register(transport.get_extra_info("socket").fileno(), select.POLLIN)
    return bool(poll.poll(0))


def connections(limits: LimitConfig, tls: SSLContext | None = None) -> Any:
    """What uvicorn makes connections by, over TLS if told how; the limits hold for all of one call together."""
    doors = Doors(limits.max_connections or most_connections(), limits.max_connections_per_address)
    make = partial(Connection, doors=doors, limits=limits)
    return make if tls is None else partial(Handshake, make=make, context=tls, doors=doors, limits=limits)


def _send_at_once(transport: asyncio.Transport) -> None:
    """What is written leaves now, not when the client has said that it has what came before, 40 ms later.

    asyncio sees to that for sockets that name TCP as their protocol; those that are accepted name none.
    """
    sock = transport.get_extra_info("socket")
    if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
