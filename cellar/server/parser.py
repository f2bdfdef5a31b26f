"""A parser of requests that stays with HTTP/1.1, whatever a client would rather speak."""

from __future__ import annotations

from typing import Any, Protocol

import httptools


class Reader(Protocol):
    """Who is told of a request's parts as httptools tells of them, and keeps those of the last head."""

    url: bytes
    headers: list[tuple[bytes, bytes]]


class Parser:
    """httptools' `HttpRequestParser`, for a `Reader` that leaves heads and ends alone which come while `asks` is true.

    Where a head asks for another protocol, httptools reads no body and stops. A server may ignore that it was asked
    (RFC 9110, 7.8), and some clients ask for h2c every time: the head is read again without it. CONNECT is no such
    question; nothing that follows it is a request.
    """

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._parser = self._fresh()

    @property
    def asks(self) -> bool:
        """True while a head is read that asks for another protocol: it will be read again."""
        return bool(self._parser.should_upgrade()) and self._parser.get_method() != b"CONNECT"

    def feed_data(self, data: bytes) -> None:
        """Read on. Raises HttpParserError, and HttpParserUpgrade behind a CONNECT."""
        while True:
            try:
                self._parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as stop:
                if not self.asks:
                    raise
                data = self._head() + data[stop.args[0] :]
                self._parser = self._fresh()

    def should_upgrade(self) -> bool:
        """False: no other protocol is spoken here."""
        return False

    def should_keep_alive(self) -> bool:
        """True if another request may follow on the connection."""
        return bool(self._parser.should_keep_alive())

    def get_http_version(self) -> str:
        """Of the last head, "1.1"."""
        return str(self._parser.get_http_version())

    def get_method(self) -> bytes:
        """Of the last head."""
        return bytes(self._parser.get_method())

    def _head(self) -> bytes:
        """The last head, without the question."""
        first = b"%b %b HTTP/%b\r\n" % (self.get_method(), self._reader.url, self.get_http_version().encode())
        lines = [b"%b: %b\r\n" % pair for pair in self._reader.headers if pair[0] != b"upgrade"]
        return b"".join((first, *lines, b"\r\n"))

    def _fresh(self) -> Any:
        parser = httptools.HttpRequestParser(self._reader)
        parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn has it
        return parser
