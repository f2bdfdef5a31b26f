"""What a stream has not been told is told together, and nothing of it is lost, doubled or out of its order."""

from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest

from cellar.core.messages import Logprobs, RequestOutput
from cellar.engine.outputs import Delta
from cellar.engine.tables import LogprobStore, LogprobTables
from cellar.engine.unread import Unread


def entry(token: int) -> Logprobs:
    place = np.array([token], np.int32)
    one = np.array([-token / 8], np.float32)
    return Logprobs(np.zeros(1, np.int32), one, place, place[:, None][:, :0], one[:, None][:, :0])


def test_what_came_while_nobody_looked_is_one_delta() -> None:
    async def run() -> None:
        unread, store = Unread(), LogprobStore(0, str)
        prompt = LogprobTables(store, 0, 0)
        for k in range(5):
            store.append(entry(k), 0, k)
            tables = LogprobTables(store, k, k + 1)
            last = {"finish_reason": "stop", "stop_reason": 4, "finished": True} if k == 4 else {}
            first = {"prompt_logprobs": prompt} if k == 0 else {}
            unread.put(Delta("r", 0, str(k), [k], tables, reasoning=f"<{k}>", **first, **last))  # type: ignore[arg-type]
            if k == 1:
                told = await unread.get()
                assert told == Delta(
                    "r", 0, "01", [0, 1], LogprobTables(store, 0, 2), prompt_logprobs=prompt, reasoning="<0><1>"
                )
        assert await unread.get() == Delta(
            "r", 0, "234", [2, 3, 4], LogprobTables(store, 2, 5), "stop", 4, True, reasoning="<2><3><4>"
        )

    asyncio.run(run())


def test_what_came_before_an_error_is_told_before_it() -> None:
    async def run() -> None:
        unread = Unread()
        for delta in (Delta("r", 0, "a", [1]), Delta("r", 0, "b", [2]), Delta("r", 0, finish_reason="error")):
            unread.put(delta)
        assert await unread.get() == Delta("r", 0, "ab", [1, 2])
        assert await unread.get() == Delta("r", 0, finish_reason="error")

    asyncio.run(run())


def test_of_outputs_so_far_the_newest_is_told() -> None:
    async def run() -> None:
        unread = Unread()
        outputs = [RequestOutput("r", None, [], [], finished=k == 3) for k in range(4)]
        unread.put(outputs[0])
        unread.put(outputs[1])
        assert await unread.get() is outputs[1]
        unread.put(Delta("r", 0, "a", [1]))
        unread.put(outputs[2])
        unread.put(outputs[3])
        assert await unread.get() == Delta("r", 0, "a", [1])
        assert await unread.get() is outputs[3]

    asyncio.run(run())


@pytest.mark.parametrize("seed", range(20))
def test_every_token_is_told_once_and_in_order(seed: int) -> None:
    """Three sequences, and somebody who looks now and then, or waits."""
    draw = random.Random(seed)

    async def run() -> None:
        unread, told = Unread(), list[list[int]]([[], [], []])
        given = [0, 0, 0]

        async def read() -> int:
            looks = 0
            while not isinstance(news := await unread.get(), RequestOutput):
                assert isinstance(news, Delta)
                looks += 1
                told[news.index] += news.token_ids
                assert news.text == "".join(map(str, news.token_ids))
                for _ in range(draw.choice((0, 0, 3))):
                    await asyncio.sleep(0)
            return looks

        reader = asyncio.create_task(read())
        for _ in range(200):
            k = draw.randrange(3)
            unread.put(Delta("r", k, str(given[k]), [given[k]]))
            given[k] += 1
            if draw.random() < 0.4:
                await asyncio.sleep(0)
        unread.put(RequestOutput("r", None, [], [], finished=True))
        looks = await reader
        assert told == [list(range(n)) for n in given]
        assert 3 <= looks < 200  # some were told together

    asyncio.run(run())


def test_whoever_waits_is_told_at_once_and_after_a_cancelled_wait() -> None:
    async def run() -> None:
        unread = Unread()
        first = asyncio.create_task(unread.get())
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        second = asyncio.create_task(unread.get())
        await asyncio.sleep(0)
        unread.put(Delta("r", 0, "a", [1]))
        unread.put(ValueError("the end"))
        assert await second == Delta("r", 0, "a", [1])
        assert isinstance(await unread.get(), ValueError)

    asyncio.run(run())
