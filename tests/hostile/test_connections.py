"""Slow, silent and greedy connections: none takes much memory, none stays, none keeps anybody else out."""

from __future__ import annotations

import resource
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest

from tests.limits import SECONDS, until
from tests.server.served import Served, serve

LIMITS = {"upload_timeout": 1.0, "max_head_bytes": 8192, "max_body_bytes": 2**20}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve(limits=LIMITS) as server:
        yield server


def connect(served: Served) -> socket.socket:
    host, port = served.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=SECONDS)


def rest(sock: socket.socket) -> bytes:
    """What comes until the other side closes."""
    data = b""
    try:
        while got := sock.recv(65536):
            data += got
    except ConnectionError:
        pass
    return data


def send_all(sock: socket.socket, data: bytes) -> None:
    """As much as the other side takes."""
    with suppress(OSError):
        sock.sendall(data)


def peak_mebibytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def answered(served: Served) -> bool:
    with served.http() as http:
        return http.get("/health").status_code == 200


GREEDY = {
    "requests ahead": b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n" * 500_000,
    "one long header": b"GET /health HTTP/1.1\r\nhost: " + b"x" * 20_000_000,
    "many headers": b"GET /health HTTP/1.1\r\n" + b"".join(b"h%d: x\r\n" % k for k in range(1_000_000)),
    "a long address": b"GET /" + b"x" * 20_000_000,
    "chunks without an end": b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
    + (b"1\r\nx\r\n" * 3_000_000),
}


@pytest.mark.parametrize("name", GREEDY)
def test_greed_takes_no_memory(served: Served, name: str) -> None:
    assert answered(served)
    data, before = GREEDY[name], peak_mebibytes()
    with connect(served) as sock:
        thread = threading.Thread(target=send_all, args=(sock, data), daemon=True)
        thread.start()
        assert answered(served)
        end = rest(sock)
        thread.join(SECONDS)
    assert not thread.is_alive()
    if name in ("one long header", "many headers", "a long address"):
        assert not end or end.startswith((b"HTTP/1.1 431", b"HTTP/1.1 400"))
    assert answered(served)
    assert peak_mebibytes() - before < 64


@pytest.mark.parametrize(
    "begun",
    [
        b"",
        b"GET /hea",
        b"GET /health HTTP/1.1\r\nhost: localhost\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{",
    ],
    ids=["silence", "half a line", "half a head", "half a body"],
)
@pytest.mark.parametrize("drips", [False, True], ids=["stops", "drips"])
def test_who_does_not_come_to_an_end_is_closed(served: Served, begun: bytes, drips: bool) -> None:
    begin = time.monotonic()
    with connect(served) as sock:
        sock.sendall(begun)
        stop = threading.Event()

        def drip() -> None:
            while not stop.wait(0.1):
                try:
                    sock.sendall(b"x")
                except OSError:
                    break

        thread = threading.Thread(target=drip, daemon=True)
        if drips and begun:
            thread.start()
        end = rest(sock)
        stop.set()
    assert time.monotonic() - begin > 0.9
    assert not end or end.startswith(b"HTTP/1.1 408")
    served.settle()


@contextmanager
def silent(served: Served, count: int) -> Iterator[list[socket.socket]]:
    with ExitStack() as stack:
        yield [stack.enter_context(connect(served)) for _ in range(count)]


def test_silent_connections_make_room_and_streams_stay() -> None:
    with serve(limits={"max_connections": 6}, latency=0.01) as served, connect(served) as stream:
        body = b'{"prompt": [5, 6, 7], "max_tokens": 300, "ignore_eos": true, "stream": true, "temperature": 0}'
        head = (
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
            b"content-type: application/json\r\nconnection: close\r\n"
        )
        stream.sendall(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        first = stream.recv(65536)
        with silent(served, 20) as quiet:
            assert answered(served)
            gone = [sock for sock in quiet[:10] if rest(sock) == b""]  # those that were silent for longest
            assert len(gone) == 10
        assert b"data: [DONE]" in first + rest(stream)


def test_an_address_has_its_share() -> None:
    """Its own silent connections make room, others' do not; who is being answered stays."""
    body = b'{"prompt": [5, 6, 7], "max_tokens": 2000, "ignore_eos": true, "stream": true, "temperature": 0}'
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    with serve(limits={"max_connections_per_address": 3}, latency=0.01) as served, silent(served, 5) as quiet:
        assert [rest(sock) for sock in quiet[:2]] == [b"", b""]
        for sock in quiet[2:]:
            sock.sendall(head + b"content-length: %d\r\n\r\n" % len(body) + body)
            assert b"200 OK" in sock.recv(65536)
        with connect(served) as one_more:
            assert rest(one_more).startswith(b"HTTP/1.1 503")
        quiet[2].close()  # who has left does not count
        until(lambda: answered(served))


def test_a_second_request_waits_as_long_as_the_first_is_answered() -> None:
    """Its head is not whole yet, and the answer before it takes longer than heads may."""
    with serve(limits={"upload_timeout": 0.3}, latency=0.02) as served, connect(served) as sock:
        body = b'{"prompt": [5, 6, 7], "max_tokens": 60, "ignore_eos": true, "temperature": 0}'
        head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        sock.sendall(head + b"content-length: %d\r\n\r\n" % len(body) + body + b"GET /health HT")
        answer = sock.recv(65536)
        assert answer.startswith(b"HTTP/1.1 200")
        sock.sendall(b"TP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        assert b"HTTP/1.1 200" in answer[20:] + rest(sock)
