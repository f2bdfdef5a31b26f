"""Slow and greedy connections, from a seed: many, silent, half said, said ahead, never read, hung up."""

from __future__ import annotations

import json
import random
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress

STREAM = json.dumps({"prompt": [5, 6, 7], "max_tokens": 200, "ignore_eos": True, "stream": True}).encode()


def head(length: int, more: str = "") -> bytes:
    return (
        f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n{more}"
        f"content-length: {length}\r\n\r\n"
    ).encode()


def chunked(more: str = "") -> bytes:
    """The head of a request whose body comes in chunks."""
    return head(0, f"{more}transfer-encoding: chunked\r\n").replace(b"content-length: 0\r\n", b"")


def crowd(url: str, seed: int, go_on: Callable[[int], bool], more: str = "", most: int = 40) -> int:
    """Open connections, at most `most` at a time, and misuse them while `go_on(count)`; -> how many there were."""
    rng, count = random.Random(seed), 0
    host, port = url.removeprefix("http://").split(":")
    while go_on(count):
        with ExitStack() as held:
            for _ in range(rng.randrange(1, most)):
                count += 1
                with suppress(OSError):
                    sock = held.enter_context(socket.create_connection((host, int(port)), timeout=5))
                    sock.settimeout(2)
                    misuse(rng, sock, more)
            time.sleep(rng.random())
    return count


def misuse(rng: random.Random, sock: socket.socket, more: str) -> None:
    """One way to be a nuisance; the connection stays open."""
    match rng.randrange(16):
        case 0:
            pass  # silence
        case 1:
            sock.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: loc")
        case 2:
            sock.sendall(head(10_000, more) + b'{"prompt": "')
        case 3:
            sock.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n" * 2000)
        case 4:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
            sock.sendall(head(len(STREAM), more) + STREAM)  # and never read
        case 5:
            sock.sendall(head(len(STREAM), more) + STREAM)
            sock.recv(rng.randrange(1, 400))
            sock.close()  # hang up in the middle
        case 6:
            sock.sendall(bytes(rng.randrange(256) for _ in range(300)))
        case 7:
            sock.sendall(chunked(more) + b"1\r\n \r\n" * rng.randrange(50_000))
        case 8:
            sock.sendall(chunked(more) + b"1;" + b"x" * rng.randrange(500_000) + b"\r\n \r\n0\r\n\r\n")
        case 9:
            sock.sendall(chunked(more) + b"0\r\n" + b"".join(b"h%d: x\r\n" % k for k in range(rng.randrange(50_000))))
        case 10:
            sock.sendall(
                head(len(STREAM), f"{more}expect: 100-continue\r\n") + STREAM[: rng.randrange(len(STREAM) + 1)]
            )
        case 11:
            upgrade = rng.choice(("websocket", "h2c", "x"))
            sock.sendall(head(len(STREAM), f"{more}connection: upgrade\r\nupgrade: {upgrade}\r\n") + STREAM)
        case 12:
            sock.sendall(
                head(len(STREAM), more).replace(b"/1.1", rng.choice((b"/1.0", b"/0.9", b"/2.0", b""))) + STREAM
            )
        case 13:
            sock.sendall(head(len(STREAM), more) + STREAM)
            sock.shutdown(socket.SHUT_WR)
        case 14:
            length = rng.choice((b"-1", b"1" * 30, b"5\r\ncontent-length: 6", b"5\r\ntransfer-encoding: chunked"))
            sock.sendall(head(0, more).replace(b"length: 0", b"length: " + length) + STREAM)
        case _:
            sock.sendall(b"GET / HTTP/1.1\r\nhost: " + b"x" * 200_000)
