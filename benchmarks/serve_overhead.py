"""What a client costs itself per streamed event: `python -m benchmarks.serve_overhead`.

A process of its own streams events at a fixed pace, so slowly that no client is the limit; the figure is the CPU time
of the client's process per event. With httpx installed, its figure stands beside that of the client in use.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import socket
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from cellar.bench.serve.client import Answer, EventReader, LoadClient

BODY = json.dumps({"model": "m", "prompt": list(range(200))}).encode()
CHOICE = {"index": 0, "text": " hello", "logprobs": None, "finish_reason": None, "stop_reason": None}
EVENT = {"id": "cmpl-" + 32 * "0", "object": "text_completion", "created": 1, "model": "m", "choices": [CHOICE]}

Ask = Callable[[], Awaitable[Answer]]


@dataclass(frozen=True)
class Pace:
    """How many streams of how many events, one each `pause` seconds, how often."""

    streams: int = 32
    events: int = 100
    pause: float = 0.01
    rounds: int = 5


class _Source(asyncio.Protocol):
    """Answers every request with a stream."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._received = b""

    def data_received(self, data: bytes) -> None:
        self._received += data
        if self._received.endswith(BODY):
            self._received = b""
            self._task = asyncio.ensure_future(self._stream())

    async def _stream(self) -> None:
        self._transport.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        for _ in range(self._pace.events):
            await asyncio.sleep(self._pace.pause)
            self._transport.write(_chunk(json.dumps(EVENT, separators=(",", ":")).encode()))
        self._transport.write(_chunk(b"[DONE]") + b"0\r\n\r\n")


def _chunk(data: bytes) -> bytes:
    event = b"data: " + data + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(event), event)


def _serve(listener: socket.socket, pace: Pace) -> None:
    async def forever() -> None:
        server = await asyncio.get_running_loop().create_server(partial(_Source, pace), sock=listener, backlog=1024)
        await server.serve_forever()

    asyncio.run(forever())


async def _cost(ask: Ask, pace: Pace) -> float:
    """Median over rounds of the CPU seconds of this process per event; the first round opens connections."""
    found = []
    for _ in range(pace.rounds + 1):
        before = time.process_time()
        answers = await asyncio.gather(*(ask() for _ in range(pace.streams)))
        found.append((time.process_time() - before) / sum(len(answer.times) for answer in answers))
    return statistics.median(found[1:])


async def measure_ours(root: str, pace: Pace) -> float:
    """The client of `cellar bench serve`."""
    async with LoadClient.open(root, root + "/v1/completions", {}) as client:
        return await _cost(lambda: client.ask(BODY), pace)


async def measure_httpx(root: str, pace: Pace) -> float:
    """The same by httpx."""
    import httpx

    async with httpx.AsyncClient(limits=httpx.Limits(max_connections=None), timeout=None) as client:

        async def ask() -> Answer:
            answer = Answer(sent=time.perf_counter())
            reader = EventReader(answer)
            async with client.stream("POST", root + "/v1/completions", content=BODY) as response:
                async for data in response.aiter_raw():
                    reader.feed(data, time.perf_counter())
            return answer

        return await _cost(ask, pace)


def main(pace: Pace = Pace()) -> None:
    """Print a line per client; the last line is JSON."""
    import uvloop

    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    source = multiprocessing.get_context("spawn").Process(target=_serve, args=(listener, pace), daemon=True)
    source.start()
    root = f"http://127.0.0.1:{listener.getsockname()[1]}"
    measures: list[tuple[str, Callable[[str, Pace], Any]]] = [("aiohttp", measure_ours), ("httpx", measure_httpx)]
    found = {}
    for name, measure in measures:
        for loop, run in (("asyncio", asyncio.run), ("uvloop", uvloop.run)):
            try:
                found[f"{name}, {loop}"] = run(measure(root, pace)) * 1e6
            except ImportError:
                continue
            print(f"{name}, {loop}: {found[f'{name}, {loop}']:.0f} us of CPU per event")
    source.terminate()
    source.join()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
