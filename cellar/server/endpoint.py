"""Where an engine's process listens for fronts: a Unix socket for those of its host, or a port that a key opens."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener, answer_challenge, deliver_challenge
from types import TracebackType

ADMIT_SECONDS = 5.0
"""How long a stranger may take to prove that it has the key."""

MAX_UNPROVEN = 32
"""Strangers that may be about to prove it at a time; one more, and the one that has taken longest is turned away."""

SILENCE_SECONDS = 10
"""After this time without a sign of the other host a connection is lost: its host, or the way to it, has gone."""

_PROBES = 3


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A TCP port, and the key that both sides must have; port 0 takes a free one.

    Messages are pickles: none is read from a peer that has not proven, by HMAC over a random challenge, to have the
    key. They are not encrypted.
    """

    host: str
    port: int
    key: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.key) < 16:
            raise ValueError(f"a key of {len(self.key)} bytes can be guessed; use at least 16 random ones.")


Address = str | Endpoint
"""A Unix socket's path, which only its directory protects, or an endpoint."""


def listen(address: Address) -> tuple[Listener, Address]:
    """A listener, and the address with its true port. Raises OSError."""
    if isinstance(address, str):
        return Listener(address, "AF_UNIX", backlog=64), address
    listener = Listener((address.host, address.port), "AF_INET", backlog=64)
    return listener, replace(address, port=listener.address[1])


def connect(address: Address) -> Connection:
    """A connection with an engine's process. Raises OSError."""
    if isinstance(address, str):
        return Client(address, "AF_UNIX")
    sock = socket.create_connection((address.host, address.port), ADMIT_SECONDS)
    sock.settimeout(None)
    connection = Connection(sock.detach())
    try:
        _watch_over(connection)
        with _Deadline(connection):
            answer_challenge(connection, address.key)
            deliver_challenge(connection, address.key)
    except (EOFError, AuthenticationError) as error:
        connection.close()
        raise ConnectionRefusedError("the engine does not take our key, or we not its own") from error
    except BaseException:
        connection.close()
        raise
    return connection


class Gate:
    """Where an engine's process has those who come prove that they may; any number of threads."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._lock = threading.Lock()
        self._unproven: dict[_Deadline, None] = {}  # in the order of coming

    def admit(self, connection: Connection) -> None:
        """Have who has come prove that it may. Raises OSError if it does not, or not in time, or too many others come
        meanwhile."""
        if isinstance(self._address, str):
            return
        _watch_over(connection)
        try:
            with _Deadline(connection) as deadline, self._counted(deadline):
                deliver_challenge(connection, self._address.key)
                answer_challenge(connection, self._address.key)
        except (EOFError, AuthenticationError) as error:
            raise ConnectionRefusedError("it has another key, or none") from error

    @contextlib.contextmanager
    def _counted(self, deadline: _Deadline) -> Iterator[None]:
        with self._lock:
            self._unproven[deadline] = None
            longest = next(iter(self._unproven)) if len(self._unproven) > MAX_UNPROVEN else None
            if longest is not None:
                del self._unproven[longest]
                longest.shut()  # under the lock: it is not closed before it has left
        try:
            yield
        finally:
            with self._lock:
                self._unproven.pop(deadline, None)


class _Deadline:
    """Shuts a connection that is not done in time, so that whoever reads from it gets an end."""

    def __init__(self, connection: Connection) -> None:
        self._socket = socket.socket(fileno=os.dup(connection.fileno()))
        self._timer = threading.Timer(ADMIT_SECONDS, self.shut)
        self._timer.daemon = True

    def __enter__(self) -> _Deadline:
        self._timer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._timer.cancel()
        self._socket.close()

    def shut(self) -> None:
        """Now."""
        with contextlib.suppress(OSError):  # it has gone already
            self._socket.shutdown(socket.SHUT_RDWR)


def _watch_over(connection: Connection) -> None:
    """Frames leave at once, and a peer that says nothing any more, not even that it hears, is gone."""
    with socket.socket(fileno=os.dup(connection.fileno())) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (
            ("TCP_KEEPIDLE", SILENCE_SECONDS // 2),
            ("TCP_KEEPINTVL", max(1, SILENCE_SECONDS // 2 // _PROBES)),
            ("TCP_KEEPCNT", _PROBES),
            ("TCP_USER_TIMEOUT", SILENCE_SECONDS * 1000),
        ):
            if hasattr(socket, name):  # Linux has all of them
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
