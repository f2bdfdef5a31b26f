"""What a request costs a server before it is anybody's: `python -m benchmarks.parsers`.

A server whose application answers two bytes reads requests of a few hundred bytes, one after another on a connection
that stays, by uvicorn's protocol over h11 (Python), by its protocol over httptools (C), and by Cellar's, which is the
latter within the limits on strangers. The figure is the CPU time of its process for a request;
turns alternate.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import socket
import statistics
import time
from multiprocessing.connection import Connection as Pipe
from typing import Any

import uvicorn

from cellar.server.config import LimitConfig, ServerConfig
from cellar.server.serving import server_config

KINDS = ("h11", "httptools", "cellar")

BODY = b'{"prompt": [5, 6, 7], "max_tokens": 8, "temperature": 0, "stream": true}'
REQUEST = b"".join(
    (
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost:8000\r\naccept: application/json\r\n",
        b"accept-encoding: gzip, deflate\r\nconnection: keep-alive\r\nuser-agent: OpenAI/Python 2.8.1\r\n",
        b"content-type: application/json\r\nauthorization: Bearer none\r\nx-stainless-lang: python\r\n",
        b"content-length: %d\r\n\r\n%b" % (len(BODY), BODY),
    )
)
ANSWER_END = b"ok"


async def answered(scope: dict[str, Any], receive: Any, send: Any) -> None:
    """An application that reads the body and says nothing of it."""
    if scope["type"] != "http":
        return
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": ANSWER_END})


def serve(kind: str, port: Pipe) -> None:
    """In a process: serve until the pipe's other end says so; whenever it asks, say how much CPU time was taken."""
    if kind == "cellar":
        config = server_config(answered, ServerConfig(log_level="error"), LimitConfig())  # type: ignore[arg-type]
    else:
        options: dict[str, Any] = {"log_level": "error", "access_log": False, "server_header": False}
        config = uvicorn.Config(answered, http=kind, **options)
    config.lifespan = "off"

    async def run() -> None:
        server, listener = uvicorn.Server(config), socket.create_server(("127.0.0.1", 0))
        serving = asyncio.create_task(server.serve([listener]))
        port.send(listener.getsockname()[1])
        while await asyncio.to_thread(port.recv):
            port.send(time.process_time())
        server.should_exit = True
        await serving

    asyncio.run(run())


class Server:
    """One kind's process, and a connection to it."""

    def __init__(self, kind: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(kind, theirs), daemon=True)
        self._process.start()
        self._connection = socket.create_connection(("127.0.0.1", self._pipe.recv()))
        # What was received is said at once: two of the three wait for that before they write on.
        self._quick = getattr(socket, "TCP_QUICKACK", None)

    def cost(self, count: int) -> float:
        """Microseconds of a request, of so many."""
        before = self._taken()
        for _ in range(count):
            self._connection.sendall(REQUEST)
            said = b""
            while not said.endswith(b"\r\n\r\n" + ANSWER_END):
                if self._quick is not None:
                    self._connection.setsockopt(socket.IPPROTO_TCP, self._quick, 1)
                said += self._connection.recv(2**16)
        return (self._taken() - before) / count * 1e6

    def close(self) -> None:
        """End it."""
        self._connection.close()
        self._pipe.send(False)
        self._process.join(10)

    def _taken(self) -> float:
        self._pipe.send(True)
        return float(self._pipe.recv())


def main() -> None:
    """Command line of this module."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.parsers", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--requests", type=int, default=2000, help="of a turn")
    options = parser.parse_args()
    servers = {kind: Server(kind) for kind in KINDS}
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for k in range(options.rounds + 1):
        for kind in KINDS if k % 2 else reversed(KINDS):
            cost = servers[kind].cost(options.requests)
            if k:
                found[kind].append(cost)
    for kind, costs in found.items():
        print(f"{kind}: {statistics.median(costs):.1f} us a request ({min(costs):.1f} to {max(costs):.1f})")
        servers[kind].close()


if __name__ == "__main__":
    main()
