"""A request that has come but was not read when its connection is to end: it is answered, whatever held up the loop."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvicorn
import uvloop

from cellar.server.config import LimitConfig
from cellar.server.connection import connections
from cellar.server.serving import Server, listen
from tests.limits import SECONDS

LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
KEEP_ALIVE = 1
ASK = b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n"


async def app(scope: Any, receive: Callable[[], Awaitable[Any]], send: Callable[[Any], Awaitable[None]]) -> None:
    """Says ok."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


def asked(client: socket.socket) -> bytes:
    """A request and its answer."""
    client.sendall(ASK)
    return answer(client)


def answer(client: socket.socket) -> bytes:
    """Up to the body's end, or what came of it; nothing from a connection that was reset."""
    got = b""
    while not got.endswith(b"ok"):
        try:
            more = client.recv(4096)
        except ConnectionResetError:
            return b"reset"
        if not more:
            break
        got += more
    return got


def connected(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), SECONDS)


async def started(listener: socket.socket, limits: LimitConfig) -> Server:
    config = uvicorn.Config(
        app, http=connections(limits), timeout_keep_alive=KEEP_ALIVE, lifespan="off", log_config=None
    )
    config.load()
    server = Server(config)
    server.lifespan = config.lifespan_class(config)
    await server.startup([listener])
    return server


def held_up(name: str, until: float, meanwhile: Callable[[], None]) -> None:
    """Keep the running loop busy until then and with `meanwhile`, so that its timers are asked before its sockets."""
    loop = asyncio.get_running_loop()

    def busy() -> None:
        time.sleep(max(0.0, until - time.monotonic()))
        meanwhile()

    if name == "asyncio":  # it notes what is due, then runs what was ready before

        def past() -> None:
            time.sleep(max(0.0, until - time.monotonic()))
            loop.call_soon(meanwhile)

        loop.call_later(until - time.monotonic() - 0.2, past)
        return
    read, write = os.pipe()  # libuv asks timers behind what sockets brought

    def readable() -> None:
        loop.remove_reader(read)
        os.close(read)
        os.close(write)
        busy()

    loop.add_reader(read, readable)
    loop.call_later(until - time.monotonic() - 0.2, os.write, write, b"x")


@pytest.mark.parametrize("name", LOOPS)
def test_a_request_on_an_idle_connection_is_read_before_it_ends(name: str) -> None:
    async def run() -> bytes:
        with listen("127.0.0.1", 0) as listener, connected(listener.getsockname()[1]) as client:
            server = await started(listener, LimitConfig())
            assert (await asyncio.to_thread(asked, client)).endswith(b"ok")
            held_up(name, time.monotonic() + KEEP_ALIVE + 0.1, lambda: client.sendall(ASK))
            got = await asyncio.to_thread(answer, client)
            await server.shutdown([listener])
            return got

    with asyncio.Runner(loop_factory=LOOPS[name]) as runner:
        assert runner.run(run()).endswith(b"ok")


@pytest.mark.parametrize("name", LOOPS)
def test_an_idle_connection_ends(name: str) -> None:
    async def run() -> bytes:
        with listen("127.0.0.1", 0) as listener, connected(listener.getsockname()[1]) as client:
            server = await started(listener, LimitConfig())
            await asyncio.to_thread(asked, client)
            got = await asyncio.to_thread(answer, client)
            await server.shutdown([listener])
            return got

    with asyncio.Runner(loop_factory=LOOPS[name]) as runner:
        assert runner.run(run()) == b""


@pytest.mark.parametrize("name", LOOPS)
def test_the_first_request_is_read_though_its_time_is_over(name: str) -> None:
    async def run() -> bytes:
        with listen("127.0.0.1", 0) as listener, connected(listener.getsockname()[1]) as client:
            server = await started(listener, LimitConfig(upload_timeout=1.0))
            while not server.server_state.connections:
                await asyncio.sleep(0.01)
            held_up(name, time.monotonic() + 1.1, lambda: client.sendall(ASK))
            got = await asyncio.to_thread(answer, client)
            await server.shutdown([listener])
            return got

    with asyncio.Runner(loop_factory=LOOPS[name]) as runner:
        assert runner.run(run()).endswith(b"ok")


@pytest.mark.parametrize("name", LOOPS)
def test_who_asked_before_a_drain_is_answered(name: str) -> None:
    """On a connection that was idle, on one that nobody has accepted, and on one that says something a moment later."""

    async def run() -> list[bytes]:
        with listen("127.0.0.1", 0) as listener:
            port = listener.getsockname()[1]
            server = await started(listener, LimitConfig())
            idle, late = connected(port), connected(port)
            for client in (idle, late):
                await asyncio.to_thread(asked, client)
            idle.sendall(ASK)  # the loop is here, and reads nothing meanwhile
            new = connected(port)
            new.sendall(ASK)
            clients = (idle, new, late)
            answers = asyncio.gather(*(asyncio.to_thread(answer, client) for client in clients))
            began = time.monotonic()
            closing = asyncio.ensure_future(server.shutdown([listener]))
            await asyncio.sleep(0)  # it has begun, and nothing has been read yet
            threading.Timer(0.1, late.sendall, [ASK]).start()
            await closing
            assert time.monotonic() - began < SECONDS / 2
            got = list(await answers)
            for client in clients:
                assert client.recv(1) == b""  # the answer was the last
                client.close()
            return got

    with asyncio.Runner(loop_factory=LOOPS[name]) as runner:
        found = runner.run(run())
    for got in found:
        assert got.endswith(b"ok"), got
    assert b"connection: close" in found[-1].lower()
