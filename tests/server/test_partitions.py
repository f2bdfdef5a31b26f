"""An engine whose host is cut off: packets vanish, and nobody is told. See `tests/network.py`."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection

import numpy as np
import pytest

from cellar import AsyncLLM, SamplingParams
from cellar.conversations import database
from cellar.server import endpoint
from cellar.server.endpoint import Endpoint
from cellar.server.outlet import Outlet
from cellar.server.pool.choice import Sticky
from cellar.server.pool.host import PoolHost
from tests.conversations.postgres import cluster
from tests.fake_front import ROOMY
from tests.limits import SECONDS, eventually, until
from tests.network import Way, way
from tests.server.fake_process import attach
from tests.server.served import MODEL, plain, serve
from tests.server.test_pool import Local

FAKE = {"latency": 0.01, **ROOMY}


class Far:
    """Two engines, each at the end of a way, and a host that knows both."""

    def __init__(self, stack: ExitStack) -> None:
        # By numbers of requests alone, so that both engines get some.
        self.host = PoolHost(partial(attach, **FAKE), chooser=Sticky())
        stack.callback(self.host.leave)
        self.engines = [Local(**FAKE) for _ in range(2)]
        self.ways: list[Way] = []
        self.addresses: list[Endpoint] = []
        for engine in self.engines:
            stack.callback(engine.close)
            assert isinstance(engine.address, Endpoint)
            self.ways.append(stack.enter_context(way((engine.address.host, engine.address.port))))
            self.addresses.append(replace(engine.address, port=self.ways[-1].port))
        for address in self.addresses:
            self.host.add(address)
        until(lambda: len(self.host.addresses()) == 2)

    @property
    def llm(self) -> AsyncLLM:
        assert self.host.llm is not None
        return self.host.llm


@pytest.fixture
def silence(monkeypatch: pytest.MonkeyPatch) -> int:
    """After so many seconds a silent host is given up."""
    monkeypatch.setattr(endpoint, "SILENCE_SECONDS", 2)
    return 2


@pytest.fixture
def far() -> Iterator[Far]:
    with ExitStack() as stack:
        yield Far(stack)


async def tokens_of(llm: AsyncLLM, prompt: list[int], count: int = 60) -> list[int]:
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    async for output in llm.generate(prompt, params):
        last = output
    return list(last.outputs[0].token_ids)


@pytest.mark.long
def test_streams_of_a_host_that_is_cut_off_go_on_elsewhere_and_it_is_called_again(silence: int, far: Far) -> None:
    async def run() -> None:
        prompts = [[k + 3, 9] for k in range(12)]
        streams = [asyncio.create_task(tokens_of(far.llm, prompt, 300)) for prompt in prompts]
        await eventually(lambda: all(len(place.streams) == 6 for place in far.host._pool.places))
        lines = far.engines[0]._board._lines
        assert lines
        far.ways[0].cut()
        found = await asyncio.wait_for(asyncio.gather(*streams), SECONDS)
        assert found == [plain(prompt, 300) for prompt in prompts]
        assert far.host.addresses() == {far.addresses[1]}
        await eventually(lambda: not lines)  # the engine, too, has given up its front, and what ran for it
        far.host.add(far.addresses[0])  # is not answered
        far.ways[0].heal()

        def back() -> bool:
            far.host.add(far.addresses[0])
            return len(far.host.addresses()) == 2

        await eventually(back)
        again = await asyncio.gather(*(tokens_of(far.llm, prompt) for prompt in prompts))
        assert again == [plain(prompt, 60) for prompt in prompts]

    asyncio.run(run())


@pytest.mark.long
def test_nobody_waits_for_the_socket_of_a_host_that_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts do not leave for one engine; the other answers meanwhile."""
    watch_over = endpoint._watch_over

    def narrow(connection: Connection) -> None:
        watch_over(connection)
        with socket.socket(fileno=os.dup(connection.fileno())) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)

    monkeypatch.setattr(endpoint, "_watch_over", narrow)

    async def run(far: Far) -> None:
        far.ways[0].cut()
        prompts = [[k + 3] * 4000 for k in range(8)]
        streams = [asyncio.create_task(tokens_of(far.llm, prompt, 2)) for prompt in prompts]
        await eventually(lambda: sum(len(place.streams) for place in far.host._pool.places) == 8)
        short = [asyncio.create_task(tokens_of(far.llm, [k + 3, 5], 2)) for k in range(2)]
        await asyncio.wait(short, timeout=SECONDS, return_when=asyncio.FIRST_COMPLETED)
        assert len(far.host.addresses()) == 2  # it was not waited until one of them is given up
        assert not all(stream.done() for stream in streams)
        far.ways[0].heal()
        found = await asyncio.wait_for(asyncio.gather(*streams, *short), SECONDS)
        assert found == [plain(prompt, 2) for prompt in (*prompts, [3, 5], [4, 5])]

    with ExitStack() as stack:
        asyncio.run(run(Far(stack)))


@pytest.mark.long
def test_streams_over_a_slow_way_are_late_and_whole(far: Far) -> None:
    """20 kB/s and 50 ms each way: frames that wait go together."""

    async def run() -> None:
        far.ways[0].rate, far.ways[0].delay = 20_000, 0.05
        prompts = [[k + 3, 9] for k in range(12)]
        streams = [asyncio.create_task(tokens_of(far.llm, prompt, 100)) for prompt in prompts]
        found = await asyncio.wait_for(asyncio.gather(*streams), SECONDS)
        assert found == [plain(prompt, 100) for prompt in prompts]
        assert len(far.host.addresses()) == 2

    asyncio.run(run())


@pytest.mark.long
def test_a_database_that_is_cut_off_is_a_503_and_all_else_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "SILENCE_SECONDS", 2)
    ask = {"model": MODEL, "max_output_tokens": 4, "input": "Hello"}
    complete = {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": 20}
    with cluster() as postgres, way(postgres.directory / ".s.PGSQL.5432") as far:
        url = f"postgresql://cellar@127.0.0.1:{far.port}/postgres"
        with serve({"conversation_store": url}, latency=0.02) as served, served.http() as http:
            assert http.post("/v1/responses", json=ask).status_code == 200
            with http.stream("POST", "/v1/responses", json={**ask, "max_output_tokens": 100, "stream": True}) as answer:
                lines = answer.iter_lines()
                while "output_text.delta" not in next(lines):
                    pass
                far.cut()
                rest = [line for line in lines if line.startswith("event: ")]
            assert sum("output_text.delta" in line for line in rest) > 10  # tokens come as before
            assert rest[-1] == "event: response.failed"  # as it could not be stored
            refused = http.post("/v1/responses", json=ask)
            assert (refused.status_code, refused.json()["error"]["type"]) == (503, "service_unavailable_error")
            assert http.post("/v1/completions", json=complete).status_code == 200
            far.heal()
            until(lambda: http.post("/v1/responses", json=ask).status_code == 200)


def test_messages_leave_in_order_whatever_their_size() -> None:
    random = np.random.default_rng(0)
    ours, theirs = multiprocessing.Pipe()
    outlet = Outlet(ours)
    sent = [bytes(int(random.integers(1, size))) for size in random.choice([10, 5_000, 400_000], 200)]
    for k, message in enumerate(sent):
        outlet.send((k, message))
    assert outlet._waiting
    for k, message in enumerate(sent):
        assert theirs.recv() == (k, message)
    outlet.send("now")
    assert theirs.recv() == "now"
    outlet.close()
    with pytest.raises(EOFError):
        theirs.recv()


def test_what_waits_is_dropped_when_an_outlet_is_closed_and_a_lost_connection_is_told() -> None:
    ours, theirs = multiprocessing.Pipe()
    outlet = Outlet(ours)
    for _ in range(10):
        outlet.send(bytes(10**6))
    closing = threading.Thread(target=outlet.close)
    closing.start()
    closing.join(SECONDS)
    assert not closing.is_alive()
    ours, theirs = multiprocessing.Pipe()
    outlet = Outlet(ours)
    for _ in range(10):
        outlet.send(bytes(10**6))
    theirs.close()

    def fails() -> bool:
        try:
            outlet.send(b"")
        except OSError:
            return True
        return False

    until(fails)
    outlet.close()
