"""Slow, silent and greedy connections: none takes much memory, none stays, none keeps anybody else out."""

from __future__ import annotations

import json
import logging
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from cellar import AsyncLLM
from cellar.server.app import build_app
from cellar.server.config import LimitConfig, ServerConfig
from cellar.server.host import SameProcess, ServedModel
from tests.fake_front import open_fake
from tests.hostile.connections import chunked, head
from tests.limits import SECONDS, until
from tests.server.served import Served, running, serve
from tests.server.test_tls import trusting, write_certificate

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


# Made when they are asked for: tens of megabytes each.
GREEDY: dict[str, Callable[[], bytes]] = {
    "requests ahead": lambda: b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n" * 500_000,
    "one long header": lambda: b"GET /health HTTP/1.1\r\nhost: " + b"x" * 20_000_000,
    "many headers": lambda: b"GET /health HTTP/1.1\r\n" + b"".join(b"h%d: x\r\n" % k for k in range(1_000_000)),
    "a long address": lambda: b"GET /" + b"x" * 20_000_000,
    "chunks without an end": lambda: (
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
        + (b"1\r\nx\r\n" * 3_000_000)
    ),
    # found by the search of 2026-11-23: what stands behind a body was kept as headers, 183 MiB of 20 MB
    "headers behind the body": lambda: chunked() + b"0\r\n" + b"".join(b"h%d: x\r\n" % k for k in range(2_000_000)),
    "one long header behind it": lambda: chunked() + b"0\r\nh: " + b"x" * 40_000_000,
    "a chunk with a long name": lambda: chunked() + b"1;" + b"x" * 40_000_000,
}


@pytest.mark.parametrize("name", GREEDY)
def test_greed_takes_no_memory(served: Served, name: str) -> None:
    assert answered(served)
    data, before = GREEDY[name](), peak_mebibytes()
    with connect(served) as sock:
        thread = threading.Thread(target=send_all, args=(sock, data), daemon=True)
        thread.start()
        assert answered(served)
        end = rest(sock)
        thread.join(SECONDS)
    assert not thread.is_alive()
    if name in ("one long header", "many headers", "a long address"):
        assert not end or end.startswith((b"HTTP/1.1 431", b"HTTP/1.1 400"))
    if "behind" in name or "chunk with" in name:
        assert not end or end.startswith(b"HTTP/1.1 400")
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


@pytest.mark.long
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


BODY = json.dumps({"prompt": [5, 6, 7], "max_tokens": 2, "temperature": 0}).encode()


def whole(sock: socket.socket) -> bytes:
    """One answer with its body."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += sock.recv(65536)
    top, _, body = data.partition(b"\r\n\r\n")
    length = int(top.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
    while len(body) < length:
        body += sock.recv(65536)
    return top + body


def test_chunks_of_one_byte_make_the_same_request(served: Served) -> None:
    with connect(served) as plain, connect(served) as pieces:
        plain.sendall(head(len(BODY)) + BODY)
        pieces.sendall(chunked() + b"".join(b"1;a=b\r\n%c\r\n" % byte for byte in BODY) + b"0\r\nlate: x\r\n\r\n")
        once, again = whole(plain), whole(pieces)
        assert b'"text":' in once
        assert once.partition(b'"choices"')[2] == again.partition(b'"choices"')[2]
        pieces.sendall(head(len(BODY)) + BODY)  # the connection is as good as before
        assert whole(pieces).startswith(b"HTTP/1.1 200")


def test_a_key_behind_the_body_is_none() -> None:
    chunks = b"%x\r\n%b\r\n0\r\n" % (len(BODY), BODY)
    with serve({"api_key": "secret"}) as served, connect(served) as before, connect(served) as behind:
        before.sendall(chunked("x-api-key: secret\r\n") + chunks + b"\r\n")
        assert whole(before).startswith(b"HTTP/1.1 200")
        behind.sendall(chunked() + chunks + b"x-api-key: secret\r\n\r\n")
        assert whole(behind).startswith(b"HTTP/1.1 401")


@pytest.mark.long
def test_who_does_not_read_is_closed() -> None:
    """Its request ends, and so do its waiting answer and its place among the connections."""
    stream = {"prompt": [5, 6, 7], "n": 64, "max_tokens": 2000, "logprobs": 2, "ignore_eos": True, "stream": True}
    body = json.dumps(stream).encode()
    with serve(limits={"upload_timeout": 0.5}, num_rows=64, num_slots=30_000, max_model_len=8192) as served:
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.settimeout(SECONDS)
            host, port = served.url.removeprefix("http://").split(":")
            sock.connect((host, int(port)))
            sock.sendall(head(len(body)) + body)
            assert sock.recv(100).startswith(b"HTTP/1.1 200")
            served.settle()  # long before all its tokens are read
            assert b"[DONE]" not in rest(sock)
        assert answered(served)


@pytest.mark.long
def test_a_slow_reader_gets_all(served: Served) -> None:
    """It takes longer than the time for a request to come, but goes on reading."""
    body = json.dumps({"prompt": "a tree " * 100_000, "return_token_strs": True}).encode()
    with connect(served) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16384)
        sock.sendall(head(len(body), "connection: close\r\n").replace(b"/v1/completions", b"/tokenize") + body)
        data, begin = b"", time.monotonic()
        while got := sock.recv(65536):
            data += got
            if time.monotonic() - begin < 3 * LIMITS["upload_timeout"]:
                time.sleep(0.05)
    assert data.startswith(b"HTTP/1.1 200")
    assert len(data) > 2**20
    assert data.endswith(b"0\r\n\r\n")


def test_an_answer_does_not_wait_until_its_beginning_was_received(served: Served) -> None:
    """Its head and its body are written one after the other, and a client says after 40 ms what it has."""
    host, port = served.url.removeprefix("http://").split(":")
    connection, seconds = HTTPConnection(host, int(port), timeout=SECONDS), []
    for _ in range(40):
        begun = time.monotonic()
        connection.request("GET", "/v1/models")
        assert connection.getresponse().read()
        seconds.append(time.monotonic() - begun)
    connection.close()
    assert min(seconds[20:]) < 0.035


def test_who_closes_its_side_leaves_no_defect(caplog: pytest.LogCaptureFixture) -> None:
    """Answers met a transport that was closed already, and each of them was a traceback in the log."""
    with serve(latency=0.001) as served, caplog.at_level(logging.ERROR), ExitStack() as held:
        socks = []
        for _ in range(60):
            socks.append(held.enter_context(connect(served)))
            socks[-1].sendall(head(len(BODY)) + BODY)
            socks[-1].shutdown(socket.SHUT_WR)
        for sock in socks:  # the last may not have been read yet when the first are done with
            rest(sock)
        served.settle()
        assert answered(served)
    assert not caplog.records


UPGRADES = {
    "h2c": "connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQCAAAAAAIAAAAA\r\n",
    "websocket": "connection: upgrade\r\nupgrade: websocket\r\n",
    "several": "upgrade: x/1, h2c\r\nupgrade: y\r\nconnection: keep-alive\r\nconnection: upgrade\r\n",
}


@pytest.mark.parametrize("name", UPGRADES)
@pytest.mark.parametrize("cut", [None, 1, 100])
def test_who_asks_for_another_protocol_gets_this_one(served: Served, name: str, cut: int | None) -> None:
    """Its body was given up, and the answer was 400; Java's HttpClient asks for h2c every time."""
    plain = head(len(BODY), UPGRADES[name]) + BODY
    pieces = head(0, UPGRADES[name]).replace(b"content-length: 0", b"transfer-encoding: chunked")
    pieces += b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
    fetch = f"GET /health HTTP/1.1\r\nhost: localhost\r\n{UPGRADES[name]}\r\n".encode()
    last = head(len(BODY), UPGRADES[name] + "connection: close\r\n") + BODY
    sent = plain + fetch + pieces + plain + last
    with connect(served) as sock:
        for begin in range(0, len(sent), cut or len(sent)):
            sock.sendall(sent[begin : begin + (cut or len(sent))])
        data = rest(sock)
    assert data.count(b"HTTP/1.1 200 OK") == 5
    assert data.count(b"HTTP/1.1 ") == 5
    assert data.count(b'"text_completion"') == 4


def test_a_question_for_another_protocol_opens_no_door(served: Served) -> None:
    """A head that is read twice is held to the same limits, and a second length in it is refused as ever."""
    wrong = head(len(BODY), UPGRADES["h2c"] + "transfer-encoding: chunked\r\n") + BODY
    large = head(len(BODY), UPGRADES["h2c"] + "x: " + "x" * 2_000_000 + "\r\n") + BODY
    tunnel = b"CONNECT localhost:1 HTTP/1.1\r\nhost: localhost\r\n" + UPGRADES["h2c"].encode() + b"\r\n" + BODY
    for sent, status in ((wrong, b"400"), (large, b"431"), (tunnel, b"400")):
        with connect(served) as sock:
            send_all(sock, sent)
            assert rest(sock)[9:12] in (status, b"")  # nothing, if it was closed while we sent
    assert answered(served)


def test_there_are_no_websockets(served: Served) -> None:
    """Their connections would not be counted."""
    key = "sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
    with connect(served) as sock:
        sock.sendall(head(0, f"connection: upgrade\r\nupgrade: websocket\r\n{key}").replace(b"POST", b"GET"))
        assert whole(sock).startswith(b"HTTP/1.1 405")


# -- TLS ------------------------------------------------------------------------------------------


@contextmanager
def served_with_tls(folder: Path, **limits: Any) -> Iterator[tuple[str, dict[str, str]]]:
    options = write_certificate(folder)
    opened, _ = open_fake()
    server, most = ServerConfig(log_level="warning", **options), LimitConfig(**limits)  # type: ignore[arg-type]
    app = build_app(SameProcess(AsyncLLM.over(opened)), ServedModel.of(opened, ("fake",)), server, most)
    with running(app, most, server) as url:
        yield url, options


def silent_at(url: str, stack: ExitStack, count: int) -> list[socket.socket]:
    host, port = url.removeprefix("https://").split(":")
    return [stack.enter_context(socket.create_connection((host, int(port)), timeout=SECONDS)) for _ in range(count)]


def test_handshakes_that_never_begin_make_room(tmp_path: Path) -> None:
    with served_with_tls(tmp_path, max_connections=4) as (url, options), ExitStack() as stack:
        quiet = silent_at(url, stack, 12)
        with trusting(options) as http:
            assert http.get(f"{url}/health").status_code == 200
        assert [rest(sock) for sock in quiet[:8]] == [b""] * 8


def test_handshakes_that_never_end_are_closed(tmp_path: Path) -> None:
    with served_with_tls(tmp_path, upload_timeout=0.5) as (url, options), ExitStack() as stack:
        silence, half, wrong, gone = silent_at(url, stack, 4)
        half.sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03")
        wrong.sendall(head(len(BODY)) + BODY)
        gone.close()
        for sock in (silence, half, wrong):
            assert b"HTTP" not in rest(sock)
        with trusting(options) as http:
            body = {"prompt": [5], "max_tokens": 2}
            assert all(http.post(f"{url}/v1/completions", json=body).status_code == 200 for _ in range(3))
