"""The engine's side of several fronts, in one process: whose tokens are whose, and what is left when a front goes."""

from __future__ import annotations

import asyncio
import multiprocessing
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cellar import AsyncLLM, SamplingParams
from cellar.core.errors import CellarError
from cellar.core.messages import RequestOutput
from cellar.front import Opened
from cellar.server.engine_process import Switchboard
from cellar.server.supervisor import Link
from cellar.server.wire import Ready
from tests.fake_front import open_fake
from tests.server.fake_process import attach
from tests.server.served import TEXT, plain

GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


class Exchange:
    """A switchboard over the fake device in a thread, and any number of fronts."""

    def __init__(self, directory: Path, **fake: Any) -> None:
        self.opened: Opened = open_fake(num_rows=16, num_slots=256, **fake)[0]
        self.address = str(directory / "engine")
        ready = Ready(self.opened.config, self.opened.spec, None, self.opened.front.reader.max_model_len)
        self.board = Switchboard(self.opened.front.engine, ready, self.address)
        self.ours, theirs = multiprocessing.Pipe()
        self.thread = threading.Thread(target=self.board.run, args=(theirs,))
        self.thread.start()
        self.links: list[Link] = []

    def link(self) -> AsyncLLM:
        self.links.append(Link(self.address, attach))
        llm = self.links[-1].llm
        assert llm is not None
        return llm

    def settle(self) -> None:
        """Nothing runs, the books balance, and the switchboard knows of no sequence."""
        engine, end = self.opened.front.engine, time.monotonic() + 5
        while engine.has_work() or self.board._owners:
            assert time.monotonic() < end
            time.sleep(0.01)
        engine.scheduler.check_integrity()
        stats = engine.scheduler.stats()
        assert stats.free_chunks + stats.cached_chunks == stats.total_chunks
        assert not any(line.ids for line in self.board._lines.values())

    def close(self) -> None:
        self.ours.close()
        self.thread.join(10)
        assert not self.thread.is_alive()
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
    exchange = Exchange(tmp_path, latency=0.01)

    async def run() -> None:
        one, two = exchange.link(), exchange.link()
        lost = [asyncio.create_task(last(one, [k, 4], GREEDY.clone(max_tokens=200))) for k in range(5)]
        kept = [asyncio.create_task(last(two, [k, 4], GREEDY)) for k in range(5)]
        while exchange.opened.front.engine.stats().running < 10:
            await asyncio.sleep(0.005)
        await exchange.links[0].close()
        for k, task in enumerate(kept):
            assert (await task).outputs[0].token_ids == plain([k, 4], 40)
        for task in lost:
            with pytest.raises(CellarError, match="closed"):
                await task
        # Everybody hears how things stand, also who has nothing running.
        three = exchange.link()
        while three.stats().running or two.stats().running:
            await asyncio.sleep(0.01)

    asyncio.run(run())
    exchange.settle()
    exchange.close()


def test_a_loop_that_ends_says_why_to_every_front(tmp_path: Path) -> None:
    exchange = Exchange(tmp_path, latency=0.01)

    async def run() -> None:
        fronts = [exchange.link(), exchange.link()]
        tasks = [asyncio.create_task(last(llm, [5], GREEDY)) for llm in fronts]
        while exchange.opened.front.engine.stats().running < 2:
            await asyncio.sleep(0.005)

        def broken(*_: Any) -> None:
            raise ValueError("a defect")

        exchange.opened.front.engine.scheduler.commit = broken  # type: ignore[method-assign]
        for task in tasks:
            with pytest.raises(CellarError, match="a defect"):
                await task
        assert [link.llm for link in exchange.links] == [None, None]

    asyncio.run(run())
    exchange.thread.join(5)
    exchange.close()
