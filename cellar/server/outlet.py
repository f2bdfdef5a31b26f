"""Outlet: sends to an engine's process without ever waiting for it.

A front's thread serves the streams of all engines. Where one engine's host is cut off, or the engine reads nothing, its
socket takes no more; a thread of its own waits for it then, until the socket takes something or the connection is lost.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import termios
import threading
from collections import deque
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any

_FREE_SHARE = 4
"""What waits in a socket and what comes on top fill a fourth of its buffer at most, as the system counts more than
bytes."""


class Outlet:
    """`send` and `close` are for one thread. Raises OSError once the connection is lost."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        with socket.socket(fileno=os.dup(connection.fileno())) as sock:
            self._room = sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) // _FREE_SHARE
        self._lock = threading.Lock()
        self._waiting: deque[memoryview] = deque()  # the first one is being sent
        self._sender: threading.Thread | None = None
        self._error: OSError | None = None

    def send(self, message: Any) -> None:
        """Send a message behind those before it, now or when there is room."""
        data = ForkingPickler.dumps(message)
        with self._lock:
            if self._error is not None:
                raise self._error
            if not self._waiting and self._has_room(len(data)):
                self._connection.send_bytes(data)
                return
            self._waiting.append(data)
            if len(self._waiting) == 1:
                self._sender = threading.Thread(
                    target=self._send_waiting, args=(data,), name="cellar-outlet", daemon=True
                )
                self._sender.start()

    def close(self) -> None:
        """Send no more, and close the connection; what waits is dropped."""
        with self._lock:
            if self._waiting:
                self._shut()
        if self._sender is not None:
            self._sender.join()
        self._connection.close()

    def _has_room(self, nbytes: int) -> bool:
        queued: int = struct.unpack("i", fcntl.ioctl(self._connection.fileno(), termios.TIOCOUTQ, bytes(4)))[0]
        return queued + nbytes <= self._room

    def _send_waiting(self, data: memoryview) -> None:
        while True:
            error = None
            try:
                self._connection.send_bytes(data)
            except OSError as found:
                error = found
            with self._lock:
                self._waiting.popleft()
                if error is not None:
                    self._error = error
                    self._waiting.clear()
                if not self._waiting:
                    return
                data = self._waiting[0]

    def _shut(self) -> None:
        with socket.socket(fileno=os.dup(self._connection.fileno())) as sock:
            sock.shutdown(socket.SHUT_RDWR)
