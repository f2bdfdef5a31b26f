"""AsyncLLM over the whole engine with a fake device: many streams, cancelling, failures, closing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from cellar import AsyncLLM, SamplingParams
from cellar.core.errors import CellarError, RequestError
from cellar.core.messages import RequestOutput
from cellar.engine.front import Prepared
from cellar.engine.opened import Opened
from cellar.engine.outputs import Delta
from cellar.text.tokenizer import Tokenizer
from tests.fake_front import ENDLESS, ROOMY, TOKENIZER, continuation, engine_of, open_fake
from tests.limits import eventually

TEXT = Tokenizer.load(TOKENIZER)
VOCAB = TEXT.vocab_size
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LONG = GREEDY.clone(max_tokens=ENDLESS)


def plain(prompt: list[int], count: int) -> list[int]:
    tokens: list[int] = []
    while len(tokens) < count:
        tokens += continuation(prompt + tokens, count - len(tokens), VOCAB)
    return tokens


async def last(outputs: AsyncIterator[RequestOutput]) -> RequestOutput:
    seen: list[RequestOutput] = []
    async for output in outputs:
        if seen:
            ids, before = output.outputs[0].token_ids, seen[-1].outputs[0].token_ids
            assert ids[: len(before)] == before
            assert output.outputs[0].text.startswith(seen[-1].outputs[0].text)
        seen.append(output)
    assert [output.finished for output in seen] == [False] * (len(seen) - 1) + [True]
    return seen[-1]


def test_many_streams_at_a_time() -> None:
    async def run() -> None:
        async with AsyncLLM.over(open_fake(num_slots=40)[0]) as llm:
            prompts = [[k % VOCAB, k % 7] * (1 + k % 20) for k in range(100)]
            found = await asyncio.gather(*(last(llm.generate(p, GREEDY)) for p in prompts))
            for prompt, output in zip(prompts, found, strict=True):
                assert output.outputs[0].token_ids == plain(prompt, 12)
            assert llm.stats().running == 0

    asyncio.run(run())


def test_what_there_is_is_told_whenever_there_is_more() -> None:
    async def run() -> None:
        async with AsyncLLM.over(open_fake(latency=0.01)[0]) as llm:
            counts = [len(o.outputs[0].token_ids) async for o in llm.generate([1, 2], GREEDY, "r")]
            assert len(counts) > 1
            assert counts == sorted(set(counts))
            assert counts[-1] == 12

    asyncio.run(run())


def test_deltas_add_up() -> None:
    async def run() -> None:
        async with AsyncLLM.over(open_fake()[0]) as llm:
            params = GREEDY.clone(n=2, max_tokens=40)
            news = [one async for one in llm.deltas("Once upon a time", params, "r")]
            *deltas, whole = news
            assert isinstance(whole, RequestOutput)
            for completion in whole.outputs:
                mine = [d for d in deltas if isinstance(d, Delta) and d.index == completion.index]
                assert "".join(d.text for d in mine) == completion.text
                assert [token for d in mine for token in d.token_ids] == completion.token_ids
                assert mine[-1].finish_reason == "length"

    asyncio.run(run())


def test_leaving_drops_the_request_and_no_other() -> None:
    async def run() -> None:
        async with AsyncLLM.over(open_fake(latency=0.002, **ROOMY)[0]) as llm:
            other = asyncio.create_task(last(llm.generate([9], GREEDY.clone(max_tokens=60))))
            stream = llm.generate([1, 2], LONG)
            await anext(stream)
            await stream.aclose()  # type: ignore[attr-defined]
            task = asyncio.create_task(last(llm.generate([3], LONG)))
            await asyncio.sleep(0.02)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert (await other).outputs[0].token_ids == plain([9], 60)
            await eventually(lambda: not llm.stats().running)
            assert 60 <= llm.stats().generation_tokens < ENDLESS

    asyncio.run(run())


def test_abort_ends_the_stream_with_what_there_is() -> None:
    async def run() -> None:
        async with AsyncLLM.over(open_fake(latency=0.002, **ROOMY)[0]) as llm:
            seen: list[RequestOutput] = []
            async for output in llm.generate([1, 2], LONG, "mine"):
                seen.append(output)
                if len(seen) == 3:
                    await llm.abort("mine")
            await llm.abort("nobody")
            assert seen[-1].finished
            assert seen[-1].outputs[0].finish_reason == "abort"
            tokens = seen[-1].outputs[0].token_ids
            assert tokens == plain([1, 2], len(tokens))
            again = await last(llm.generate([1, 2], GREEDY, "mine"))
            assert again.outputs[0].token_ids == plain([1, 2], 12)

    asyncio.run(run())


def test_an_id_in_use_is_refused_and_the_first_goes_on() -> None:
    async def run() -> None:
        async with AsyncLLM.over(open_fake(latency=0.002, **ROOMY)[0]) as llm:
            first = llm.generate([1], LONG, "same")
            await anext(first)
            with pytest.raises(RequestError, match="in use"):
                await last(llm.generate([2], GREEDY, "same"))
            known = llm.stats().generation_tokens
            tokens: list[int] = []
            while len(tokens) <= known:  # so it went on
                tokens = (await anext(first)).outputs[0].token_ids
            assert tokens == plain([1], len(tokens))
            await first.aclose()  # type: ignore[attr-defined]

    asyncio.run(run())


@pytest.mark.parametrize("prompt", [[], [VOCAB], [1] * 300, "", 7])
def test_bad_input_is_refused_at_once(prompt: Any) -> None:
    async def run() -> None:
        async with AsyncLLM.over(open_fake()[0]) as llm:
            with pytest.raises(RequestError):
                llm.generate(prompt, GREEDY)
            assert (await last(llm.generate([1], GREEDY))).finished

    asyncio.run(run())


def test_what_could_never_run_ends_with_an_error() -> None:
    async def run() -> None:
        async with AsyncLLM.over(open_fake(num_slots=4)[0]) as llm:
            output = await last(llm.generate([1] * 60, GREEDY.clone(max_tokens=100)))
            assert output.outputs[0].finish_reason == "error"
            assert "chunks" in str(output.outputs[0].stop_reason)

    asyncio.run(run())


def test_an_error_of_the_loop_reaches_every_stream() -> None:
    async def run() -> None:
        opened, _ = open_fake(latency=0.002, **ROOMY)
        llm = AsyncLLM.over(opened)
        streams = [llm.generate([k], LONG) for k in range(5)]
        for stream in streams:
            await anext(stream)

        def broken(*_: Any) -> None:
            raise ZeroDivisionError("a defect")

        engine_of(opened).scheduler.commit = broken  # type: ignore[method-assign, assignment]
        found = await asyncio.gather(*map(last, streams), return_exceptions=True)
        assert [type(one) for one in found] == [ZeroDivisionError] * 5
        with pytest.raises(CellarError, match="a defect"):
            await last(llm.generate([1], GREEDY))
        assert not llm.running
        llm.close()

    asyncio.run(run())


def test_closing_ends_open_streams_and_later_ones() -> None:
    async def run() -> None:
        llm = AsyncLLM.over(open_fake(latency=0.002, **ROOMY)[0])
        stream = llm.generate([1], LONG)
        await anext(stream)
        await asyncio.to_thread(llm.close)
        with pytest.raises(CellarError, match="closed"):
            await last(stream)
        with pytest.raises(CellarError, match="closed"):
            await last(llm.generate([1], GREEDY))
        llm.close()

    asyncio.run(run())


def slow_starts(opened: Opened, monkeypatch: pytest.MonkeyPatch, seconds: float = 0.002) -> list[str]:
    """Starting a request takes so long from now on; gives the ids of those that were started, in their order."""
    started: list[str] = []
    add = opened.front.add

    def slow(one: Prepared, stream: bool = False) -> None:
        time.sleep(seconds)
        started.append(one.id)
        add(one, stream)

    monkeypatch.setattr(opened.front, "add", slow)
    return started


def test_many_prompts_of_one_owner_let_others_begin_and_get_their_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        opened, _ = open_fake(num_slots=400, num_rows=100)
        started = slow_starts(opened, monkeypatch)
        async with AsyncLLM.over(opened) as llm:
            running = llm.generate([7], LONG.clone(max_tokens=200), "running")
            await anext(running)
            many = [last_of(llm.deltas([k % 7], GREEDY, f"many-{k}", owner="many")) for k in range(300)]
            tasks = [asyncio.create_task(one) for one in many]
            await asyncio.sleep(0)
            found = asyncio.create_task(last_of(llm.deltas([9], GREEDY, "one", owner="one")))
            tokens_at: dict[int, int] = {}  # of the request that was there before, by how many had been started
            async for output in running:
                tokens_at.setdefault(len(started), len(output.outputs[0].token_ids))
                if found.done():
                    break
            await running.aclose()  # type: ignore[attr-defined]
            assert (await found).outputs[0].token_ids == plain([9], 12)
            assert started.index("one") < 20, "behind a few of the others, not behind all of them"
            assert len(set(tokens_at.values())) > 1, "and whoever was there before got tokens meanwhile"
            for k, output in enumerate(await asyncio.gather(*tasks)):
                assert output.outputs[0].token_ids == plain([k % 7], 12)
            assert [id for id in started if id.startswith("many")] == [f"many-{k}" for k in range(300)]

    asyncio.run(run())


async def last_of(news: AsyncIterator[Delta | RequestOutput]) -> RequestOutput:
    found = [one async for one in news][-1]
    assert isinstance(found, RequestOutput)
    return found


def test_who_leaves_before_it_was_started_never_is(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        opened, _ = open_fake()
        started = slow_starts(opened, monkeypatch)
        async with AsyncLLM.over(opened) as llm:
            tasks = [
                asyncio.create_task(last_of(llm.deltas([k % 7], GREEDY, f"{k}", owner="mine"))) for k in range(200)
            ]
            await asyncio.sleep(0.02)
            for task in tasks[50:]:
                task.cancel()
            aborted = asyncio.create_task(last_of(llm.deltas([5], GREEDY, "aborted", owner="mine")))
            await asyncio.sleep(0)
            await llm.abort("aborted")
            found = await asyncio.gather(*tasks, return_exceptions=True)
            assert [isinstance(one, asyncio.CancelledError) for one in found] == [False] * 50 + [True] * 150
            assert (await aborted).outputs[0].finish_reason == "abort"
            assert len(started) < 150
            again = await last_of(llm.deltas([3], GREEDY, "199", owner="mine"))
            assert again.outputs[0].token_ids == plain([3], 12)
            streams = llm._streams
            assert (streams._fresh, streams._owners, streams._streams) == ({}, {}, {})

    asyncio.run(run())


def test_of_two_with_one_id_the_second_is_refused_also_before_the_first_was_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def run() -> None:
        opened, _ = open_fake()
        slow_starts(opened, monkeypatch, 0.01)
        async with AsyncLLM.over(opened) as llm:
            others = [asyncio.create_task(last_of(llm.deltas([1], GREEDY, owner="mine"))) for _ in range(5)]
            first = asyncio.create_task(last_of(llm.deltas([4], GREEDY, "same", owner="mine")))
            second = asyncio.create_task(last_of(llm.deltas([6], GREEDY, "same", owner="mine")))
            found = await asyncio.gather(first, second, *others, return_exceptions=True)
            assert isinstance(found[0], RequestOutput)
            assert found[0].outputs[0].token_ids == plain([4], 12)
            assert isinstance(found[1], RequestError)

    asyncio.run(run())


def test_closing_ends_what_was_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        opened, _ = open_fake()
        slow_starts(opened, monkeypatch, 0.01)
        async with AsyncLLM.over(opened) as llm:
            tasks = [asyncio.create_task(last_of(llm.deltas([1], LONG, owner="mine"))) for _ in range(40)]
            await asyncio.sleep(0.03)
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(one, CellarError) for one in found)

    asyncio.run(run())


def test_streams_of_two_event_loops() -> None:
    llm = AsyncLLM.over(open_fake(latency=0.001)[0])

    async def one(prompt: list[int]) -> list[int]:
        return (await last(llm.generate(prompt, GREEDY))).outputs[0].token_ids

    async def both() -> None:
        mine, other = await asyncio.gather(one([1]), asyncio.to_thread(lambda: asyncio.run(one([2]))))
        assert mine == plain([1], 12)
        assert other == plain([2], 12)

    asyncio.run(both())
    llm.close()
