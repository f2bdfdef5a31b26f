"""What clients and machines do to a server, all of it on one server with two fronts; then its books must balance.

The engine here checks its books whenever work ends and would end itself by a breach, so a restart that nobody caused
is one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.limits import SECONDS, join_all, until
from tests.server.fake_process import started
from tests.server.served import TEXT, plain
from tests.server.test_fronts import metrics, of

JSON = {"content-type": "application/json"}
MIB = 2**20


def address(url: str) -> tuple[str, int]:
    host, _, port = url.removeprefix("http://").partition(":")
    return host, int(port)


async def hang_up(url: str, rng: random.Random, k: int) -> None:
    """A client that goes: while it sends, while it waits, or while it reads."""
    body = {"prompt": [k % 50 + 3] * (1 + k % 40), "max_tokens": 120, "ignore_eos": True, "stream": bool(k % 2)}
    if k % 5 == 0:
        body["structured_outputs"] = {"regex": "[a-z]{100}"}
    sent = json.dumps({**body, "n": 1 + k % 3}).encode()
    head = (
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
        b"content-type: application/json\r\ncontent-length: %d\r\n\r\n"
    )
    data = head % len(sent) + sent
    with contextlib.suppress(TimeoutError, ConnectionError):
        reader, writer = await asyncio.open_connection(*address(url))
        writer.write(data[: rng.randrange(len(data))] if k % 10 == 0 else data)
        await asyncio.wait_for(reader.read(), rng.random() * 0.3)
    if k % 4 == 0:
        writer.transport.abort()
    else:
        writer.close()


def hang_ups(url: str, count: int) -> None:
    rng, gate = random.Random(2), asyncio.Semaphore(40)

    async def gated(k: int) -> None:
        async with gate:
            await hang_up(url, rng, k)

    async def run() -> None:
        await asyncio.gather(*(gated(k) for k in range(count)))

    asyncio.run(run())


def large_bodies(url: str) -> None:
    """100 MB: announced, and not announced; a client that sends on is cut off, one that listens is told."""
    pieces = (b" " * MIB for _ in range(100))
    with contextlib.suppress(httpx.TransportError):
        assert httpx.post(f"{url}/v1/completions", content=pieces, headers=JSON, timeout=SECONDS).status_code == 413
    with socket.create_connection(address(url), timeout=SECONDS) as sock:
        sock.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 104857600\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            for _ in range(100):
                sock.sendall(b"x" * MIB)
        with contextlib.suppress(ConnectionError):
            assert sock.recv(100).startswith(b"HTTP/1.1 413")


def malformed(url: str) -> None:
    for body in (b'{"prompt": "\xff\xfe"}', b"\xff" * 1000, b"[" * 10**6, b'{"prompt": "\\udc00"}', b"{" * 10):
        answer = httpx.post(f"{url}/v1/completions", content=body, headers=JSON, timeout=SECONDS)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["message"]


def large_schema(url: str) -> None:
    """10 MB of it: more than this server takes for a grammar."""
    schema = {"enum": ["x" * 1000 + str(k) for k in range(10_000)]}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    body = {"prompt": [5], "response_format": wanted}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=SECONDS)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "response_format"


def bombs(url: str) -> None:
    for regex in ("(((a{1,1000}){1,1000}){1,1000}){1,1000}", "(x+x+)+y" * 50, "(a|b|ab|ba)*" * 2000):
        body = {"prompt": [5], "max_tokens": 8, "structured_outputs": {"regex": regex}}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=SECONDS)
        assert answer.status_code in (200, 400), answer.text


@pytest.fixture
def server() -> Iterator[tuple[Any, str]]:
    limits = {"max_body_bytes": 32 * MIB}
    process, url = started(fronts=2, latency=0.002, num_slots=96, num_rows=16, limits=limits)
    yield process, url
    process.terminate()
    _, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, errors
    assert "Traceback" not in errors, errors


@pytest.mark.long
def test_a_server_outlives_its_clients(server: tuple[Any, str]) -> None:
    _, url = server
    threads = [threading.Thread(target=hang_ups, args=(url, 1000))]
    threads += [threading.Thread(target=fault, args=(url,)) for fault in (malformed, large_schema, bombs)]
    for thread in threads:
        thread.start()
    large_bodies(url)
    join_all(threads, 2 * SECONDS)
    idle = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    until(lambda: all(of(found, stem) == 0 for found in [metrics(url)] for stem in idle))
    found = metrics(url)
    assert of(found, "engine_restarts_total") == of(found, "front_restarts_total") == 0
    assert of(found, "engine_up") == 1
    assert not any('status="500"' in name for name in found)
    assert sum(count for name, count in found.items() if "request_success" in name and '"abort"' in name) > 250
    for _ in range(4):
        body = {"prompt": [7, 8], "max_tokens": 9, "ignore_eos": True}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=SECONDS)
        assert answer.json()["choices"][0]["text"] == TEXT.decode(plain([7, 8], 9))
