"""A way between two programs that can be cut as a cable is, broken, made longer and made narrower.

No program is told of a cut: packets are dropped in the kernel, by a filter on the sockets of a proxy (socket(7),
SO_ATTACH_FILTER), so its neighbours get neither an answer, nor an acknowledgement, nor an end.
"""

from __future__ import annotations

import ctypes
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import Queue

Target = tuple[str, int] | Path
"""A TCP port, or a Unix socket."""

_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27
_PIECE, _PIECES = 2**14, 16  # what is under way in one direction is that much at most


class _Instruction(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint16), ("jt", ctypes.c_uint8), ("jf", ctypes.c_uint8), ("k", ctypes.c_uint32))


class _Program(ctypes.Structure):
    _fields_ = (("len", ctypes.c_uint16), ("filter", ctypes.POINTER(_Instruction)))


def deafen(sock: socket.socket) -> None:
    """Drop every packet that comes for a TCP socket, before the system answers it: `BPF_RET | BPF_K`, 0 bytes."""
    nothing = _Instruction(0x06, 0, 0, 0)
    program = _Program(1, ctypes.pointer(nothing))
    sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, bytes(program))


class Way:
    """Passes what comes to its own `port` of 127.0.0.1, or to a `listener`, on to `target`, and back.

    Bytes take `delay` seconds in each direction, and no more than `rate` of them pass in a second.
    """

    def __init__(self, target: Target, listener: socket.socket | None = None) -> None:
        self.delay, self.rate = 0.0, float("inf")
        self._target = target
        self._open = threading.Event()
        self._open.set()
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._listener = listener or socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """From now on nothing passes, and nobody hears of it."""
        with self._lock:
            self._open.clear()
            for sock in (self._listener, *self._sockets):
                deafen(sock)

    def heal(self) -> None:
        """Let pass again."""
        with self._lock:
            for sock in (self._listener, *self._sockets):
                with suppress(OSError):
                    sock.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)
            self._open.set()

    def break_off(self) -> None:
        """End all connections, as a program does that ends; new ones may be made."""
        with self._lock:
            for sock in self._sockets:
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Take nobody else, and end all."""
        self.heal()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.break_off()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                threading.Thread(target=self._carry, args=(near,), daemon=True).start()

    def _carry(self, near: socket.socket) -> None:
        self._open.wait()
        try:
            if isinstance(self._target, Path):
                far = socket.socket(socket.AF_UNIX)
                far.connect(str(self._target))
            else:
                far = socket.create_connection(self._target)
        except OSError:
            near.close()
            return
        with near, far:
            with self._lock:
                self._sockets |= {near, far}
                if not self._open.is_set():
                    deafen(near)
                    deafen(far)
            directions = [
                threading.Thread(target=self._pass, args=ends, daemon=True) for ends in ((near, far), (far, near))
            ]
            for direction in directions:
                direction.start()
            for direction in directions:
                direction.join()
            with self._lock:
                self._sockets -= {near, far}

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        """One direction: read here, write in another thread when it is due."""
        under_way: Queue[tuple[float, bytes]] = Queue(_PIECES)
        writer = threading.Thread(target=self._write, args=(under_way, sink), daemon=True)
        writer.start()
        free = 0.0  # when the way has room again
        data = b"?"
        while data:
            try:
                data = source.recv(_PIECE)
            except OSError:
                data = b""
            free = max(free, time.monotonic()) + len(data) / self.rate
            under_way.put((free + self.delay, data))
        writer.join()

    def _write(self, under_way: Queue[tuple[float, bytes]], sink: socket.socket) -> None:
        broken = False
        while True:
            due, data = under_way.get()
            time.sleep(max(0.0, due - time.monotonic()))
            self._open.wait()
            with suppress(OSError):
                if not data:
                    sink.shutdown(socket.SHUT_WR)
                elif not broken:
                    broken = True
                    sink.sendall(data)
                    broken = False
            if not data:
                return


@contextmanager
def way(target: Target) -> Iterator[Way]:
    """A way, gone afterwards."""
    made = Way(target)
    try:
        yield made
    finally:
        made.close()
