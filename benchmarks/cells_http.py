"""Cells over HTTP: `python -m benchmarks.cells_http`.

A server of a classifier in a process of its own, and connections that each send the next request when the last one is
answered. Printed: requests/s, latency, what a request costs the server in CPU time (which a busy machine changes
least), and requests/s of the same engine without HTTP, in the server's process before it serves. JSON last.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from cellar.cells.heads import ClassifierHead
from cellar.cells.lstm import TokenLSTMCell
from cellar.cells.sequence import classifier
from cellar.engine.cells import CellEngine
from cellar.server.cells.app import PATH, build_cells_app
from cellar.server.config import LimitConfig, ServerConfig
from cellar.server.serving import run

VOCAB, CLASSES, MOST_WORDS = 1000, 5, 30
START_SECONDS = 300.0


@dataclass(frozen=True)
class Load:
    """What is served, and to how many connections."""

    hidden: int = 256
    device: str = "auto"
    threads: int = 1
    connections: int = 64
    requests: int = 5000
    seed: int = 0


def bodies(load: Load) -> list[dict[str, list[int]]]:
    """Sentences of 1 to 30 words."""
    rng = random.Random(load.seed)
    return [{"tokens": [rng.randrange(VOCAB) for _ in range(rng.randint(1, MOST_WORDS))]} for _ in range(500)]


def _serve(load: Load, listener: socket.socket, pipe: Connection) -> None:
    """The server's process: the engine alone first, then HTTP; answers every message with its CPU seconds so far."""
    torch.manual_seed(load.seed)
    torch.set_num_threads(load.threads)
    model = classifier(TokenLSTMCell(VOCAB, load.hidden, load.hidden), ClassifierHead(load.hidden, CLASSES))
    engine = CellEngine.open([model], (load.device,), num_threads=load.threads)
    asked = bodies(load)
    engine.run(model.name, asked)
    begun, all_ = time.perf_counter(), [asked[k % len(asked)] for k in range(load.requests)]
    engine.run(model.name, all_)
    pipe.send((model.name, load.requests / (time.perf_counter() - begun)))

    def answer() -> None:
        with suppress(EOFError):  # the client has gone
            while pipe.recv():
                pipe.send(time.process_time())

    threading.Thread(target=answer, daemon=True).start()
    limits = LimitConfig()
    server = ServerConfig(log_level="warning")
    run(build_cells_app(engine, server, limits), listener, server, limits)


async def _client(address: tuple[str, int], path: str, requests: Iterator[bytes], seconds: list[float]) -> None:
    """A connection that asks until there is nothing left to ask."""
    reader, writer = await asyncio.open_connection(*address)
    for body in requests:
        head = (
            f"POST {path} HTTP/1.1\r\nhost: localhost\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        sent = time.perf_counter()
        writer.write(head.encode() + body)
        answer = (await reader.readuntil(b"\r\n\r\n")).lower()
        if not answer.startswith(b"http/1.1 200"):
            raise RuntimeError(answer.decode())
        await reader.readexactly(int(answer.partition(b"content-length:")[2].split(b"\r\n", 1)[0]))
        seconds.append(time.perf_counter() - sent)
    writer.close()


async def _load(address: tuple[str, int], path: str, load: Load, count: int) -> list[float]:
    """-> seconds of each of `count` requests."""
    sentences = [json.dumps(body).encode() for body in bodies(load)]
    requests = (sentences[k % len(sentences)] for k in range(count))
    seconds: list[float] = []
    await asyncio.gather(*(_client(address, path, requests, seconds) for _ in range(load.connections)))
    return seconds


def measure(load: Load) -> dict[str, Any]:
    """Start the server, warm it up, load it."""
    context = multiprocessing.get_context("spawn")
    listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
    pipe, theirs = context.Pipe()
    server = context.Process(target=_serve, args=(load, listener, theirs), daemon=True)
    server.start()
    try:
        if not pipe.poll(START_SECONDS):
            raise TimeoutError("the server did not start")
        name, alone = pipe.recv()
        address, path = listener.getsockname()[:2], f"{PATH}/{name}"
        asyncio.run(_load(address, path, load, max(200, load.requests // 10)))

        def cpu() -> float:
            pipe.send(True)
            found: float = pipe.recv()
            return found

        used, begun, own = cpu(), time.perf_counter(), time.process_time()
        seconds = sorted(asyncio.run(_load(address, path, load, load.requests)))
        elapsed, spent, client = time.perf_counter() - begun, cpu() - used, time.process_time() - own
    finally:
        server.terminate()
        server.join()
        listener.close()
    return {
        "benchmark": "cells_http",
        "setup": asdict(load),
        "requests_per_second": load.requests / elapsed,
        "requests_per_second_without_http": alone,
        "server_cpu_us": 1e6 * spent / load.requests,
        "client_cpu_us": 1e6 * client / load.requests,
        "p50": seconds[len(seconds) // 2],
        "p90": seconds[len(seconds) * 9 // 10],
        "torch": torch.__version__,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cells_http", description=__doc__)
    for name, default in asdict(Load()).items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    found = measure(Load(**vars(parser.parse_args(arguments))))
    print(
        f"{found['requests_per_second']:,.0f} requests/s over HTTP, {found['requests_per_second_without_http']:,.0f} "
        f"without; CPU {found['server_cpu_us']:.0f} us a request in the server, {found['client_cpu_us']:.0f} in the "
        f"client; p50 {1e3 * found['p50']:.1f} ms, p90 {1e3 * found['p90']:.1f} ms"
    )
    print(json.dumps(found))


if __name__ == "__main__":
    main()
