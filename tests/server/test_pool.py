"""Several engines behind one front: who gets a request, and that a stream outlives its engine without gap or repeat."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cellar import AsyncLLM, SamplingParams
from cellar.core.errors import CellarError
from cellar.core.messages import Logprobs, Request, SchedulerStats, Tier, TierStats
from cellar.server.endpoint import Endpoint
from cellar.server.engine_process import EngineProcess, Switchboard
from cellar.server.pool import pool as module
from cellar.server.pool.choice import MAX_EXCESS, Sticky
from cellar.server.pool.host import PoolHost
from cellar.server.pool.pool import Place
from cellar.server.pool.stream import Stream
from cellar.server.pool.totals import merged, past, summed
from cellar.server.wire import Ready
from tests.fake_front import ENDLESS, ROOMY, open_fake
from tests.limits import SECONDS, eventually, join_all, until
from tests.server.fake_process import attach, open_engine
from tests.server.served import plain

GREEDY = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)


class Local:
    """An engine in threads of this process; to kill it is to cut all its connections."""

    def __init__(self, **fake: Any) -> None:
        opened, _ = open_fake(**fake)
        ready = Ready(
            opened.config, opened.spec, None, opened.front.reader.max_model_len, opened.generation, opened.basis
        )
        at = Endpoint("127.0.0.1", 0, os.urandom(32))
        self._board = Switchboard(opened.front.engine, ready, at, opened.outlook)
        self.address = self._board.address
        self._ours, theirs = multiprocessing.Pipe()
        self._thread = threading.Thread(target=self._board.run, args=(theirs,), daemon=True)
        self._thread.start()

    def kill(self) -> None:
        for line in list(self._board._lines.values()):
            with suppress(OSError), socket.socket(fileno=os.dup(line.connection.fileno())) as sock:
                sock.shutdown(socket.SHUT_RDWR)
        self.close()

    def close(self) -> None:
        self._ours.close()
        join_all([self._thread])


class Process(EngineProcess):
    """An engine in a process; to kill it is `kill -9`."""

    def __init__(self, **fake: Any) -> None:
        super().__init__(partial(open_engine, **fake), Endpoint("127.0.0.1", 0, os.urandom(32)))

    def kill(self) -> None:
        self.process.kill()
        self.close()


class Engines:
    """Engines over the fake device, and a host that knows them."""

    def __init__(self, count: int, kind: type[Local] | type[Process] = Local, **fake: Any) -> None:
        self._fake = {"latency": 0.01, **ROOMY, **fake}
        self._kind = kind
        self.host = PoolHost(partial(attach, **self._fake))
        self.running: list[Local | Process] = []
        for _ in range(count):
            self.start()
        self.host.wait(SECONDS)
        until(lambda: len(self.host.addresses()) == count)

    def start(self) -> None:
        engine = self._kind(**self._fake)
        self.running.append(engine)
        self.host.add(engine.address)

    def kill(self, engine: Local | Process) -> None:
        self.running.remove(engine)
        engine.kill()

    @property
    def llm(self) -> AsyncLLM:
        llm = self.host.llm
        assert llm is not None
        return llm

    def close(self) -> None:
        self.host.leave()
        for engine in self.running:
            engine.close()

    def busiest(self) -> Local | Process:
        """The engine that has most of the requests now."""
        place = max(self.host._pool.places, key=lambda place: len(place.streams))
        return next(one for one in self.running if one.address == place.address)


@pytest.fixture
def three() -> Iterator[Engines]:
    found = Engines(3)
    yield found
    found.close()


async def tokens_of(llm: AsyncLLM, prompt: list[int], **options: Any) -> list[int]:
    """As they come, each once."""
    found: list[int] = []
    async for delta in llm.deltas(prompt, GREEDY, **options):
        if hasattr(delta, "token_ids"):
            found += delta.token_ids
        else:
            assert list(delta.outputs[0].token_ids) == found
    return found


@pytest.mark.parametrize("kind", [Local, pytest.param(Process, marks=pytest.mark.long)])
def test_streams_outlive_engines_that_are_killed(kind: type[Local] | type[Process]) -> None:
    three = Engines(3, kind)
    prompts = [[k + 3, 5, k] * (1 + k % 4) for k in range(24)]

    async def run() -> None:
        llm = three.llm
        streams = [asyncio.create_task(tokens_of(llm, prompt)) for prompt in prompts]
        for _ in range(2):
            await asyncio.sleep(0.15)
            await asyncio.to_thread(three.kill, three.busiest())
            before = len(three.host.addresses())
            await asyncio.to_thread(three.start)
            await eventually(lambda count=before: len(three.host.addresses()) >= count)
        found = await asyncio.wait_for(asyncio.gather(*streams), SECONDS)
        assert found == [plain(prompt, 60) for prompt in prompts]
        await eventually(lambda: (stats := three.host.stats()) is not None and stats.running + stats.waiting == 0)

    asyncio.run(run())
    assert not three.host._pool._streams
    three.close()


async def end_of(llm: AsyncLLM, prompt: list[int]) -> tuple[str | None, object]:
    """How a request that goes on and on ends, and what is said of it."""
    async for output in llm.generate(prompt, GREEDY.clone(max_tokens=ENDLESS)):
        last = output.outputs[0]
    return last.finish_reason, last.stop_reason


def test_an_engine_that_drains_passes_its_streams_on(three: Engines) -> None:
    async def run() -> None:
        llm = three.llm
        streams = [asyncio.create_task(tokens_of(llm, [k + 3, 9])) for k in range(12)]
        await eventually(lambda: all(place.streams for place in three.host._pool.places))
        gone = three.busiest()
        three.host.drain(gone.address)
        place = next(one for one in three.host._pool.places if one.address == gone.address)
        await eventually(lambda: not place.streams)
        late = asyncio.create_task(tokens_of(llm, [40, 41]))
        await asyncio.sleep(0.05)
        assert not place.streams  # nor does it get new ones
        found = await asyncio.wait_for(asyncio.gather(*streams, late), SECONDS)
        assert found == [plain([k + 3, 9], 60) for k in range(12)] + [plain([40, 41], 60)]

    asyncio.run(run())


def test_the_last_engine_keeps_its_streams_until_another_comes() -> None:
    engines = Engines(1)

    async def run() -> None:
        (only,) = engines.running
        stream = asyncio.create_task(tokens_of(engines.llm, [3, 4]))
        place = engines.host._pool.places[0]
        await eventually(lambda: place.streams)
        engines.host.drain(only.address)
        await eventually(lambda: place.draining)
        assert place.streams
        await asyncio.to_thread(engines.start)
        await eventually(lambda: not place.streams)
        assert await asyncio.wait_for(stream, SECONDS) == plain([3, 4], 60)

    asyncio.run(run())
    engines.close()


def test_streams_wait_for_an_engine_while_there_is_none_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = Engines(1)

    async def run() -> None:
        llm = engines.llm
        stream = asyncio.create_task(tokens_of(llm, [3, 4]))
        await eventually(lambda: any(place.streams for place in engines.host._pool.places))
        await asyncio.to_thread(engines.kill, engines.running[0])
        await eventually(lambda: engines.host.llm is None)
        assert engines.host.stats() is None
        await asyncio.to_thread(engines.start)
        assert await asyncio.wait_for(stream, SECONDS) == plain([3, 4], 60)
        monkeypatch.setattr(module, "PATIENCE_SECONDS", 0.1)
        left = asyncio.create_task(end_of(llm, [5, 6]))
        await eventually(lambda: any(place.streams for place in engines.host._pool.places))
        await asyncio.to_thread(engines.kill, engines.running[0])
        reason, said = await asyncio.wait_for(left, SECONDS)
        assert (reason, "no engine" in str(said)) == ("error", True)

    asyncio.run(run())
    engines.close()


def test_a_request_that_takes_engines_down_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_LOST", 1)
    engines = Engines(2)

    async def run() -> None:
        llm = engines.llm
        stream = asyncio.create_task(end_of(llm, [3, 4]))
        await eventually(lambda: any(place.streams for place in engines.host._pool.places))
        await asyncio.to_thread(engines.kill, engines.busiest())
        reason, said = await asyncio.wait_for(stream, SECONDS)
        assert (reason, "lost 1 times" in str(said)) == ("error", True)
        assert await asyncio.wait_for(tokens_of(llm, [7, 8]), SECONDS) == plain([7, 8], 60)

    asyncio.run(run())
    engines.close()


def test_what_is_aborted_is_heard_of_no_more(three: Engines) -> None:
    async def run() -> None:
        streams = [three.llm.generate([k + 3], GREEDY.clone(max_tokens=ENDLESS)) for k in range(6)]
        for stream in streams:
            await anext(stream)
        for stream in streams:
            await stream.aclose()  # type: ignore[attr-defined]
        await eventually(lambda: (stats := three.host.stats()) is not None and stats.running + stats.waiting == 0)

    asyncio.run(run())
    assert not three.host._pool.has_work()


@pytest.mark.long
def test_a_conversation_stays_and_questions_reach_all(three: Engines) -> None:
    async def run() -> None:
        llm = three.llm
        prompt = list(range(3, 80))
        await tokens_of(llm, prompt, conversation="mine")
        hits = three.host.stats()
        assert hits is not None
        for _ in range(3):
            await tokens_of(llm, [90], conversation="other")
            await tokens_of(llm, prompt, conversation="mine")
        after = three.host.stats()
        assert after is not None
        assert after.prefix_hits - hits.prefix_hits >= 3 * 64
        (tiers,) = await asyncio.wait_for(llm.memory("mine"), SECONDS)
        assert sum(tiers.values()) >= 64
        await asyncio.wait_for(llm.memory("mine", forget=True), SECONDS)
        (tiers,) = await asyncio.wait_for(llm.memory("mine"), SECONDS)
        assert not sum(tiers.values())

    asyncio.run(run())


# -- decisions ------------------------------------------------------------------------------------


def place(count: int) -> Place:
    made = Place("somewhere", None)  # type: ignore[arg-type]
    made.streams = {str(k): Stream(request()) for k in range(count)}
    return made


def request(conversation: str | None = None, salt: bytes = b"") -> Request:
    params = SamplingParams()
    return Request("a", np.array([1], np.int32), params, frozenset(), 1, conversation=conversation, salt=salt)


def test_who_gets_a_request() -> None:
    chooser, a, b = Sticky(), place(2), place(1)
    assert chooser.choose(request(), [a, b]) is b
    assert chooser.choose(request("x"), [a]) is a
    assert chooser.choose(request("x"), [a, b]) is a  # it has its memory
    assert chooser.choose(request("x", salt=b"other's"), [a, b]) is b
    a.streams = place(3 + 2 * MAX_EXCESS).streams
    assert chooser.choose(request("x"), [a, b]) is b  # but not at any price
    assert chooser.choose(request("x"), [a, b]) is b
    chooser.gone(b)
    assert chooser.choose(request("x"), [a]) is a


def test_prompt_logprobs_are_told_once() -> None:
    def scored(*positions: int) -> Logprobs:
        count = len(positions)
        rank, top = np.zeros(count, np.int32), np.zeros((count, 0), np.int32)
        return Logprobs(np.array(positions), np.zeros(count, np.float32), rank, top, top.astype(np.float32))

    stream: Stream[Place] = Stream(request())
    assert stream.fresh(scored(1, 2, 3)).index.tolist() == [1, 2, 3]  # type: ignore[union-attr]
    assert stream.fresh(scored(1, 2)) is None
    assert stream.fresh(scored(3, 4)).index.tolist() == [4]  # type: ignore[union-attr]


def test_sums() -> None:
    host = TierStats(Tier.HOST, 10, 2, 3, 5, loaded=7)
    a = SchedulerStats(1, 2, 10, 5, 3, 8, 4, 1, 9, 9, tiers=(host,), steps=(1, 2), step_tokens=3)
    b = SchedulerStats(3, 4, 20, 5, 3, 8, 4, 1, 9, 9, steps=(1, 2, 5), step_tokens=3)
    total = summed([a, b])
    assert (total.running, total.waiting, total.total_chunks, total.prefix_queries) == (4, 6, 30, 16)
    assert (total.steps, total.tiers) == ((2, 4, 5), (host,))
    assert summed([a, a]).tiers[0].loaded == 14
    gone = past(a)
    assert (gone.running, gone.total_chunks, gone.tiers, gone.prefix_queries, gone.steps) == (0, 0, (), 8, (1, 2))
    answers = ({Tier.DEVICE: 3}, {}), ({Tier.DEVICE: 1, Tier.HOST: 5}, {Tier.HOST: 1})
    assert merged(answers, 2) == ({Tier.DEVICE: 1, Tier.HOST: 5}, {Tier.HOST: 1})
    assert merged([({Tier.HOST: 2},), ({Tier.HOST: 3},)], 0) == ({Tier.HOST: 5},)
    assert merged([], 1) == ({},)


def test_a_host_without_engines(tmp_path: Path) -> None:
    host = PoolHost()
    assert host.llm is None
    with pytest.raises(CellarError, match="no engine has come"):
        host.opened  # noqa: B018
    with pytest.raises(CellarError, match="in 0 s"):
        host.wait(0.01)
    host.add(str(tmp_path / "nobody"))
    until(lambda: not host._known)  # may be added again
    host.leave()
