"""The engine's side of several fronts, in one process: whose tokens are whose, and what is left when a front goes."""

from __future__ import annotations

import asyncio
import multiprocessing
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cellar import AsyncLLM, SamplingParams
from cellar.core.errors import CellarError
from cellar.core.messages import FinishReason, Request, RequestOutput
from cellar.engine.opened import Opened
from cellar.server.engine_process import Switchboard
from cellar.server.remote import RemoteEngine
from cellar.server.supervisor import Link
from cellar.server.wire import Add, Call, Ready
from tests.fake_front import ENDLESS, ROOMY, engine_of, open_fake
from tests.limits import SECONDS, asked, eventually, join_all, until
from tests.server.fake_process import attach
from tests.server.served import TEXT, plain

GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
LONG = GREEDY.clone(max_tokens=ENDLESS)


class Exchange:
    """A switchboard over the fake device in a thread, and any number of fronts."""

    def __init__(self, directory: Path, **fake: Any) -> None:
        self.opened: Opened
        self.opened, self.runtime = open_fake(num_rows=16, **{"num_slots": 256, **fake})
        self.address = str(directory / "engine")
        ready = Ready(self.opened.config, self.opened.spec, None, self.opened.front.reader.max_model_len)
        self.board = Switchboard(self.opened.front.engine, ready, self.address)
        self.ours, theirs = multiprocessing.Pipe()
        self.thread = threading.Thread(target=self.board.run, args=(theirs,), daemon=True)
        self.thread.start()
        self.links: list[Link] = []

    def link(self) -> AsyncLLM:
        self.links.append(Link(self.address, attach))
        llm = self.links[-1].llm
        assert llm is not None
        return llm

    def settle(self) -> None:
        """Nothing runs, the books balance, and the switchboard knows of no sequence."""
        engine, board = engine_of(self.opened), self.board
        until(lambda: not engine.has_work() and not board._owners)
        asked(engine, engine.scheduler.check_integrity)
        stats = asked(engine, engine.stats)
        assert stats.free_chunks + stats.cached_chunks == stats.total_chunks
        until(lambda: not any(line.ids for line in list(board._lines.values())))

    def close(self) -> None:
        self.ours.close()
        join_all([self.thread])
        for link in self.links:
            link.leave()


@pytest.fixture
def exchange(tmp_path: Path) -> Iterator[Exchange]:
    found = Exchange(tmp_path, latency=0.001)
    yield found
    found.close()


async def last(llm: AsyncLLM, prompt: list[int], params: SamplingParams, id: str | None = None) -> RequestOutput:
    return [output async for output in llm.generate(prompt, params, id)][-1]


def test_equal_ids_at_two_fronts_are_two_requests(exchange: Exchange) -> None:
    async def run() -> None:
        one, two = exchange.link(), exchange.link()
        params = GREEDY.clone(logprobs=1, prompt_logprobs=1, n=2)
        prompts = [[k + 3, 5 + k] for k in range(6)]
        found = await asyncio.gather(
            *(last(llm, prompt, params, f"same-{k}") for k, prompt in enumerate(prompts) for llm in (one, two))
        )
        for k, output in enumerate(found):
            prompt = prompts[k // 2]
            assert [made.token_ids for made in output.outputs] == [plain(prompt, 40)] * 2
            assert all(len(made.logprobs or ()) == 40 for made in output.outputs)
            assert output.prompt_logprobs is not None
        # A stop string is found at a front; the engine learns of it, and only of that one.
        text = TEXT.decode(plain([9, 9], 40))
        stopped, whole = await asyncio.gather(
            last(one, [9, 9], GREEDY.clone(stop=text[8:12]), "x"), last(two, [9, 9], GREEDY, "x")
        )
        assert stopped.outputs[0].finish_reason == "stop"
        assert whole.outputs[0].text == text

    asyncio.run(run())
    exchange.settle()


def test_a_front_that_goes_takes_its_requests_along_and_no_others(tmp_path: Path) -> None:
    exchange = Exchange(tmp_path, latency=0.01, **ROOMY)
    stats = exchange.opened.front.engine.stats

    async def run() -> None:
        one, two = exchange.link(), exchange.link()
        lost = [one.generate([k, 4], LONG) for k in range(5)]
        kept = [two.generate([k, 4], LONG) for k in range(5)]
        for stream in lost + kept:
            await anext(stream)
        await exchange.links[0].close()
        await eventually(lambda: stats().running == 5)
        for stream in lost:
            with pytest.raises(CellarError, match="closed"):
                async for _ in stream:
                    pass
        # Nobody else has noticed: they go on with their own tokens, more than there have been steps by now.
        steps = exchange.runtime.num_steps
        for k, stream in enumerate(kept):
            tokens: list[int] = []
            while len(tokens) <= steps:
                tokens = (await anext(stream)).outputs[0].token_ids
            assert tokens == plain([k, 4], len(tokens))
        assert stats().running == 5
        for stream in kept:
            await stream.aclose()  # type: ignore[attr-defined]
        # Everybody hears how things stand, also who has nothing running.
        three = exchange.link()
        await eventually(lambda: three.stats().running == two.stats().running == 0)

    asyncio.run(run())
    exchange.settle()
    exchange.close()


def test_a_loop_that_ends_says_why_to_every_front(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What runs waits for the engine to be started again, so the reason is told to who reads the log."""
    exchange = Exchange(tmp_path, latency=0.01, **ROOMY)

    async def run() -> None:
        fronts = [exchange.link(), exchange.link()]
        tasks = [asyncio.create_task(last(llm, [5], LONG)) for llm in fronts]
        await eventually(lambda: exchange.opened.front.engine.stats().running == 2)

        def broken(*_: Any) -> None:
            raise ValueError("a defect")

        engine_of(exchange.opened).scheduler.commit = broken  # type: ignore[method-assign]
        await eventually(lambda: [link.llm for link in exchange.links] == [None, None])

        def told() -> list[str]:
            return [one.getMessage() for one in caplog.records if "an engine is lost" in one.getMessage()]

        await eventually(lambda: len(told()) == 2)  # each front says it a moment after it has let go of the engine
        assert all("a defect" in line for line in told())
        assert not any(task.done() for task in tasks)
        for link in exchange.links:
            await link.close()
        for task in tasks:
            with pytest.raises(CellarError, match="closed"):
                await task

    asyncio.run(run())
    exchange.close()


def _turn_until_it_raises(engine: RemoteEngine) -> None:
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        engine.turn(1.0)


def test_what_one_front_sends_wrongly_harms_no_other(exchange: Exchange) -> None:
    """A call that cannot be served ends its sequence, a message that cannot be read its front; others go on."""

    async def run() -> None:
        good, bad = exchange.link(), RemoteEngine(exchange.address)
        kept = good.generate([5], GREEDY)
        outputs = [await anext(kept)]
        unknown = Add(7, (0,), (0,), np.array([5], np.int32), 1, 0, b"", None, "", "", None)
        for number, call in enumerate((unknown, Call("finish", 1, ("many", None, 3)))):
            bad._names[number], bad._numbers[f"r{number}"] = f"r{number}", number
            bad._pipe.send(call)
        ends: dict[str, Any] = {}
        for _ in range(int(SECONDS)):
            if len(ends) == 2:
                break
            for output in await asyncio.to_thread(bad.turn, 1.0):
                ends |= output.finished
        assert len(ends) == 2
        assert all(reason is FinishReason.ERROR for reason, _ in ends.values())
        bad._pipe.send_bytes(b"no pickle")
        with pytest.raises(CellarError, match="has ended"):
            await asyncio.to_thread(_turn_until_it_raises, bad)
        bad.close()
        outputs += [output async for output in kept]
        assert outputs[-1].outputs[0].token_ids == plain([5], 40)

    asyncio.run(run())
    exchange.settle()


def test_sequences_keep_what_they_are_asked_with() -> None:
    """Through the pipe, in which a request's parts lie in order."""
    asked = Request(
        id="r",
        prompt=np.array([5, 6], np.int32),
        params=GREEDY,
        stop_ids=frozenset({2}),
        max_tokens=3,
        priority=4,
        salt=b"s",
        conversation="c",
        seed=9,
        owner="o",
        tenant="t",
    )
    (found,) = Add.of(0, (1,), [asked]).requests(GREEDY, frozenset({2}), 3)
    assert found == replace(asked, id="3.1", owner="3.o")
